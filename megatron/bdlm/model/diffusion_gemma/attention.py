"""Self-attention of DiffusionGemma: two kinds of layers over the engine's `SelfAttention`.

    sliding   d, g      q = rope(N_q(a Wq))   k = rope(N_k(a Wk))   v = N(a Wv)
    full      D, G      q = rope(N_q(a Wq))   k = rope(N_k(a Wk))   v = N(a Wk)      no value projection

The value of a full layer is the raw key projection under a norm without weight: neither the weight of N_k nor the
rotation touch it. Scores are not scaled. Which layers are full follows from the engine's window options.

`linear_qkv` holds, for each key-value head, its query heads, its key, and in sliding layers its value.

Shapes: s rows, b samples, n query heads, d, D head sizes, g, G key-value heads of the two kinds.
"""

import copy
import dataclasses

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module
from torch import Tensor

from megatron.bdlm.attention.core_attention import layer_window
from megatron.bdlm.config import DiffusionGemmaOptions
from megatron.bdlm.model.diffusion_gemma.norms import unweighted_norm


class GemmaSelfAttention(SelfAttention):
    """Attention of one layer, of the kind that its number says.

    Args:
        options: head size and key-value heads of full layers.
        Others: the engine's.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int,
        options: DiffusionGemmaOptions, **kwargs,
    ):
        self.is_full = layer_window(config, layer_number) is None
        first = 0
        if self.is_full:
            first = config.kv_channels
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = options.full_head_size, options.full_key_heads
            submodules = _without_value(submodules, config.kv_channels * config.num_query_groups)
        super().__init__(config, submodules, layer_number, **kwargs)
        self.angles = slice(first, first + config.kv_channels)  # of this kind in the pair of rotary tables

    def forward(self, hidden_states: Tensor, attention_mask=None, *, rotary_pos_emb: Tensor, **kwargs):
        """The engine's forward with this kind's angles out of [s, 1 or b, 1, d + D]."""
        angles = rotary_pos_emb[..., self.angles]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=angles, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, key_value_states=None, **_) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [s, b, h] -> query [s, b, n, d], key and value [s, b, g, d], before rotation."""
        mixed, _ = apply_module(self.linear_qkv)(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        share = self.num_attention_heads_per_partition // groups
        mixed = mixed.unflatten(-1, (groups, -1, size))  # [s, b, g, share + 1 or 2, d]
        query = self.q_layernorm(mixed[:, :, :, :share].flatten(2, 3))
        raw_key = mixed[:, :, :, share]
        raw_value = raw_key if self.is_full else mixed[:, :, :, share + 1]
        return query, self.k_layernorm(raw_key), unweighted_norm(raw_value, self.config.layernorm_epsilon)


def _without_value(submodules: SelfAttentionSubmodules, value_rows: int) -> SelfAttentionSubmodules:
    """The same parts, with a query-key-value projection that lacks the rows of the value."""
    whole = submodules.linear_qkv

    def linear_qk(input_size: int, output_size: int, **kwargs) -> torch.nn.Module:
        return whole(input_size, output_size - value_rows, **kwargs)

    return dataclasses.replace(submodules, linear_qkv=linear_qk)
