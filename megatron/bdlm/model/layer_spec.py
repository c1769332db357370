"""Layer specs: the engine's own, with our core attention.

Local spec (CPU and plain torch) and Transformer Engine spec. The engine's local norm refuses
sequence parallel, so the local spec takes small norms that mark their parameters for it. The
last layer of the model may leave clean rows out (`final_layer.py`); layers with experts get our
router (`experts.py`).
"""

import copy

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.bdlm.attention.core_attention import BlockDiffusionCoreAttention
from megatron.bdlm.model.experts import expert_layers, with_experts
from megatron.bdlm.model.final_layer import noisy_rows_bias_dropout_add, noisy_rows_bias_dropout_add_sequence_parallel


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """torch RMSNorm whose weight gradient the engine sums over tensor-parallel ranks under sequence parallel."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """torch LayerNorm with the same mark on weight and bias."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel


def block_diffusion_layer_spec(model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Block spec of the layers that this pipeline stage builds (a block spec also chooses the final norm).

    Args:
        model_config: a `GPTModelConfig`.
        vp_stage: virtual pipeline stage.
    """
    transformer = model_config.transformer
    kinds = expert_layers(transformer)
    specs = {kind: _layer_spec(transformer, kind) for kind in sorted({False, *kinds})}
    count = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    offset = get_transformer_layer_offset(transformer, vp_stage)
    layers = [specs[kind][0] for kind in kinds[offset : offset + count]]
    if count and offset + count == transformer.num_layers:
        layers[-1] = _final_layer_spec(layers[-1], transformer)
    return TransformerBlockSubmodules(layers, layer_norm=specs[False][1])


def _layer_spec(transformer: TransformerConfig, experts: bool) -> tuple[ModuleSpec, type]:
    """The spec of a layer, dense or with experts, and the norm behind the last one."""
    options = dict(qk_layernorm=transformer.qk_layernorm)
    if experts:
        options |= dict(num_experts=transformer.num_moe_experts, moe_grouped_gemm=transformer.moe_grouped_gemm)
    if transformer.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(**options)
        norm = LayerNormImpl
    else:
        layer = get_gpt_layer_local_spec(**options, normalization=transformer.normalization)
        norm = SequenceParallelRMSNorm if transformer.normalization == "RMSNorm" else SequenceParallelLayerNorm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if transformer.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
    layer.submodules.self_attention.submodules.core_attention = BlockDiffusionCoreAttention
    return with_experts(layer, transformer) if experts else layer, norm


def _final_layer_spec(layer: ModuleSpec, transformer: TransformerConfig) -> ModuleSpec:
    final = copy.deepcopy(layer)
    final.submodules.self_attn_bda = (
        noisy_rows_bias_dropout_add_sequence_parallel if transformer.sequence_parallel else noisy_rows_bias_dropout_add
    )
    return final
