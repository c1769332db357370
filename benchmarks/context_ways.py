"""Ways to share one sample's attention among ranks, each as a step (forward and backward) that can be taken apart.

A `Way` runs its whole step, its computation alone (what other ranks would send is simply there) and its communication
alone (everything arrives, nothing is computed): the two ceilings of the step.

    cp/ring, cp/allgather, bp, csbp/TRANSPORT    this project's attention under a plan
    ulysses                                      head-parallel: all-to-all before and after, all rows of n/P heads between

Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): q, k, v travel in one message so that a rank has all 2L rows of its heads, the
output travels back; backward mirrors both. It computes with the same rectangles and kernel as the others, balances exactly, and
cannot overlap. It needs P to divide the key heads.

    n query heads, nk key heads, d head size, P ranks, s = (V+1)L/P local rows
"""

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.bdlm.attention import functional
from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.attention.kernels.base import AttentionKernel
from megatron.bdlm.parallel import transport_choice
from megatron.bdlm.parallel.exchange import Exchange, Link, Wire, traffic
from megatron.bdlm.parallel.plan import SequencePlan

WAYS = (
    "cp/ring", "cp/allgather", "ulysses", "bp", "csbp/direct", "csbp/hierarchical", "csbp/ring", "csbp/allgather",
)
BASELINES = ("cp/ring", "cp/allgather", "ulysses", "bp")


