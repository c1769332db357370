"""Staircases as rectangles: worked examples, exact cover of random staircases, regular shapes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.parallel.staircase import ANTICAUSAL, CAUSAL, FULL, Rectangles, Staircase, decompose


def stairs_of(segments) -> Staircase:
    """From (query, rows, low, high, low_moves, high_moves, group) tuples."""
    columns = [np.array(column) for column in zip(*segments)]
    return Staircase(*(c.astype(bool if i in (4, 5) else np.int64) for i, c in enumerate(columns)))


def covered(parts: Rectangles, shape) -> np.ndarray:
    count = np.zeros(shape, int)
    for i in range(parts.count):
        q, n, k, m = (int(getattr(parts, name)[i]) for name in ("query", "queries", "key", "keys"))
        row, key = np.mgrid[:n, :m]
        kept = {FULL: row >= 0, CAUSAL: key <= row, ANTICAUSAL: key >= row}[int(parts.kind[i])]
        count[q:q + n, k:k + m] += kept
    return count


def shapes(parts: Rectangles) -> list[tuple[int, int, int]]:
    """Sorted (queries, keys, how many)."""
    pairs = list(zip(parts.queries.tolist(), parts.keys.tolist()))
    return sorted((*pair, pairs.count(pair)) for pair in set(pairs))


def test_strictly_earlier_blocks_by_halving():
    """The worked example of the module: 4 blocks of 2."""
    parts = decompose(stairs_of([(2 * b, 2, 0, 2 * b, False, False, 0) for b in range(4)]), 2)
    assert shapes(parts) == [(2, 2, 2), (4, 4, 1)]


def test_a_partial_last_segment_leaves_the_others_regular():
    parts = decompose(stairs_of([(2 * b, 2, 0, 2 * b, False, False, 0) for b in range(7)]), 2)
    assert shapes(parts) == [(2, 2, 3), (2, 4, 1), (4, 4, 1), (6, 8, 1)]


def test_a_long_run_gets_a_rectangle_of_its_own():
    """Three runs that see 4, 8 and 20 keys of another rank: no halving between them."""
    runs = [(query, 8, 0, keys, False, False, 0) for query, keys in ((0, 4), (8, 8), (16, 20))]
    parts = decompose(stairs_of(runs), 2)
    assert shapes(parts) == [(8, 4, 1), (8, 8, 1), (8, 20, 1)]


def test_equal_neighbours_are_one_rectangle():
    parts = decompose(stairs_of([(0, 4, 0, 6, False, False, 0), (4, 4, 0, 6, False, False, 0)]), 4)
    assert shapes(parts) == [(8, 6, 1)]


def test_token_causal_run_is_one_triangle():
    parts = decompose(stairs_of([(0, 16, 0, 0, False, True, 0)]), 4)
    assert parts.kind.tolist() == [CAUSAL] and shapes(parts) == [(16, 16, 1)]


def test_window_band_is_triangles_and_a_core():
    """W = 7 from row 7 on: 6 keys before the row and itself, in tiles of 4 rows."""
    parts = decompose(stairs_of([(0, 7, 0, 0, False, True, 0), (7, 8, 1, 7, True, True, 0)]), 2)
    mask = np.array([[max(0, i - 6) <= k <= i for k in range(15)] for i in range(15)])
    assert np.array_equal(covered(parts, (15, 15)), mask.astype(int))
    tiles = parts.take(parts.query >= 7)
    assert sorted(zip(tiles.kind.tolist(), tiles.queries.tolist(), tiles.keys.tolist())) == [
        (FULL, 4, 2), (FULL, 4, 2), (CAUSAL, 4, 4), (CAUSAL, 4, 4), (ANTICAUSAL, 4, 4), (ANTICAUSAL, 4, 4)
    ]


def test_nothing_to_see():
    assert decompose(stairs_of([(0, 4, 3, 3, False, False, 0)]), 4).count == 0


@st.composite
def staircases(draw):
    """Monotone staircases with both kinds of ends, gaps in the queries and several groups."""
    segments, query, low, high = [], 0, 0, 0
    for _ in range(draw(st.integers(1, 9))):
        rows = draw(st.integers(1, 6))
        low_moves = draw(st.booleans())
        high_moves = draw(st.booleans())
        low += draw(st.integers(0, 3))
        # a row sees something at every step of a moving low end
        least = low if not low_moves else low + (1 if high_moves else rows)
        high = max(high + draw(st.integers(0, 3)), least - (1 if high_moves and low_moves else 0))
        segments.append((query, rows, low, high, low_moves, high_moves, 0))
        low += rows if low_moves else 0
        high += rows if high_moves else 0
        query += rows + draw(st.sampled_from([0, 0, 0, 2]))
    return segments


@settings(max_examples=300, deadline=None, derandomize=True)
@given(staircases(), st.integers(1, 8))
def test_every_staircase_is_covered_exactly_once(segments, longest_step):
    rows = max(s[0] + s[1] for s in segments)
    keys = max(s[3] + s[1] for s in segments) + 1
    wanted = np.zeros((rows, keys), int)
    for query, count, low, high, low_moves, high_moves, _ in segments:
        for i in range(count):
            wanted[query + i, low + i * low_moves:high + (i + 1) * high_moves] = 1
    parts = decompose(stairs_of(segments), longest_step)
    assert np.array_equal(covered(parts, (rows, keys)), wanted)
    assert ((parts.kind == FULL) | (parts.queries == parts.keys)).all()
    for label in set(zip(parts.phase.tolist(), parts.level.tolist())):
        chosen = parts.take((parts.phase == label[0]) & (parts.level == label[1]))
        taken = np.zeros(rows, int)
        for query, count in zip(chosen.query, chosen.queries):
            taken[query:query + count] += 1
        assert taken.max() <= 1, "parts of one phase and level share a query row"
