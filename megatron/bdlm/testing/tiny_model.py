"""A small plain-torch transformer over the rows of a plan, in any data type: whole steps without the engine.

Tests use it in float64, where the engine has no model; benchmarks use it to time a step alone.

    model = TinyModel(TinyShape(), dtype=torch.float64)
    loss, count = step_loss(model, [sample], config)

Shapes: s local rows, h hidden size, n scored rows.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.noise import Noised
from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy
from megatron.bdlm.objective.loss import block_diffusion_loss, select_rows
from megatron.bdlm.objective.targets import build_targets, target_blocks
from megatron.bdlm.parallel.plan import SequencePlan


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the model."""

    vocabulary: int = 64
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    key_heads: int = 2


class TinyLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: TinyShape):
        super().__init__()
        h, size = shape.hidden, shape.hidden // shape.heads
        self.shape, self.size = shape, size
        self.qkv = nn.Linear(h, (shape.heads + 2 * shape.key_heads) * size, bias=False)
        self.projection = nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 2 * h, bias=False), nn.Linear(2 * h, h, bias=False)

    def forward(self, x: Tensor, plan: SequencePlan, angles: Tensor) -> Tensor:
        """[s, h] -> [s, h]"""
        heads, keys = self.shape.heads, self.shape.key_heads
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:])).view(len(x), 1, -1, self.size)
        q, k, v = qkv.split([heads, keys, keys], dim=2)
        q, k = _rotate(q, angles), _rotate(k, angles)
        x = x + self.projection(block_diffusion_attention(q, k, v, plan).reshape(len(x), -1))
        return x + self.down(F.silu(self.up(F.rms_norm(x, x.shape[-1:]))))


class TinyModel(nn.Module):
    """Embedding, layers, tied output layer; deterministic weights."""

    def __init__(self, shape: TinyShape, dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(TinyLayer(shape) for _ in range(shape.layers))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        self.to(dtype)

    def forward(self, ids: Tensor, plan: SequencePlan) -> Tensor:
        """Ids [s] of the plan's rows -> hidden states [s, h]."""
        x = self.embedding(ids)
        size = self.shape.hidden // self.shape.heads
        frequency = 10000.0 ** (-torch.arange(size // 2, dtype=x.dtype) / (size // 2))
        angles = (plan.position_ids[:, None] * frequency)[:, None, None]
        for layer in self.layers:
            x = layer(x, plan, angles)
        return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@dataclass(frozen=True)
class TinySample:
    """One sample and its noise."""

    tokens: np.ndarray
    eligible: np.ndarray
    noised: Noised
    documents: Optional[tuple[int, ...]] = None


def step_loss(model: TinyModel, samples: Sequence[TinySample], config: BDLMConfig) -> tuple[Tensor, int]:
    """(sum, count) of the diffusion loss over samples, one after the other, on this process."""
    total, count = 0.0, 0
    for sample in samples:
        length, views = len(sample.tokens), sample.noised.xt.shape[0]
        blocks = None
        if config.bdlm_noisy_rows == "targets":
            blocks = target_blocks(sample.eligible, sample.noised.block_starts, sample.documents, config.bdlm_label_shift)
        plan = SequencePlan.build(
            length, config.bdlm_block_size, views=views, documents=sample.documents, target_blocks=blocks,
            clean_attention=config.bdlm_clean_attention, noisy_attention=config.bdlm_noisy_attention,
        )
        targets = build_targets(sample.tokens, sample.eligible, sample.noised, sample.documents, config)
        rows = select_rows([targets], plan.rows, plan.scored_clean)
        ids = plan.take(torch.from_numpy(np.concatenate([sample.noised.xt.reshape(-1), sample.tokens])))
        hidden = model(ids, plan).index_select(0, rows.index)
        nll = linear_cross_entropy(hidden, model.embedding.weight, rows.target, excluded_token=config.bdlm_mask_token_id)
        loss, counted, _ = block_diffusion_loss(nll, rows, config)
        total, count = total + loss, count + int(counted)
    return total, count
