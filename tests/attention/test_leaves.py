"""Masked leaves cover exactly what the tiles they replace covered."""

import pytest
import torch

from megatron.bdlm.attention import leaves
from megatron.bdlm.attention.leaves import with_leaves
from megatron.bdlm.attention.tiles import Spaced, tiles_of
from megatron.bdlm.parallel.plan import SequencePlan

CPU = torch.device("cpu")


def coverage(tiles, rows, keys):
    """How often each (folded query row, key) pair is covered."""
    covered = torch.zeros(rows, keys, dtype=torch.int64)
    row_numbers = torch.arange(rows, dtype=torch.float64).view(-1, 1, 1)
    key_numbers = torch.arange(keys, dtype=torch.float64).view(-1, 1, 1)
    for tile in tiles:
        query_rows = tile.queries.read(row_numbers)[:, 0, :, 0].long()
        key_rows = tile.keys.read(key_numbers)[:, 0, :, 0].long()
        for r, c in zip(query_rows, key_rows):
            seen = torch.ones(len(r), len(c), dtype=torch.int64) if tile.mask is None else (tile.mask == 0).long()
            if tile.kind == "causal":
                seen = seen.tril()
            covered[r[:, None], c] += seen
    return covered


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(seq_length=256, block_size=4),
        dict(seq_length=256, block_size=1),
        dict(seq_length=250, block_size=3),
        dict(seq_length=256, block_size=4, views=2),
        dict(seq_length=256, block_size=32),
        dict(seq_length=300, block_size=4, documents=[120, 52, 128]),
        dict(seq_length=256, block_size=4, clean_attention="token-causal"),
        dict(seq_length=512, block_size=4, context_parallel_size=4, rank=1),
        dict(seq_length=256, block_size=4, noisy_attention="causal"),
    ],
    ids=str,
)
def test_the_same_pairs_are_covered_once(arguments, g):
    piece = SequencePlan.build(**arguments).program().local
    if any(batch.kind == "causal" for batch in piece.batches) and g > 1:
        g = 1  # a diagonal counts tokens, not folded rows: coverage above reads one kind of row
    tiles = tiles_of(piece.batches, g, CPU)
    joined = with_leaves(tiles, g, CPU)
    before, after = (coverage(some, len(piece.rows) * g, len(piece.rows)) for some in (tiles, joined))
    assert before.max() == 1 and torch.equal(before, after)
    for tile in joined:
        if tile.mask is not None:
            assert tile.mask.numel() <= leaves.LEAF_PAIRS
            assert (tile.mask == 0).any(1).all(), "a row without keys would be 0/0"


def test_small_levels_of_a_regular_sample_are_gone():
    joined = with_leaves(tiles_of(SequencePlan.build(1024, 4).program().local.batches, 1, CPU), 1, CPU)
    masked = [(tile.queries.length, tile.keys.length, tile.queries.count) for tile in joined if tile.mask is not None]
    assert sorted(masked) == [(16, 16, 64), (60, 60, 16), (64, 64, 16)]  # noisy own blocks, noisy and clean leaves
    assert min(tile.keys.length for tile in joined if tile.mask is None) == 64
    assert all(isinstance(tile.queries, Spaced) for tile in joined)


def test_large_blocks_keep_their_tiles():
    tiles = tiles_of(SequencePlan.build(1024, 256).program().local.batches, 1, CPU)
    assert with_leaves(tiles, 1, CPU) == tiles
