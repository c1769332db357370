"""Small samples whose every number can be worked out by hand.

Token i has the id 10 + i. A noisy row that predicts token i costs i + 1 nats, a clean row (i + 1) / 10.
"""

import numpy as np
import torch

from megatron.bdlm.config import BDLMConfig, recipe_values
from megatron.bdlm.data.noise import Noised, block_starts_of
from megatron.bdlm.data.schedules import NoiseSchedule
from megatron.bdlm.objective.loss import block_diffusion_loss, sample_counts, select_rows
from megatron.bdlm.objective.targets import Targets, build_targets

MASK = 9


def make(recipe=None, **options) -> BDLMConfig:
    """A validated config: a recipe's values, then `options` (without the bdlm_ prefix)."""
    values = recipe_values(recipe) if recipe else {}
    config = BDLMConfig(**{**values, "bdlm_mask_token_id": MASK, **{f"bdlm_{k}": v for k, v in options.items()}})
    config.validate()
    return config


def tokens_of(length):
    return np.arange(10, 10 + length)


def flags(length, indices):
    out = np.zeros(length, bool)
    out[list(indices)] = True
    return out


def noised_by_hand(config, length, corrupted, t, documents=None) -> Noised:
    """Noise whose corrupted tokens (one list a view) and per-token noise levels are given."""
    schedule = NoiseSchedule(config.bdlm_noise_schedule, config.bdlm_noise_eps)
    masks = np.stack([flags(length, view) for view in corrupted])
    t = np.broadcast_to(np.asarray(t, np.float32), masks.shape)
    weights = [schedule.weight(t[0]), schedule.complement_weight(t[0])][: len(masks)]
    nelbo = np.stack(weights).astype(np.float32)
    return Noised(
        xt=np.where(masks, MASK, tokens_of(length)),
        corrupted=masks,
        t=t,
        weight=np.ones_like(nelbo) if config.bdlm_loss_weight == "unit" else nelbo,
        nelbo_weight=nelbo,
        range_factor=schedule.range_factor(config.bdlm_t_min, config.bdlm_t_max),
        block_starts=block_starts_of(length, config.bdlm_block_size, documents),
    )


def targets_by_hand(config, length, corrupted, t, documents=None, eligible=None) -> Targets:
    eligible = flags(length, range(length) if eligible is None else eligible)
    noised = noised_by_hand(config, length, corrupted, t, documents)
    return build_targets(tokens_of(length), eligible, noised, documents, config)


def all_rows(targets: Targets) -> np.ndarray:
    return np.arange(targets.target.size)


def cost(rows) -> torch.Tensor:
    """[n] float64 the agreed price of each selected row, a leaf."""
    nats = (rows.target - 9).double()
    return torch.where(rows.clean, nats / 10, nats).requires_grad_()


def loss_by_hand(config, targets: Targets):
    """(loss, metrics as numbers) of one sample that is the whole global batch, on one rank."""
    rows = select_rows([targets], all_rows(targets))
    total, count, metrics = block_diffusion_loss(cost(rows), rows, config, sample_counts(targets))
    return total.item() / max(1, count.item()), {name: tuple(pair.tolist()) for name, pair in metrics.items()}
