"""What a training step costs under a layout: FLOPs, bytes, memory by part, seconds. A model of the machine, not a measurement.

Everything is of the heaviest rank. Terms, with V views, L tokens, P = cp, B = 2 bytes an activation:

    rows        (V+1)L/P; under bp the clean ones are not divided: L + V L/P
    linear      2 flops a parameter and row, backward twice that; full recompute runs forward again
    attention   4 n d flops a visible pair in forward, 10 in backward (2.5 times)
    exchange    rows of `traffic.needs`, K/V once in forward; again in backward, with dK/dV
    hidden      an exchange hides behind its layer's attention; of P steps, the first or last one cannot
    pipeline    (m + pp - 1) slots of a micro-batch and stage for m micro-batches
    memory      `memory.py`

Left out: norms and other element-wise work, recurrences of linear-attention layers (their projections count), imbalance of
experts, start-up of kernels. Small models and short contexts run slower than predicted here.
"""

from dataclasses import dataclass
from typing import Optional

from megatron.bdlm.planner.hardware import GPU, Efficiency
from megatron.bdlm.planner.memory import memory
from megatron.bdlm.planner.models import AttentionLayers, Model
from megatron.bdlm.planner.traffic import Needs, needs
from megatron.bdlm.planner.work import Layout, Machine, Prediction, Workload, rank_share


# ---- attention -------------------------------------------------------------------------------------


def attention_area(workload: Workload, window: Optional[int]) -> tuple[float, float]:
    """Visible pairs of one layer over the whole sample: (of one noisy view, of the clean stream)."""
    length, block = workload.length, workload.block_size
    if window is None or window >= length:
        both = length * (length + block) / 2
        return both, both
    earlier = length * window - window * window / 2
    # a noisy row: W - 1 keys before its block, and the block; a clean row: W keys, and the rest of its block
    return earlier - length + length * block, earlier + length * (block - 1) / 2


def travelling_rows(layout: Layout, workload: Workload, gpu: GPU, window: Optional[int]) -> Needs:
    """Rows that travel in one direction of one layer when K/V move once."""
    if layout.strategy == "bp":
        return Needs(0, 0, 0, 0)
    # hybrid and cp split blocks, so under ring and allgather noisy rows travel as well
    streams = 1 if layout.bp == layout.cp else workload.views + 1
    moved = needs(workload.length, layout.cp, layout.ranks_per_node(gpu), layout.transport, streams, window)
    if layout.strategy != "hybrid":
        return moved
    inner = layout.cp // layout.bp
    noisy = (inner - 1) * workload.views * workload.length / layout.cp  # own blocks' noisy rows, among adjacent ranks
    return Needs(moved.most + noisy, moved.mean + noisy, moved.most_between, moved.mean_between)


@dataclass(frozen=True)
class LayerCost:
    """Attention of one layer and micro-batch on the heaviest rank."""

    flops: float
    bytes_mean: float
    bytes_between: float
    seconds: float
    exposed: float


def qkv_width(model: Model) -> float:
    """Columns of the projections of queries, keys and values, the mean over layers."""
    return sum(kind.count * kind.head_size * (model.query_heads + 2 * kind.key_heads) for kind in model.kinds) / model.layers


