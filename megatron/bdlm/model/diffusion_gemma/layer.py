"""A DiffusionGemma layer: norms before and behind both parts, and a scalar that depends on a row's stream.

    x = x + N_postattn( Attn( N_in(x) ) )
    x = x + N_postff( FeedForward(x) )
    x = x * layer_scalar              noisy rows (the published "decoder")
    x = x * clean_layer_scalar        clean rows (the published "encoder")

The scalars are buffers: stored, never trained. All other weights serve both streams.
"""

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.bdlm.model.diffusion_gemma.norms import GemmaRMSNorm
from megatron.bdlm.model.experts import local_row_classes


class GemmaLayer(TransformerLayer):
    """See the module docstring."""

    def __init__(self, config, submodules, layer_number: int = 1, **kwargs):
        super().__init__(config, submodules, layer_number, **kwargs)
        self.post_self_attn_layernorm = GemmaRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = GemmaRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        self.register_buffer("clean_layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(
        self, hidden_states: Tensor, attention_mask=None, *, rotary_pos_emb=None, packed_seq_params=None, **_
    ) -> tuple[Tensor, None]:
        """Rows [s, b, h] -> ([s, b, h], no context); `packed_seq_params.is_clean` says which stream each row is of."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
        )
        hidden_states = hidden_states + self.post_self_attn_layernorm(attended)
        classes = getattr(packed_seq_params, "row_classes", None)
        if classes is not None:
            classes = local_row_classes(classes, hidden_states.size(0), self.tp_group if self.config.sequence_parallel else None)
        mixed, _ = self.mlp(hidden_states, padding_mask=classes)
        hidden_states = hidden_states + self.post_mlp_layernorm(mixed)
        clean = local_rows(column(packed_seq_params.is_clean), self.config, self.tp_group)
        return hidden_states * torch.where(clean, self.clean_layer_scalar, self.layer_scalar), None


def column(flags: Tensor) -> Tensor:
    """[s] (shared by the batch) or [b, s] -> [s, 1, 1] or [s, b, 1], as hidden states are laid out."""
    return flags[:, None, None] if flags.dim() == 1 else flags.t().contiguous()[:, :, None]


def local_rows(x: Tensor, config, group) -> Tensor:
    """The rows of [s, ..] that this rank holds under sequence parallel; without it all of them."""
    if not config.sequence_parallel:
        return x
    return x.chunk(group.size())[group.rank()]
