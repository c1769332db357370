"""Small rectangles as intervals: every pair kept once, by the intervals or by the batches that are left."""

import numpy as np
import pytest

from megatron.bdlm.attention import diagonal
from megatron.bdlm.parallel.plan import SequencePlan
from tests.parallel.test_batches import pairs

PLANS = {
    "regular": dict(seq_length=64, block_size=4),
    "S = 1": dict(seq_length=32, block_size=1),
    "ragged documents, two views": dict(seq_length=61, block_size=3, documents=[20, 9, 32], views=2),
    "token-causal": dict(seq_length=64, block_size=4, clean_attention="token-causal"),
    "two blocks": dict(seq_length=24, block_size=12),
}


def seen(intervals: np.ndarray) -> list[tuple[int, int]]:
    """(query, key) pairs of the intervals, by plain loops."""
    found = []
    for row, (a, b, c, d) in enumerate(intervals.tolist()):
        found += [(row, key) for key in (*range(a, b), *range(c, d))]
    return sorted(found)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("side", [None, 1, 8, 1000])
@pytest.mark.parametrize("name", PLANS)
def test_every_pair_is_in_the_intervals_or_in_what_is_left(name, side, window):
    for size in (1, 2):
        plan = SequencePlan.build(context_parallel_size=size, block_parallel_size=size, rank=size - 1, **PLANS[name])
        program = plan.program(window)
        for piece in (program.local, *program.remote):
            intervals, rest = diagonal.split(piece.batches, side)
            assert sorted(seen(intervals) + pairs(rest)) == pairs(piece.batches)


def test_without_a_window_every_small_rectangle_of_a_half_chunk_is_taken():
    for views in (1, 2):
        plan = SequencePlan.build(256, 4, 2, rank=1, views=views)
        batches = plan.program().local.batches
        _, rest = diagonal.split(batches, 16)
        assert 0 < len(rest) < len(batches)
        assert all(batch.keys > 16 for batch in rest)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("tile_tokens", "tile_keys"), [(4, 8), (16, 16), (5, 4)])
def test_tiles_hold_every_row_once_and_key_tiles_know_who_sees_them(name, tile_tokens, tile_keys):
    plan = SequencePlan.build(context_parallel_size=1, rank=0, **PLANS[name])
    intervals, _ = diagonal.split(plan.program().local.batches, 16)
    table = diagonal.tiled(intervals, tile_tokens, tile_keys)
    assert table.area == len(seen(intervals))
    rows = [row for first, count, *_ in table.tiles.tolist() for row in range(first, first + count)]
    assert len(set(rows)) == len(rows) and set(rows) >= {row for row, _ in seen(intervals)}
    tile_of = {row: number for number, (first, count, *_) in enumerate(table.tiles.tolist()) for row in range(first, first + count)}
    assert table.tiles[:, 1].max() <= tile_tokens
    for row, (a, b, c, d) in enumerate(intervals.tolist()):
        if b > a or d > c:
            span = table.tiles[tile_of[row]]
            assert a == b or span[2] <= a < b <= span[3]
            assert c == d or span[4] <= c < d <= span[5]
    sees = {(tile_of[row], key // tile_keys) for row, key in seen(intervals)}
    known = {(int(tile), first // tile_keys) for first, begin, end in table.key_tiles.tolist() for tile in table.seen_by[begin:end]}
    assert sees <= known
    assert len(known) == len(table.seen_by)


def test_nothing_small():
    intervals, rest = diagonal.split((), 128)
    table = diagonal.tiled(intervals, 64, 64)
    assert rest == () and len(table.tiles) == len(table.key_tiles) == 0
