"""A staircase of visible keys as dense rectangles and triangles: the geometry behind maskless attention.

Query rows ascend, and row i sees one interval of keys `[lo(i), hi(i))` whose ends never move back:
that is the whole block diffusion mask, on any rank, against the keys of any rank. A `Staircase`
stores it in segments; over a segment `lo` and `hi` are constant, or move one key a row.

`decompose` covers it exactly, each pair once:

* a node is a range of segments. When its last row's `lo` is not beyond its first row's `hi`, all
  its rows share the keys between them: one rectangle, the *core*. Otherwise it is cut in half.
* what is left is an upper stair (keys above the core, more for later rows) and a lower stair (keys
  below the core, more for earlier rows). Both fall to aligned halving: at each level the second
  half of an upper node sees what the first half's rows come to see: a rectangle `h x h`.
* where an end moves one key a row, the stair is a triangle: one "causal" or "anticausal" square.

Worked example, 4 blocks of S = 2, strictly earlier blocks, no window: segments hi = 0, 2, 4, 6.
The core is empty; rows 4..7 see keys 0..3 (one 4 x 4), rows 2..3 see keys 0..1 and rows 6..7 see
keys 4..5 (a batch of two 2 x 2).

Without a window every `lo` is the document's start, so the first node is the only one with a core;
a window makes cores of at most its width by itself. All steps are vectorised over the nodes of a level.
"""

from dataclasses import dataclass, replace

import numpy as np

