"""Block diffusion attention of one layer: one autograd function for every strategy and transport.

    s local rows, b samples, n query heads, nk key heads (n / nk = g), d and dv head sizes, h = b * nk

The plan's program says everything: which rectangles of (query, key) rows are visible among the local rows, and which
with the K/V rows of every peer. Forward posts the first transfer, computes the local rectangles, then each piece as
it arrives, and merges by log-sum-exp. Backward moves K/V again, computes every rectangle with the final output and
log-sum-exp, and a piece's dK/dV go home as soon as they are finished. Saved in between: local q, k, v, output and
log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.bdlm.attention.diagonal_tile import uses_triton
from megatron.bdlm.attention.kernels import choose
from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase
from megatron.bdlm.attention.pieces import heads_joined, piece_tiles
from megatron.bdlm.attention.tiles import (
    FinishedRows,
    Partial,
    accumulation_dtype,
    attend,
    attend_backward,
    fold,
    unfold,
)
from megatron.bdlm.attention.travelling_queries import TravellingQueriesAttention
from megatron.bdlm.parallel.anchor_plan import AnchorPlan
from megatron.bdlm.parallel.exchange import Exchange, Link, Wire
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.parallel.program import AttentionProgram
from megatron.bdlm.parallel.replicas import Replicas
from megatron.bdlm.parallel.transport_choice import open_exchange
from megatron.bdlm.platform.ranges import span, span_each, spanned


def block_diffusion_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SequencePlan,
    group: dist.ProcessGroup | None = None,
    transport: str = "direct",
    kernel: str = "auto",
    softmax_scale: float | None = None,
    window: int | None = None,
    *,
    queries: str = "all",
    grad_dtype: torch.dtype | None = None,
    ranks_per_node: int | None = None,
    diagonal_kernel: str = "auto",
) -> torch.Tensor:
    """Attention of this rank's rows under the block diffusion mask, differentiable in q, k and v.

    Args:
        q: [s, b, n, d]; k: [s, b, nk, d]; v: [s, b, nk, dv]: rows in the plan's local order, any strides.
        plan: of this rank; every rank of `group` calls with its own plan of the same layout.
        group: context-parallel process group; None: the default group (none is needed for one rank).
        transport: "auto", "direct", "hierarchical", "ring" or "allgather".
        kernel: "auto" or the name of a kernel adapter.
        softmax_scale: default d ** -0.5.
        window: sliding window on clean keys, in tokens; None for no limit.
        queries: "all", or "noisy": clean rows are not computed, their output is zero.
        grad_dtype: data type of dK/dV on the wire; default float32 (float64 for float64 inputs), in which they are
            summed.
        ranks_per_node: consecutive ranks on a node; default LOCAL_WORLD_SIZE.
        diagonal_kernel: what computes small rectangles: "auto", "triton" or "dense" (diagonal_tile.py).

    Returns:
        [s, b, n, dv]. A padding row sees only itself: its output is its own v (zero with queries "noisy").

    Raises:
        ValueError: shapes or data types that do not fit; ExchangeError, KernelUnavailable: what cannot serve.
    """
    _check_shapes(q, k, v, plan)
    sum_dtype, case = accumulation_dtype(q.dtype), KernelCase.of(q, v)
    call = AttentionCall(
        program=plan.program(window, queries),
        needed=lambda rank, source: plan.needed_rows(rank, source, window, queries),
        link=Link.of(group, plan.context_parallel_size, ranks_per_node),
        transport=transport,
        wire=Wire(sum_dtype, grad_dtype or sum_dtype),
        kernel=choose(kernel, case).kernel,
        diagonal=uses_triton(diagonal_kernel, case),
        scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        padding=plan.s_local - plan.used_rows if queries == "all" else 0,
    )
    return BlockDiffusionAttention.apply(q, k, v, call)


@dataclass(frozen=True)
class DraftLink:
    """How the ranks of an `AnchorPlan` meet: the group of one inner index, and that of one slot; None for one rank."""

    slots: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    transport: str = "direct"
    kernel: str = "auto"
    ranks_per_node: int | None = None
    movement: str = "auto"  # what moves between slots: keys, queries, or what is less


def draft_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AnchorPlan,
    link: DraftLink = DraftLink(),
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of a drafter's rows on the context before their anchors and on their own blocks, differentiable in q, k, v.

    Args:
        q: [r, 1, n, d] draft rows; k: [c + r, 1, nk, d], v: [c + r, 1, nk, dv]: local context rows, then the draft rows.
        plan: of this rank; every rank of the context-parallel group calls with its own plan of the same anchors.
        window, causal: of this layer (`AnchorPlan`).

    Returns:
        [r, 1, n, dv], equal on the replicas of a slot. Gradients of context keys count every replica's loss.

    Raises:
        ValueError: rows that are not the plan's; ExchangeError, KernelUnavailable: what cannot serve.
    """
    rows = plan.local_context.count + plan.draft_rows
    if len(q) != plan.draft_rows or len(k) != rows or len(v) != rows:
        raise ValueError(f"q {len(q)}, k {len(k)}, v {len(v)} rows: must be the plan's, {plan.draft_rows} and {rows} for keys and values")
    sum_dtype = accumulation_dtype(q.dtype)
    heads = q.shape[2], k.shape[2]
    queries_travel = link.movement == "queries" or (link.movement == "auto" and plan.queries_are_less(window, *heads))
    call = AttentionCall(
        program=plan.program(window, causal, queries_travel),
        needed=plan.needed(window),
        link=Link.of(link.slots, plan.block_parallel_size, link.ranks_per_node),
        transport=link.transport,
        wire=Wire(sum_dtype, sum_dtype),
        kernel=choose(link.kernel, KernelCase.of(q, v)).kernel,
        diagonal=False,
        scale=q.shape[3] ** -0.5,
        replicas=Replicas(link.replicas, plan.replicas),
    )
    return (TravellingQueriesAttention if queries_travel else BlockDiffusionAttention).apply(q, k, v, call)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Everything but the tensors."""

    program: AttentionProgram
    needed: Callable
    link: Link
    transport: str
    wire: Wire
    kernel: AttentionKernel
    diagonal: bool  # small rectangles go to the Triton kernels
    scale: float
    padding: int = 0  # last rows that see only themselves
    replicas: Replicas = Replicas(None, 1)

    def exchange(self, backward: bool) -> Exchange:
        return open_exchange(self.transport, self.program, self.link, self.needed, self.wire if backward else None)


class BlockDiffusionAttention(torch.autograd.Function):
    """See the module docstring."""

    @staticmethod
    @spanned("bdlm/attention")
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        batch, key_heads, head_size = q.shape[1], k.shape[2], q.shape[3]
        exchange = call.exchange(backward=False)
        with span("bdlm/exchange"):
            exchange.post(_shared_rows(k, v, call))

        q_folded = fold(q, key_heads)  # [s, g, h, d]
        keys, values = (_arranged(heads_joined(x), call.kernel) for x in (k, v))  # [s, h, d]
        seen = Partial.empty(q_folded, v.shape[3])
        attend(seen, q_folded, keys, values, piece_tiles(call.program.local, q_folded, call), call.kernel, call.scale)
        for arrival in span_each("bdlm/exchange", exchange.arrivals()):
            theirs = _arranged(arrival.rows, call.kernel).split((head_size, v.shape[3]), dim=-1)
            attend(seen, q_folded, *theirs, piece_tiles(arrival.piece, q_folded, call), call.kernel, call.scale)

        if call.program.own is not None:
            call.replicas.merge(seen.out, seen.lse)
            attend(seen, q_folded, keys, values, piece_tiles(call.program.own, q_folded, call), call.kernel, call.scale)
        if call.padding:
            seen.out[-call.padding :] = heads_joined(v)[-call.padding :, None]
        out = unfold(seen.out, batch).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, seen.lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    @spanned("bdlm/attention backward")
    def backward(ctx, dout: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        batch, key_heads, head_size = q.shape[1], k.shape[2], q.shape[3]
        exchange = call.exchange(backward=True)
        with span("bdlm/exchange"):
            exchange.post(_shared_rows(k, v, call))

        dout = dout.to(q.dtype)
        rows = FinishedRows(fold(dout, key_heads), fold(q, key_heads), fold(out, key_heads), lse)
        keys, values = heads_joined(k), heads_joined(v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=call.wire.sum_dtype, device=x.device) for x in (rows.q, keys, values))
        local = piece_tiles(call.program.local, rows.q, call)
        attend_backward(rows, keys, values, local, call.kernel, call.scale, (dq, dk, dv))
        for arrival in span_each("bdlm/exchange", exchange.arrivals()):
            keys, values = arrival.rows.split((head_size, v.shape[3]), dim=-1)
            d_keys, d_values = arrival.gradient.split((head_size, v.shape[3]), dim=-1)
            tiles = piece_tiles(arrival.piece, rows.q, call)
            attend_backward(rows, keys, values, tiles, call.kernel, call.scale, (dq, d_keys, d_values))

        if call.padding:
            dv[-call.padding :] += rows.dout[-call.padding :].sum(1, dtype=dv.dtype)
        with span("bdlm/exchange"):
            _add_returned(exchange.collect(), dk, dv, call)
        if call.program.own is not None:
            call.replicas.add_up(dq)
            for gradient in (dk, dv):  # each key met one replica's rows, and counts for the equal losses of all
                gradient.mul_(call.replicas.size)
            own = piece_tiles(call.program.own, rows.q, call)
            attend_backward(rows, heads_joined(k), heads_joined(v), own, call.kernel, call.scale, (dq, dk, dv))
        return unfold(dq, batch).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None


# ---- small steps --------------------------------------------------------------------------------


def _arranged(x: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
    """x [s, h, ..], in the order of heads in memory where the kernel's forward is faster so: one copy serves every tile."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if kernel.keys_by_head else x


