"""Small tiles joined under one explicit mask, for kernels that take one (torch's CPU operator).

Halving ends in rectangles of a few rows, where a kernel spends its time on overhead: below about 64 x 64 pairs one
masked tile is faster than the levels it covers (measured on a CPU for S = 4, one stream of 4096 rows, forward /
backward in ms: levels 4 to 32 and own blocks 28 / 62, one masked level of 64 x 64 leaves 12 / 26). All leaves of a
level look alike, so they share one mask of at most LEAF_PAIRS entries: memory does not depend on the length.

    Example, S = 1, leaf of 4 tokens. Clean rows: level 2 (rows 2-3 see keys 0-1), level 1 (row 1 sees key 0, row 3
    key 2) and own blocks (row i sees key i) become one 4 x 4 tile, lower triangle visible. Noisy rows have no own
    clean block: row 0 sees nothing here, so the leaf is rows 1-3 against keys 0-2.

A pure function from tiles to tiles: pairs covered before are covered after, each once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.bdlm.attention.tiles import Spaced, Tile
from megatron.bdlm.parallel.device import to_device

LEAF_PAIRS = 64 * 64  # (query row, key) pairs of a leaf at most
DIAGONAL_ROWS = 16  # adjacent own-block squares are joined up to this many rows


def with_leaves(tiles: Sequence[Tile], g: int, device: torch.device) -> tuple[Tile, ...]:
    """Replace the small levels of regular halving, and tiny own-block squares, by masked tiles; g as in `tiles`."""
    rest = list(tiles)
    tops = [tile for tile in rest if _is_level(tile, g) and 4 * tile.keys.length**2 * g <= LEAF_PAIRS]
    leaves = []
    for top in sorted(tops, key=lambda tile: -tile.keys.length):
        if any(tile is top for tile in rest):
            leaf, rest = _join_levels(top, rest, g, device)
            leaves += leaf
    rest = [part for tile in rest for part in _join_squares(tile, g, device)]
    return (*rest, *leaves)


def _is_level(tile: Tile, g: int) -> bool:
    """Whether the tile is a level of halving: squares of h tokens, one in every 2h tokens."""
    if tile.kind != "full" or not (isinstance(tile.queries, Spaced) and isinstance(tile.keys, Spaced)):
        return False
    h = tile.keys.length
    return tile.queries.length == h * g and tile.queries.step == 2 * h * g and tile.keys.step == 2 * h


def _join_levels(top: Tile, tiles: list[Tile], g: int, device: torch.device) -> tuple[list[Tile], list[Tile]]:
    """Leaves of twice the size of `top`'s squares: everything inside them becomes one tile; return it and the rest."""
    size, count = 2 * top.keys.length, top.queries.count
    query, key = top.queries.start - top.keys.length * g, top.keys.start  # where the first leaf starts
    covered = torch.zeros(size, size, dtype=torch.int64)  # [token, key] of a leaf
    rest, joined = [], 0
    for tile in tiles:
        inside = _inside(tile, query, key, size, count, g)
        if inside is None:
            rest.append(tile)
            continue
        first, step = inside
        for number in range(size // step):
            row = tile.queries.start // g + (first + number) * step - query // g
            column = tile.keys.start + (first + number) * step - key
            covered[row : row + tile.queries.length // g, column : column + tile.keys.length] += 1
        taken = count * size // step
        rest += _cut(tile, 0, first) + _cut(tile, first + taken, tile.queries.count)
        joined += 1
    rows, columns = covered.any(1).nonzero().flatten(), covered.any(0).nonzero().flatten()
    top_row, left, bottom, right = int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
    visible = covered[top_row:bottom, left:right]
    if joined < 2 or int(covered.max()) > 1 or not visible.any(1).all() or visible.all():
        return [], tiles
    queries = Spaced(count, query + top_row * g, size * g, (bottom - top_row) * g)
    keys = Spaced(count, key + left, size, right - left)
    return [Tile(queries, keys, "full", _mask(visible > 0, g, device))], rest


def _inside(tile: Tile, query: int, key: int, size: int, count: int, g: int) -> tuple[int, int] | None:
    """Which rectangles of a tile lie in the `count` leaves of `size` tokens that start at (query, key).

    Returns:
        (number of the first one, their distance in tokens) when every leaf holds the same ones, else None.
    """
    if tile.kind != "full" or tile.mask is not None or not isinstance(tile.queries, Spaced):
        return None
    step = tile.keys.step
    if step < 1 or tile.queries.step != step * g or size % step or query % g or tile.queries.length % g:
        return None
    first = -((tile.queries.start - query) // (step * g))  # the first one that starts at or after `query`
    row = tile.queries.start // g + first * step - query // g
    column = tile.keys.start + first * step - key
    last = size - step  # from the first to the last one of a leaf
    fits = 0 <= row and row + last + tile.queries.length // g <= size
    fits = fits and 0 <= column and column + last + tile.keys.length <= size
    return (first, step) if fits and first >= 0 and first + count * size // step <= tile.queries.count else None


def _cut(tile: Tile, first: int, stop: int) -> list[Tile]:
    """Rectangles first..stop-1 of a tile of spaced runs, as a tile of their own."""
    if stop <= first:
        return []
    queries, keys = (
        replace(where, count=stop - first, start=where.start + first * where.step)
        for where in (tile.queries, tile.keys)
    )
    return [replace(tile, queries=queries, keys=keys)]


def _join_squares(tile: Tile, g: int, device: torch.device) -> list[Tile]:
    """Adjacent tiny squares (own blocks) side by side in one masked square."""
    if tile.kind != "full" or tile.mask is not None or not isinstance(tile.queries, Spaced):
        return [tile]
    size = tile.keys.length
    adjacent = tile.keys.step == size and tile.queries.length == tile.queries.step == size * g
    together = DIAGONAL_ROWS // (size * g)
    count = tile.queries.count // max(together, 1)
    if not adjacent or together < 2 or count < 2:
        return [tile]
    visible = torch.block_diag(*[torch.ones(size, size)] * together) > 0
    queries = Spaced(count, tile.queries.start, together * size * g, together * size * g)
    keys = Spaced(count, tile.keys.start, together * size, together * size)
    joined = Tile(queries, keys, "full", _mask(visible, g, device))
    return [joined, *_cut(tile, count * together, tile.queries.count)]


def _mask(visible: torch.Tensor, g: int, device: torch.device) -> torch.Tensor:
    """Additive mask [rows * g, keys] of a leaf: 0 where visible, -inf elsewhere."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    return to_device(mask.repeat_interleave(g, 0), device)
