"""torch on a CPU: `aten::_scaled_dot_product_flash_attention_for_cpu`, which gives and takes the log-sum-exp.

The operator reads any strides and writes out, lse and the gradients in `[n, rows, heads, d]` memory order,
the order our tensors have, so nothing is copied around it. It wants one head size for q, k and v: the
smaller of the two is padded with zeros.
"""

import torch

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase, pad_head

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TorchCpuKernel(AttentionKernel):
    name = "torch"
    note = "torch's fused operator, the fastest one on a CPU"
    takes_mask = True
    keys_by_head = True  # forward only, 2 to 3% with the copy: it reads a head's keys again and again

    def refusal(self, case: KernelCase) -> str | None:
        if case.device != "cpu":
            return f"serves the CPU, not {case.device}"
        if case.dtype not in _DTYPES:
            return f"has no {case.dtype} version"
        return None

    def forward(self, q, k, v, scale, causal, mask=None):
        size = max(q.shape[-1], v.shape[-1])
        dv = v.shape[-1]
        q, k, v = (pad_head(x, size) for x in (q, k, v))
        out, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=_shaped(mask, q), scale=scale)
        return out[..., :dv], lse

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        d, dv = q.shape[-1], v.shape[-1]
        size = max(d, dv)
        dout, q, k, v, out = (pad_head(x, size) for x in (dout, q, k, v, out))
        dq, dk, dvalue = _BACKWARD(dout, q, k, v, out, lse, 0.0, causal, attn_mask=_shaped(mask, q), scale=scale)
        return dq[..., :d], dk[..., :d], dvalue[..., :dv]


def _shaped(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """[r, c] in q's type, to be broadcast over the batch and the heads."""
    return None if mask is None else mask.to(q.dtype)[None, None]