def _shared_range(call: AttentionCall) -> slice:
    """This rank's shared rows; the plan makes them consecutive."""
    rows = call.program.shared[call.link.rank]
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)


def _shared_rows(k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """K and V of the rows that other ranks may need, packed side by side: [m, h, d + dv]."""
    rows = _shared_range(call)
    return torch.cat((k[rows], v[rows]), dim=-1).flatten(1, 2)


def _add_returned(returned: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, call: AttentionCall) -> None:
    """Add what peers computed for our shared rows, [m, h, d + dv], to dk and dv [s, h, ..]."""
    d_keys, d_values = returned.split((dk.shape[2], dv.shape[2]), dim=-1)
    rows = _shared_range(call)
    dk[rows] += d_keys
    dv[rows] += d_values


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SequencePlan) -> None:
    """Raises ValueError naming the tensor and what it must be."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[0] != plan.s_local:
            raise ValueError(
                f"{name} {tuple(x.shape)}: must be [s, b, heads, size] with the plan's s = {plan.s_local} local rows"
            )
        if x.shape[1] != q.shape[1]:
            raise ValueError(f"{name} {tuple(x.shape)}: must have as many samples as q, {q.shape[1]}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}: must be like q, {q.dtype} on {q.device}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k {tuple(k.shape)}: must have the head size of q, {q.shape[3]}")
    if k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k has {k.shape[2]} heads, v {v.shape[2]}: must be equal and divide the {q.shape[2]} heads of q"
        )
