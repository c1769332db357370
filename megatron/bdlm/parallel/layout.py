"""Who holds what: every rank's share of the noisy and of the clean stream, per strategy.

    strategy   noisy rows                          clean rows
    csbp       the blocks a rank owns              the same blocks
    bp         the blocks a rank owns              all, on every rank
    cp         token ranges, two-ended             the same token ranges; a block may be split
    hybrid     a slot's blocks, each block split   the slot's clean tokens, two-ended over the
               over the slot's inner ranks         slot's inner ranks

Hybrid: K slots of P/K adjacent ranks, `rank = inner_rank + (P/K) * slot`. When 2P divides B its clean
shares are exactly the two-ended half chunks over all P ranks.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import numpy as np

from megatron.bdlm.parallel.blocks import BlockTable, PlanError, build_blocks
from megatron.bdlm.parallel.intervals import Intervals
from megatron.bdlm.parallel.placement import place

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
                f"--bdlm-strategy {self.strategy} with --block-parallel-size {slots}: at --context-parallel-size {size} "
                f"it needs --block-parallel-size {needed}"
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


@lru_cache(maxsize=16)
def build_layout(spec: LayoutSpec) -> Layout:
    """The layout of one sample shape."""
    spec.check()
    blocks = build_blocks(
        spec.seq_length, spec.block_size, spec.documents, spec.block_origin, spec.block_restarts, spec.target_blocks
    )
    _check_block_count(spec, blocks.count)
    if spec.context_parallel_size == 1:
        shares = _by_owner(blocks, np.zeros(blocks.count, np.int64), 1)
    elif spec.strategy == "cp":
        shares = _by_position(spec, blocks)
    elif spec.strategy == "hybrid":
        shares = _by_slot(spec, blocks)
    else:
        shares = _by_owner(blocks, _owners(spec, blocks, spec.context_parallel_size), spec.context_parallel_size)
        if spec.strategy == "bp":
            everything = Intervals.of([0], [spec.seq_length])
            shares = [Share(share.noisy, everything, share.scored) for share in shares]
    return Layout(spec, blocks, tuple(shares))


def _check_block_count(spec: LayoutSpec, count: int) -> None:
    slots = spec.block_parallel_size
    if count >= slots or spec.strategy == "cp":
        return
    legal = max(k for k in range(1, count + 1) if spec.context_parallel_size % k == 0)
    raise PlanError(
        f"--bdlm-strategy {spec.strategy} with --block-parallel-size {slots}: --seq-length {spec.seq_length} and "
        f"--bdlm-block-size {spec.block_size} make {count} block(s), fewer than the {slots} ranks that share them. "
        f"A legal value: --bdlm-strategy hybrid --block-parallel-size {legal}"
    )


def _owners(spec: LayoutSpec, blocks: BlockTable, ranks: int) -> np.ndarray:
    """Owner of each block among `ranks`, balanced by attention area and rows."""
    clean_everywhere = spec.strategy == "bp"
    area = spec.views * blocks.noisy_area(spec.noisy_attention)
    rows = spec.views * np.where(blocks.is_target, blocks.sizes, 0)
    if not clean_everywhere:
        area, rows = area + blocks.clean_area(spec.clean_attention), rows + blocks.sizes
    return place(area, rows, ranks)


def _by_owner(blocks: BlockTable, owner: np.ndarray, ranks: int) -> list[Share]:
    shares = []
    for rank in range(ranks):
        mine = owner == rank
        noisy = mine & blocks.is_target
        clean = Intervals.of(blocks.starts[mine], blocks.stops[mine])
        shares.append(Share(Intervals.of(blocks.starts[noisy], blocks.stops[noisy]), clean, clean))
    return shares


def _by_position(spec: LayoutSpec, blocks: BlockTable) -> list[Share]:
    """Conventional context parallelism: 2P ranges of tokens, whatever the blocks."""
    ranks = spec.context_parallel_size
    edges = np.arange(2 * ranks + 1) * spec.seq_length // (2 * ranks)
    targets = Intervals.of(blocks.starts[blocks.is_target], blocks.stops[blocks.is_target])
    shares = []
    for rank in range(ranks):
        halves = np.array([rank, 2 * ranks - 1 - rank])
        clean = Intervals.of(edges[halves], edges[halves + 1])
        shares.append(Share(targets.intersect(clean), clean, clean))
    return shares


def _by_slot(spec: LayoutSpec, blocks: BlockTable) -> list[Share]:
    """Block-parallel slots of P/K adjacent ranks that split every block among them."""
    slots = spec.block_parallel_size
    inner = spec.context_parallel_size // slots
    shares = []
    for slot in _by_owner(blocks, _owners(spec, blocks, slots), slots):
        parts = _split_blocks(*slot.noisy.cut(blocks.starts), inner)
        edges = np.arange(2 * inner + 1) * slot.clean.count // (2 * inner)
        for inner_rank, noisy in enumerate(parts):
            low, high = inner_rank, 2 * inner - 1 - inner_rank
            halves = [slot.clean.slice_rows(edges[half], edges[half + 1]) for half in (low, high)]
            clean = Intervals.of(*(np.concatenate([getattr(h, end) for h in halves]) for end in ("starts", "stops")))
            shares.append(Share(noisy, clean, clean))
    return shares


def _split_blocks(starts: np.ndarray, stops: np.ndarray, parts: int) -> list[Intervals]:
    """Each block in `parts` contiguous parts; the odd rows of successive blocks go round the parts.

    Worked example, 2 parts of blocks of 3: sizes 2+1, 1+2, 2+1, ..
    """
    sizes = stops - starts
    extra = sizes % parts
    turn = (np.cumsum(extra) - extra) % parts
    order = (np.arange(parts)[:, None] - turn) % parts
    lengths = sizes // parts + (order < extra)
    ends = starts + np.cumsum(lengths, axis=0)
    return [Intervals.of(end - length, end) for length, end in zip(lengths, ends)]