def attention_layer(
    model: Model, kind: AttentionLayers, machine: Machine, workload: Workload, layout: Layout, clean_rows: bool = True
) -> LayerCost:
    """One layer of one kind, forward and backward; the last one may leave clean rows out."""
    if kind.linear:
        return LayerCost(0, 0, 0, 0, 0)
    gpu, efficiency = machine.gpu, machine.efficiency
    noisy, clean = attention_area(workload, kind.window)
    area = workload.micro_batch * rank_share(layout, workload, noisy, clean if clean_rows else 0.0)
    forward = 4 * area * kind.head_size * model.query_heads / layout.tp
    rows = travelling_rows(layout, workload, gpu, kind.window)
    row = workload.micro_batch * 2 * max(1, kind.key_heads // layout.tp) * kind.head_size
    rate = gpu.peak_flops * efficiency.attention_forward, gpu.peak_flops * efficiency.attention_backward
    runs = 2 if layout.recompute else 1
    seconds = exposed = moved = between = 0.0
    own = workload.precision.item
    for compute, item, times in ((forward / rate[0], own, runs), (2.5 * forward / rate[1], own + workload.gradient_item, 1)):
        # in backward what the busiest rank receives most of, it sends least of (gradients go the other way)
        busiest = rows.most if item == own else (rows.most + rows.mean) / 2
        inside = (busiest - rows.most_between) * row * item / gpu.node_bandwidth
        across = rows.most_between * row * item / gpu.network_bandwidth
        transfer = max(0.0, inside, across) / efficiency.link
        hidden = min(compute, transfer) * (1 - 1 / layout.cp)
        seconds += times * (compute + transfer - hidden)
        exposed += times * (transfer - hidden)
        moved += times * rows.mean * row * item
        between += times * rows.mean_between * row * item
    return LayerCost(forward * (runs + 2.5), moved, between, seconds, exposed)


# ---- a step ----------------------------------------------------------------------------------------


def predict(model: Model, machine: Machine, workload: Workload, layout: Layout) -> Prediction:
    """Everything about one step under a legal layout."""
    gpu, efficiency = machine.gpu, machine.efficiency
    rows = workload.micro_batch * rank_share(layout, workload, workload.length, workload.length)
    runs = 4 if layout.recompute else 3
    linear = 2 * model.parameters_per_row * rows * runs / (layout.tp * layout.pp)
    short = workload.short_last_layer and layout.pp == 1  # with more stages, an earlier one is the heaviest
    if short:  # clean rows pass the last layer's projections of keys, values and queries only
        clean = rows - workload.micro_batch * workload.views * workload.length / layout.cp
        linear -= 2 * (model.parameters_per_row / model.layers - model.hidden * qkv_width(model)) * clean * runs / layout.tp
    scored = workload.micro_batch * workload.scored_share * workload.views * workload.length / layout.cp
    head = 3 * 2 * model.hidden * model.vocabulary * scored / layout.tp
    layers = [(kind.count / layout.pp, attention_layer(model, kind, machine, workload, layout)) for kind in model.kinds]
    if short:
        last = model.kinds[-1]
        layers += [(-1, attention_layer(model, last, machine, workload, layout))]
        layers += [(1, attention_layer(model, last, machine, workload, layout, clean_rows=False))]
    attention = {name: sum(count * getattr(cost, name) for count, cost in layers) for name in LayerCost.__annotations__}
    moves = _other_bytes(model, workload, layout, rows)
    spans = layout.tp * layout.ep > gpu.gpus_per_node
    tensor = moves["tensor parallel"] / gpu.node_bandwidth / efficiency.link
    experts = moves["experts"] / (gpu.network_bandwidth if spans else gpu.node_bandwidth) / efficiency.link
    stage = (linear + head) / (gpu.peak_flops * efficiency.linear) + attention["seconds"] + tensor + experts
    micro = layout.micro_batches(workload)
    pipeline = stage * (micro + layout.pp - 1)
    reduce = moves["gradients and parameters"] / gpu.network_bandwidth / efficiency.link
    step = pipeline + max(0.0, reduce - 0.5 * pipeline)  # it overlaps with backward and the next forward
    parts = memory(model, workload, layout)
    per_step = {name: value * micro for name, value in moves.items() if name != "gradients and parameters"}
    return Prediction(
        layout, parts,
        {"linear": linear * micro, "output layer": head * micro, "attention": attention["flops"] * micro},
        {
            "attention": attention["bytes_mean"] * micro, "attention between nodes": attention["bytes_between"] * micro,
            **per_step, "gradients and parameters": moves["gradients and parameters"],
        },
        {
            "step": step, "linear": linear * micro / (gpu.peak_flops * efficiency.linear), "attention": attention["seconds"] * micro,
            "attention exposed": attention["exposed"] * micro, "tensor parallel": tensor * micro, "experts": experts * micro,
            "pipeline bubble": stage * (layout.pp - 1), "gradients exposed": step - pipeline,
        },
        workload.clean_tokens / step,
        sum(parts.values()) <= gpu.memory * efficiency.memory_fill,
    )


def _other_bytes(model: Model, workload: Workload, layout: Layout, rows: float) -> dict[str, float]:
    """Bytes a rank sends beside attention: of one micro-batch, and for gradients of a step."""
    layers = model.layers / layout.pp
    hidden = rows * model.hidden * workload.precision.item
    # sequence parallel: a gather and a scatter a linear pair and direction, one gather more in backward; experts' rows
    # come to their owner, one copy an expert, and are gathered there, for each expert is split over the same tp ranks
    pairs = 1 if model.ffn == 0 else 2
    copies = hidden * model.experts_per_token
    tensor = layers * (5 * pairs * hidden + 4 * copies) * (layout.tp - 1) / layout.tp
    experts = layers * 4 * copies * (layout.ep - 1) / layout.ep / layout.tp
    split, together = layout.tp * layout.pp, layout.dp * layout.cp
    own = (model.dense_parameters + model.embedding_parameters) / split * (together - 1) / together
    own += model.expert_parameters / (split * layout.ep) * (together - layout.ep) / together
    return {
        "tensor parallel": tensor, "experts": experts,
        "pipeline": 2 * hidden / layout.tp if layout.pp > 1 else 0.0,
        "gradients and parameters": own * (workload.precision.gradient + workload.precision.item),
    }
