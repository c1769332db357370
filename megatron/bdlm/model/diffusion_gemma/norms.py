"""RMS norms of DiffusionGemma: computed in float32, weight and all, and rounded once at the end.

    rms(x) = x * (mean(x^2) + eps)^(-1/2)          N_w(x) = rms(x) * w

The weight is plain w (not 1 + w, as in earlier Gemma models). Some norms have no weight.
"""

import torch
from torch import Tensor, nn


def rms(x: Tensor, eps: float) -> Tensor:
    """rms(x) over the last dimension, in float32 (float64 for float64 inputs)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def unweighted_norm(x: Tensor, eps: float) -> Tensor:
    """N(x) without a weight, in the type of x."""
    return rms(x, eps).to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """N_w(x); the engine sums its weight's gradient over tensor-parallel ranks under sequence parallel."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        normed = rms(x, self.eps)
        return (normed * self.weight.to(normed.dtype)).to(x.dtype)
