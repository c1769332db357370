"""Memory of the heaviest rank, by part; what `benchmarks/planner_steps.py` measures on real training steps.

    parameters, gradients   of the first or last pipeline stage, with its embedding or output layer
    optimizer               over the data- and context-parallel ranks that share it
    activations             what layers keep between forward and backward, of all micro-batches under way
    working                 the most that is held beside them: attention's buffers, or the logits of a chunk of scored rows
"""

from dataclasses import dataclass

from megatron.bdlm.planner.models import Model
from megatron.bdlm.planner.work import Layout, Workload, rank_share


@dataclass(frozen=True)
class Saved:
    """Values of a row that one layer keeps, as multiples: of the hidden size, of query and key width, of the MLP's width."""

    hidden: int
    query: int
    key: int
    ffn: int  # of a gated MLP; one less without a gate


SAVED = {
    # x and its norm, twice; q, k, v as projected (v is a view of them), q and k rotated, the output; up, gate and their product
    "fused": Saved(hidden=4, query=3, key=4, ffn=3),
    # also a norm's value before its weight, twice, and the activation of the gate
    "local": Saved(hidden=6, query=3, key=4, ffn=4),
}
"""By implementation: the fused layers of a GPU, and the engine's plain torch layers."""


def memory(model: Model, workload: Workload, layout: Layout) -> dict[str, float]:
    """Bytes on the heaviest pipeline stage, by part."""
    dense, expert = held_parameters(model, layout)
    precision, together = workload.precision, layout.dp * layout.cp if layout.sharded_optimizer else 1
    rows = workload.micro_batch * rank_share(layout, workload, workload.length, workload.length)
    return {
        "parameters": precision.item * (dense + expert), "gradients": precision.gradient * (dense + expert),
        "optimizer": precision.optimizer * (dense / together + expert / max(1, together / layout.ep)),
        "activations": activations(model, workload, layout, rows),
        "working": max(attention_buffers(model, workload, layout, rows), output_layer(model, workload, layout, rows)),
    }


def held_parameters(model: Model, layout: Layout) -> tuple[float, float]:
    """(dense, expert) parameters of a rank; the first pipeline stage has the embedding, the last the output layer."""
    share = layout.tp * layout.pp
    embedding = model.embedding_parameters if layout.pp == 1 else model.vocabulary * model.hidden
    return model.dense_parameters / share + embedding / layout.tp, model.expert_parameters / (share * layout.ep)


def layer_values(model: Model, layout: Layout) -> int:
    """Values of a row that one layer keeps, of the widest kind of layer, over the tensor-parallel ranks."""
    saved = SAVED[layout.saved]
    query = max(model.query_heads * kind.head_size for kind in model.kinds)
    keys = max(kind.key_heads * kind.head_size for kind in model.kinds)
    ffn = model.ffn + model.experts_per_token * model.expert_ffn
    return saved.hidden * model.hidden + saved.query * query + saved.key * keys + (saved.ffn - (not model.gated)) * ffn


def activations(model: Model, workload: Workload, layout: Layout, rows: float) -> float:
    """With full recompute a layer keeps its input, and one layer at a time everything."""
    layers = -(-model.layers // layout.pp) * min(layout.pp, layout.micro_batches(workload))
    working = layer_values(model, layout)
    values = layers * model.hidden + working if layout.recompute else layers * working
    return workload.precision.item * rows * values / layout.tp


def output_layer(model: Model, workload: Workload, layout: Layout, rows: float) -> float:
    """Float32 logits of one chunk of scored rows, and their gradient."""
    scored = rows * workload.views / (workload.views + 1)
    return 2 * 4 * min(workload.output_chunk or scored, scored) * model.vocabulary / layout.tp


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
    pieces = {"allgather": ranks, "hierarchical": 3}.get(transport, 2)
    during = query_side * (5 * item + 4) + (key_side + travelling * (1 + pieces)) * (item + 4)
    if transport != "allgather":
        return during
    at_end = query_side * (4 * item + 4) + key_side * 4 + travelling * (ranks * (item + 4 + 4) + item + 4 + 4)
    return max(during, at_end)
