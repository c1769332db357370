"""The plan of a drafter's sample: who holds which context, who drafts from which anchors, what sees what.

    C context tokens     A anchors     B block size     P context-parallel ranks, K block-parallel ones, I = P / K replicas

`rank = inner + I * slot`, as for hybrid block plans. Context is shared out over all P ranks. Anchors are dealt over the K
slots; the I ranks of a slot hold the same draft rows and divide the context that these see: inner rank i takes the
context of ranks i, i + I, i + 2I, .., and their partial results are merged (`replicas`). I = 1 is block parallelism;
K = 1 is context parallelism, with every draft row on every rank. Context keys and values move between the ranks of one
inner index only; draft rows never move.

A rank's local rows are, for keys `[context; draft rows]`, for queries `[draft rows]`. Draft row k of an anchor a stands at
a + k, sees the context [start of its document, a) and its own block. A window W, per layer, leaves the tokens from
a + k - (W - 1) on; inside the block it holds too, and `causal` leaves rows up to k.

    Example. C = 32, B = 8, anchors 10 and 13, one document: the rows of 13 see context 0..12 and their own eight rows, none
    of those of 10, although the blocks overlap in the text.

Slots without an anchor (padding, so that every rank has as many rows as the others) see their own block alone.
"""

from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

import numpy as np

from megatron.bdlm.parallel.batches import LabelledRectangles, into_batches, merge_adjacent
from megatron.bdlm.parallel.blocks import PlanError
from megatron.bdlm.parallel.intervals import Intervals
from megatron.bdlm.parallel.program import AttentionProgram, Piece
from megatron.bdlm.parallel.staircase import Staircase, decompose

_ANY_STEP = int(np.iinfo(np.int64).max)  # random anchors are far apart: only halving over them makes rectangles of many rows


@dataclass(frozen=True, eq=False)
class Anchors:
    """The anchors of a sample, or of several laid end to end; int64 [A] each, in ascending order of position."""

    positions: np.ndarray
    context_starts: np.ndarray  # first context token that each may see

    @staticmethod
    def of(positions: Sequence[int], context_starts: Optional[Sequence[int]] = None) -> "Anchors":
        positions = np.asarray(positions, np.int64).reshape(-1)
        starts = np.zeros_like(positions) if context_starts is None else np.asarray(context_starts, np.int64).reshape(-1)
        return Anchors(positions, starts)

    @property
    def costs(self) -> np.ndarray:
        """Context tokens that each sees, without a window."""
        return self.positions - self.context_starts

    def take(self, index: np.ndarray) -> "Anchors":
        return Anchors(self.positions[index], self.context_starts[index])


