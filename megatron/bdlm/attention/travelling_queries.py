"""Attention whose queries travel, not its keys: for few query rows against a long context.

    K ranks of the group     s query rows of a rank (equal on all)     c local keys     g, h, d as in `tiles`

Every rank gathers the queries of all K, lets them see its own keys, and sends each owner its partial result; the owner
merges by log-sum-exp. In backward the rows' gradients, outputs and log-sum-exps are gathered, and partial query
gradients go back. Keys and their gradients stay where they are. A row moves 6 d + 2 values a query head; with travelling
keys a context row moves 6 d a key head, so this pays where draft rows are far fewer than context rows.

What follows (replicas, own blocks) is that of `functional`, and gives the same result.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.bdlm.attention.pieces import heads_joined, piece_tiles
from megatron.bdlm.attention.tiles import FinishedRows, Partial, attend, attend_backward, fold, unfold
from megatron.bdlm.parallel.exchange import Link


class TravellingQueriesAttention(torch.autograd.Function):
    """See the module docstring; `call` is an `AttentionCall` whose `local` piece has the rows of all K ranks as queries."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call) -> torch.Tensor:
        batch, key_heads = q.shape[1], k.shape[2]
        q_folded = fold(q, key_heads).contiguous()  # [s, g, h, d]
        keys, values = (heads_joined(x) for x in (k, v))
        everyone = gather(q_folded, call.link, "forward")
        partial = Partial.empty(everyone, v.shape[3])
        attend(partial, everyone, keys, values, piece_tiles(call.program.local, everyone, call), call.kernel, call.scale)
        mine = exchange(torch.cat((partial.out, partial.lse.unsqueeze(-1)), -1), call.link, "forward")  # [K, s, g, h, dv + 1]
        seen = merged(mine[..., :-1], mine[..., -1])
        call.replicas.merge(seen.out, seen.lse)
        attend(seen, q_folded, keys, values, piece_tiles(call.program.own, q_folded, call), call.kernel, call.scale)
        out = unfold(seen.out, batch).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, seen.lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        call, key_heads = ctx.call, k.shape[2]
        rows = FinishedRows(*(fold(x.to(q.dtype), key_heads).contiguous() for x in (dout, q, out)), lse)
        keys, values = (heads_joined(x) for x in (k, v))
        everyone = FinishedRows(*(gather(x, call.link, "backward") for x in (rows.dout, rows.q, rows.out, rows.lse)))
        dq_all, dk, dv = (torch.zeros(x.shape, dtype=call.wire.sum_dtype, device=x.device) for x in (everyone.q, keys, values))
        local = piece_tiles(call.program.local, everyone.q, call)
        attend_backward(everyone, keys, values, local, call.kernel, call.scale, (dq_all, dk, dv))
        dq = exchange(dq_all, call.link, "backward").sum(0)
        call.replicas.add_up(dq)
        for gradient in (dk, dv):  # each key met one replica's rows, and counts for the equal losses of all
            gradient.mul_(call.replicas.size)
        own = piece_tiles(call.program.own, rows.q, call)
        attend_backward(rows, keys, values, own, call.kernel, call.scale, (dq, dk, dv))
        return unfold(dq, q.shape[1]).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None


def gather(x: torch.Tensor, link: Link, direction: str) -> torch.Tensor:
    """Rows [s, ..] of every rank of the group, in rank order: [K * s, ..]."""
    if link.size == 1:
        return x
    out = x.new_empty((link.size * len(x), *x.shape[1:]))
    for peer in range(link.size):
        if peer != link.rank:
            link.count("sent", direction, peer, x)
            link.count("received", direction, peer, x)
    dist.all_gather_into_tensor(out, x.contiguous(), group=link.group)
    return out


def exchange(x: torch.Tensor, link: Link, direction: str) -> torch.Tensor:
    """Send part i of [K * s, ..] to rank i; what every rank computed for our rows: [K, s, ..]."""
    parts = x.unflatten(0, (link.size, -1)).contiguous()
    if link.size == 1:
        return parts
    received = torch.empty_like(parts)
    others = [peer for peer in range(link.size) if peer != link.rank]
    link.transfer({peer: parts[peer] for peer in others}, {peer: received[peer] for peer in others}, direction, tag=3).wait()
    received[link.rank] = parts[link.rank]
    return received


def merged(out: torch.Tensor, lse: torch.Tensor) -> Partial:
    """Partial results [K, s, g, h, dv], [K, s, g, h] as one; rows that nobody saw stay at zero, -inf."""
    top = lse.amax(0)
    top = torch.where(torch.isfinite(top), top, 0)
    share = torch.exp(lse - top)
    total = share.sum(0)
    weighted = (out * share.unsqueeze(-1)).sum(0) / torch.where(total > 0, total, 1).unsqueeze(-1)
    return Partial(weighted, total.log() + top)
