"""Which rank owns which block (or token range): equal attention area, near-equal rows, few long runs.

Three things cost: a rank's attention area (its visible query-key pairs), its rows (norms, projections,
MLP; all ranks are padded to the heaviest rank's rows), and its number of runs (every run cuts the mask
into more and smaller rectangles). They pull in different directions, so they are ordered:

1. area: the heaviest rank within `AREA_LIMIT` of what any placement can reach, wherever the search gets there;
2. rows: under that, the tightest of `_row_limits` (first the even share plus less than one block);
3. runs: under both, the coarsest items, that is the longest runs, that come within `AREA_LIMIT`.

So an uneven count of blocks costs rows, not area: with 9 blocks on some ranks and 8 on others, those with 9
get cheaper ones. For example B = 10 equal blocks on P = 4 ranks have areas 1..10: {1, 6, 7} {2, 3, 8} {4, 10}
{5, 9} is within 2% of even in area with 3, 3, 2 and 2 blocks; pairing blocks first with last gives 1.6.

When 2P divides B and the areas rise evenly (one document), the two-ended placement is exact in all three:
rank a owns half chunks a and 2P-1-a.

Areas are those of a layer without a window: one plan serves all layers, and the layers that see everything
cost most. A windowed layer of packed documents can be less even.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

AREA_TARGET = 1.01
"""Area of the heaviest rank, over the least possible, at which exchanging stops and half chunks stay as they are."""

AREA_LIMIT = 1.018
"""The same, at which neither finer items nor a looser row limit are tried; a plan promises 1.02."""

EXACT_ATOMS = 14
"""Up to so many blocks the search is exhaustive."""

ITEMS_PER_RANK = 64
"""Finest runs considered: enough for swaps to even out areas to a fraction of a percent."""

SPLIT_ITEMS = 12
"""Two ranks that together have so few items are split anew over all subsets; beyond, one item is swapped."""

STIRRED_PER_RANK = 8
STIRS = 40
"""Up to so many items a rank, an uneven result is stirred and improved so many times."""

SEARCH_NODES = 100_000
"""Steps of the exhaustive search at most."""


def two_ended(count: int, ranks: int) -> np.ndarray:
    """Owners when rank a holds half chunks a and 2P-1-a; 2P divides `count`."""
    chunk = np.arange(count) // (count // (2 * ranks))
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def place(areas: np.ndarray, rows: np.ndarray, ranks: int) -> np.ndarray:
    """Owner of every atom (a block, or a token range), int64.

    Args:
        areas: attention area of each atom, in sequence order.
        rows: rows of each atom.
        ranks: number of owners.
    """
    areas, rows = np.asarray(areas, np.int64), np.asarray(rows, np.int64)
    if ranks == 1:
        return np.zeros(len(areas), np.int64)
    if len(areas) % (2 * ranks) == 0:
        owner = two_ended(len(areas), ranks)
        if max(imbalance(areas, owner, ranks), imbalance(rows, owner, ranks)) <= AREA_TARGET:
            return owner
    least = _least_area(areas, ranks)
    best = None
    for limit in _row_limits(rows, ranks):
        found = _within(areas, rows, ranks, limit, least)
        # looser limits mean more padding: they must be clearly better in area
        if found is not None and (best is None or found[0] * AREA_TARGET < best[0]):
            best = found
        if best is not None and best[0] <= AREA_LIMIT * least:
            break
    return best[1]


def _within(areas: np.ndarray, rows: np.ndarray, ranks: int, limit: float, least: float):
    """Best (heaviest area, owners) under a row limit, from long runs to short ones; None where none was found."""
    best = None
    for edges in _item_edges(rows, ranks):
        items = _search(np.add.reduceat(areas, edges[:-1]), np.add.reduceat(rows, edges[:-1]), ranks, limit, least)
        if items is None:
            continue
        owner = np.repeat(items, np.diff(edges))
        heaviest = float(np.bincount(owner, areas, ranks).max())
        if best is None or heaviest < best[0]:
            best = heaviest, owner
        if heaviest <= AREA_LIMIT * least:
            break
    return best


def _least_area(areas: np.ndarray, ranks: int) -> float:
    """What the heaviest rank must at least have: the mean, and k+1 of the kP+1 heaviest atoms for some k."""
    before = np.concatenate(([0], np.cumsum(np.sort(areas)[::-1])))  # area of the n heaviest atoms
    k = np.arange((len(areas) - 1) // ranks + 1)
    return max(areas.sum() / ranks, float((before[k * ranks + 1] - before[k * ranks - k]).max(initial=0)))


def imbalance(weights: np.ndarray, owner: np.ndarray, ranks: int) -> float:
    """Heaviest over mean."""
    loads = np.bincount(owner, weights, ranks)
    return float(loads.max() * ranks / max(loads.sum(), 1))


def _row_limits(rows: np.ndarray, ranks: int) -> list[float]:
    """Most rows a rank may have, tightest first: less than the even share plus 1, 2 and 4 blocks, then any."""
    even, block = rows.sum() / ranks, int(rows.max())
    return [np.nextafter(even + blocks * block, 0) for blocks in (1, 2, 4)] + [float("inf")]


def _item_edges(rows: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Edges of ever finer items of near-equal rows: 2, 4, .. 64 a rank, at the finest single atoms."""
    before = np.concatenate(([0], np.cumsum(np.maximum(rows, 0))))
    levels = []
    per_rank = 2
    while per_rank <= ITEMS_PER_RANK and per_rank * ranks < len(rows):
        wanted = np.arange(per_rank * ranks + 1) * (before[-1] / (per_rank * ranks))
        edges = np.minimum(np.searchsorted(before, wanted), len(rows))
        nearer = (edges > 0) & (wanted - before[edges - 1] < before[np.minimum(edges, len(rows))] - wanted)
        levels.append(np.unique(np.concatenate(([0], edges - nearer, [len(rows)]))))
        per_rank *= 2
    if len(rows) <= ITEMS_PER_RANK * ranks:
        levels.append(np.arange(len(rows) + 1))
    return levels


