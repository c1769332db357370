"""Cutting batches of rectangles by keys: the parts hold every pair once, and keep the promises of a batch."""

import numpy as np
import pytest

from megatron.bdlm.parallel.batches import KINDS, RectangleBatch, cut_keys
from megatron.bdlm.parallel.plan import SequencePlan


def pairs(batches, key_offset: int = 0) -> list[tuple[int, int]]:
    """Visible (query, key) pairs, by plain loops."""
    seen = []
    for batch in batches:
        for query, key in zip(batch.query_starts.tolist(), batch.key_starts.tolist()):
            for i in range(batch.queries):
                for j in range(batch.keys):
                    if batch.kind == "full" or (j <= i if batch.kind == "causal" else j >= i):
                        seen.append((query + i, key + j + key_offset))
    return sorted(seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", range(15))
def test_both_sides_of_a_cut_hold_every_pair_once(kind, cut):
    batch = RectangleBatch(4, 4, np.array([0, 10, 20, 30, 40, 50]), np.tile([1, 5, 9], 2), kind, copies=2)
    below, above = cut_keys(batch, 0, cut), cut_keys(batch, cut, 14)
    assert sorted(pairs(below) + pairs(above, cut)) == pairs([batch])
    for part in below + above:
        starts = part.key_starts.reshape(part.copies, -1)
        assert (starts == starts[0]).all()
        assert len(set(part.query_starts.tolist())) == part.count
        assert part.kind == "full" or part.queries == part.keys


@pytest.mark.parametrize(
    "arguments",
    [
        dict(seq_length=64, block_size=4),
        dict(seq_length=50, block_size=3, documents=[20, 30], views=2),
        dict(seq_length=64, block_size=4, clean_attention="token-causal"),
        dict(seq_length=61, block_size=16, strategy="hybrid", block_parallel_size=2),
    ],
)
def test_parts_of_a_piece_hold_its_pairs_and_rows(arguments):
    for rank in range(4):
        plan = SequencePlan.build(context_parallel_size=4, rank=rank, **{"block_parallel_size": 4, **arguments})
        for piece in plan.program().remote:
            for cut in (0, int(piece.rows[len(piece.rows) // 3]), int(piece.rows[-1]), 1000):
                low, high = piece.part(0, cut), piece.part(cut, 1000)
                assert np.array_equal(np.concatenate((low.rows, high.rows)), piece.rows)
                assert low.area + high.area == piece.area
                assert sorted(pairs(low.batches) + pairs(high.batches, len(low.rows))) == pairs(piece.batches)
