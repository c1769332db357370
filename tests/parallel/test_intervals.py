"""Intervals against plain sets of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.parallel.intervals import Intervals, spans

token_sets = st.sets(st.integers(0, 30))
quick = settings(max_examples=100, deadline=None, derandomize=True)


def of_tokens(tokens) -> Intervals:
    starts = np.array(sorted(tokens), np.int64)
    return Intervals.of(starts, starts + 1)


def test_normal_form():
    assert Intervals.of([8, 0, 4, 6], [9, 4, 6, 6]).pairs == [(0, 6), (8, 9)]
    with pytest.raises(ValueError, match="overlap"):
        Intervals.of([0, 3], [4, 5])


def test_worked_example():
    held = Intervals.of([0, 12], [4, 16])
    assert held.rank_of([13, 8, 0, 40]).tolist() == [5, 4, 0, 8]
    assert spans([3, 9], [2, 3]).tolist() == [3, 4, 9, 10, 11]


@quick
@given(token_sets, token_sets)
def test_sets(a, b):
    held, other = of_tokens(a), of_tokens(b)
    assert held.count == len(a) and held.tokens().tolist() == sorted(a)
    every = np.arange(35)
    assert held.holds(every).tolist() == [t in a for t in every]
    assert held.rank_of(every).tolist() == [len([x for x in a if x < t]) for t in every]
    assert held.tokens_at(np.arange(len(a))).tolist() == sorted(a)
    assert held.intersect(other).tokens().tolist() == sorted(a & b)


@quick
@given(token_sets, st.sets(st.integers(0, 35)))
def test_cut(a, boundaries):
    starts, stops = of_tokens(a).cut(np.array(sorted(boundaries), np.int64))
    assert spans(starts, stops - starts).tolist() == sorted(a)
    for start, stop in zip(starts.tolist(), stops.tolist()):
        assert stop > start and not boundaries & set(range(start + 1, stop))
    joints = [start for start, stop in zip(starts[1:].tolist(), stops[:-1].tolist()) if start == stop]
    assert set(joints) <= boundaries
