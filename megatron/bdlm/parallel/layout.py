"""Who holds what: every rank's share of the noisy and of the clean stream, per strategy.

    strategy   noisy rows                          clean rows
    csbp       the blocks a rank owns              the same blocks
    bp         the blocks a rank owns              all, on every rank
    cp         token ranges, two-ended             the same token ranges; a block may be split
    hybrid     a slot's blocks, each block split   the slot's clean tokens in ranges, two-ended
               over the slot's inner ranks         over the slot's inner ranks

Hybrid: K slots of P/K adjacent ranks, `rank = inner_rank + (P/K) * slot`. When 2P divides B its clean
shares are exactly the two-ended half chunks over all P ranks.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import numpy as np

from megatron.bdlm.parallel.blocks import BlockTable, PlanError, build_blocks
from megatron.bdlm.parallel.intervals import Intervals
from megatron.bdlm.parallel.placement import AREA_LIMIT, ITEMS_PER_RANK, place, two_ended

STRATEGIES = ("csbp", "cp", "bp", "hybrid")


@dataclass(frozen=True)
class LayoutSpec:
    """Everything a layout depends on; hashable, so ranks and steps of one shape share the layout."""

    seq_length: int
    block_size: int
    context_parallel_size: int
    block_parallel_size: int
    views: int
    documents: Optional[tuple[int, ...]]
    clean_attention: str
    noisy_attention: str
    strategy: str
    block_origin: "int | tuple[int, ...]"
    block_restarts: Optional[tuple[int, ...]]
    target_blocks: Optional[tuple[int, ...]]

    @property
    def clean_causal(self) -> bool:
        """A clean row sees its own block up to itself only."""
        return self.clean_attention == "token-causal"

    @property
    def noisy_causal(self) -> bool:
        """A noisy row sees its own block up to itself only."""
        return self.noisy_attention == "causal"

    @property
    def splits_blocks(self) -> bool:
        """Rows of one block may stand on several ranks, so noisy keys travel too."""
        return self.block_parallel_size < self.context_parallel_size and self.strategy in ("cp", "hybrid")

    def check(self) -> None:
        """Refuse combinations that no layout serves.

        Raises:
            PlanError: naming the flags, their values, the rule and a legal value.
        """
        size, slots = self.context_parallel_size, self.block_parallel_size
        if size < 1:
            raise PlanError(f"--context-parallel-size {size}: at least one rank. A legal value: 1")
        if self.views < 1:
            raise PlanError(f"--bdlm-views {self.views}: at least one noisy stream. A legal value: 1")
        _one_of("--bdlm-strategy", self.strategy, STRATEGIES)
        _one_of("--bdlm-clean-attention", self.clean_attention, ("block-causal", "token-causal"))
        _one_of("--bdlm-noisy-attention", self.noisy_attention, ("bidirectional", "causal"))
        if slots < 1 or size % slots:
            raise PlanError(
                f"--block-parallel-size {slots}: it must divide --context-parallel-size {size}. A legal value: {size}"
            )
        needed = {"csbp": size, "bp": size, "cp": 1}.get(self.strategy, slots)
        if slots != needed:
            raise PlanError(
                f"--bdlm-strategy {self.strategy} with --block-parallel-size {slots}: "
                f"at --context-parallel-size {size} it needs --block-parallel-size {needed}"
            )


def _one_of(flag: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise PlanError(f"{flag} {value}: known values are {', '.join(legal)}. A legal value: {legal[0]}")


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank holds, as token intervals."""

    noisy: Intervals  # of every view
    clean: Intervals
    scored: Intervals  # clean tokens whose clean loss this rank owns

    def rows(self, views: int) -> int:
        return views * self.noisy.count + self.clean.count


@dataclass(frozen=True, eq=False)
class Layout:
    """The block table and every rank's share."""

    spec: LayoutSpec
    blocks: BlockTable
    shares: tuple[Share, ...]

    @property
    def rows(self) -> int:
        """Rows of the heaviest rank."""
        return max(share.rows(self.spec.views) for share in self.shares)


@lru_cache(maxsize=8)
def build_layout(spec: LayoutSpec) -> Layout:
    """The layout of one sample shape."""
    spec.check()
    blocks = build_blocks(
        spec.seq_length, spec.block_size, spec.documents, spec.block_origin, spec.block_restarts, spec.target_blocks
    )
    _check_block_count(spec, blocks.count)
    if spec.context_parallel_size == 1:
        shares = _by_owner(spec, blocks, 1)
    elif spec.strategy == "cp":
        shares = _by_position(spec, blocks)
    elif spec.strategy == "hybrid":
        shares = _by_slot(spec, blocks)
    else:
        shares = _by_owner(spec, blocks, spec.context_parallel_size)
        if spec.strategy == "bp":
            everything = Intervals.of([0], [spec.seq_length])
            shares = [Share(share.noisy, everything, share.scored) for share in shares]
    return Layout(spec, blocks, tuple(shares))


def _check_block_count(spec: LayoutSpec, count: int) -> None:
    slots = spec.block_parallel_size
    if count >= slots or spec.strategy == "cp":
        return
    divisors = [k for k in range(1, count + 1) if spec.context_parallel_size % k == 0]
    legal = max([k for k in divisors if count % (2 * k) == 0] or divisors)  # the even placement if there is one
    raise PlanError(
        f"--bdlm-strategy {spec.strategy} with --block-parallel-size {slots}: --seq-length {spec.seq_length} and "
        f"--bdlm-block-size {spec.block_size} make {count} block(s), fewer than the {slots} ranks that share them. "
        f"A legal value: --bdlm-strategy hybrid --block-parallel-size {legal}"
    )


