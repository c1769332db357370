"""Memory of the heaviest rank, by part; `benchmarks/planner_steps.py` measures the same parts on real training steps.

    parameters, gradients   of the first pipeline stage, with the embedding (and the output layer where there is one stage)
    optimizer               over the data- and context-parallel ranks that share it
    activations             held when forward ends, of all micro-batches under way
    working                 the most that backward holds beyond that: at the output layer, in an MLP, or in attention

Backward frees as it goes: when it reaches a layer's attention, what its MLP kept is gone. The last layer's MLP has noisy rows only
(`--bdlm-full-last-layer`). Example, h = q = 128, k = 64, head 32, MLP 384, 4 heads, plain torch layers: a row keeps 6h + 3q + 3k + 5 x 384
+ 4 x 32 + heads + 2 = 3398 values in a layer.
"""

from dataclasses import dataclass

from megatron.bdlm.planner.models import Model
from megatron.bdlm.planner.work import Layout, Workload, rank_share


@dataclass(frozen=True)
class Saved:
    """Values of a row that one layer keeps, as multiples of sizes; half of `hidden` belongs to attention, half to the MLP."""

    hidden: int
    query: int
    key: int
    ffn: int  # of a gated MLP; two less without a gate
    head: int  # of one head's size


SAVED = {
    # x and its norm, twice; q, k, v as projected (v is a view of all three), q and k rotated, the output; up, gate and their product
    "fused": Saved(hidden=4, query=3, key=3, ffn=3, head=0),
    # also a norm before its weight, twice; the gate's activation and up plus an offset; cosine and sine for q and for k
    "local": Saved(hidden=6, query=3, key=3, ffn=5, head=4),
}
"""By implementation: the fused layers of a GPU (counted by hand), and the engine's plain torch layers (measured)."""


def memory(model: Model, workload: Workload, layout: Layout) -> dict[str, float]:
    """Bytes on the heaviest pipeline stage, by part."""
    dense, expert = held_parameters(model, layout)
    precision, together = workload.precision, layout.dp * layout.cp if layout.sharded_optimizer else 1
    held, working = activations(model, workload, layout)
    return {
        "parameters": precision.item * (dense + expert), "gradients": precision.gradient * (dense + expert),
        "optimizer": precision.optimizer * (dense / together + expert / max(1, together / layout.ep)),
        "activations": held, "working": working,
    }


def held_parameters(model: Model, layout: Layout) -> tuple[float, float]:
    """(dense, expert) parameters of a rank; the first pipeline stage has the embedding, the last the output layer."""
    share = layout.tp * layout.pp
    embedding = model.embedding_parameters if layout.pp == 1 else model.vocabulary * model.hidden
    return model.dense_parameters / share + embedding / layout.tp, model.expert_parameters / (share * layout.ep)


@dataclass(frozen=True)
class _Rows:
    """Rows of a rank in one micro-batch."""

    all: float
    last: float  # in the last layer's MLP
    scored: float

    @staticmethod
    def of(workload: Workload, layout: Layout) -> "_Rows":
        every = workload.micro_batch * rank_share(layout, workload, workload.length, workload.length)
        noisy = workload.micro_batch * workload.views * workload.length / layout.cp
        return _Rows(every, noisy if workload.short_last_layer and layout.pp == 1 else every, noisy * workload.scored_share)


def _layer(model: Model, layout: Layout) -> tuple[float, float, float]:
    """Values of a row: what attention keeps, what the MLP keeps, and the MLP's gradients in backward."""
    saved = SAVED[layout.saved]
    query = max(model.query_heads * kind.head_size for kind in model.kinds)
    keys = max(kind.key_heads * kind.head_size for kind in model.kinds)
    head = max(kind.head_size for kind in model.kinds)
    ffn = model.ffn + model.experts_per_token * model.expert_ffn
    hidden = saved.hidden / 2 * model.hidden
    attention = hidden + saved.query * query + saved.key * keys + saved.head * head + model.query_heads + 1
    inner = saved.ffn if model.gated else max(2, saved.ffn - 2)
    return attention, hidden + inner * ffn + 1, model.hidden + (2 if model.gated else 1) * ffn


