"""Losses as (sum, count): the sum over this rank's rows, divided once by the count over the whole global batch.

    loss = w_d * S_d / N_d + w_c * S_c / N_c

S_d = sum of weight * nll over noisy rows, N_d = counted tokens (supervised, or corrupted); S_c, N_c: the same for the
next-token loss on clean rows; w_d, w_c: `--bdlm-diffusion-loss-weight`, `--bdlm-clean-loss-weight`. All four totals
are over data and context parallel ranks and micro-batches.

The engine (with --calculate-per-token-loss) adds the gradients of the returned sums everywhere and divides them once
by the sum of the returned counts, N = max(N_d, 1). One divisor cannot serve two denominators, so the clean part
carries the ratio:

    returned sum = w_d * S_d + (w_c * N / N_c) * S_c,   returned count = the rank's share of N_d

which is exact, because N_d and N_c are known before the step: they count tokens of the global batch, a matter of
eligibility (and of the noise, for the `masked` denominator), not of the model. `sample_counts` counts one sample; the
caller sums over the global batch (all micro-batches of its data-parallel rank, one all-reduce over data-parallel
ranks) and passes `GlobalCounts`.

Shapes: n selected rows of this rank, over all samples of the micro-batch.
"""

import dataclasses
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.objective.targets import Targets
from megatron.bdlm.parallel.device import to_device
from megatron.bdlm.platform.ranges import spanned

T_BUCKETS = 10
"""Equal intervals of the noise level t in [0, 1] for which the NELBO is logged apart."""


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators of one global batch: counted tokens of noisy rows (N_d) and of clean rows (N_c)."""

    noisy: int
    clean: int

    def __add__(self, other: "GlobalCounts") -> "GlobalCounts":
        return GlobalCounts(self.noisy + other.noisy, self.clean + other.clean)


@dataclass(frozen=True)
class ScoredRows:
    """The rows of this rank that need logits, and what all its rows (scored or not) count for.

    `index` points into the rank's hidden states [s_local, b, h] flattened to [s_local * b, h].
    """

    index: Tensor  # [n] int64, ascending
    target: Tensor  # [n] int64
    weight: Tensor  # [n] float32
    nelbo_weight: Tensor  # [n] float32
    t: Tensor  # [n] float32
    clean: Tensor  # [n] bool
    corrupted: Tensor  # [n] bool
    bucket_supervised: Tensor  # [T_BUCKETS] float32 supervised tokens by noise level
    counts: GlobalCounts  # this rank's share of the denominators
    supervised: int  # supervised tokens that this rank's noisy rows predict, each once over the views
    masked: int  # corrupted tokens that its noisy rows predict, over all views
    share: float = 1.0  # of this part in the global batch: 1 / (micro-batches * data- * context-parallel ranks)

    def to(self, device: torch.device | str) -> "ScoredRows":
        """The same on another device."""
        moved = {
            f.name: to_device(value, torch.device(device))
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)


def select_rows(
    samples: Sequence[Targets],
    rows: np.ndarray | Tensor,
    scored_clean: Optional[np.ndarray | Tensor] = None,
    share: float = 1.0,
) -> ScoredRows:
    """This rank's scored rows out of whole samples.

    Args:
        samples: the b samples of the micro-batch.
        rows: [s_local], or [b, s_local] where every sample has its own plan: indices in the global order
            [xt_1; ..; xt_V; x0], -1 for padding (`SequencePlan.rows`).
        scored_clean: bool, shaped like `rows`: clean rows whose loss this rank owns
            (`SequencePlan.scored_clean`); None: all.
        share: see `ScoredRows.share`.
    """
    rows = np.asarray(rows)
    batch = len(samples)
    views, length = samples[0].target.shape[0] - 1, samples[0].target.shape[1]
    rows = np.broadcast_to(rows, (batch, rows.shape[-1]))
    is_clean = rows >= views * length
    owned = rows >= 0
    if scored_clean is not None:
        owned = owned & (~is_clean | np.broadcast_to(np.asarray(scored_clean), rows.shape))

    def local(name: str) -> np.ndarray:
        """[s_local, b], the order in which hidden states are flattened; padding takes row 0 and is not owned"""
        return np.stack([getattr(s, name).reshape(-1)[np.maximum(r, 0)] for s, r in zip(samples, rows)], axis=1)

    owned, is_clean = owned.T, is_clean.T
    noisy = owned & ~is_clean
    keep = (owned & local("scored")).reshape(-1)
    counted, supervised, t = local("counted"), local("supervised") & noisy, local("t")

    def selected(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.reshape(-1)[keep])

    buckets = np.bincount(_bucket(t[supervised]), minlength=T_BUCKETS)
    return ScoredRows(
        index=torch.from_numpy(np.flatnonzero(keep)),
        target=selected(local("target")),
        weight=selected(local("weight")),
        nelbo_weight=selected(local("nelbo_weight")),
        t=selected(t),
        clean=selected(is_clean),
        corrupted=selected(local("corrupted")),
        bucket_supervised=torch.from_numpy(buckets).float(),
        counts=GlobalCounts(int((counted & noisy).sum()), int((counted & owned & is_clean).sum())),
        supervised=int(supervised.sum()),
        masked=int((local("corrupted") & noisy).sum()),
        share=share,
    )


def sample_counts(targets: Targets) -> GlobalCounts:
    """Denominators that one whole sample adds to the global batch."""
    return GlobalCounts(int(targets.counted[:-1].sum()), int(targets.counted[-1].sum()))


@spanned("bdlm/loss")
def block_diffusion_loss(
    nll: Tensor,
    rows: ScoredRows,
    config: BDLMConfig,
    global_counts: Optional[GlobalCounts] = None,
    diagnostics: bool = True,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of this rank's part of the global batch.

    Args:
        nll: [n] negative log-likelihood of each selected row's target.
        rows: the selected rows.
        config: factors of the two losses.
        global_counts: denominators of the whole global batch; needed only when clean rows are scored.
        diagnostics: also return counters and the NELBO by noise level; off in validation, where the engine takes
            every entry for a loss and prints its exponential.

    Returns:
        sum (connected to `nll` even when no row is selected), count (int tensor), metrics: name -> [sum, count]
        pairs, which the engine adds up over micro-batches and ranks.
    """
    if nll.shape != rows.weight.shape:
        raise ValueError(f"nll {tuple(nll.shape)}: expected {tuple(rows.weight.shape)}, one value a selected row")
    noisy = ~rows.clean
    weighted = nll * rows.weight.to(nll.dtype)
    diffusion = (weighted * noisy).sum()
    loss = config.bdlm_diffusion_loss_weight * diffusion
    if config.bdlm_clean_loss_weight > 0.0:
        loss = loss + _clean_factor(config, global_counts) * (weighted * rows.clean).sum()
    count = to_device(torch.tensor(rows.counts.noisy, dtype=torch.int), nll.device)
    with torch.no_grad():
        metrics = {"lm loss": _pair(loss, rows.counts.noisy)}
        metrics |= _losses(nll.detach(), diffusion.detach(), rows, config)
        if diagnostics:
            metrics |= _diagnostics(nll.detach(), rows, config)
    return loss, count, metrics


