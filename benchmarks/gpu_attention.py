"""Attention of one rank among many, measured on one device: what the other ranks would send is simply there.

Ways to compute the same number of (query, key) pairs, forward and backward:

    ours      block_diffusion_attention's tiles under the rank's plan
    dense     the same without the Triton kernels for small rectangles (--bdlm-diagonal-kernel dense)
    maskless  one call of the same kernel: the rank's rows against as many keys as give the area. The ceiling
    causal    one causal call of the same kernel, a square of the same area
    flex      compiled FlexAttention with the same mask (its block mask is made beforehand and not timed)

    s local rows, n query heads, nk key heads, d head size; work: 4 n d flops a pair forward, 10 backward
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from megatron.bdlm.attention.diagonal_tile import uses_triton
from megatron.bdlm.attention.functional import AttentionCall, BlockDiffusionAttention
from megatron.bdlm.attention.kernels import choose
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.parallel import transport_choice
from megatron.bdlm.parallel.exchange import Exchange, Link, Wire
from megatron.bdlm.parallel.plan import SequencePlan


@dataclass(frozen=True)
class Heads:
    """One kind of attention layer of a model."""

    query: int
    key: int
    size: int
    window: int | None = None


MODELS = {
    "qwen3-8b": Heads(32, 8, 128),
    "26b-a4b sliding": Heads(16, 8, 256, 1024),
    "26b-a4b full": Heads(16, 2, 512),
    "toy": Heads(4, 2, 16),
}
"""Sizes as in planner/models.py."""


@dataclass(frozen=True)
class Point:
    """What is measured together."""

    model: str
    length: int  # L, of the whole sample
    ranks: int
    block_size: int

    def plan(self, rank: int) -> SequencePlan:
        return SequencePlan.build(self.length, self.block_size, self.ranks, rank=rank)

    @property
    def rank(self) -> int:
        """One in the middle: its keys come from ranks before and after it; areas are balanced."""
        return self.ranks // 2


class Resident(Exchange):
    """Every piece is here already, the same random rows again and again; gradients go nowhere."""

    def begin(self) -> None:
        longest = max((len(piece.rows) for piece in self.program.remote), default=0)
        self.rows = torch.randn(longest, *self.shared.shape[1:], dtype=self.shared.dtype, device=self.shared.device)

    def arrivals(self):
        for piece in self.program.remote:
            yield self.arrival(piece, self.rows[: len(piece.rows)])


transport_choice.CLASSES["resident here"] = Resident


class Work:
    """A way's forward, which keeps what backward needs, and its backward."""

    def __init__(self, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]):
        self.forward, self.backward = forward, backward


def drawn(*shape: int, like: dict) -> torch.Tensor:
    return torch.randn(*shape, **like)


# ---- ways ------------------------------------------------------------------------------------------


def ours(point: Point, heads: Heads, like: dict, diagonal: str = "auto") -> Work:
    plan = point.plan(point.rank)
    q, k, v = (
        drawn(plan.s_local, 1, count, heads.size, like=like).requires_grad_() for count in (heads.query, heads.key, heads.key)
    )
    case = KernelCase.of(q, v)
    call = AttentionCall(
        program=plan.program(heads.window),
        needed=lambda rank, source: plan.needed_rows(rank, source, heads.window),
        link=Link(None, point.rank, point.ranks, point.ranks),
        transport="resident here",
        wire=Wire(torch.float32, torch.float32),
        kernel=choose("auto", case).kernel,
        diagonal=uses_triton(diagonal, case),
        scale=heads.size**-0.5,
        padding=plan.s_local - plan.used_rows,
    )
    return Work(
        lambda: BlockDiffusionAttention.apply(q, k, v, call), lambda out: torch.autograd.grad(out, (q, k, v), out.detach())
    )


def one_call(rows: int, keys: int, heads: int, size: int, causal: bool, like: dict) -> Work:
    """The kernel that `ours` uses, called once."""
    q, k, v = (drawn(1, heads, length, size, like=like) for length in (rows, keys, keys))
    kernel = choose("auto", KernelCase.of(q, v)).kernel
    kept: list = []

    def forward():
        kept[:] = kernel.forward(q, k, v, size**-0.5, causal)
        return kept[0]

    def backward(out):
        return kernel.backward(out, q, k, v, out, kept[1].float(), size**-0.5, causal)

    return Work(forward, backward)


