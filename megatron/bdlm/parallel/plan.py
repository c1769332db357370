"""The sequence plan: which rows a rank holds, which keys it needs from whom, what it computes with them.

A frozen value made on the CPU, the same on every rank but for `rank`; without torch.distributed and
without Megatron. Everything about parallelism that is not arithmetic is decided here.

Rows. The global order is `[xt_1; ..; xt_V; x0]`, L rows each: noisy row of view v (from 0) and token i
is `v*L + i`, clean row i is `V*L + i`. A rank's local order is

    [noisy rows of view 1; ..; noisy rows of view V; clean rows; padding rows]

each in ascending token order, every view with the same tokens. Padding (index -1) brings every rank to
the heaviest rank's count, because pipeline and sequence parallelism want equal shapes; a padding row
is seen by nobody and sees only itself.

Where the rest is: `blocks` (the block table), `layout` and `placement` (who holds what), `relations` (the mask
as staircases), `staircase` (staircases as rectangles), `batches`, `program` (the result).
"""

from dataclasses import dataclass, field
from typing import Optional, Sequence, Union

import numpy as np
import torch

from megatron.bdlm.parallel.blocks import PlanError
from megatron.bdlm.parallel.layout import Layout, LayoutSpec, Share, build_layout
from megatron.bdlm.parallel.program import AttentionProgram, LayerView, build_program, needed_rows

