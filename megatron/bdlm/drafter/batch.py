"""From samples to what one rank drafts: anchors, their deal, local context, labels.

The samples of a micro-batch are laid end to end, each a document of its own or several, so that attention sees one
sequence of C = b * S tokens. Every rank of a context-parallel group builds the same anchors and takes its own.

    b samples of S tokens     A anchors     a local slots     B block size     c local context rows     m * D features
"""

from dataclasses import dataclass
from typing import Optional, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.bdlm.drafter.anchors import AnchorDraw, context_starts, deal, scored_rows
from megatron.bdlm.drafter.format import DrafterConfig
from megatron.bdlm.parallel.anchor_plan import AnchorPlan, Anchors, even_shares


@dataclass(frozen=True, eq=False)
class DraftSample:
    """One sample: what a drafter trains on besides the target's features."""

    tokens: np.ndarray  # int64 [S]
    loss_mask: np.ndarray  # bool [S]
    documents: np.ndarray  # int [S], -1 padding
    sample_index: int
    epoch: int = 0


@dataclass(frozen=True)
class Cell:
    """This rank among those that share a sample."""

    context_parallel_size: int = 1
    block_parallel_size: int = 1
    rank: int = 0


class FeatureSource(Protocol):
    """The frozen target's side of a micro-batch."""

    def features(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), m * D] of the sample's tokens."""

    def last_hidden(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), D], ready for the output layer (behind the final norm)."""


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """One rank's part of a micro-batch."""

    plan: AnchorPlan
    tokens: Tensor  # int64 [a, B]: anchor, then masks
    labels: Tensor  # int64 [a, B]: token a + k; the selector reads it also before a scored row
    scored: Tensor  # bool [a, B]
    positions: Tensor  # int64 [a * B]
    context_positions: Tensor  # int64 [c]
    features: Tensor  # [c, m * D]
    teacher: Optional[Tensor] = None  # [n, D] of the scored rows in order, for `kl`

    @property
    def share(self) -> float:
        """This rank's part of its slot's loss: the replicas of a slot all hold it."""
        return 1.0 / self.plan.replicas


def draft_plan(samples: Sequence[DraftSample], config: DrafterConfig, draw: AnchorDraw, cell: Cell) -> AnchorPlan:
    """The plan of this rank for some samples laid end to end."""
    positions, starts, offset = [], [], 0
    for sample in samples:
        anchors = draw.draw(sample.loss_mask, sample.documents, sample.sample_index, sample.epoch)
        positions.append(anchors + offset)
        starts.append(context_starts(anchors, sample.documents) + offset)
        offset += len(sample.tokens)
    anchors = Anchors.of(np.concatenate(positions), np.concatenate(starts))
    owners = deal(anchors.costs, cell.block_parallel_size)
    shares = even_shares(offset, cell.context_parallel_size)
    return AnchorPlan.build(
        anchors, config.block_size, shares, owners, cell.block_parallel_size, cell.rank, config.widest_window()
    )


def build_batch(
    samples: Sequence[DraftSample],
    source: FeatureSource,
    config: DrafterConfig,
    draw: AnchorDraw,
    cell: Cell = Cell(),
    teacher: bool = False,
    device: torch.device | str = "cpu",
) -> DraftBatch:
    """This rank's batch. Positions count from the sample's start, as the target counted them."""
    plan = draft_plan(samples, config, draw, cell)
    lengths = [len(sample.tokens) for sample in samples]
    starts = np.cumsum([0, *lengths])
    tokens, mask, documents = (np.concatenate([getattr(s, name) for s in samples]) for name in ("tokens", "loss_mask", "documents"))
    # a segment of one sample never goes on in the next: ids are made distinct
    documents = np.where(documents < 0, -1, documents + np.repeat(np.arange(len(samples)), lengths) * (documents.max() + 1))

    local = plan.local_anchors
    present = local >= 0
    anchors = np.where(present, plan.anchors.positions[np.maximum(local, 0)], 0) if len(plan.anchors.positions) else 0 * local
    rows = anchors[:, None] + np.arange(config.block_size)
    scored = scored_rows(anchors, mask, documents, config.block_size) & present[:, None]
    drafted = np.full(rows.shape, config.mask_token_id, np.int64)
    drafted[:, 0] = np.where(present, tokens[anchors], config.mask_token_id)
    first = starts[np.searchsorted(starts, anchors, side="right") - 1]
    held = plan.local_context.tokens()
    last = rows[scored] - 1 if teacher else None
    return DraftBatch(
        plan,
        torch.from_numpy(drafted).to(device),
        torch.from_numpy(tokens[np.minimum(rows, len(tokens) - 1)]).to(device),
        torch.from_numpy(scored).to(device),
        torch.from_numpy((rows - first[:, None]).reshape(-1)).to(device),
        torch.from_numpy(held - starts[np.searchsorted(starts, held, side="right") - 1]).to(device),
        _gathered(samples, starts, held, source.features).to(device),
        None if last is None else _gathered(samples, starts, last, source.last_hidden).to(device),
    )


def _gathered(samples: Sequence[DraftSample], starts: np.ndarray, tokens: np.ndarray, read) -> Tensor:
    """Rows of `tokens` of the joint sequence, sample by sample."""
    owner = np.searchsorted(starts, tokens, side="right") - 1
    parts = [read(sample, tokens[owner == number] - starts[number]) for number, sample in enumerate(samples)]
    gathered = torch.cat(parts)
    order = np.argsort(owner, kind="stable")
    if (order == np.arange(len(order))).all():
        return gathered
    return gathered[torch.from_numpy(np.argsort(order))]
