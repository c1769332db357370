"""What is planned: a machine, the work of a step, a way to share it; and what is predicted of them."""

from dataclasses import dataclass

from megatron.bdlm.planner.hardware import GPU, Efficiency


@dataclass(frozen=True)
class Machine:
    """`count` GPUs of a kind."""

    gpu: GPU
    count: int
    efficiency: Efficiency = Efficiency()


@dataclass(frozen=True)
class Precision:
    """Bytes of a value."""

    item: int = 2  # a weight, an activation
    gradient: int = 4  # a weight's gradient, as it is summed
    optimizer: int = 12  # a weight's float32 copy and two moments; 8 where weights are float32 themselves


@dataclass(frozen=True)
class Workload:
    """What one step trains on."""

    length: int
    block_size: int
    global_batch: int
    views: int = 1
    gradient_item: int = 4  # bytes of a dK/dV value on the wire
    scored_share: float = 0.5  # of the noisy rows that reach the output layer
    micro_batch: int = 1
    precision: Precision = Precision()
    output_chunk: int = 4096  # rows whose logits are held at a time; 0: all
    short_last_layer: bool = True  # nobody reads clean rows behind the last layer's keys and values

    @property
    def clean_tokens(self) -> int:
        return self.length * self.global_batch


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: `bp` is the block-parallel size K."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    bp: int = 1
    ep: int = 1
    dp: int = 1
    strategy: str = "csbp"
    transport: str = "direct"
    recompute: bool = False
    sharded_optimizer: bool = True  # over data- and context-parallel ranks
    saved: str = "fused"  # what layers keep for backward: a key of memory.SAVED

    def micro_batches(self, workload: Workload) -> int:
        return workload.global_batch // (self.dp * workload.micro_batch)

    def ranks_per_node(self, gpu: GPU) -> int:
        """Context-parallel ranks on a node: they stand beside tensor-parallel ones."""
        return max(1, min(self.cp, gpu.gpus_per_node // self.tp))


@dataclass(frozen=True)
class Prediction:
    """Of one step; bytes, flops and seconds of the heaviest rank."""

    layout: Layout
    memory: dict[str, float]
    flops: dict[str, float]
    bytes: dict[str, float]
    seconds: dict[str, float]
    tokens_per_second: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        return self.seconds["step"]

    @property
    def memory_total(self) -> float:
        return sum(self.memory.values())


def rank_share(layout: Layout, workload: Workload, noisy: float, clean: float) -> float:
    """A rank's part of something that views and the clean stream have."""
    clean_part = clean if layout.strategy == "bp" else clean / layout.cp
    return workload.views * noisy / layout.cp + clean_part
