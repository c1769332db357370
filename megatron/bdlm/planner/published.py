"""Figures that a peer of this project published, beside what this planner predicts for them. Nothing is fitted to a row.

The published setting is known only in part: 16 H200, and for the traffic CP 8. So the check states its own assumptions: context
parallelism over CP 8 on one node, two replicas, block size 32, one view, gradients of K and V in bfloat16 on the wire, both
sides over rings: the conventional one moves both streams, CSBP's the clean one. The predicted speedup is therefore what
communication explains; balance is 1 on both sides (two-ended placement). What is left of a published speedup must come from
something else, above all from how well kernels like the shapes each side gives them, which this planner does not model.
"""

from dataclasses import dataclass
from typing import Optional

from megatron.bdlm.planner.costs import predict
from megatron.bdlm.planner.hardware import GPUS
from megatron.bdlm.planner.models import KNOWN
from megatron.bdlm.planner.work import Layout, Machine, Workload

GIB = 2**30


@dataclass(frozen=True)
class Published:
    """One published figure: a speedup of CSBP over conventional context parallelism, or traffic of both in GiB."""

    model: str
    length: int
    speedup: Optional[float] = None
    traffic: Optional[tuple[float, float]] = None


PUBLISHED = (
    Published("14b", 262144, traffic=(210.0, 105.0)),
    Published("3b", 262144, 1.19), Published("8b", 262144, 1.18), Published("14b", 262144, 1.18),
    Published("26b-a4b", 65536, 1.25), Published("26b-a4b", 131072, 1.44), Published("26b-a4b", 262144, 1.45),
    Published("26b-a4b", 524288, 1.61), Published("27b-hybrid", 262144, 1.33),
)


@dataclass(frozen=True)
class Comparison:
    """A published figure, and what was predicted for it."""

    published: Published
    predicted: tuple[float, ...]  # traffic of both, or the speedup on each network
    explained: str


def compare() -> list[Comparison]:
    """Every published figure with the prediction, over NVLink (CP 8) and across two nodes (CP 16)."""
    return [_traffic(row) if row.traffic else _speedup(row) for row in PUBLISHED]


def _pair(row: Published, cp: int):
    """Predictions of conventional context parallelism and of CSBP."""
    machine = Machine(GPUS["h200"], 16)
    workload = Workload(row.length, 32, 16 // cp, gradient_item=2)
    ring = Layout(cp=cp, bp=1, dp=16 // cp, strategy="cp", transport="ring")
    ours = Layout(cp=cp, bp=cp, dp=16 // cp, strategy="csbp", transport="ring")
    return tuple(predict(KNOWN[row.model], machine, workload, layout) for layout in (ring, ours))


def _traffic(row: Published) -> Comparison:
    both = tuple(prediction.bytes["attention"] / GIB for prediction in _pair(row, 8))
    return Comparison(row, both, "communication: all of it")


def _speedup(row: Published) -> Comparison:
    predicted = []
    for cp in (8, 16):
        ring, ours = _pair(row, cp)
        predicted.append(ring.step_seconds / ours.step_seconds)
    best = max(predicted)
    share = (best - 1) / (row.speedup - 1)
    return Comparison(row, tuple(predicted), f"communication: {min(share, 1):.0%} of the gain at most; balance: none; the rest is not modelled")
