"""The two rotary embeddings of DiffusionGemma, at explicit positions.

    sliding layers  theta_j = base^(-2j/d)            all d/2 pairs (j, j + d/2)
    full layers     theta_j = full_base^(-2j/D)       j < factor * D/2; 0 for the others

D is the head size of full layers. The pairing distance stays D/2 and the exponent's denominator stays D, whatever the
factor: this is neither a rotary embedding of factor*D channels nor the engine's `rotary_percent`. D = 8, factor 0.5:
pairs (0, 4) and (1, 5) turn, (2, 6) and (3, 7) stand.

Both tables travel side by side through the engine as one tensor [.., d + D]; an attention layer takes its part.
"""

import torch
from torch import Tensor, nn

from megatron.bdlm.config import DiffusionGemmaOptions


def frequencies(size: int, base: float, factor: float = 1.0) -> Tensor:
    """theta [size / 2] in float32; those beyond `factor` are zero."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    turning = torch.arange(size // 2) < int(factor * size // 2)
    return torch.where(turning, 1.0 / base**exponents, 0.0)


class PairedRotaryEmbedding(nn.Module):
    """Stands where the engine's model has its rotary embedding.

    `positions` is set before each forward: int64 [s] (shared by the batch) or [b, s].
    """

    positions: Tensor | None = None

    def __init__(self, head_size: int, base: float, options: DiffusionGemmaOptions):
        super().__init__()
        self.sliding = frequencies(head_size, base)
        self.full = frequencies(options.full_head_size, options.full_rotary_base, options.full_rotary_factor)

    def get_rotary_seq_len(self, *_) -> int:
        """The engine asks for it; positions say how many rows there are."""
        return self.positions.shape[-1]

    def forward(self, length: int, **_) -> Tensor:
        """Angles [s, 1, 1, d + D] or [s, b, 1, d + D] in float32, sliding layers' first."""
        positions = self.positions.to(torch.float32)[..., None]
        parts = [positions * theta.to(positions.device) for theta in (self.sliding, self.sliding, self.full, self.full)]
        table = torch.cat(parts, dim=-1)
        return table[:, None, None] if table.dim() == 2 else table.transpose(0, 1)[:, :, None]