@dataclass(frozen=True, eq=False)
class AnchorPlan:
    """One rank's part; build it with `AnchorPlan.build`."""

    block_size: int
    context: tuple[Intervals, ...]  # per rank: the tokens whose features it holds
    anchors: Anchors
    slots: tuple[np.ndarray, ...]  # per slot: int64 indices of `anchors`, ascending, then -1 for padding; equal lengths
    rank: int
    _programs: dict = field(default_factory=dict, repr=False)

    @staticmethod
    def build(
        anchors: Anchors,
        block_size: int,
        context: Sequence[Intervals],
        owners: np.ndarray,
        block_parallel_size: int,
        rank: int,
        window: Optional[int] = None,
    ) -> "AnchorPlan":
        """Plan for one rank.

        Args:
            context: tokens held by each of the P ranks; disjoint.
            owners: slot of each anchor, int64 [A], as dealt.
            window: the widest window of all layers where every layer has one: context that no row can see is left out.

        Raises:
            PlanError: sizes that do not fit.
        """
        size = len(context)
        if block_parallel_size < 1 or size % block_parallel_size:
            raise PlanError(
                f"--block-parallel-size {block_parallel_size}: it must divide --context-parallel-size {size}. A legal value: {size}"
            )
        if not 0 <= rank < size:
            raise PlanError(f"rank {rank}: 0 <= rank < --context-parallel-size {size}. A legal value: 0")
        if window is not None:
            visible = _union(np.maximum(anchors.positions - window + 1, anchors.context_starts), anchors.positions)
            context = [held.intersect(visible) for held in context]
        dealt = [np.flatnonzero(owners == slot) for slot in range(block_parallel_size)]
        most = max(1, *(len(each) for each in dealt))
        slots = tuple(np.concatenate((each, np.full(most - len(each), -1, np.int64))) for each in dealt)
        return AnchorPlan(block_size, tuple(context), anchors, slots, rank)

    # ---- what is held -----------------------------------------------------------------------

    @property
    def context_parallel_size(self) -> int:
        """P."""
        return len(self.context)

    @property
    def block_parallel_size(self) -> int:
        """K."""
        return len(self.slots)

    @property
    def replicas(self) -> int:
        """I, the ranks that hold the same draft rows."""
        return self.context_parallel_size // self.block_parallel_size

    @property
    def slot(self) -> int:
        """Which deal of anchors is this rank's."""
        return self.rank // self.replicas

    @property
    def local_anchors(self) -> np.ndarray:
        """int64 [local slots]: index of each anchor, -1 for padding."""
        return self.slots[self.slot]

    @property
    def draft_rows(self) -> int:
        """Local draft rows."""
        return len(self.local_anchors) * self.block_size

    @property
    def local_context(self) -> Intervals:
        """Tokens whose features this rank holds."""
        return self.context[self.rank]

    def cost(self, rank: int) -> int:
        """Visible (query, context key) pairs of a rank, without a window."""
        slot, inner = rank // self.replicas, rank % self.replicas
        mine = self.slots[slot]
        mine = self.anchors.take(mine[mine >= 0])
        held = [self.context[inner + self.replicas * other] for other in range(self.block_parallel_size)]
        return self.block_size * int(sum((c.rank_of(mine.positions) - c.rank_of(mine.context_starts)).sum() for c in held))

    # ---- what is computed -------------------------------------------------------------------

    def program(self, window: Optional[int] = None, causal: bool = False, queries_travel: bool = False) -> AttentionProgram:
        """The attention of this rank in one layer; sources and peers are slots (the ranks of one inner index).

        Args:
            queries_travel: the local piece has the draft rows of all slots, slot after slot, and nothing is sent.
        """
        key = (window, causal, queries_travel)
        if key not in self._programs:
            self._programs[key] = self._build_travelling(window, causal) if queries_travel else self._build(window, causal)
        return self._programs[key]

    def queries_are_less(self, window: Optional[int], query_heads: int, key_heads: int) -> bool:
        """Whether moving queries and partial results between slots moves fewer values than keys; the same on every slot.

        A head's row costs as much either way (`attention.travelling_queries`), so rows times heads are compared.
        """
        size = self.block_parallel_size
        if size == 1:
            return False
        if ("less", window) not in self._programs:
            pairs = [(slot, source) for slot in range(size) for source in range(size) if slot != source]
            self._programs["less", window] = sum(len(self._needed(slot, source, window)) for slot, source in pairs)
        return size * (size - 1) * self.draft_rows * query_heads < self._programs["less", window] * key_heads

    def needed(self, window: Optional[int]) -> Callable[[int, int], np.ndarray]:
        """(slot, source slot) -> ascending local context rows of the source that the slot's anchors see."""
        return lambda slot, source: self._needed(slot, source, window)

    def _held(self, slot: int) -> Intervals:
        """The context of the rank of `slot` with this rank's inner index."""
        return self.context[self.rank % self.replicas + self.replicas * slot]

    def _needed(self, slot: int, source: int, window: Optional[int]) -> np.ndarray:
        held = self._held(source)
        seen = np.zeros(held.count + 1, np.int64)
        self._context_stairs(slot, source, window).count_keys(seen)
        return np.flatnonzero(np.cumsum(seen[:-1]) > 0)

    def _build(self, window: Optional[int], causal: bool) -> AttentionProgram:
        size, slot = self.block_parallel_size, self.slot
        remote, sends = [], {}
        for distance in range(1, size):
            source, peer = (slot - distance) % size, (slot + distance) % size
            rows, asked = self._needed(slot, source, window), self._needed(peer, slot, window)
            if len(rows):
                remote.append(Piece(source, rows, into_batches(self._context_rectangles(slot, source, window).keys_among(rows))))
            if len(asked):
                sends[peer] = asked
        return AttentionProgram(
            queries=self.draft_rows,
            local=Piece(slot, np.arange(self._held(slot).count), into_batches(self._context_rectangles(slot, slot, window))),
            remote=tuple(remote),
            sends=sends,
            shared=tuple(np.arange(self._held(each).count if size > 1 else 0) for each in range(size)),
            own=self._own_piece(window, causal),
        )

    def _build_travelling(self, window: Optional[int], causal: bool) -> AttentionProgram:
        size, mine = self.block_parallel_size, self.slot
        every = [self._context_stairs(slot, mine, window) for slot in range(size)]
        parts = [(decompose(stairs, _ANY_STEP).shifted(slot * self.draft_rows, 0), 0, 1) for slot, stairs in enumerate(every)]
        batches = into_batches(merge_adjacent(LabelledRectangles.join(parts)))
        return AttentionProgram(
            queries=size * self.draft_rows,
            local=Piece(mine, np.arange(self._held(mine).count), batches),
            remote=(),
            sends={},
            shared=(np.arange(0),) * size,
            own=self._own_piece(window, causal),
        )

    def _own_piece(self, window: Optional[int], causal: bool) -> Piece:
        context = self._held(self.slot).count
        own = decompose(self._own_stairs(window, causal), self.block_size).shifted(0, context)
        return Piece(self.slot, np.arange(context + self.draft_rows), into_batches(LabelledRectangles.join([(own, 0, 0)])))

    def _context_rectangles(self, slot: int, source: int, window: Optional[int]) -> LabelledRectangles:
        parts = decompose(self._context_stairs(slot, source, window), _ANY_STEP)
        return merge_adjacent(LabelledRectangles.join([(parts, 0, 1)]))

    def _context_stairs(self, slot: int, source: int, window: Optional[int]) -> Staircase:
        """The slot's draft rows against the source's context rows."""
        index, held = self.slots[slot], self._held(source)
        mine, first = self.anchors.take(index[index >= 0]), np.arange((index >= 0).sum()) * self.block_size
        if window is None:
            still = np.zeros(len(first), bool)
            low, high = held.rank_of(mine.context_starts), held.rank_of(mine.positions)
            return Staircase(first, np.full(len(first), self.block_size), low, high, still, still, mine.context_starts)
        oldest = mine.positions[:, None] + np.arange(self.block_size) - (window - 1)
        low = held.rank_of(np.clip(oldest, mine.context_starts[:, None], mine.positions[:, None]))
        return _of_rows(low, np.broadcast_to(held.rank_of(mine.positions)[:, None], low.shape))

    def _own_stairs(self, window: Optional[int], causal: bool) -> Staircase:
        """Each block against itself; keys count from the first draft row."""
        row, first = np.arange(self.block_size), np.arange(len(self.local_anchors))[:, None] * self.block_size
        reach = self.block_size if window is None else window
        low = np.maximum(row - reach + 1, 0)
        high = row + 1 if causal else np.minimum(row + reach, self.block_size)
        return _of_rows(first + low, first + high)


