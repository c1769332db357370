"""Ranks that hold the same query rows and see different keys: their partial results become one.

    s query rows     g, h as in `attention.tiles`     I replicas

Forward, two all-reduces: with the partial outputs o_i and log-sum-exps l_i, l = log sum_i exp(l_i) and
o = sum_i exp(l_i - l) o_i (Dao et al., FlashAttention, 2022). Backward, one: the gradient of a query is the sum of what
the replicas computed for it. Every replica goes on with equal values, so a loss is that of one of them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.bdlm.parallel.exchange import count_all_reduce


@dataclass(frozen=True)
class Replicas:
    """The replicas of this rank; size 1 needs no process group."""

    group: dist.ProcessGroup | None
    size: int

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge partial results out [s, g, h, dv] and lse [s, g, h], in place; a row that nobody saw stays at zero, -inf."""
        if self.size == 1:
            return
        top = lse.clone()
        self._all_reduce(top, dist.ReduceOp.MAX, "forward")
        top = torch.where(torch.isfinite(top), top, 0)
        share = torch.exp(lse - top)
        sums = torch.cat((out * share.unsqueeze(-1), share.unsqueeze(-1)), dim=-1)
        self._all_reduce(sums, dist.ReduceOp.SUM, "forward")
        total = sums[..., -1]
        out.copy_(sums[..., :-1] / torch.where(total > 0, total, 1).unsqueeze(-1))
        lse.copy_(total.log() + top)

    def add_up(self, gradient: torch.Tensor) -> None:
        """Sum of every replica's part, in place."""
        if self.size > 1:
            self._all_reduce(gradient, dist.ReduceOp.SUM, "backward")

    def _all_reduce(self, x: torch.Tensor, op: dist.ReduceOp, direction: str) -> None:
        count_all_reduce(direction, x, self.size)
        dist.all_reduce(x, op=op, group=self.group)