@dataclass(frozen=True)
class Shape:
    """The attention of one layer."""

    length: int = 2048
    block_size: int = 32
    query_heads: int = 16
    key_heads: int = 4
    head_size: int = 64
    views: int = 1
    window: int | None = None
    prompt: float = 0.0  # share of the blocks, from the start, without noisy rows

    def plan(self, size: int, rank: int, strategy: str) -> SequencePlan:
        blocks = -(-self.length // self.block_size)
        targets = None if not self.prompt else range(round(self.prompt * blocks), blocks)
        return SequencePlan.build(
            self.length, self.block_size, size, rank=rank, strategy=strategy, views=self.views, target_blocks=targets
        )

    def flops(self, area: int, heads: int) -> float:
        """Forward and backward of `area` pairs: 4 d a pair, and 2.5 times that."""
        return 14.0 * area * self.head_size * heads


PLACE = {"device": "cpu", "dtype": torch.float32}
"""Where inputs are and what they are; `context_strategies.py --device cuda` sets it before it makes a way."""


class Way(ABC):
    """One way on this rank."""

    name: str
    flops: float  # of this rank, forward and backward

    @abstractmethod
    def step(self) -> None:
        """Forward and backward."""

    @abstractmethod
    def compute(self) -> None:
        """The same without any transfer."""

    @abstractmethod
    def communicate(self) -> None:
        """The transfers alone."""

    def peak_bytes(self) -> int:
        """Most memory held at a time beyond the inputs, by the allocator's own record of one step."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            self.step()
            return torch.cuda.max_memory_allocated() - held
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:
            self.step()
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in profiler.kineto_results.events() if event.name() == "[memory]"
        )
        held = peak = 0
        for _, change in changes:
            held += change
            peak = max(peak, held)
        return peak


def make_way(name: str, shape: Shape, ranks_per_node: int) -> Way:
    """The way of that name on this rank of the default process group."""
    if name == "ulysses":
        return Ulysses(shape)
    strategy, _, transport = name.partition("/")
    return Planned(name, shape, strategy, transport or "direct", ranks_per_node)


# ---- this project's attention --------------------------------------------------------------------------


class Resident(Exchange):
    """Every piece is here already, filled with a constant; gradients go nowhere."""

    def begin(self) -> None:
        pass

    def arrivals(self):
        for piece in self.program.remote:
            yield self.arrival(piece, self.buffer(len(piece.rows)).fill_(0.1))


transport_choice.CLASSES["resident"] = Resident


class Planned(Way):
    """`block_diffusion_attention` under a plan."""

    def __init__(self, name: str, shape: Shape, strategy: str, transport: str, ranks_per_node: int):
        self.name, self.shape, self.transport = name, shape, transport
        size, rank = dist.get_world_size(), dist.get_rank()
        self.plan = shape.plan(size, rank, strategy)
        self.program = self.plan.program(shape.window)
        self.link = Link.of(None, size, ranks_per_node)
        self.flops = shape.flops(self.program.area, shape.query_heads)
        heads = (shape.query_heads, shape.key_heads, shape.key_heads)
        self.inputs = [torch.randn(self.plan.s_local, 1, h, shape.head_size, requires_grad=True, **PLACE) for h in heads]

    def _run(self, transport: str) -> None:
        out = block_diffusion_attention(
            *self.inputs, self.plan, transport=transport, window=self.shape.window, ranks_per_node=self.link.ranks_per_node
        )
        torch.autograd.grad(out, self.inputs, out.detach())

    def step(self) -> None:
        self._run(self.transport)

    def compute(self) -> None:
        self._run("resident")

    def communicate(self) -> None:
        shared = self.program.shared[dist.get_rank()]
        packed = torch.zeros(len(shared), self.shape.key_heads, 2 * self.shape.head_size, **PLACE)

        def needed(rank, source):
            return self.plan.needed_rows(rank, source, self.shape.window)

        for wire in (None, Wire(torch.float32, torch.float32)):
            exchange = transport_choice.open_exchange(self.transport, self.program, self.link, needed, wire)
            exchange.post(packed)
            for _ in exchange.arrivals():
                pass
            exchange.collect()


# ---- head-parallel ---------------------------------------------------------------------------------------


class Ulysses(Way):
    """All-to-all head parallelism; the local rows are rank r's s of the global order `[xt_1; ..; xt_V; x0]`."""

    name = "ulysses"

    def __init__(self, shape: Shape):
        self.shape, self.size = shape, dist.get_world_size()
        if shape.key_heads % self.size:
            raise ValueError(f"ulysses: {self.size} ranks must divide the {shape.key_heads} key heads")
        self.plan = shape.plan(1, 0, "csbp")
        total = self.plan.s_local
        if total % self.size:
            raise ValueError(f"ulysses: {self.size} ranks must divide the {total} rows")
        self.heads = (shape.query_heads // self.size, shape.key_heads // self.size, shape.key_heads // self.size)
        self.flops = shape.flops(self.plan.program(shape.window).area, self.heads[0])
        rows = total // self.size
        # [s, P, (n + 2 nk)/P, d]: heads grouped by the rank that computes them, q, k and v of a group side by side
        self.inputs = torch.randn(rows, self.size, sum(self.heads), shape.head_size, requires_grad=True, **PLACE)
        self.resident = torch.randn(total, sum(self.heads), shape.head_size, requires_grad=True, **PLACE)

    def _attend(self, rows: torch.Tensor) -> torch.Tensor:
        """[(V+1)L, (n + 2 nk)/P, d] -> [(V+1)L, n/P, d]."""
        q, k, v = (part[:, None] for part in rows.split(self.heads, dim=1))
        return block_diffusion_attention(q, k, v, self.plan, window=self.shape.window)[:, 0]

    def step(self) -> None:
        out = HeadsToRows.apply(self._attend(RowsToHeads.apply(self.inputs)))
        torch.autograd.grad(out, self.inputs, out.detach())

    def compute(self) -> None:
        out = self._attend(self.resident)
        torch.autograd.grad(out, self.resident, out.detach())

    def communicate(self) -> None:
        with torch.no_grad():
            rows = RowsToHeads.apply(self.inputs)
            HeadsToRows.apply(rows[:, : self.heads[0]].contiguous())
            RowsToHeads.apply(self.inputs[:, :, : self.heads[0]].contiguous())
            HeadsToRows.apply(rows)


def rows_to_heads(x: torch.Tensor) -> torch.Tensor:
    """[s, P, h, d] -> [P s, h, d]: send every rank its heads, receive all rows of ours."""
    sent = x.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    _count(sent)
    dist.all_to_all_single(received, sent)
    return received.flatten(0, 1)


def heads_to_rows(x: torch.Tensor) -> torch.Tensor:
    """[P s, h, d] -> [s, P, h, d]: the way back."""
    sent = x.unflatten(0, (dist.get_world_size(), -1)).contiguous()
    received = torch.empty_like(sent)
    _count(sent)
    dist.all_to_all_single(received, sent)
    return received.transpose(0, 1)


class RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return rows_to_heads(x)

    @staticmethod
    def backward(ctx, gradient):
        return heads_to_rows(gradient)


class HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return heads_to_rows(x)

    @staticmethod
    def backward(ctx, gradient):
        return rows_to_heads(gradient)


ulysses_bytes = {"sent": 0}


def _count(sent: torch.Tensor) -> None:
    """Everything but the own part crosses."""
    ulysses_bytes["sent"] += sent.numel() * sent.element_size() * (dist.get_world_size() - 1) // dist.get_world_size()


def bytes_of_step(way: Way, ranks_per_node: int) -> dict[str, int]:
    """Bytes this rank sends in one step, and the part of it that leaves the node."""
    traffic()
    ulysses_bytes["sent"] = 0
    way.step()
    counted = traffic()
    size = dist.get_world_size()
    head_parallel = ulysses_bytes["sent"]
    return {
        "sent": head_parallel + sum(counts["sent"] for counts in counted.values()),
        "between_nodes": head_parallel * (size - ranks_per_node) // max(size - 1, 1)
        + sum(counts["sent_inter_node"] for counts in counted.values()),
        "received": head_parallel + sum(counts["received"] for counts in counted.values()),
    }


# ---- a device of its own for every rank ---------------------------------------------------------------------


class DeviceKernel(AttentionKernel):
    """Takes as long as a device of a given speed would, without its arithmetic: results are meaningless.

    On a machine with fewer cores than ranks, ranks otherwise compete for cores, also with the network's own work; ranks
    with accelerators do not. What is outside the kernel (packing, merging, transfers) stays real.
    """

    name = note = "device"

    def __init__(self, flops_per_second: float):
        self.rate, self.owed = flops_per_second, 0.0

    def refusal(self, case):
        return None

    def _spend(self, flops: float) -> None:
        self.owed += flops / self.rate
        if self.owed > 1e-3:  # shorter waits are not kept by the clock; the rest is carried on
            start = time.perf_counter()
            threading.Event().wait(self.owed)
            self.owed -= time.perf_counter() - start

    def forward(self, q, k, v, scale, causal, mask=None):
        n, h, r, d = q.shape
        self._spend(4.0 * n * h * r * k.shape[2] * d / (2 if causal else 1))
        # [n, r, h, dv] memory order, as the real kernel's
        return q.new_zeros(n, r, h, v.shape[-1]).transpose(1, 2), q.new_zeros(n, h, r)

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        n, h, r, d = q.shape
        self._spend(10.0 * n * h * r * k.shape[2] * d / (2 if causal else 1))
        return tuple(x.new_zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))


def use_device(flops_per_second: float) -> None:
    """From now on this process computes attention tiles with a `DeviceKernel`."""
    kernel = DeviceKernel(flops_per_second)
    functional.choose = lambda name, case: type("Choice", (), {"kernel": kernel})