def _search(areas: np.ndarray, rows: np.ndarray, ranks: int, limit: float, least: float) -> "np.ndarray | None":
    """Owners of items under a row limit, or None where none was found."""
    best, best_area = None, np.inf
    for deal in (_to_and_fro, _to_the_lightest):
        owner = deal(areas, rows, ranks, limit)
        if owner is None:
            continue
        owner = _exchange(areas, rows, owner, ranks, limit, AREA_TARGET * least)
        heaviest = np.bincount(owner, areas, ranks).max()
        if heaviest < best_area:
            best, best_area = owner, heaviest
        if heaviest <= AREA_TARGET * least:
            return best
    if len(areas) <= EXACT_ATOMS:
        return _Exhaustive(areas, rows, ranks, limit, least).best(best)
    if best is not None and len(areas) <= STIRRED_PER_RANK * ranks:
        return _stir(areas, rows, best, ranks, limit, AREA_LIMIT * least)
    return best


def _stir(
    areas: np.ndarray, rows: np.ndarray, owner: np.ndarray, ranks: int, limit: float, enough: float
) -> np.ndarray:
    """Leave a local optimum: deal out anew the items of the heaviest and two other ranks, exchange, keep no worse."""
    draw = np.random.default_rng(0)  # the same placement on every rank
    area_of = np.bincount(owner, areas, ranks)
    for _ in range(STIRS):
        if area_of.max() <= enough:
            break
        chosen = draw.choice(ranks, min(2, ranks), replace=False)
        pool = np.flatnonzero(np.isin(owner, chosen) | (owner == np.argmax(area_of)))
        stirred = owner.copy()
        stirred[pool] = draw.permutation(owner[pool])
        if np.bincount(stirred, rows, ranks).max() > limit:
            continue
        stirred = _exchange(areas, rows, stirred, ranks, limit, enough)
        stirred_area = np.bincount(stirred, areas, ranks)
        if stirred_area.max() <= area_of.max():
            owner, area_of = stirred, stirred_area
    return owner


def _to_and_fro(areas: np.ndarray, rows: np.ndarray, ranks: int, limit: float) -> "np.ndarray | None":
    """Deal the items, heaviest first, to and fro over the ranks; with 2P items of one document that is two-ended."""
    order = np.argsort(-areas, kind="stable")
    turn = np.arange(len(areas)) % (2 * ranks)
    owner = np.empty(len(areas), np.int64)
    owner[order] = np.minimum(turn, 2 * ranks - 1 - turn)
    return owner if np.bincount(owner, rows, ranks).max() <= limit else None


def _to_the_lightest(areas: np.ndarray, rows: np.ndarray, ranks: int, limit: float) -> "np.ndarray | None":
    """Each item, heaviest first, to the rank with the least area that has room for its rows."""
    owner = np.empty(len(areas), np.int64)
    area_of, rows_of = np.zeros(ranks), np.zeros(ranks)
    for item in np.argsort(-areas, kind="stable"):
        room = rows_of + rows[item] <= limit
        if not room.any():
            return None
        rank = int(np.argmin(np.where(room, area_of, np.inf)))
        owner[item] = rank
        area_of[rank] += areas[item]
        rows_of[rank] += rows[item]
    return owner


