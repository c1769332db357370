"""Rotary embedding at explicit positions, with the scaled frequencies of published models.

The noisy and the clean row of token i carry the same position i, and a rank's rows are not a
slice of the sequence, so the engine's table (position = index, cut by context-parallel rank,
cached) does not serve. This subclass computes the angles of the given positions only: nothing
of the length of the whole sequence is held.

Frequencies theta_j = base^(-2j/d), j = 0 .. d/2-1, wavelength 2 pi / theta_j. Scaled kinds
(names and parameters as in Hugging Face configs; N = original_max_position_embeddings):

    linear   theta / factor
    llama3   theta / factor where the wavelength exceeds N / low_freq_factor, theta where it is below
             N / high_freq_factor, blended between them
    yarn     theta / factor blended with theta by a ramp over j; queries and keys are scaled by an
             attention factor, which `attention_scale` folds into the softmax scale (YaRN, arXiv 2309.00071)
"""

import math
from typing import Any, Mapping, Optional

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class ExplicitRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` whose forward returns the angles of `positions`.

    `positions` is set before each forward: int64 [s] (shared by the batch) or [b, s].

    Args:
        rope_parameters: scaling of the frequencies (`BDLMConfig.rope_parameters`); None for none.
        Others: as the engine's.
    """

    positions: Optional[torch.Tensor] = None

    def __init__(self, *args: Any, rope_parameters: Optional[Mapping[str, Any]] = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if rope_parameters is not None:
            base = kwargs.get("rotary_base", 10000)
            self.inv_freq = scaled_frequencies(self.inv_freq, base, rope_parameters)

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


def scaled_frequencies(frequencies: torch.Tensor, base: float, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Frequencies [d/2] of a scaled kind out of the plain ones [d/2]; see the module docstring."""
    kind, factor = parameters["rope_type"], parameters["factor"]
    if kind == "linear":
        return frequencies / factor
    if kind == "llama3":
        return _llama3(frequencies, parameters)
    count = frequencies.numel()
    ramp = _yarn_ramp(count, base, parameters).to(frequencies.device)
    return frequencies / factor * ramp + frequencies * (1.0 - ramp)


def attention_factor(parameters: Optional[Mapping[str, Any]]) -> float:
    """What rotated queries and keys are multiplied by; 1 for every kind but yarn."""
    if parameters is None or parameters["rope_type"] != "yarn":
        return 1.0
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor, mscale, mscale_all_dim = parameters["factor"], parameters.get("mscale"), parameters.get("mscale_all_dim")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def attention_scale(parameters: Optional[Mapping[str, Any]], head_size: int) -> Optional[float]:
    """Softmax scale with the attention factor in it, None where that is the usual 1/sqrt(head size).

    Queries and keys times a are scores times a^2: head size 64 and a = 1.1 give 1.21 / 8.
    """
    factor = attention_factor(parameters)
    return None if factor == 1.0 else factor * factor / math.sqrt(head_size)


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    original, low, high = (parameters[n] for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * math.pi / frequencies
    slow = frequencies / parameters["factor"]
    blend = (original / wavelength - low) / (high - low)
    between = (1 - blend) * slow + blend * frequencies
    return torch.where(wavelength > original / low, slow, torch.where(wavelength < original / high, frequencies, between))


def _yarn_ramp(count: int, base: float, parameters: Mapping[str, Any]) -> torch.Tensor:
    """0 for fast frequencies (kept), 1 for slow ones (divided by the factor), rising between two indices."""
    size, original = 2 * count, parameters["original_max_position_embeddings"]

    def index_of(rotations: float) -> float:  # the frequency that turns so often over the original length
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = index_of(parameters.get("beta_fast") or 32), index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(count, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