def _of_rows(low: np.ndarray, high: np.ndarray) -> Staircase:
    """Rows of A groups, int64 [A, B] each: row k of a group sees keys [low, high). Ends rise by at most one key a row."""
    groups, rows = low.shape
    # how the ends move from a row to the next; the last row goes on as before
    moves = [np.diff(end, axis=1, append=2 * end[:, -1:] - end[:, -2:-1] if rows > 1 else end) for end in (low, high)]
    blind = low >= high  # such rows stand apart: a slope must not run into them
    begins = np.ones((groups, rows), bool)
    begins[:, 1:] = np.logical_or.reduce([each[:, 1:] != each[:, :-1] for each in (*moves, blind)])
    first = np.flatnonzero(begins)
    count = np.diff(np.append(first, groups * rows))
    low_moves, high_moves = ((move.reshape(-1)[first] > 0) & ~blind.reshape(-1)[first] for move in moves)
    return Staircase(
        first, count, low.reshape(-1)[first], high.reshape(-1)[first] - high_moves, low_moves, high_moves, first // rows
    )


def _union(starts: np.ndarray, stops: np.ndarray) -> Intervals:
    """The tokens of runs that may overlap; both ascend."""
    if not len(starts):
        return Intervals.of([], [])
    reach = np.maximum.accumulate(stops)
    begins = np.flatnonzero(np.concatenate(([True], starts[1:] > reach[:-1])))
    return Intervals.of(starts[begins], reach[np.append(begins[1:], len(starts)) - 1])


def even_shares(tokens: int, ranks: int) -> list[Intervals]:
    """Context in equal runs, rank after rank: what features cost does not depend on where they stand."""
    edges = np.arange(ranks + 1) * tokens // ranks
    return [Intervals.of([first], [stop]) for first, stop in zip(edges, edges[1:])]