def maskless(point: Point, heads: Heads, like: dict) -> Work:
    plan = point.plan(point.rank)
    rows = plan.used_rows
    keys = max(1, plan.program(heads.window).area // rows)
    return one_call(rows * heads.query // heads.key, keys, heads.key, heads.size, False, like)


def causal(point: Point, heads: Heads, like: dict) -> Work:
    side = math.isqrt(2 * point.plan(point.rank).program(heads.window).area)
    return one_call(side, side, heads.query, heads.size, True, like)


def flex(point: Point, heads: Heads, like: dict) -> Work:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = torch.device(like["device"])
    rows, keys = (x.to(device) for x in rows_and_keys(point, heads))
    visible = mask_of(point, heads, rows, keys)
    on_gpu = device.type == "cuda"
    make = torch.compile(create_block_mask) if on_gpu else create_block_mask  # eager holds the whole mask
    mask = make(visible, None, None, len(rows), len(keys), device=device)
    q = drawn(1, heads.query, len(rows), heads.size, like=like).requires_grad_(on_gpu)
    k, v = (drawn(1, heads.key, len(keys), heads.size, like=like).requires_grad_(on_gpu) for _ in range(2))
    attend = torch.compile(flex_attention) if on_gpu else flex_attention
    return Work(
        lambda: attend(q, k, v, block_mask=mask, enable_gqa=True),
        (lambda out: torch.autograd.grad(out, (q, k, v), out.detach())) if on_gpu else None,  # a CPU has no backward
    )


def rows_and_keys(point: Point, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Global row numbers of the rank's queries, and of every key it sees: its own rows, then the other ranks'."""
    plan = point.plan(point.rank)
    own = plan.rows[plan.rows >= 0]
    remote = [point.plan(piece.source).rows[torch.from_numpy(piece.rows)] for piece in plan.program(heads.window).remote]
    return own, torch.cat([own, *remote])


def mask_of(point: Point, heads: Heads, rows: torch.Tensor, keys: torch.Tensor) -> Callable:
    """The block diffusion mask (semantics.md, section 2) between global row numbers, noisy rows first, clean from L on."""
    length, size, window = point.length, point.block_size, heads.window

    def visible(batch, head, query, key):
        row, column = rows[query], keys[key]
        q_noisy, k_noisy = row < length, column < length
        q_place, k_place = row % length, column % length
        q_block, k_block = q_place // size, k_place // size
        own = q_noisy & k_noisy & (q_block == k_block)
        earlier = q_noisy & ~k_noisy & (k_block < q_block)
        clean = ~q_noisy & ~k_noisy & (k_block <= q_block)
        if window is not None:
            earlier = earlier & (q_block * size - k_place < window)
            clean = clean & (q_place - k_place < window)
        return own | earlier | clean

    return visible


WAYS: dict[str, Callable[[Point, Heads, dict], Work]] = {
    "ours": ours, "dense": partial(ours, diagonal="dense"), "maskless": maskless, "causal": causal, "flex": flex,
}


# ---- measuring -------------------------------------------------------------------------------------


def synchronised(call: Callable, *arguments) -> tuple[float, object]:
    """Seconds of a call, the device's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = call(*arguments)
    wait()
    return time.perf_counter() - start, result


def measure_way(name: str, point: Point, heads: Heads, repeats: int, like: dict) -> dict:
    """Medians in seconds and peak memory in bytes of one way; {"error": why} where it does not run here."""
    on_gpu = torch.cuda.is_available()
    forwards, backwards = [], []
    try:
        work = WAYS[name](point, heads, like)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        for _ in range(repeats + 1):  # the first one compiles and warms up
            seconds, out = synchronised(work.forward)
            forwards.append(seconds)
            if work.backward is not None:
                backwards.append(synchronised(work.backward, out)[0])
            del out
        peak = torch.cuda.max_memory_allocated() - held if on_gpu else None
    except Exception as error:  # out of memory, sizes that a library refuses or cannot compile: the other ways go on
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    return {
        "forward_seconds": statistics.median(forwards[1:]),
        "backward_seconds": statistics.median(backwards[1:]) if backwards else None,
        "peak_bytes": peak,
    }


def measure_point(point: Point, repeats: int, like: dict, peak_flops: float, ways=tuple(WAYS)) -> dict:
    """All ways of a point, one after the other, with rates: TFLOP/s and shares of the measured matmul peak."""
    heads = MODELS[point.model]
    area = point.plan(point.rank).program(heads.window).area
    found = {}
    for name in ways:
        row = measure_way(name, point, heads, repeats, like)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for direction, flops in (("forward", 4.0), ("backward", 10.0)):
            seconds = row.get(f"{direction}_seconds")
            if seconds:
                rate = flops * heads.query * heads.size * area / seconds
                row[f"{direction}_tflops"], row[f"{direction}_share_of_peak"] = rate / 1e12, rate / peak_flops
        found[name] = row
    return {**asdict(point), "heads": asdict(heads), "area": area, "ways": found, "ratios": ratios(found)}


def ratios(found: dict[str, dict]) -> dict[str, float]:
    """How many times faster ours is than each other way, by direction (below one for the ceilings)."""
    return {
        f"{direction} {name}": row[f"{direction}_seconds"] / found["ours"][f"{direction}_seconds"]
        for name, row in found.items() for direction in ("forward", "backward")
        if name != "ours" and row.get(f"{direction}_seconds") and found.get("ours", {}).get(f"{direction}_seconds")
    }


def matmul_peak(size: int, repeats: int, like: dict) -> float:
    """flop/s of the fastest of some square matrix products: what this device reaches, whatever its data sheet says."""
    a, b = (drawn(size, size, like=like) for _ in range(2))
    return max(2.0 * size**3 / synchronised(torch.mm, a, b)[0] for _ in range(repeats + 2))
