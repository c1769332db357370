"""Cases of block diffusion attention, run sharded and compared with the dense float64 oracle.

A case is small and picklable. Every rank draws the same global inputs from the case's seed, computes its rows, and
returns output and gradients; the parent puts them together (gradients of rows that several ranks hold are partial: it
sums).
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.parallel.exchange import traffic
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.oracle import dense_block_diffusion_attention

ORACLE_ARGUMENTS = (
    "seq_length",
    "block_size",
    "views",
    "documents",
    "clean_attention",
    "noisy_attention",
    "block_origin",
    "block_restarts",
    "target_blocks",
)


@dataclass(frozen=True)
class Case:
    """One attention call: arguments of the plan, of the call, and of the inputs."""

    plan: dict[str, Any]
    transport: str = "direct"
    ranks_per_node: int | None = None
    window: int | None = None
    queries: str = "all"
    scale: float | None = None
    kernel: str = "auto"
    diagonal_kernel: str = "dense"
    grad_dtype: torch.dtype | None = None
    heads: tuple[int, int, int, int] = (2, 2, 8, 8)  # n, nk, d, dv
    batch: int = 1
    strided: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        changed = {
            name: value for name, value in vars(self).items() if value != Case.__dataclass_fields__[name].default
        }
        return ", ".join(f"{name}={value}" for name, value in changed.items())

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Global q, k, v and output gradient [R, b, heads, size], float64 values that self.dtype holds exactly."""
        rows = (self.plan.get("views", 1) + 1) * self.plan["seq_length"]
        n, nk, d, dv = self.heads
        generator = torch.Generator().manual_seed(self.seed)
        return tuple(
            torch.randn(rows, self.batch, heads, size, generator=generator, dtype=torch.float64).to(self.dtype).double()
            for heads, size in ((n, d), (nk, d), (nk, dv), (n, dv))
        )


@dataclass
class Shard:
    """What one rank returns."""

    rows: torch.Tensor  # global row of each local row, -1 padding
    out: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    moved: dict = field(default_factory=dict)


def run_case(case: Case, size: int, rank: int) -> Shard:
    """This rank's part of a case."""
    plan = SequencePlan.build(**case.plan, context_parallel_size=size, rank=rank)
    q, k, v, dout = (plan.take(x).to(case.device, case.dtype) for x in case.inputs())
    if case.plan.get("strategy") == "bp":  # clean rows stand on every rank: each copy gets its share of their gradient
        dout[plan.is_clean] /= size
    q, k, v = ((strided(x) if case.strided else x).requires_grad_() for x in (q, k, v))
    traffic()
    out = block_diffusion_attention(
        q,
        k,
        v,
        plan,
        transport=case.transport,
        kernel=case.kernel,
        diagonal_kernel=case.diagonal_kernel,
        softmax_scale=case.scale,
        window=case.window,
        queries=case.queries,
        grad_dtype=case.grad_dtype,
        ranks_per_node=case.ranks_per_node,
    )
    gradients = torch.autograd.grad(out, (q, k, v), strided(dout) if case.strided else dout)
    return Shard(plan.rows, out.detach().cpu(), tuple(x.cpu() for x in gradients), traffic())


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values inside a wider tensor, as slices of a fused projection are."""
    wide = torch.full((*x.shape[:3], 3 * x.shape[3]), 7.0, dtype=x.dtype)
    wide[..., x.shape[3] : 2 * x.shape[3]] = x
    return wide[..., x.shape[3] : 2 * x.shape[3]]


def run_cases_on_rank(cases: list[Case]) -> list[Shard]:
    """Body of a spawned rank: all cases, one after the other."""
    return [run_case(case, dist.get_world_size(), dist.get_rank()) for case in cases]


_references: dict[str, tuple[torch.Tensor, ...]] = {}  # a sample is sharded in many ways, its reference is one


def reference(case: Case) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the dense oracle over all global rows, float64."""
    sample = {name: value for name, value in case.plan.items() if name in ORACLE_ARGUMENTS}
    key = str((sample, case.window, case.queries, case.scale, case.heads, case.batch, case.dtype, case.seed))
    if key not in _references:
        _references[key] = compute_reference(case)
    return _references[key]