def _clean_factor(config: BDLMConfig, global_counts: Optional[GlobalCounts]) -> float:
    """w_c * N / N_c with N = max(N_d, 1), the engine's divisor (module docstring)."""
    if global_counts is None:
        raise ValueError(
            f"--bdlm-clean-loss-weight {config.bdlm_clean_loss_weight}: the loss on clean rows has its own denominator "
            f"and needs the counts of the whole global batch (global_counts). A legal value: 0"
        )
    if global_counts.clean == 0:
        return 0.0
    return config.bdlm_clean_loss_weight * max(global_counts.noisy, 1) / global_counts.clean


def _losses(nll: Tensor, diffusion: Tensor, rows: ScoredRows, config: BDLMConfig) -> dict[str, Tensor]:
    """What validation reports beside the primary loss."""
    corrupted = rows.corrupted & ~rows.clean
    losses = {
        "diffusion loss per supervised token": _pair(diffusion, rows.supervised),
        "diffusion loss per masked token": _pair(diffusion, rows.masked),
        "masked cross entropy": _pair((nll * corrupted).sum(), rows.masked),
    }
    if config.bdlm_corruption == "absorbing":  # the bound is that of the absorbing process
        losses["nelbo"] = _pair((nll * rows.nelbo_weight.to(nll.dtype)).sum(), rows.supervised)
    if config.bdlm_clean_loss_weight > 0.0:
        losses["clean cross entropy"] = _pair((nll * rows.clean).sum(), rows.counts.clean)
    return losses


def _diagnostics(nll: Tensor, rows: ScoredRows, config: BDLMConfig) -> dict[str, Tensor]:
    """Counters, and the NELBO by noise level."""
    pairs = {
        "masked fraction": (rows.masked, rows.supervised * config.bdlm_views),
        "supervised tokens": (rows.supervised, rows.share),
        "parts without supervised tokens": (rows.counts.noisy == 0, rows.share),
    }
    out = {name: to_device(torch.tensor(pair, dtype=torch.float32), nll.device) for name, pair in pairs.items()}
    if config.bdlm_corruption != "absorbing":
        return out
    bucket = (rows.t * T_BUCKETS).long().clamp_(max=T_BUCKETS - 1)
    sums = torch.zeros(T_BUCKETS, dtype=nll.dtype, device=nll.device)
    sums.index_add_(0, bucket, nll * rows.nelbo_weight.to(nll.dtype))
    for b in range(T_BUCKETS):
        name = f"nelbo t {b / T_BUCKETS:.1f}-{(b + 1) / T_BUCKETS:.1f}"
        out[name] = torch.stack([sums[b].float(), rows.bucket_supervised[b].to(nll.device)])
    return out


def _bucket(t: np.ndarray) -> np.ndarray:
    return np.minimum((t * np.float32(T_BUCKETS)).astype(np.int64), T_BUCKETS - 1)


def _pair(total: Tensor, count: int) -> Tensor:
    """[sum, count] in float32, as the engine adds metrics up."""
    return torch.stack([total.detach().float(), to_device(torch.tensor(float(count)), total.device)])
