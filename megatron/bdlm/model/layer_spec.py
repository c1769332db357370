"""Layer specs: the engine's own, with our core attention.

Local spec (CPU and plain torch) and Transformer Engine spec. The engine's local norm refuses
sequence parallel, so the local spec takes a small RMSNorm that marks its weight for it.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron.bdlm.attention.core_attention import BlockDiffusionCoreAttention


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch RMSNorm whose weight gradient the engine sums over tensor-parallel ranks under sequence parallel."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def block_diffusion_layer_spec(model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Block spec of the layers that this pipeline stage builds (a block spec also chooses the final norm).

    Args:
        model_config: a `GPTModelConfig`.
        vp_stage: virtual pipeline stage.
    """
    transformer = model_config.transformer
    if transformer.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
        final_norm = LayerNormImpl
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization=transformer.normalization)
        final_norm = SequenceParallelRMSNorm
        layer.submodules.input_layernorm = SequenceParallelRMSNorm
        layer.submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
        if transformer.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    layer.submodules.self_attention.submodules.core_attention = BlockDiffusionCoreAttention
    count = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    return TransformerBlockSubmodules([layer] * count, layer_norm=final_norm)