def activations(model: Model, workload: Workload, layout: Layout) -> tuple[float, float]:
    """(held when forward ends, the most that backward holds beyond it), bytes."""
    rows, item, h = _Rows.of(workload, layout), workload.precision.item, model.hidden
    attention, mlp, gradients = _layer(model, layout)
    buffers = attention_buffers(model, workload, layout, rows.all) * layout.tp / item
    layers = -(-model.layers // layout.pp)
    one_stage = layout.pp == 1
    # the final norm, and the scored rows in front of the output layer
    output = SAVED[layout.saved].hidden / 2 * h * rows.last * 2 / 3 + h * rows.scored if one_stage else 0.0
    layer, last = (attention + mlp) * rows.all, attention * rows.all + mlp * rows.last
    if layout.recompute:  # layers keep their inputs; backward has one layer at a time in full
        held = layers * h * rows.all
        peaks = [peak + last - output for peak in _backward(mlp, gradients, h, rows.all, rows.last, buffers)]
        if layers > 1:
            peaks += [peak + layer - output - h * rows.all for peak in _backward(mlp, gradients, h, rows.all, rows.all, buffers)]
    else:
        held = (layers - 1) * layer + last
        peaks = [peak - output for peak in _backward(mlp, gradients, h, rows.all, rows.last, buffers)]
        peaks += [peak - output - last for peak in _backward(mlp, gradients, h, rows.all, rows.all, buffers)]
    under_way = min(layout.pp, layout.micro_batches(workload))
    working = max([0.0, *peaks]) * item / layout.tp
    return (held * under_way + output) * item / layout.tp, max(working, output_layer(model, workload, layout, rows.scored) if one_stage else 0.0)


def _backward(mlp: float, gradients: float, hidden: int, rows: float, mlp_rows: float, buffers: float) -> tuple[float, float]:
    """Values held beyond the end of forward in a layer's MLP, and in its attention, when what its MLP kept is gone."""
    return gradients * mlp_rows, hidden * rows + buffers - mlp * mlp_rows


def output_layer(model: Model, workload: Workload, layout: Layout, scored: float) -> float:
    """Float32 logits of one chunk of scored rows, with a copy in 16 bits; the gradients of the rows and, in float32, of the weight."""
    item = workload.precision.item
    logits = min(workload.output_chunk or scored, scored) * model.vocabulary * (4 + (item if item < 4 else 0))
    return (logits + model.vocabulary * model.hidden * 4) / layout.tp + scored * model.hidden * item


def attention_buffers(model: Model, workload: Workload, layout: Layout, rows: float) -> float:
    """Of the widest kind of layer."""
    kinds = [kind for kind in model.kinds if not kind.linear]
    widest = max(model.query_heads * kind.head_size for kind in kinds)
    keys = max(kind.key_heads * kind.head_size for kind in kinds)
    streams = 1 if layout.bp == layout.cp else workload.views + 1
    alone = layout.cp == 1 or layout.strategy == "bp"
    shared = 0.0 if alone else streams * workload.micro_batch * workload.length / layout.cp
    return layer_buffers(rows, shared, layout.cp, layout.transport, widest, keys, workload.precision.item) / layout.tp


def layer_buffers(
    rows: float, shared: float, ranks: int, transport: str, query_width: int, key_width: int, item: int = 2
) -> float:
    """Peak of one layer's forward and backward beyond its inputs, in bytes; it falls into backward.

    Args:
        rows: local rows; shared: those that travel; query_width, key_width: heads times head size.

    A query-side row has the output, copies of q, dout and out folded by head groups, a kernel's dq, and the float32 sum of dq;
    a key-side row a kernel's dk and dv and their float32 sums; a travelling row K and V as sent and in the pieces under way,
    each with a float32 gradient: the current and the next piece; under hierarchical two landings and the piece handed on;
    under allgather every rank's, and at the end the reduction's own copy of all gradients, when kernels are done.
    """
    query_side, key_side = rows * query_width, rows * 2 * key_width
    travelling = shared * 2 * key_width
    pieces = ranks if transport == "allgather" else min(ranks - 1, 3 if transport == "hierarchical" else 2)
    during = query_side * (5 * item + 4) + (key_side + travelling * (1 + pieces)) * (item + 4)
    if transport != "allgather":
        return during
    at_end = query_side * (4 * item + 4) + key_side * 4 + travelling * (ranks * (item + 4 + 4) + item + 4 + 4)
    return max(during, at_end)
