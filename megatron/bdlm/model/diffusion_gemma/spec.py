"""What the engine must be told to build DiffusionGemma: its configuration and its layer spec.

The engine's flags describe the sliding layers (--kv-channels, --num-query-groups, --window-size), the experts
(--num-experts, ..) and the dense branch (--moe-shared-expert-intermediate-size); `--bdlm-diffusion-gemma` the rest.
"""

import dataclasses
from functools import partial

from megatron.core.activations import fast_gelu
from megatron.core.models.backends import get_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron.bdlm.attention.core_attention import BlockDiffusionCoreAttention
from megatron.bdlm.config import BDLMConfigError, DiffusionGemmaOptions
from megatron.bdlm.model.diffusion_gemma.attention import GemmaSelfAttention
from megatron.bdlm.model.diffusion_gemma.experts import GemmaMoELayer
from megatron.bdlm.model.diffusion_gemma.layer import GemmaLayer
from megatron.bdlm.model.diffusion_gemma.norms import GemmaRMSNorm
from megatron.bdlm.model.diffusion_gemma.router import GemmaRouter
from megatron.bdlm.model.experts import SeededExperts

RECOMPUTED = {"core_attn", "moe", "shared_experts"}
"""Values of --recompute-modules that these layers honour."""

# flag, field of the engine's configuration, the value that the model has
_RULES = (
    ("--normalization", "normalization", "RMSNorm"),
    ("--qk-layernorm", "qk_layernorm", True),
    ("--disable-bias-linear", "add_bias_linear", False),
    ("--attention-output-gate", "attention_output_gate", False),
    ("--moe-router-score-function", "moe_router_score_function", "softmax"),
    ("--moe-router-pre-softmax", "moe_router_pre_softmax", False),
    ("--moe-router-load-balancing-type", "moe_router_load_balancing_type", "none"),
    ("--moe-shared-expert-overlap", "moe_shared_expert_overlap", False),
    ("--moe-layer-freq", "moe_layer_freq", 1),
    ("--hidden-dropout", "hidden_dropout", 0.0),
    ("--rotary-interleaved", "rotary_interleaved", False),
)


def check_configuration(config: TransformerConfig, options: DiffusionGemmaOptions) -> None:
    """Refuse flags of the engine that describe another model.

    Raises:
        BDLMConfigError: naming the flag, its value, the rule and a legal value.
    """
    def refuse(when: bool, flag: str, value: object, rule: str, legal: object) -> None:
        if when:
            raise BDLMConfigError(f"{flag} {value}: {rule}. A legal value: {legal}")

    for flag, name, wanted in _RULES:
        value = getattr(config, name)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        refuse(value != wanted, flag, value, "a model with --bdlm-diffusion-gemma has another", wanted)
    refuse(config.num_moe_experts is None, "--num-experts", None, "a model with --bdlm-diffusion-gemma has experts", 128)
    dense = config.moe_shared_expert_intermediate_size
    refuse(dense is None, "--moe-shared-expert-intermediate-size", None, "the size of the dense branch beside the experts", 2112)
    refuse(config.window_size is None, "--window-size", None, "most of its layers have a window", "1023,0")
    ranks = config.tensor_model_parallel_size
    for flag, heads in (("full_key_heads", options.full_key_heads), ("--num-query-groups", config.num_query_groups)):
        refuse(
            heads % ranks != 0, "--tensor-model-parallel-size", ranks,
            f"it must divide the {heads} key-value heads of {flag}", min(options.full_key_heads, config.num_query_groups),
        )
    modules = set(config.recompute_modules or []) if config.recompute_granularity == "selective" else set()
    unknown = sorted(modules - RECOMPUTED)
    refuse(bool(unknown), "--recompute-modules", " ".join(unknown), "these layers recompute " + ", ".join(sorted(RECOMPUTED)), "core_attn")


def adapt_configuration(config: TransformerConfig) -> None:
    """Set what no flag says, in place; the same result if called again."""
    config.activation_func, config.gated_linear_unit = fast_gelu, True
    config.bias_activation_fusion = config.use_te_activation_func = False
    config.softmax_scale = 1.0
    config.hetereogenous_dist_checkpoint = True  # the engine's spelling: layers have tensors of unlike shapes


def diffusion_gemma_layer_spec(
    config: TransformerConfig, options: DiffusionGemmaOptions, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Block spec of the layers that this pipeline stage builds."""
    backend = get_backend(config.transformer_impl)
    attention = ModuleSpec(
        module=GemmaSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "options": options},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(), core_attention=BlockDiffusionCoreAttention,
            linear_proj=backend.row_parallel_linear(), q_layernorm=GemmaRMSNorm, k_layernorm=GemmaRMSNorm,
        ),
    )
    moe = get_moe_module_spec_for_backend(backend, config.num_moe_experts, config.moe_grouped_gemm).keywords["submodules"]
    experts = partial(SeededExperts, **moe.experts.keywords) if config.transformer_impl == "local" else moe.experts
    moe = dataclasses.replace(moe, experts=experts, router=GemmaRouter)
    layer = ModuleSpec(
        module=GemmaLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=GemmaRMSNorm, self_attention=attention, mlp=partial(GemmaMoELayer, submodules=moe)
        ),
    )
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=GemmaRMSNorm)


def mlp_submodules(config: TransformerConfig) -> MLPSubmodules:
    """Linear layers of the self-conditioning module."""
    backend = get_backend(config.transformer_impl)
    return MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
