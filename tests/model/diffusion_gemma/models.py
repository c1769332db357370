"""The published model, tiny and random, and ours with the same weights."""

import json
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bdlm.attention.core_attention import AttentionOptions, BlockDiffusionParams
from megatron.bdlm.checkpoint import diffusion_gemma as mapping
from megatron.bdlm.checkpoint.layout import Sizes
from megatron.bdlm.config import BDLMConfig, recipe_values
from megatron.bdlm.model.builder import BlockDiffusionModelBuilder, BlockDiffusionModelConfig
from megatron.bdlm.parallel.plan import SequencePlan

VOCABULARY, PADDED = 97, 128
SIZES = Sizes(2, 32, 48, 4, 2, 16, VOCABULARY, PADDED, 4, 24)
OPTIONS = dict(vocab_size=VOCABULARY, full_head_size=32, full_key_heads=1)


def published(window=8, canvas=6, seed=0, kinds=("sliding_attention", "full_attention"), key_heads=1):
    """`transformers`' model. Weights are far from their initial values: with those, wrong variants would pass."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    torch.manual_seed(seed)
    text = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=len(kinds), num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=key_heads, head_dim=16, global_head_dim=32, sliding_window=window,
        num_experts=4, top_k_experts=2, moe_intermediate_size=24, layer_types=list(kinds), use_bidirectional_attention="vision",
        max_position_embeddings=512,
    )
    vision = dict(
        model_type="gemma4_vision", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=16,
    )
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=canvas, image_token_id=90, boi_token_id=91, eoi_token_id=92
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    model.set_experts_implementation("eager")
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.9 if "encoder" in name else 0.7)  # unlike, so that a mix-up shows
    return model


def tensors(key_heads=1, layers=2):
    """The mapping of the tiny model; the last of `layers` layers is full."""
    options = SimpleNamespace(full_head_size=32, full_key_heads=key_heads)
    sizes = Sizes(layers, *(getattr(SIZES, name) for name in list(SIZES.__dataclass_fields__)[1:]))
    return list(mapping.tensors(sizes, mapping.full_sizes(sizes, options), [False] * (layers - 1) + [True]))


def joined(model, **sizes):
    """Tensors of the published model under our names."""
    theirs = model.state_dict()
    return {each.target: each.join(theirs) for each in tensors(**sizes)}


def options(**changes):
    """Options of a run with the tiny model."""
    values = {**recipe_values("diffusion-gemma"), "bdlm_diffusion_gemma": json.dumps(OPTIONS), "bdlm_block_size": 6, **changes}
    config = BDLMConfig(**values)
    config.validate()
    return config


def start(**layout):
    """Groups of the engine; a process group of one rank where there is none."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    model_parallel_cuda_manual_seed(1)


def ours(window=8, layers=2, bdlm=None, **changes):
    """Our model in the layout of `start`, weights as initialised."""
    values = dict(
        num_layers=layers, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=48, moe_ffn_hidden_size=24, num_moe_experts=4, moe_router_topk=2,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.0,
        window_size=(window - 1, 0), window_attn_skip_freq=[1] * (layers - 1) + [0], normalization="RMSNorm",
        layernorm_epsilon=1e-6, add_bias_linear=False, qk_layernorm=True, gated_linear_unit=True, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, transformer_impl="local", calculate_per_token_loss=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )
    config = BlockDiffusionModelConfig(
        transformer=TransformerConfig(**{**values, **changes}), vocab_size=PADDED, should_pad_vocab=False, seq_length=512,
        position_embedding_type="rope", share_embeddings_and_output_weights=True, parallel_output=False,
        bdlm=bdlm or options(), candidate_tokens=VOCABULARY, tokenizer_tokens=VOCABULARY,
    )
    return BlockDiffusionModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def load(model, tensors_by_name):
    """Fill a model of one rank; every tensor must be used."""
    state = {}
    for name, tensor in tensors_by_name.items():
        if ".experts.experts." in name:
            head, tail = name.split("experts.experts.")
            state |= {f"{head}experts.local_experts.{number}.{tail}": each for number, each in enumerate(tensor)}
        else:
            state[name] = tensor
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing), (missing, unexpected)
    return model


def plan_of(length, start_of_response, size, **layout):
    """Rows of one sample whose response has noisy rows and blocks of its own."""
    blocks = dict(
        seq_length=length, block_size=size, clean_attention="token-causal",
        block_restarts=[start_of_response] if start_of_response else None,
    )
    whole = SequencePlan.build(**blocks)
    targets = [number for number, first in enumerate(whole.block_starts) if first >= start_of_response]
    return SequencePlan.build(**blocks, target_blocks=targets, **layout)


def run(model, plan, x0, xt, group=None, **kwargs):
    """Forward of our model over rows of `plan`; x0 and xt int64 [b, L], of which xt counts in the response."""
    rows = torch.cat((xt, x0), dim=1).t()
    ids = plan.take(rows, 0).t().contiguous()
    params = BlockDiffusionParams.from_plan(plan, group, AttentionOptions(transport="direct"), torch.device("cpu"))
    return model(ids, params.position_ids.expand(len(ids), -1), packed_seq_params=params, **kwargs)
