"""A run's resolved options as the planner's values; pure, of any namespace with the engine's argument names."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Optional

from megatron.bdlm.planner.models import AttentionLayers, Model
from megatron.bdlm.planner.work import Layout, Precision, Workload


def model_of(args: Any, windows: Sequence[Optional[int]]) -> Model:
    """The model that `args` describe.

    Args:
        windows: sliding window of every layer; None for full attention.
    """
    key_heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    kinds = tuple(
        AttentionLayers(count, key_heads, args.kv_channels, window)
        for window, count in sorted(Counter(windows).items(), key=lambda item: item[0] is not None)
    )
    experts = args.num_experts or 0
    shared = args.moe_shared_expert_intermediate_size or 0
    return Model(
        "flags", args.hidden_size, args.num_attention_heads, kinds, shared if experts else args.ffn_hidden_size,
        args.padded_vocab_size, not args.untie_embeddings_and_output_weights, experts,
        args.moe_router_topk if experts else 0, (args.moe_ffn_hidden_size or args.ffn_hidden_size) if experts else 0, bool(args.swiglu),
    )


def workload_of(args: Any) -> Workload:
    """What a step of the run trains on, at its last block size."""
    item = 2 if args.bf16 or args.fp16 else 4
    gradient = 2 if item == 2 and not args.accumulate_allreduce_grads_in_fp32 else 4
    wire = {"fp32": 4, "bf16": 2, "input": item}[args.bp_grad_dtype]
    return Workload(
        args.seq_length, args.bdlm_block_size, args.global_batch_size, args.bdlm_views, wire, micro_batch=args.micro_batch_size,
        precision=Precision(item, gradient, 12 if item == 2 else 8), output_chunk=args.bdlm_cross_entropy_chunk,
        short_last_layer=not (args.bdlm_full_last_layer or args.bdlm_clean_loss_weight > 0 or args.attention_output_gate),
    )


def layout_of(args: Any, strategy: str, slots: int, ranks_per_node: int) -> Layout:
    """How the run shares its work.

    Args:
        strategy, slots: as `BDLMConfig.resolved_strategy` has them.
        ranks_per_node: context-parallel ranks on a node.
    """
    transport = args.bdlm_transport
    if transport == "auto" or strategy == "bp":
        transport = "hierarchical" if strategy != "bp" and ranks_per_node < args.context_parallel_size else "direct"
    return Layout(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size, slots,
        args.expert_model_parallel_size, args.data_parallel_size, strategy, transport, args.recompute_granularity == "full",
        bool(args.use_distributed_optimizer), "fused" if args.transformer_impl == "transformer_engine" else "local",
    )
