"""The small rectangles of a piece as two key intervals a row, for a kernel that computes them all in one launch.

Near the diagonal of a half chunk the rectangles are small (own blocks, the lowest levels of halving), and a kernel for
dense rectangles spends its time starting. But what a row sees there is at most two intervals of keys:

    noisy row    its own noisy block, and the clean keys from the start of its segment up to its block
    clean row    the keys from the start of its segment up to the end of its block (or up to itself)

    Example, S = 2, segments of 4 tokens, noisy keys 0..7, clean keys 8..15. Noisy row 6 sees [6, 8) and [12, 14);
    its clean twin, row 14, sees [12, 16) in one interval.

So four numbers a row say what is visible, whatever made it: ragged blocks, documents, views, windows, causal rows. No
mask exists. Rows are grouped in *query tiles*, keys in *key tiles*; for the gradients of keys each key tile knows the
query tiles that see it, so that no two programs write the same rows. All of it is made once per plan, on the CPU.

Indices: query tokens of this rank, keys in the rows of the piece, as in `RectangleBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.bdlm.parallel.batches import RectangleBatch

LARGEST_SIDE = 128  # keys of a rectangle up to which it counts as small
INTERVALS = 2  # that a row may have


@dataclass(frozen=True, eq=False)
class Diagonal:
    """What the small rectangles hold, as arrays of int32."""

    intervals: np.ndarray  # [tokens, 4]: the row sees the keys [a, b) and [c, d); empty where a == b, c == d
    tiles: np.ndarray  # [n, 6]: first token, tokens, and the span [a, b), [c, d) of what its rows see in either interval
    key_tiles: np.ndarray  # [m, 3]: first key, and the range [begin, end) of its entries in `seen_by`
    seen_by: np.ndarray  # query tiles, those of a key tile side by side

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        return int((self.intervals[:, 1::2] - self.intervals[:, 0::2]).sum())


def split(
    batches: Sequence[RectangleBatch], largest_side: int | None = LARGEST_SIDE
) -> tuple[np.ndarray, tuple[RectangleBatch, ...]]:
    """Separate small rectangles from those that a dense kernel computes well.

    Args:
        largest_side: keys of a small rectangle at most; None: all are small.

    Returns:
        ([tokens, 4] intervals of the rows up to the last one that sees any, the other batches). A batch whose keys do
        not adjoin a row's intervals when both are taken stays with the others.
    """
    tokens = max((int(batch.query_starts.max()) + batch.queries for batch in batches if batch.count), default=0)
    intervals = np.zeros((tokens, 2 * INTERVALS), np.int64)
    rest = []
    for batch in sorted(batches, key=lambda batch: batch.keys):  # from the own block outwards
        small = largest_side is None or batch.keys <= largest_side
        if not (small and batch.count and _extend(intervals, *_rows_of(batch))):
            rest.append(batch)
    return intervals, tuple(rest)


def _rows_of(batch: RectangleBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each query row of a batch with the keys [low, high) it sees; no row stands there twice."""
    row = np.arange(batch.queries)
    rows = (batch.query_starts[:, None] + row).reshape(-1)
    low = batch.key_starts[:, None] + (row if batch.kind == "anticausal" else 0 * row)
    high = batch.key_starts[:, None] + (row + 1 if batch.kind == "causal" else batch.keys)
    return rows, low.reshape(-1), np.broadcast_to(high, (batch.count, batch.queries)).reshape(-1)


def _extend(intervals: np.ndarray, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    """Add keys [low, high) to the rows' intervals, in place; False, and nothing done, where a row has no room."""
    mine = intervals[rows]
    left = low < high  # rows that are still to be served
    for start in range(0, 2 * INTERVALS, 2):
        first, last = mine[:, start], mine[:, start + 1]
        before, after, fresh = left & (high == first), left & (low == last), left & (first == last)
        mine[:, start] = np.where(before | fresh, low, first)
        mine[:, start + 1] = np.where(fresh | after & ~before, high, last)
        left = left & ~(before | after | fresh)
    if left.any():
        return False
    intervals[rows] = mine
    return True


def tiled(intervals: np.ndarray, tile_tokens: int, tile_keys: int) -> Diagonal:
    """Group rows and keys in tiles of at most `tile_tokens` and `tile_keys`.

    A tile ends where the next row's keys are elsewhere (another stream, document or segment), so that the span of its
    keys holds little that no row of it sees.
    """
    low, high = intervals[:, 0::2], intervals[:, 1::2]
    some = high > low
    jump = np.ones(len(intervals), bool)
    both = some[1:] & some[:-1]
    moved = np.maximum(np.abs(np.diff(low, axis=0)), np.abs(np.diff(high, axis=0))) > tile_keys
    jump[1:] = (both & moved).any(1) | (some[1:].any(1) != some[:-1].any(1))
    starts = np.flatnonzero(jump)
    stops = np.append(starts[1:], len(intervals))
    used = some.any(1)[starts]
    starts, stops = starts[used], stops[used]
    pieces = -(-(stops - starts) // tile_tokens)
    run = np.repeat(np.arange(len(starts)), pieces)
    first = starts[run] + (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile_tokens
    tiles = np.zeros((len(first), 6), np.int64)
    tiles[:, 0], tiles[:, 1] = first, np.minimum(tile_tokens, stops[run] - first)
    if len(first):
        far = np.iinfo(np.int64).max
        tiles[:, 2::2] = np.minimum.reduceat(np.where(some, low, far), first)
        tiles[:, 3::2] = np.maximum.reduceat(np.where(some, high, 0), first)
        tiles[:, 2::2] = np.minimum(tiles[:, 2::2], tiles[:, 3::2])  # an interval that no row has: [0, 0)
    key_tiles, seen_by = _seen_by(tiles, tile_keys)
    return Diagonal(*(array.astype(np.int32) for array in (intervals, tiles, key_tiles, seen_by)))


def _seen_by(tiles: np.ndarray, tile_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """The key tiles that any query tile sees, [m, 3], and the query tiles that see them."""
    if not len(tiles):
        return np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
    pairs = []
    for start in range(2, 2 + 2 * INTERVALS, 2):
        first, last = tiles[:, start] // tile_keys, -(-tiles[:, start + 1] // tile_keys)
        last = np.where(tiles[:, start + 1] > tiles[:, start], last, first)
        count = last - first
        tile = np.repeat(np.arange(len(tiles)), count)
        key_tile = first[tile] + np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
        pairs.append(np.stack((key_tile, tile), 1))
    pairs = np.unique(np.concatenate(pairs), axis=0)
    numbers, begins = np.unique(pairs[:, 0], return_index=True)
    ends = np.append(begins[1:], len(pairs))
    return np.stack((numbers * tile_keys, begins, ends), 1), pairs[:, 1]
