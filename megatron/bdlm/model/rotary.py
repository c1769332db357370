"""Rotary embedding at explicit positions.

The noisy and the clean row of token i carry the same position i, and a rank's rows are not a
slice of the sequence, so the engine's table (position = index, cut by context-parallel rank,
cached) does not serve. This subclass computes the angles of the given positions only: nothing
of the length of the whole sequence is held.
"""

from typing import Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class ExplicitRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` whose forward returns the angles of `positions`.

    `positions` is set before each forward: int64 [s] (shared by the batch) or [b, s].
    """

    positions: Optional[torch.Tensor] = None

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None) -> torch.Tensor:
        """Angles [s, 1, 1, dim] or [s, b, 1, dim] in float32; the arguments of the base class are not used."""
        inv_freq = self.inv_freq.to(self.positions.device)
        positions = self.positions.to(inv_freq.dtype)
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        angles = positions[..., None] * inv_freq
        pair = (angles, angles)
        table = torch.stack(pair, dim=-1).flatten(-2) if self.rotary_interleaved else torch.cat(pair, dim=-1)
        if table.dim() == 2:
            return table[:, None, None, :]
        return table.transpose(0, 1)[:, :, None, :]
