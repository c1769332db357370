"""Constants of hardware, one place, with sources. Peaks are vendors'; efficiencies are this planner's own assumptions.

Rates are per GPU and in one direction. Dense bfloat16 peaks: vendors print twice as much "with sparsity".

    H100, H200   989.5 Tflop/s dense bf16, NVLink 900 GB/s both directions together, 80 GB / 141 GB, 3.35 / 4.8 TB/s
                 (NVIDIA H100 and H200 Tensor Core GPU datasheets)
    A100         312 Tflop/s, NVLink 600 GB/s, 80 GB, 2.0 TB/s (NVIDIA A100 datasheet)
    B200         2250 Tflop/s, NVLink 1800 GB/s, 180 GB, 8 TB/s (NVIDIA DGX B200 datasheet: 8 GPUs, 1440 GB, 144 PF FP8 sparse)
    network      400 Gbit/s a GPU on H100, H200 and B200 systems, 200 Gbit/s on A100 systems (NVIDIA DGX datasheets)
"""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """One kind of GPU and its usual network."""

    name: str
    peak_flops: float  # dense bfloat16, a second
    memory: float  # bytes
    memory_bandwidth: float  # bytes a second
    node_bandwidth: float  # bytes a second between GPUs of a node, one direction
    network_bandwidth: float  # bytes a second to other nodes, one direction, per GPU
    gpus_per_node: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100", 312e12, 80 * GB, 2.0e12, 300 * GB, 25 * GB),
        GPU("h100", 989.5e12, 80 * GB, 3.35e12, 450 * GB, 50 * GB),
        GPU("h200", 989.5e12, 141 * GB, 4.8e12, 450 * GB, 50 * GB),
        GPU("b200", 2250e12, 180 * GB, 8.0e12, 900 * GB, 50 * GB),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """Share of a peak that is reached. Assumptions, the same for every model and layout; `tools/plan_run.py` takes others."""

    linear: float = 0.6  # large bf16 matrix products
    attention_forward: float = 0.6  # fused attention, long rows, head size 128 (FlashAttention-3, arXiv 2407.08608, fig. 5-6)
    attention_backward: float = 0.5
    link: float = 0.8  # of a link's rate
    memory_fill: float = 0.9  # of a GPU's memory that a plan may use: the rest is for the allocator and the libraries
