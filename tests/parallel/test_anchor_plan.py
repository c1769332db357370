"""The plan of anchors covers exactly what the nested loops of the oracle see, on every rank and replica."""

import numpy as np
import pytest
import torch

from megatron.bdlm.parallel.anchor_plan import AnchorPlan, Anchors, even_shares
from megatron.bdlm.parallel.blocks import PlanError
from megatron.bdlm.parallel.intervals import Intervals
from megatron.bdlm.testing.drafter_oracle import draft_mask


def _plans(anchors, block_size, context, size, slots, window=None, starts=None, compact=None, shares=None):
    given = Anchors.of(anchors, starts)
    owners = np.arange(len(anchors)) % slots
    shares = shares or even_shares(context, size)
    return [AnchorPlan.build(given, block_size, shares, owners, slots, rank, compact) for rank in range(size)]


def _covered(plans, context, window, causal):
    """How often each pair of (draft row by anchor, key) is computed over the replicas, [A * B, C + A * B]."""
    B, anchors = plans[0].block_size, len(plans[0].anchors.positions)
    count = torch.zeros(anchors * B, context + anchors * B, dtype=torch.int64)
    for plan in plans:
        local, program = plan.local_anchors, plan.program(window, causal)
        rows = np.concatenate([np.arange(B) + a * B if a >= 0 else np.full(B, -1) for a in local])
        inner = plan.rank % plan.replicas
        pieces = [(piece, plan.context[inner + plan.replicas * piece.source].tokens()) for piece in (program.local, *program.remote)]
        pieces = [(piece, tokens[piece.rows]) for piece, tokens in pieces]
        if inner == 0:  # every replica computes its own blocks
            keys = np.concatenate((plan.local_context.tokens(), context + rows))
            pieces.append((program.own, keys))
        for piece, keys in pieces:
            for batch in piece.batches:
                for query, key in zip(batch.query_starts, batch.key_starts):
                    for i in range(batch.queries):
                        if rows[query + i] < 0:
                            continue
                        last = i + 1 if batch.kind == "causal" else batch.keys
                        first = i if batch.kind == "anticausal" else 0
                        count[rows[query + i], torch.from_numpy(keys[key + first : key + last])] += 1
    return count


CASES = [
    dict(anchors=[10, 13], block_size=8, context=32),
    dict(anchors=[0, 3, 4, 11, 17, 30, 31], block_size=4, context=32, starts=[0, 0, 0, 8, 8, 8, 8]),
    dict(anchors=[5], block_size=2, context=9),
    dict(anchors=[], block_size=4, context=8),
]


@pytest.mark.parametrize("size, slots", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("window, causal", [(None, False), (4, True), (4, False), (9, True), (None, True)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["anchors"]))
def test_every_visible_pair_once(case, window, causal, size, slots):
    plans = _plans(size=size, slots=slots, **case)
    wanted = draft_mask(case["context"], case["anchors"], case["block_size"], case.get("starts"), window, causal)
    assert torch.equal(_covered(plans, case["context"], window, causal), wanted.long())
    assert len({plan.draft_rows for plan in plans}) == 1


@pytest.mark.parametrize("size, slots", [(2, 2), (4, 2)])
@pytest.mark.parametrize("window", [None, 4])
def test_travelling_queries_cover_the_same_pairs(window, size, slots):
    case = CASES[1]
    plans, B = _plans(size=size, slots=slots, **case), case["block_size"]
    wanted = draft_mask(case["context"], case["anchors"], B, case["starts"], window)[:, : case["context"]].long()
    count = torch.zeros_like(wanted)
    for plan in plans:
        rows = np.concatenate([np.arange(B) + a * B if a >= 0 else np.full(B, -1) for slot in plan.slots for a in slot])
        program, keys = plan.program(window, False, queries_travel=True), plan.local_context.tokens()
        assert program.queries == len(rows) and not program.remote and not program.sends
        for batch in program.local.batches:
            for query, key in zip(batch.query_starts, batch.key_starts):
                for i in range(batch.queries):
                    first, last = (i if batch.kind == "anticausal" else 0), (i + 1 if batch.kind == "causal" else batch.keys)
                    count[rows[query + i], torch.from_numpy(keys[key + first : key + last])] += 1
    assert torch.equal(count, wanted)


def test_what_moves_is_what_is_less():
    few, many = _plans([4000], 4, 4096, 2, 2)[0], _plans(list(range(0, 4000, 8)), 4, 4096, 2, 2)[0]
    assert few.queries_are_less(None, 8, 2) and not many.queries_are_less(None, 8, 2)
    assert not few.queries_are_less(4, 8, 2)  # a window needs hardly any key
    assert not _plans([4000], 4, 4096, 1, 1)[0].queries_are_less(None, 8, 2)


def test_shares_of_several_runs_and_dropped_context():
    anchors, context, window = [9, 20, 40], 48, 5
    shares = [Intervals.of([0, 36], [12, 48]), Intervals.of([12], [36])]
    plans = _plans(anchors, 4, context, 2, 2, shares=shares, compact=window)
    assert [plan.local_context.pairs for plan in plans] == [[(5, 9), (36, 40)], [(16, 20)]]
    wanted = draft_mask(context, anchors, 4, None, window, True)
    assert torch.equal(_covered(plans, context, window, True), wanted.long())


def test_two_near_anchors_leak_nothing():
    mask = draft_mask(32, [10, 13], 8)
    row = mask[8 + 3]
    assert row[:32].nonzero().flatten().tolist() == list(range(13)) and row[32:].nonzero().flatten().tolist() == list(range(8, 16))
    windowed = draft_mask(32, [10, 13], 8, window=4, causal=True)
    assert [windowed[8 + k, :32].nonzero().flatten().tolist() for k in range(4)] == [[10, 11, 12], [11, 12], [12], []]


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="--block-parallel-size 3: it must divide --context-parallel-size 4. A legal value: 4"):
        _plans([3], 2, 8, 4, 3)
