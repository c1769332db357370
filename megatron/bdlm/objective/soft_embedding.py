"""The expected embedding of the predicted token, without its probabilities in memory.

    out_i = sum_v softmax_v( cap * tanh(hidden_i . E_v / cap) ) E_v

Streamed over rows x vocabulary: one buffer [chunk, columns] of logits at a time, with the running maximum, sum of
exponentials and weighted sum of rows of E of the chunk. Over a tensor-parallel group the three are combined at the end of
each chunk: the maximum first, then sum and vector in one reduction. No gradient.

Shapes: n rows, c rows of a chunk, h hidden size, v rows of the weight on this rank (ids rank*v .. (rank+1)*v - 1).
"""

from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.bdlm.objective.linear_cross_entropy import softcapped


@torch.no_grad()
def soft_embedding(
    hidden: Tensor,
    weight: Tensor,
    *,
    softcap: Optional[float] = None,
    vocab_size: Optional[int] = None,
    tp_group: Optional[dist.ProcessGroup] = None,
    chunk: int = 1024,
    columns: int = 16384,
) -> Tensor:
    """Expected embedding of each row, [n, h] in float32 (float64 for float64 inputs).

    Args:
        hidden: [n, h]; the same on every rank of `tp_group`.
        weight: [v, h], this rank's slice of the tied embedding.
        softcap: cap of the logits; None: none.
        vocab_size: tokens of the vocabulary; rows of the weight from there on are padding, without probability.
        tp_group: ranks that hold the other slices of the weight.
        chunk, columns: rows and vocabulary rows whose logits exist at a time.
    """
    shared = tp_group is not None and dist.get_world_size(tp_group) > 1
    first = weight.shape[0] * dist.get_rank(tp_group) if shared else 0
    valid = weight.shape[0] if vocab_size is None else max(0, min(weight.shape[0], vocab_size - first))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    out = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        top, total, mean = _stream(hidden[rows], weight[:valid], softcap, columns, dtype)
        if shared:
            whole = top.clone()
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=tp_group)
            sums = torch.cat((total[:, None], mean), dim=1) * torch.exp(top - whole)[:, None]
            dist.all_reduce(sums, group=tp_group)
            total, mean = sums[:, 0], sums[:, 1:]
        out[rows] = mean / total[:, None]
    return out


def _stream(hidden: Tensor, weight: Tensor, softcap: Optional[float], columns: int, dtype: torch.dtype):
    """Of one chunk [c, h]: maximum [c], sum of exponentials below it [c], weighted sum of rows [c, h]."""
    top = torch.full(hidden.shape[:1], -torch.inf, dtype=dtype, device=hidden.device)
    total, mean = torch.zeros_like(top), torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for start in range(0, weight.shape[0], columns):
        part = weight[start : start + columns]
        logits = softcapped(torch.mm(hidden, part.t()).to(dtype), softcap)
        higher = torch.maximum(top, logits.amax(1))
        shrink = torch.exp(top - higher)
        shares = logits.sub_(higher[:, None]).exp_()
        total = total * shrink + shares.sum(1)
        mean = mean * shrink[:, None] + torch.mm(shares.to(part.dtype), part).to(dtype)
        top = higher
    return top, total, mean