def compute_reference(case: Case) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = case.inputs()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    arguments = {name: case.plan[name] for name in ORACLE_ARGUMENTS if name in case.plan}
    out = dense_block_diffusion_attention(q, k, v, window=case.window, softmax_scale=case.scale, **arguments)
    if case.queries == "noisy":
        noisy = torch.arange(len(out)) < case.plan.get("views", 1) * case.plan["seq_length"]
        out = out * noisy[:, None, None, None]
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def assembled(shards: list[Shard], case: Case) -> tuple[torch.Tensor, ...]:
    """Global output and gradients, float64; copies of an output row are compared with each other."""
    q, k, v, dout = case.inputs()
    whole = [torch.zeros_like(x) for x in (dout, q, k, v)]
    for shard in shards:
        real = shard.rows >= 0
        known = whole[0][shard.rows[real]]
        torch.testing.assert_close(shard.out[real].double()[known != 0], known[known != 0], rtol=1e-12, atol=1e-14)
        whole[0][shard.rows[real]] = shard.out[real].double()
        for total, gradient in zip(whole[1:], shard.gradients):
            total.index_add_(0, shard.rows[real], gradient[real].double())
    return tuple(whole)


def errors(shards: list[Shard], case: Case) -> dict[str, float]:
    """Largest error of output and gradients, relative to the largest entry of the reference (of order one)."""
    names = ("out", "dq", "dk", "dv")
    return {
        name: ((ours - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()
        for name, ours, expected in zip(names, assembled(shards, case), reference(case))
    }


# ---- the grid -----------------------------------------------------------------------------------

SHAPES: tuple[dict[str, Any], ...] = (
    dict(plan=dict(seq_length=32, block_size=4)),
    dict(plan=dict(seq_length=24, block_size=1), heads=(4, 2, 8, 8)),
    dict(plan=dict(seq_length=31, block_size=3), batch=2),
    dict(plan=dict(seq_length=30, block_size=4, views=2), heads=(4, 1, 8, 5)),
    dict(plan=dict(seq_length=33, block_size=4, documents=[7, 0, 9, 1, 16]), strided=True),
    dict(plan=dict(seq_length=32, block_size=4, clean_attention="token-causal")),
    dict(
        plan=dict(seq_length=29, block_size=4, clean_attention="token-causal", documents=[13, 16], views=2),
        heads=(6, 3, 4, 6),
    ),
    dict(
        plan=dict(seq_length=32, block_size=4, noisy_attention="causal", clean_attention="token-causal"),
        heads=(4, 2, 8, 8),
    ),
    dict(plan=dict(seq_length=32, block_size=4), window=6),
    dict(
        plan=dict(seq_length=35, block_size=3, clean_attention="token-causal", documents=[20, 15]),
        window=5,
        heads=(4, 2, 8, 8),
    ),
    dict(plan=dict(seq_length=28, block_size=4, views=2), queries="noisy", scale=0.7),
    dict(
        plan=dict(seq_length=34, block_size=4, block_origin=[5, 3], documents=[19, 15], target_blocks=[2, 3, 5, 7, 8])
    ),
    dict(
        plan=dict(seq_length=36, block_size=4, block_restarts=[7, 22], row_multiple=4), batch=2, strided=True, scale=1.0
    ),
    dict(plan=dict(seq_length=160, block_size=32), heads=(2, 1, 8, 8)),
)
FEW_BLOCKS: tuple[dict[str, Any], ...] = (  # fewer blocks than ranks: only cp and hybrid serve them
    dict(plan=dict(seq_length=16, block_size=16), heads=(4, 2, 8, 8)),
    dict(plan=dict(seq_length=23, block_size=12, views=2)),
)


def strategies(size: int) -> list[dict[str, Any]]:
    """Strategy and K of every way to share a sample over `size` ranks."""
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    return [
        dict(strategy="csbp"),
        dict(strategy="cp"),
        dict(strategy="bp"),
        *(dict(strategy="hybrid", block_parallel_size=k) for k in divisors),
    ]


def transports(size: int) -> list[dict[str, Any]]:
    """Transport and ranks of a node, every kind."""
    return [
        dict(transport="direct"),
        dict(transport="ring"),
        dict(transport="allgather"),
        dict(transport="hierarchical", ranks_per_node=max(1, size // 2)),
        dict(transport="auto"),
        dict(transport="hierarchical", ranks_per_node=1),
        dict(transport="hierarchical", ranks_per_node=size),
    ]


def grid(size: int) -> list[Case]:
    """Every shape with every strategy, transports in turn; every strategy with every transport on the first shapes."""
    ways = transports(size)
    turn = random.Random(size)
    cases = []
    for number, shape in enumerate(SHAPES + FEW_BLOCKS):
        for strategy in strategies(size):
            if shape in FEW_BLOCKS and not (strategy["strategy"] == "cp" or strategy.get("block_parallel_size") == 1):
                continue
            chosen = ways if number in (0, 6) else turn.sample(ways, 1)
            for transport in chosen if size > 1 else ways[:1]:
                options = {**shape, **transport, "plan": {**shape["plan"], **strategy}, "seed": number}
                cases.append(Case(**options))
    return cases