def _exchange(
    areas: np.ndarray, rows: np.ndarray, owner: np.ndarray, ranks: int, limit: float, enough: float
) -> np.ndarray:
    """Share out anew between the heaviest rank and another while that lowers the maximum."""
    owner = owner.copy()
    area_of, rows_of = np.bincount(owner, areas, ranks), np.bincount(owner, rows, ranks)
    for _ in range(32 * ranks):
        heavy = int(np.argmax(area_of))
        if area_of[heavy] <= enough:
            break
        for other in np.argsort(area_of, kind="stable")[:-1].tolist():
            mine, theirs = np.flatnonzero(owner == heavy), np.flatnonzero(owner == other)
            split = _split_anew if len(mine) + len(theirs) <= SPLIT_ITEMS else _swap_one
            kept, given, heavier = split(areas, rows, mine, theirs, limit)
            if heavier < area_of[heavy]:
                break
        else:
            break
        owner[kept], owner[given] = heavy, other
        for rank in (heavy, other):
            area_of[rank], rows_of[rank] = areas[owner == rank].sum(), rows[owner == rank].sum()
    return owner


def _split_anew(areas, rows, mine, theirs, limit):
    """The most even split of two ranks' items, over all splits: (items of the one, of the other, heavier area)."""
    items = np.concatenate((mine, theirs))
    subset = _subsets(len(items))
    area, row = subset @ areas[items], subset @ rows[items]
    heavier = np.maximum(area, areas[items].sum() - area)
    allowed = (row <= limit) & (rows[items].sum() - row <= limit)
    at = int(np.argmin(np.where(allowed, heavier, np.inf)))
    chosen = subset[at].astype(bool)
    return items[chosen], items[~chosen], heavier[at] if allowed[at] else np.inf


@lru_cache(maxsize=None)
def _subsets(count: int) -> np.ndarray:
    """Membership of every subset that holds the first item, `[2^(count-1), count]`."""
    masks = np.arange(1, 1 << count, 2)
    return (masks[:, None] >> np.arange(count)) & 1


def _swap_one(areas, rows, mine, theirs, limit):
    """The best exchange of one item for one or none: (items of the one, of the other, heavier area)."""
    # the last column takes nothing back
    area = areas[mine][:, None] - np.append(areas[theirs], 0)
    row = rows[mine][:, None] - np.append(rows[theirs], 0)
    heavier = np.maximum(areas[mine].sum() - area, areas[theirs].sum() + area)
    allowed = (rows[mine].sum() - row <= limit) & (rows[theirs].sum() + row <= limit)
    at = int(np.argmin(np.where(allowed, heavier, np.inf)))
    given, taken = divmod(at, len(theirs) + 1)
    back = theirs[taken:taken + 1]
    kept = np.concatenate((np.delete(mine, given), back))
    return kept, np.concatenate((mine[given:given + 1], np.setdiff1d(theirs, back))), (
        heavier.flat[at] if allowed.flat[at] else np.inf
    )


@dataclass
class _Exhaustive:
    """Branch and bound over all placements of a few items, heaviest item first."""

    areas: np.ndarray
    rows: np.ndarray
    ranks: int
    limit: float
    least: float

    def best(self, start: "np.ndarray | None") -> "np.ndarray | None":
        """The placement of least maximal area under the row limit (None: there is none)."""
        self.order = np.argsort(-self.areas, kind="stable").tolist()
        self.found = start
        self.bound = np.inf if start is None else np.bincount(start, self.areas, self.ranks).max()
        self.nodes = 0
        self.owner = [0] * len(self.areas)
        self._descend(0, [0] * self.ranks, [0] * self.ranks)
        return self.found

    def _descend(self, depth: int, area_of: list[int], rows_of: list[int]) -> None:
        if depth == len(self.order):
            self.bound = max(area_of)
            self.found = np.array(self.owner, np.int64)
            return
        item = self.order[depth]
        area, rows = int(self.areas[item]), int(self.rows[item])
        tried = set()
        for rank in sorted(range(self.ranks), key=area_of.__getitem__):
            self.nodes += 1
            if self.bound <= self.least or self.nodes > SEARCH_NODES:
                return
            state = area_of[rank], rows_of[rank]  # ranks in the same state are interchangeable
            if state in tried or area_of[rank] + area >= self.bound or rows_of[rank] + rows > self.limit:
                continue
            tried.add(state)
            area_of[rank] += area
            rows_of[rank] += rows
            self.owner[item] = rank
            self._descend(depth + 1, area_of, rows_of)
            area_of[rank] -= area
            rows_of[rank] -= rows
