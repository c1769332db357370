"""The drafter's loss on the scored rows of a rank, without the logits of all of them.

    n scored rows     a slots     B block size     D hidden     V vocabulary     K candidates

The target's output layer is frozen. Plain logits go through `linear_cross_entropy`; where they are transformed, rescored
or compared with the teacher's, chunks of rows are computed again in backward.

Selector (DFlash2): cross entropy over a row's K candidates with the true token before it as predecessor, with the weights
of the main loss; rows whose label is not among the K add nothing. It shares the denominator of the main loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils.checkpoint import checkpoint

from megatron.bdlm.drafter.batch import DraftBatch
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError
from megatron.bdlm.drafter.losses import DPACE_VARIANTS, KINDS, LK_KINDS, default_gamma, dpace_weights, lk_loss, position_weights
from megatron.bdlm.drafter.model import Drafter, transform_logits
from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class DraftObjective:
    """What is minimised."""

    kind: str = "ce"
    gamma: float | None = None
    """decay of the position weights; None: `default_gamma`"""
    dpace_alpha: float = 0.5
    dpace_variant: str = "suffix"
    lk: str = "none"
    """what of the label's likelihood is minimised (`losses.lk_loss`); not with kl"""
    selector: float = 1.0
    """factor of the selector's loss"""
    chunk: int = 1024
    """rows whose logits exist at a time"""

    def __post_init__(self) -> None:
        for name, value, legal in (
            ("--dflash-loss", self.kind, KINDS), ("--dflash-dpace-variant", self.dpace_variant, DPACE_VARIANTS),
            ("--dflash-lk-loss", self.lk, LK_KINDS),
        ):
            if value not in legal:
                raise DrafterError(f"{name} {value}: known values are {', '.join(legal)}. A legal value: {legal[0]}")
        if self.kind == "kl" and self.lk != "none":
            raise DrafterError(f"--dflash-lk-loss {self.lk}: kl has no label. A legal value: none")
        if not 0 <= self.dpace_alpha <= 1:
            raise DrafterError(f"--dflash-dpace-alpha {self.dpace_alpha}: between 0 and 1. A legal value: 0.5")


@dataclass(frozen=True)
class DraftLoss:
    """Sums of one rank's rows, already this rank's share of its slot."""

    total: Tensor  # sum of weight * loss, with the selector's
    weight: Tensor  # sum of weights, the denominator's part
    parts: dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), detached


def draft_loss(hidden: Tensor, batch: DraftBatch, head: Tensor, drafter: Drafter, objective: DraftObjective) -> DraftLoss:
    """The loss of draft rows with hidden states [a * B, D], against the target's output layer [V, D]."""
    config, scored = drafter.shape, batch.scored
    rows = hidden.unflatten(0, scored.shape)[scored].to(head.dtype)  # [n, D]
    labels = batch.labels[scored]
    if objective.kind == "kl" or config.version == 2 or _transforms(config):
        before = torch.cat((batch.tokens[:, :1], batch.labels[:, :-1]), dim=1)[scored]
        divergence, nll, chosen = _in_chunks(rows, labels, before, batch.teacher, head, drafter, objective)
    else:
        nll = linear_cross_entropy(rows, head, labels, chunk=objective.chunk)
        divergence, chosen = None, None
    losses = divergence if objective.kind == "kl" else lk_loss(nll, objective.lk)
    weights = _weights(nll, scored, config, objective) * batch.share
    total, weight = (losses * weights).sum(), weights.sum()
    parts = {"draft cross entropy": ((nll.detach() * weights).sum(), weight)}
    if chosen is not None and config.version == 2:
        selector, inside = chosen
        total = total + objective.selector * (selector * weights).sum()
        parts["selector loss"] = ((selector.detach() * weights).sum(), (inside * weights).sum())
        parts["candidate recall"] = ((inside * weights).sum(), weight)
    parts["draft probability"] = ((torch.exp(-nll.detach()) * weights).sum(), weight)
    return DraftLoss(total, weight, parts)


def _weights(nll: Tensor, scored: Tensor, config: DrafterConfig, objective: DraftObjective) -> Tensor:
    """Weight of each scored row [n]."""
    if objective.kind == "dpace":
        p = torch.zeros(scored.shape, dtype=nll.dtype, device=nll.device)
        p[scored] = torch.exp(-nll.detach())
        return dpace_weights(p, scored, objective.dpace_alpha, objective.dpace_variant)[scored]
    gamma = objective.gamma or default_gamma(config.block_size)
    return position_weights(config.block_size, gamma, nll.dtype).to(nll.device).expand(scored.shape)[scored]


def _transforms(config: DrafterConfig) -> bool:
    return config.output_multiplier != 1.0 or config.final_logit_softcapping is not None


def _in_chunks(rows, labels, before, teacher, head, drafter, objective):
    """(KL to the teacher [n], nll [n], (selector losses [n], label is a candidate [n])), computed again in backward."""
    parts = []
    for start in range(0, max(len(rows), 1), objective.chunk):
        span = slice(start, start + objective.chunk)
        taught = None if teacher is None else teacher[span]
        parts.append(checkpoint(
            _chunk, rows[span], labels[span], before[span], taught, head, drafter, objective, use_reentrant=False
        ))
    divergence, nll, selector, inside = (torch.cat(part) for part in zip(*parts))
    return divergence, nll, (selector, inside)


def _chunk(rows, labels, before, taught, head, drafter: Drafter, objective: DraftObjective):
    """KL to the teacher, nll, selector losses and whether the label is a candidate, [c] each; zeros for what is not asked."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    logits = transform_logits((rows @ head.t()).to(wide), drafter.shape)
    logs = log_softmax(logits, -1)
    nll = -logs.gather(1, labels[:, None]).squeeze(1)
    nothing = torch.zeros_like(nll)
    divergence = nothing
    if objective.kind == "kl":
        teacher = log_softmax((taught @ head.t()).to(wide), -1).detach()
        divergence = (teacher.exp() * (teacher - logs)).sum(-1)
    if drafter.candidate_selector is None:
        return divergence, nll, nothing, nothing
    scores, ids = drafter.candidate_selector.scores(logits, rows, before)
    found = ids == labels[:, None]
    inside = found.any(-1)
    picked = cross_entropy(scores, found.int().argmax(-1), reduction="none")
    return divergence, nll, picked * inside, inside.to(nll.dtype)


def draft_forward(drafter: Drafter, batch: DraftBatch, embedding: Tensor, attend) -> Tensor:
    """Hidden states [a * B, D] of the batch's draft rows; `embedding` [V, D] is the target's, frozen."""
    rows = embedding[batch.tokens.reshape(-1)].to(batch.features.dtype)
    return drafter(rows, batch.features, batch.positions, batch.context_positions, attend)
