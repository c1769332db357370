"""Layers with experts: the engine's mixture-of-experts layer with our router, told of every row what it is.

The engine hands a padding mask from the first pipeline stage on, and splits it for sequence parallelism there only. Here
a layer takes the classes of its rows from the sequence parameters, which reach every layer, stage and recomputation,
and cuts them to the rows that it holds (the last layer may compute noisy rows only).
"""

import dataclasses
from functools import partial
from typing import Optional

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.bdlm.model.router import BlockDiffusionRouter


class ExpertLayer(TransformerLayer):
    """A transformer layer whose router knows which of its rows are clean, noisy or not to be counted."""

    def _forward_mlp(self, hidden_states, inference_context=None, padding_mask=None, packed_seq_params=None):
        classes = getattr(packed_seq_params, "row_classes", None)
        if classes is not None:
            group = self.pg_collection.tp if self.config.sequence_parallel else None
            padding_mask = local_row_classes(classes, hidden_states.size(0), group)
        return super()._forward_mlp(hidden_states, inference_context, padding_mask, packed_seq_params)


def local_row_classes(
    classes: torch.Tensor, rows: int, group: Optional[torch.distributed.ProcessGroup]
) -> torch.Tensor:
    """Classes [b, rows, 3] of the rows that this rank holds of [b, s, 3].

    `rows` ranks of `group` (sequence parallel; None for one) hold the first T * rows rows of the local order, rank r
    the rows [r * rows, (r+1) * rows): s = 8 and T = 2, all rows: 4 each; a last layer with 4 noisy rows: 2 each.
    """
    first = 0 if group is None else group.rank() * rows
    return classes[:, first : first + rows]


class SeededExperts(SequentialMLP):
    """`SequentialMLP` whose fresh weights on a CPU depend on the expert's number in the model, not on the rank that holds it.

    The engine initialises on a CPU from one generator, seeded alike on all ranks of a pipeline stage: every
    expert-parallel rank would get the same experts, and the layers behind them other weights than without
    expert parallelism. Here each expert draws from a seed of its own, and the generator moves by one draw a layer.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: MLPSubmodules, pg_collection=None, name=None):
        super().__init__(0, config, submodules, pg_collection=pg_collection, name=name)
        self.num_local_experts = num_local_experts
        first = pg_collection.ep.rank() * num_local_experts
        seed = int(torch.randint(2**62, ()))
        state = torch.get_rng_state()
        for number in range(num_local_experts):
            if config.use_cpu_initialization:
                torch.manual_seed(seed + first + number)
            expert = MLP(
                self.config, submodules, ffn_hidden_size=self.config.moe_ffn_hidden_size, is_expert=True,
                tp_group=pg_collection.expt_tp, name=None if name is None else f"{name}.local_experts.{number}",
            )
            self.local_experts.append(expert)
        if config.use_cpu_initialization:
            torch.set_rng_state(state)


def with_experts(layer: ModuleSpec, transformer: TransformerConfig) -> ModuleSpec:
    """The engine's spec of a layer with experts, changed in place: our layer, router and initialisation."""
    layer.module = ExpertLayer
    submodules = layer.submodules.mlp.keywords["submodules"]
    experts = submodules.experts
    if transformer.transformer_impl == "local":
        experts = partial(SeededExperts, **experts.keywords)
        # the engine's map is that of a dense layer; checkpoints of both specs shall have the same names
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    submodules = dataclasses.replace(submodules, experts=experts, router=BlockDiffusionRouter)
    layer.submodules.mlp = partial(MoELayer, submodules=submodules)
    return layer


def expert_layers(transformer: TransformerConfig) -> list[bool]:
    """Which layers of the model have experts, by --moe-layer-freq: every n-th from the first on, or a list."""
    layers, given = transformer.num_layers, transformer.moe_layer_freq
    if transformer.num_moe_experts is None:
        return [False] * layers
    if isinstance(given, int):
        return [number % given == 0 for number in range(layers)]
    if len(given) != layers:
        raise ValueError(f"--moe-layer-freq {given}: one entry a layer, and --num-layers is {layers}. A legal value: {[1] * layers}")
    return [bool(entry) for entry in given]


def mark_experts(model: torch.nn.Module) -> None:
    """Keep gradients and optimizer state of experts apart from those of the other parameters, whatever the layout.

    The engine does so with expert parallelism only; a checkpoint could then not be loaded by a run with another size.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            for parameter in module.experts.parameters():
                parameter.allreduce = False


def freeze_routers(model: torch.nn.Module) -> None:
    """Train everything but the routers (--bdlm-freeze-router)."""
    for module in model.modules():
        if isinstance(module, BlockDiffusionRouter):
            module.requires_grad_(False)
