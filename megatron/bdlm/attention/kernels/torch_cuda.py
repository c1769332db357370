"""torch on a GPU, without any extra package: its FlashAttention and cuDNN operators.

Both give and take the log-sum-exp. cuDNN's is the kernel behind Transformer Engine's fused attention; its
statistics carry a trailing dimension of one. The flash operator wants one head size, a multiple of 8, for q, k and v.
Signatures: `torch.ops.aten.<name>.default._schema` (held by tests/attention/test_kernels.py).
"""

import torch

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase, own_batch, pad_head

_HALF = (torch.float16, torch.bfloat16)


def refuse_unless_half_on_gpu(case: KernelCase, largest_head: int) -> str | None:
    """The limits that all fused GPU kernels share."""
    if case.device != "cuda":
        return f"serves GPUs, not {case.device}"
    if case.dtype not in _HALF:
        return f"serves float16 and bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    size = max(case.head_size, case.value_head_size)
    if size > largest_head:
        return f"serves head sizes up to {largest_head}, not {size}"
    return None


class TorchFlashKernel(AttentionKernel):
    """`aten::_scaled_dot_product_flash_attention` and its backward."""

    name = "torch"
    note = "torch's FlashAttention operator: no extra package"

    def refusal(self, case: KernelCase) -> str | None:
        if case.capability is not None and case.capability < (8, 0):
            return f"needs compute capability 8.0, this GPU has {case.capability[0]}.{case.capability[1]}"
        return refuse_unless_half_on_gpu(case, 256)

    def forward(self, q, k, v, scale, causal, mask=None):
        size, dv = _head_multiple_of_8(q, v), v.shape[-1]
        q, k, v = (own_batch(pad_head(x, size)) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out[..., :dv], lse

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        size, d, dv = _head_multiple_of_8(q, v), q.shape[-1], v.shape[-1]
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only with dropout
        dout, q, k, v, out = (own_batch(pad_head(x, size)) for x in (dout, q, k, v, out))
        statistics = lse.contiguous()  # the operator reads it without strides
        dq, dk, dvalue = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            dout, q, k, v, out, statistics, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
        )
        return dq[..., :d], dk[..., :d], dvalue[..., :dv]


class TorchCudnnKernel(AttentionKernel):
    """`aten::_scaled_dot_product_cudnn_attention` and its backward."""

    name = "torch"
    note = "torch's cuDNN operator: the fastest one on compute capability 9.0 and later"

    def refusal(self, case: KernelCase) -> str | None:
        if case.capability is not None and case.capability < (9, 0):
            return f"preferred from compute capability 9.0, this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.head_size % 8 or case.value_head_size % 8:
            return "serves head sizes that are multiples of 8"
        return refuse_unless_half_on_gpu(case, 128)

    def forward(self, q, k, v, scale, causal, mask=None):
        q, k, v = (own_batch(x) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        dout, q, k, v, out = (own_batch(x) for x in (dout, q, k, v, out))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only with dropout
        statistics = lse.contiguous().unsqueeze(-1)  # [n, h, r, 1]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            dout, q, k, v, out, statistics, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip


def _head_multiple_of_8(q: torch.Tensor, v: torch.Tensor) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
