"""What training a drafter holds and computes on a rank: features, context, draft rows, weights. A model, not a measurement.

    S context tokens     A anchors     B block size     D hidden     m feature layers     n draft layers     P, K as in `AnchorPlan`
    G key heads     d head size     I ffn     V vocabulary

Bytes, in bfloat16 unless noted; of a sample, on one rank:

    features    2 m D S / P                      the target's, read or received
    context     2 D S / P                        after fc and norm, shared by all layers; and the output of fc before the norm
    keys        2 * 2 G d n S / P                context keys and values of n layers, kept for backward
    transit     2 * 2 * 2 G d S / P              two pieces of another rank's keys while a layer runs (K > 1)
    drafts      activations of A B / K rows      per layer 2 (6 D + 3 I + 2 (H + 2 G) d), kept for backward
    logits      4 chunk V                        one chunk in float32
    weights     18 bytes a parameter             bfloat16 weight, float32 gradient, master and two moments

A window w on every layer leaves at most A (B + w) context rows to fc and to the layers; features are still read.
"""

from dataclasses import dataclass
from typing import Optional

GIB = 2**30
ITEM = 2  # bytes of a bfloat16 value
CHUNK = 1024


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a drafter."""

    hidden: int
    ffn: int
    layers: int
    query_heads: int
    key_heads: int
    head_size: int
    feature_layers: int
    vocabulary: int
    block_size: int = 16
    window: Optional[int] = None

    @property
    def layer_parameters(self) -> int:
        """Matrices of one draft layer."""
        return self.hidden * self.head_size * 2 * (self.query_heads + self.key_heads) + 3 * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Trained: fc and the layers; embedding and output layer are the target's."""
        return self.layers * self.layer_parameters + self.feature_layers * self.hidden**2


PUBLISHED = DraftShape(5120, 17408, 5, 32, 8, 128, 5, 248320, 8)
"""The shape of a published drafter with D = 5120 and five layers; its vocabulary is an assumption."""


@dataclass(frozen=True)
class DraftCost:
    """Of one sample on one rank."""

    memory: dict[str, float]  # bytes by part
    draft_flops: float  # forward and backward
    context_flops: float
    sent_bytes: float  # between slots: of keys and their gradients or of queries and partial results, what is less

    @property
    def memory_total(self) -> float:
        return sum(self.memory.values())


def draft_cost(shape: DraftShape, context: int, anchors: int, context_parallel: int, block_parallel: int) -> DraftCost:
    """What a rank of P = `context_parallel` holds and computes, K = `block_parallel`."""
    rows = anchors * shape.block_size / block_parallel
    held = context / context_parallel
    used = held if shape.window is None else min(held, anchors * (shape.block_size + shape.window) / context_parallel)
    key_row = 2 * shape.key_heads * shape.head_size  # values of k and v
    activations = 6 * shape.hidden + 3 * shape.ffn + 2 * (shape.query_heads + 2 * shape.key_heads) * shape.head_size
    memory = {
        "features": ITEM * shape.feature_layers * shape.hidden * held,
        "context": 2 * ITEM * shape.hidden * used,
        "keys": ITEM * key_row * shape.layers * used,
        "transit": 2 * ITEM * key_row * used if block_parallel > 1 else 0.0,
        "drafts": ITEM * activations * shape.layers * rows,
        "logits": 4.0 * CHUNK * shape.vocabulary,
        "weights": 18.0 * shape.parameters,
    }
    row_flops = 6 * (shape.layers * shape.layer_parameters) + 6 * shape.hidden * shape.vocabulary
    seen = context / 2 if shape.window is None else min(shape.window, context / 2)
    attention = 14 * shape.query_heads * shape.head_size * seen * shape.layers  # a draft row, forward and backward
    projections = 6 * (shape.feature_layers * shape.hidden**2 + shape.layers * shape.hidden * key_row)
    inner = context_parallel // block_parallel
    # forward keys, backward keys again, and gradients in float32, to the K - 1 other slots
    keys = used * key_row * (2 * ITEM + 4)
    # q there, output and log-sum-exp back in float32; in backward q, dout, out and log-sum-exp there, dq back in float32
    queries = rows * shape.query_heads * (shape.head_size * (4 * ITEM + 8) + 8)
    sent = (block_parallel - 1) * shape.layers * min(keys, queries)
    return DraftCost(memory, rows * (row_flops + attention / inner), used * projections, sent)