def _by_owner(spec: LayoutSpec, blocks: BlockTable, ranks: int) -> list[Share]:
    """Whole blocks per rank, balanced by attention area and rows."""
    rows = spec.views * np.where(blocks.is_target, blocks.sizes, 0)
    area = rows // np.maximum(blocks.sizes, 1) * blocks.area(blocks.starts, blocks.stops, spec.noisy_causal)
    if spec.strategy != "bp":
        rows = rows + blocks.sizes
        area = area + blocks.area(blocks.starts, blocks.stops, spec.clean_causal)
    owner = place(area, rows, ranks)
    shares = []
    for rank in range(ranks):
        mine = owner == rank
        noisy = mine & blocks.is_target
        clean = Intervals.of(blocks.starts[mine], blocks.stops[mine])
        shares.append(Share(Intervals.of(blocks.starts[noisy], blocks.stops[noisy]), clean, clean))
    return shares


def _by_position(spec: LayoutSpec, blocks: BlockTable) -> list[Share]:
    """Conventional context parallelism: ranges of tokens, whatever the blocks."""
    everything = Intervals.of([0], [spec.seq_length])
    targets = Intervals.of(blocks.starts[blocks.is_target], blocks.stops[blocks.is_target])
    shares = _ranges(everything, targets, spec, blocks, spec.context_parallel_size)
    return [Share(targets.intersect(clean), clean, clean) for clean in shares]


def _by_slot(spec: LayoutSpec, blocks: BlockTable) -> list[Share]:
    """Block-parallel slots of P/K adjacent ranks that split every block among them."""
    slots = spec.block_parallel_size
    inner = spec.context_parallel_size // slots
    shares = []
    for slot in _by_owner(spec, blocks, slots):
        noisy_parts = _split_blocks(*slot.noisy.cut(blocks.starts), inner)
        clean_parts = _ranges(slot.clean, Intervals.of([], []), spec, blocks, inner)
        shares += [Share(noisy, clean, clean) for noisy, clean in zip(noisy_parts, clean_parts)]
    return shares


def _ranges(held: Intervals, targets: Intervals, spec: LayoutSpec, blocks: BlockTable, ranks: int) -> list[Intervals]:
    """Share token ranges out among ranks, by the area and rows of clean tokens and of `targets`' noisy rows.

    Two ranges a rank, two-ended, where that is balanced but for a row or two; else finer ones, placed like blocks.
    """
    edges = np.arange(2 * ranks + 1) * held.count // (2 * ranks)
    area, rows = _range_costs(held, edges, targets, spec, blocks)
    owner = two_ended(2 * ranks, ranks)
    even_rows, even_area = rows.sum() / ranks, area.sum() / ranks
    row_excess = np.bincount(owner, rows, ranks).max() - AREA_LIMIT * even_rows
    area_excess = np.bincount(owner, area, ranks).max() - AREA_LIMIT * even_area
    if row_excess > 2 or area_excess * even_rows > 4 * even_area:
        count = min(ITEMS_PER_RANK * ranks, held.count)
        edges = np.arange(count + 1) * held.count // count
        owner = place(*_range_costs(held, edges, targets, spec, blocks), ranks)
    return [_rows_of(held, edges, owner == rank) for rank in range(ranks)]


def _range_costs(held: Intervals, edges: np.ndarray, targets: Intervals, spec: LayoutSpec, blocks: BlockTable):
    """Attention area and rows of each range `[edges[i], edges[i+1])` of held rows, clean and noisy: ([n], [n])."""
    area, rows = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
    edge_tokens = held.tokens_at(edges[edges < held.count])
    streams = ((held, 1, spec.clean_causal), (targets.intersect(held), spec.views, spec.noisy_causal))
    for stream, copies, causal in streams:
        starts, stops = stream.cut(edge_tokens, blocks.starts)
        which = np.searchsorted(edges, held.rank_of(starts), side="right") - 1
        np.add.at(area, which, copies * blocks.area(starts, stops, causal))
        np.add.at(rows, which, copies * (stops - starts))
    return area, rows


def _rows_of(held: Intervals, edges: np.ndarray, mine: np.ndarray) -> Intervals:
    """The tokens of the row ranges `[edges[i], edges[i+1])` with `mine[i]`."""
    nonempty = mine & (edges[1:] > edges[:-1])
    chosen = Intervals.of(edges[:-1][nonempty], edges[1:][nonempty])
    starts, stops = held.cut(held.tokens_at(chosen.starts), held.tokens_at(chosen.stops[chosen.stops < held.count]))
    inside = chosen.holds(held.rank_of(starts))
    return Intervals.of(starts[inside], stops[inside])


def _split_blocks(starts: np.ndarray, stops: np.ndarray, parts: int) -> list[Intervals]:
    """Each block in `parts` contiguous parts; the odd rows of successive blocks go round the parts.

    Worked example, 2 parts of blocks of 3: sizes 2+1, 1+2, 2+1, .. (With noisy rows causal inside their block the
    later parts see more of it; that share of the area is left uneven.)
    """
    sizes = stops - starts
    extra = sizes % parts
    turn = (np.cumsum(extra) - extra) % parts
    order = (np.arange(parts)[:, None] - turn) % parts
    lengths = sizes // parts + (order < extra)
    ends = starts + np.cumsum(lengths, axis=0)
    return [Intervals.of(end - length, end) for length, end in zip(lengths, ends)]