FULL, CAUSAL, ANTICAUSAL = 0, 1, 2
CORE, UPPER, LOWER = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Dense parts of one staircase, int64 arrays of one length.

    Parts of equal (`phase`, `level`) never share a query row.
    """

    query: np.ndarray  # first query row
    queries: np.ndarray  # rows
    key: np.ndarray  # first key
    keys: np.ndarray  # keys
    kind: np.ndarray  # FULL, CAUSAL (row i sees keys 0..i), ANTICAUSAL (row i sees keys i..)
    phase: np.ndarray  # CORE, UPPER, LOWER
    level: np.ndarray  # node size in segments, rounded up to a power of two

    @property
    def count(self) -> int:
        return len(self.query)

    def take(self, index) -> "Rectangles":
        return Rectangles(*(getattr(self, name)[index] for name in _FIELDS))

    def shifted(self, query: int, key: int) -> "Rectangles":
        """The same parts with rows counted from `query` and keys from `key`."""
        return replace(self, query=self.query + query, key=self.key + key)

    @staticmethod
    def join(parts: "list[Rectangles]") -> "Rectangles":
        if not parts:
            return Rectangles(*(np.zeros(0, np.int64) for _ in _FIELDS))
        return Rectangles(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = tuple(Rectangles.__dataclass_fields__)


@dataclass(frozen=True, eq=False)
class Staircase:
    """Segments of query rows in ascending order, int64 arrays unless noted.

    Row i of a segment (i from 0) sees the keys from `low + (i if low_moves else 0)` up to, exclusive,
    `high + (i + 1 if high_moves else 0)`.
    """

    query: np.ndarray  # first query row
    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    low_moves: np.ndarray  # bool
    high_moves: np.ndarray  # bool
    group: np.ndarray  # rows of different groups (documents, blocks) never share a rectangle

    @property
    def count(self) -> int:
        return len(self.query)

    def count_keys(self, change: np.ndarray, offset: int = 0) -> None:
        """Add +1 where each segment's keys start and -1 where they stop, keys counted from `offset`, in `change` [keys + 1]."""
        high = self.high + np.where(self.high_moves, self.rows, 0)
        seen = high > self.low
        np.add.at(change, self.low[seen] + offset, 1)
        np.add.at(change, high[seen] + offset, -1)

    def take(self, index) -> "Staircase":
        return Staircase(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def decompose(stairs: Staircase, longest_step: int) -> Rectangles:
    """Cover `stairs` exactly with rectangles and triangles.

    Args:
        longest_step: rows and keys up to which a step is worth halving with its neighbours (the block
            size); a longer one, such as a whole run of blocks against another rank's keys, gets a
            rectangle of its own.
    """
    stairs = _drop_empty(_single_rows_stand_still(_cut_double_slopes(_start_slopes_late(stairs))))
    if not stairs.count:
        return Rectangles.join([])
    stairs = _join_equal(stairs, longest_step)
    first = np.flatnonzero(~_steps_on(stairs, longest_step))
    nodes = (first, np.concatenate((first[1:], [stairs.count])))
    parts: list[Rectangles] = []
    upper, lower = [], []
    while len(nodes[0]):
        fits = _lowest_common(stairs, nodes[1]) <= stairs.high[nodes[0]]
        cored = nodes[0][fits], nodes[1][fits]
        parts.append(_core(stairs, *cored))
        upper.append(cored)
        lower.append(cored)
        nodes = nodes[0][~fits], nodes[1][~fits]
        assert (nodes[1] - nodes[0] > 1).all(), "a segment alone always has a core"
        nodes = _halves(*nodes)
    parts += _stair(stairs, _concatenated(upper), UPPER)
    parts += _stair(stairs, _concatenated(lower), LOWER)
    return Rectangles.join(parts)


# ---- normal form ----------------------------------------------------------------------------


def _start_slopes_late(stairs: Staircase) -> Staircase:
    """Give the first row of a low slope to the level segment before it that sees the same.

    A window W leaves the document's first token out from row W on; row W-1 still sees it. Slopes then
    start where blocks do when W is a multiple of S.
    """
    level_end = stairs.high + np.where(stairs.high_moves, stairs.rows, 0)
    late = np.zeros(stairs.count, bool)
    late[1:] = (
        stairs.low_moves[1:]
        & ~stairs.low_moves[:-1]
        & (stairs.group[1:] == stairs.group[:-1])
        & (stairs.query[1:] == stairs.query[:-1] + stairs.rows[:-1])
        & (stairs.low[1:] == stairs.low[:-1])
        & (stairs.high[1:] == level_end[:-1])
        & (stairs.high_moves[1:] == stairs.high_moves[:-1])
    )
    longer = np.append(late[1:], False)
    moved = replace(
        stairs, query=stairs.query + late, rows=stairs.rows - late + longer,
        low=stairs.low + late, high=stairs.high + (late & stairs.high_moves),
    )
    return moved.take(moved.rows > 0)


def _cut_double_slopes(stairs: Staircase) -> Staircase:
    """Cut segments where both ends move into tiles short enough to have a core.

    With `w = high - low` keys below the first row's own, a tile of T <= w rows has the triangles
    `[low, low+T)` and `[high, high+T)` apart; T is a power of two so that tiles batch.
    """
    width = np.maximum(stairs.high - stairs.low, 1)
    tile = np.where(stairs.low_moves & stairs.high_moves, _power_below(width), stairs.rows)
    tile = np.maximum(np.minimum(tile, stairs.rows), 1)
    pieces = -(-stairs.rows // tile)
    source = np.repeat(np.arange(stairs.count), pieces)
    offset = (np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile[source]
    cut = stairs.take(source)
    return replace(
        cut, query=cut.query + offset, rows=np.minimum(tile[source], cut.rows - offset),
        low=cut.low + np.where(cut.low_moves, offset, 0), high=cut.high + np.where(cut.high_moves, offset, 0),
    )


def _single_rows_stand_still(stairs: Staircase) -> Staircase:
    """Over one row nothing moves."""
    single = stairs.rows == 1
    return replace(
        stairs, high=stairs.high + (single & stairs.high_moves),
        low_moves=stairs.low_moves & ~single, high_moves=stairs.high_moves & ~single,
    )


def _drop_empty(stairs: Staircase) -> Staircase:
    """Drop segments that see nothing, but for the one before a segment that sees something.

    A document's first block sees no earlier one; without it the halving of the others would be out of step.
    """
    sees = (stairs.high > stairs.low) | stairs.high_moves
    before = np.zeros(stairs.count, bool)
    before[:-1] = sees[1:] & (stairs.group[1:] == stairs.group[:-1])
    return stairs.take(sees | before)


def _follows(stairs: Staircase) -> np.ndarray:
    """Whether segment i continues segment i-1 without any step, [count] bool (first: False)."""
    follows = np.zeros(stairs.count, bool)
    before, after = stairs.take(slice(0, -1)), stairs.take(slice(1, None))
    follows[1:] = (
        (after.group == before.group)
        & (after.query == before.query + before.rows)
        & (after.low == before.low + np.where(before.low_moves, before.rows, 0))
        & (after.high == before.high + np.where(before.high_moves, before.rows, 0))
        & (after.low_moves == before.low_moves)
        & (after.high_moves == before.high_moves)
    )
    return follows


def _steps_on(stairs: Staircase, longest_step: int) -> np.ndarray:
    """Whether segment i goes on from segment i-1 by a short step, [count] bool (first: False).

    Where it does not (another group, a gap in the queries, a long step) a new top node starts.
    """
    on = np.zeros(stairs.count, bool)
    before, after = stairs.take(slice(0, -1)), stairs.take(slice(1, None))
    low_end = before.low + np.where(before.low_moves, before.rows, 0)
    high_end = before.high + np.where(before.high_moves, before.rows, 0)
    on[1:] = (
        (after.group == before.group)
        & (after.query == before.query + before.rows)
        & (np.maximum(after.rows, before.rows) <= longest_step)
        & (after.high - high_end <= longest_step)
        & (after.low - low_end <= longest_step)
    )
    return on


def _join_equal(stairs: Staircase, longest_step: int) -> Staircase:
    """Join neighbours without a step between them.

    Not the tiles of `_cut_double_slopes`, and not the last segment before a flight of short steps: it is
    the first of the flight, which would otherwise be halved out of step.
    """
    follows = _follows(stairs)
    flight = _steps_on(stairs, longest_step) & ~follows
    before_flight = np.append(flight[1:], False)
    first = np.flatnonzero(~follows | before_flight | (stairs.low_moves & stairs.high_moves))
    return replace(stairs.take(first), rows=np.add.reduceat(stairs.rows, first))


# ---- nodes ----------------------------------------------------------------------------------


def _power_below(n: np.ndarray) -> np.ndarray:
    """Largest power of two not above n (n >= 1)."""
    return np.int64(1) << (np.frexp(n.astype(np.float64))[1] - 1).astype(np.int64)


def _power_above(n: np.ndarray) -> np.ndarray:
    """Smallest power of two not below n (n >= 1)."""
    return np.where(n > 1, _power_below(np.maximum(n - 1, 1)) * 2, 1)


def _middle(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Aligned middle of nodes of at least two segments: the first half is a power of two."""
    return first + _power_above(last - first) // 2


def _halves(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    middle = _middle(first, last)
    return np.concatenate((first, middle)), np.concatenate((middle, last))


def _concatenated(nodes: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([first for first, _ in nodes]), np.concatenate([last for _, last in nodes])


def _lowest_common(stairs: Staircase, last: np.ndarray) -> np.ndarray:
    """Lowest key that every row of nodes ending at `last` may share; a moving low end gives its square away."""
    final = last - 1
    return stairs.low[final] + np.where(stairs.low_moves[final], stairs.rows[final], 0)


def _rectangles(query, query_stop, key, key_stop, kind, phase, level) -> Rectangles:
    """Rectangles from half-open ranges, empty ones dropped."""
    parts = Rectangles(
        query, query_stop - query, key, key_stop - key,
        np.full_like(query, kind), np.full_like(query, phase), level,
    )
    return parts.take((parts.queries > 0) & (parts.keys > 0))


def _row_stop(stairs: Staircase, last: np.ndarray) -> np.ndarray:
    return stairs.query[last - 1] + stairs.rows[last - 1]


def _core(stairs: Staircase, first: np.ndarray, last: np.ndarray) -> Rectangles:
    return _rectangles(
        stairs.query[first], _row_stop(stairs, last), _lowest_common(stairs, last), stairs.high[first],
        FULL, CORE, np.zeros_like(first),
    )


def _stair(stairs: Staircase, nodes: tuple[np.ndarray, np.ndarray], phase: int) -> list[Rectangles]:
    """Halve the stair of each node above (`UPPER`) or below (`LOWER`) its core."""
    moves, end = (stairs.high_moves, stairs.high) if phase == UPPER else (stairs.low_moves, stairs.low)
    # steady[i]: the end moves on from segment i-1 to i at one key a row
    steady = np.zeros(stairs.count, np.int64)
    steady[1:] = moves[1:] & moves[:-1] & (end[1:] == end[:-1] + stairs.rows[:-1])
    steady_before = np.cumsum(steady)
    parts = []
    first, last = nodes
    while len(first):
        triangle = moves[first] & (steady_before[last - 1] - steady_before[first] == last - 1 - first)
        start, stop = stairs.query[first[triangle]], _row_stop(stairs, last[triangle])
        corner = end[first[triangle]]
        kind = CAUSAL if phase == UPPER else ANTICAUSAL
        level = _power_above(last - first)
        parts.append(_rectangles(start, stop, corner, corner + stop - start, kind, phase, level[triangle]))
        split = ~triangle & (last - first > 1)
        first, last, level = first[split], last[split], level[split]
        middle = _middle(first, last)
        if phase == UPPER:
            parts.append(_rectangles(
                stairs.query[middle], _row_stop(stairs, last), stairs.high[first], stairs.high[middle],
                FULL, phase, level,
            ))
        else:
            parts.append(_rectangles(
                stairs.query[first], _row_stop(stairs, middle), _lowest_common(stairs, middle),
                _lowest_common(stairs, last), FULL, phase, level,
            ))
        first, last = _halves(first, last)
    return parts
