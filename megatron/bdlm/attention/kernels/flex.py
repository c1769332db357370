"""FlexAttention, compiled: serves data types and head sizes that the fused GPU kernels refuse (float32, odd sizes).

Its backward wants the log-sum-exp of its own forward, not the final one of the row. So backward runs forward again and
passes the gradients of this rectangle's own out_i and lse_i. With w = exp(lse_i - lse), and out = sum_i w_i out_i:

    d out_i = w * dout        d lse_i = w * (dout . (out_i - out))

which gives the same dq, dk, dv as the formula with the final values.
"""

from functools import cache

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase


class FlexKernel(AttentionKernel):
    name = "flex"
    note = "compiled FlexAttention: any floating-point type"

    def refusal(self, case: KernelCase) -> str | None:
        if case.dtype == torch.float64:
            return "has no float64 version"
        if case.device == "cpu":
            return "has no backward on a CPU"
        return None

    def forward(self, q, k, v, scale, causal, mask=None):
        return _compiled()(q, k, v, block_mask=_mask(q, k, causal), scale=scale, return_lse=True)

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            own_out, own_lse = self.forward(*inputs, scale, causal)
        weight = torch.exp(own_lse.detach() - lse).unsqueeze(-1)  # [n, h, r, 1]
        difference = own_out.detach().float() - out.float()
        d_lse = (weight * dout.float() * difference).sum(-1)
        return torch.autograd.grad(
            (own_out, own_lse), inputs, ((weight * dout).to(own_out.dtype), d_lse.to(own_lse.dtype))
        )


@cache
def _compiled():
    return torch.compile(flex_attention)


def _mask(q: torch.Tensor, k: torch.Tensor, causal: bool):
    if not causal:
        return None
    return create_block_mask(_sees_earlier, None, None, q.shape[2], k.shape[2], device=q.device)


def _sees_earlier(batch, head, row, key):
    return key <= row