__all__ = ["PlanError", "SequencePlan"]


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """One rank's part of one sample; build it with `SequencePlan.build`.

    Per-row tensors, `[s_local]`:
        rows: int64 global row, -1 for padding
        position_ids: int64 position inside the document; padding 0
        is_clean: bool
        view: int64 view of a noisy row, -1 for clean and padding rows
        block_ids: int64 block over the whole sample, -1 for padding
        scored_clean: bool, clean rows whose clean loss this rank owns (under bp only its own blocks')
    """

    layout: Layout
    rank: int
    row_multiple: int
    rows: torch.Tensor
    position_ids: torch.Tensor
    is_clean: torch.Tensor
    view: torch.Tensor
    block_ids: torch.Tensor
    scored_clean: torch.Tensor
    _programs: dict = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        seq_length: int,
        block_size: int,
        context_parallel_size: int = 1,
        block_parallel_size: Optional[int] = None,
        rank: int = 0,
        views: int = 1,
        documents: Optional[Sequence[int]] = None,
        clean_attention: str = "block-causal",
        strategy: str = "csbp",
        block_origin: Union[int, Sequence[int]] = 0,
        target_blocks: Optional[Sequence[int]] = None,
        noisy_attention: str = "bidirectional",
        block_restarts: Optional[Sequence[int]] = None,
        row_multiple: int = 1,
    ) -> "SequencePlan":
        """Plan one sample for one rank.

        Args:
            seq_length: L; block_size: S; context_parallel_size: P; block_parallel_size: K (None: what
                the strategy implies: 1 for cp, else P); rank: in the context-parallel group.
            views: V noisy streams over one clean stream.
            documents: lengths that sum to L; zero lengths are skipped. None: one document.
            clean_attention: "block-causal" or "token-causal"; noisy_attention: "bidirectional" or "causal".
            strategy: "csbp", "cp", "bp" or "hybrid".
            block_origin: tokens of a document before its blocks start to count, one or one per document.
            target_blocks: blocks (in order over the sample) that have noisy rows. None: all.
            block_restarts: further tokens of the sample at which a block starts.
            row_multiple: the local row count is rounded up to a multiple of it (sequence parallelism).

        Raises:
            PlanError: a layout that cannot be, naming flag, value, rule and a legal value.
        """
        if block_parallel_size is None:
            block_parallel_size = 1 if strategy == "cp" else context_parallel_size
        spec = LayoutSpec(
            int(seq_length), int(block_size), int(context_parallel_size), int(block_parallel_size), int(views),
            _frozen(documents), clean_attention, noisy_attention, strategy,
            int(block_origin) if np.ndim(block_origin) == 0 else _frozen(block_origin),
            _frozen(block_restarts), _frozen(target_blocks),
        )
        layout = build_layout(spec)
        if not 0 <= rank < context_parallel_size:
            size = context_parallel_size
            raise PlanError(f"rank {rank}: 0 <= rank < --context-parallel-size {size}. A legal value: 0")
        if row_multiple < 1:
            raise PlanError(f"row_multiple {row_multiple}: rows are rounded up to it. A legal value: 1")
        return cls(layout, rank, row_multiple, **_row_tensors(layout, rank, row_multiple))

    # ---- what is held -----------------------------------------------------------------------

    @property
    def seq_length(self) -> int:
        """L, the clean length of the sample."""
        return self.layout.spec.seq_length

    @property
    def block_size(self) -> int:
        """S."""
        return self.layout.spec.block_size

    @property
    def views(self) -> int:
        """V, noisy streams."""
        return self.layout.spec.views

    @property
    def context_parallel_size(self) -> int:
        """P."""
        return self.layout.spec.context_parallel_size

    @property
    def block_parallel_size(self) -> int:
        """K."""
        return self.layout.spec.block_parallel_size

    @property
    def strategy(self) -> str:
        """"csbp", "cp", "bp" or "hybrid"."""
        return self.layout.spec.strategy

    @property
    def clean_attention(self) -> str:
        """"block-causal" or "token-causal"."""
        return self.layout.spec.clean_attention

    @property
    def noisy_attention(self) -> str:
        """"bidirectional" or "causal"."""
        return self.layout.spec.noisy_attention

    @property
    def s_local(self) -> int:
        """Local rows, padding included; the same on every rank."""
        return len(self.rows)

    @property
    def noisy_rows(self) -> int:
        """Local noisy rows, all views; they come first."""
        return self.views * self.layout.shares[self.rank].noisy.count

    @property
    def used_rows(self) -> int:
        """Local rows without padding."""
        return self.layout.shares[self.rank].rows(self.views)

    @property
    def block_starts(self) -> np.ndarray:
        """First token of every block of the sample, int64 [B]."""
        return self.layout.blocks.starts

    @property
    def block_stops(self) -> np.ndarray:
        """One past the last token of every block, int64 [B]."""
        return self.layout.blocks.stops

    @property
    def block_documents(self) -> np.ndarray:
        """Document of every block, int64 [B]."""
        return self.layout.blocks.documents

    def holdings(self, rank: Optional[int] = None) -> Share:
        """Token intervals a rank holds: `.noisy` (of every view), `.clean`, `.scored`."""
        return self.layout.shares[self.rank if rank is None else rank]

    def take(self, global_rows: torch.Tensor, fill: Union[int, float, bool] = 0) -> torch.Tensor:
        """This rank's rows of `[(V+1)L, ...]` as `[s_local, ...]`; padding rows get `fill`."""
        rows = self.rows.to(global_rows.device)
        taken = global_rows[rows.clamp(min=0)]
        padding = (rows < 0).reshape(-1, *(1,) * (taken.dim() - 1))
        return taken.masked_fill(padding, fill)

    # ---- what it costs ----------------------------------------------------------------------

    def cost(self, rank: Optional[int] = None) -> int:
        """Attention area (visible query-key pairs) of a rank, without a window."""
        share = self.holdings(rank)
        blocks, spec = self.layout.blocks, self.layout.spec
        noisy = blocks.area(*share.noisy.cut(blocks.starts), spec.noisy_causal).sum()
        clean = blocks.area(*share.clean.cut(blocks.starts), spec.clean_causal).sum()
        return int(self.views * noisy + clean)

    def balance(self) -> float:
        """Attention area of the heaviest rank over the mean."""
        costs = [self.cost(rank) for rank in range(self.context_parallel_size)]
        return max(costs) * len(costs) / max(sum(costs), 1)

    def fingerprint(self) -> tuple:
        """Hashable identity: plans of equal fingerprints are equal."""
        return (self.layout.spec, self.rank, self.row_multiple)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequencePlan) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        share = self.holdings()
        return (
            f"SequencePlan({self.strategy}, L={self.seq_length}, S={self.block_size}, B={len(self.block_starts)}, "
            f"P={self.context_parallel_size}, K={self.block_parallel_size}, V={self.views}, rank={self.rank}: "
            f"{self.noisy_rows} noisy + {share.clean.count} clean + {self.s_local - self.used_rows} padding rows)"
        )

    # ---- what is computed -------------------------------------------------------------------

    def program(self, window: Optional[int] = None, queries: str = "all") -> AttentionProgram:
        """The attention of this rank in one layer.

        Args:
            window: sliding window W on clean keys; None: no limit.
            queries: "all", or "noisy" (a last layer whose clean rows nobody reads).
        """
        layer = self._layer(window, queries)
        if layer not in self._programs:
            self._programs[layer] = build_program(self.layout, self.rank, layer)
        return self._programs[layer]

    def needed_rows(self, rank: int, source: int, window: Optional[int] = None, queries: str = "all") -> np.ndarray:
        """Ascending local rows of `source` that `rank` needs: any pair of ranks, for transports with several hops."""
        if rank == source or self.strategy == "bp":
            return np.zeros(0, np.int64)
        return needed_rows(self.layout, rank, source, self._layer(window, queries))

    def _layer(self, window: Optional[int], queries: str) -> LayerView:
        if window is not None and window < 1:
            rule = "a clean row sees at least itself"
            raise PlanError(f"--window-size {window}: {rule}. A legal value: {self.seq_length}")
        if queries not in ("all", "noisy"):
            raise PlanError(f"queries {queries}: known values are all, noisy. A legal value: all")
        # a window over the whole sample limits nothing
        return LayerView(None if window is not None and window >= self.seq_length else window, queries)


def _frozen(values: Optional[Sequence[int]]) -> Optional[tuple[int, ...]]:
    return None if values is None else tuple(np.asarray(values, np.int64).reshape(-1).tolist())


def _row_tensors(layout: Layout, rank: int, row_multiple: int) -> dict[str, torch.Tensor]:
    """The per-row tensors of a plan."""
    spec, blocks, share = layout.spec, layout.blocks, layout.shares[rank]
    noisy, clean = share.noisy.tokens(), share.clean.tokens()
    tokens = np.concatenate([noisy] * spec.views + [clean])
    streams = np.repeat(np.arange(spec.views + 1), [len(noisy)] * spec.views + [len(clean)])
    block = blocks.of_tokens(tokens)
    padded = -(-layout.rows // row_multiple) * row_multiple - len(tokens)

    def pad(values: np.ndarray, fill: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate((values, np.full(padded, fill, values.dtype))))

    is_clean = streams == spec.views
    return dict(
        rows=pad(streams * spec.seq_length + tokens, -1),
        position_ids=pad(tokens - blocks.document_starts[block], 0),
        is_clean=pad(is_clean, False),
        view=pad(np.where(is_clean, -1, streams), -1),
        block_ids=pad(block, -1),
        scored_clean=pad(is_clean & share.scored.holds(tokens), False),
    )
