"""FlashAttention 2 (package `flash_attn`, 2.7 or later) and 3 (package `flash_attn_interface`, Hopper).

Both take `[n, rows, heads, d]` tensors of any stride with a contiguous last dimension, so the transposed views
below copy nothing, and a log-sum-exp `[n, heads, rows]`. Signatures: `flash_attn/flash_attn_interface.py` and
`hopper/flash_attn_interface.py` of github.com/Dao-AILab/flash-attention. Version 3's changed on the way: its parameters
had no defaults at first, and backward's `causal` became `is_causal`.
"""

import importlib
import inspect
from functools import cache
from types import ModuleType

import torch

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase, own_batch, pad_head
from megatron.bdlm.attention.kernels.torch_cuda import refuse_unless_half_on_gpu

VERSION_2 = "flash_attn.flash_attn_interface"
VERSION_3 = "flash_attn_interface"


@cache
def load(module: str) -> ModuleType | str:
    """The library's module, or why it does not import."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a binary built for another CUDA or torch
        return f"{module} does not import ({error})"


class FlashAttention2Kernel(AttentionKernel):
    name = "flash_attn"
    note = "FlashAttention 2"

    def refusal(self, case: KernelCase) -> str | None:
        library = load(VERSION_2)
        if isinstance(library, str):
            return library
        if case.head_size % 8 or case.value_head_size % 8:
            return "serves head sizes that are multiples of 8"
        return refuse_unless_half_on_gpu(case, 256)

    def forward(self, q, k, v, scale, causal, mask=None):
        size, dv = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = (rows_first(pad_head(x, size)) for x in (q, k, v))
        out, lse, _, _ = load(VERSION_2)._flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
        return out.transpose(1, 2)[..., :dv], lse

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        size, d, dv = max(q.shape[-1], v.shape[-1]), q.shape[-1], v.shape[-1]
        dout, q, k, v, out = (rows_first(pad_head(x, size)) for x in (dout, q, k, v, out))
        dq, dk, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        load(VERSION_2)._flash_attn_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dvalue, 0.0, scale, causal, -1, -1, 0.0, None, False
        )
        return dq.transpose(1, 2)[..., :d], dk.transpose(1, 2)[..., :d], dvalue.transpose(1, 2)[..., :dv]


class FlashAttention3Kernel(AttentionKernel):
    name = "flash_attn"
    note = "FlashAttention 3, made for compute capability 9.0"

    def refusal(self, case: KernelCase) -> str | None:
        library = load(VERSION_3)
        if isinstance(library, str):
            return library
        if case.capability is not None and case.capability[0] != 9:
            return f"needs compute capability 9.x, this GPU has {case.capability[0]}.{case.capability[1]}"
        if case.head_size != case.value_head_size or case.head_size % 8:
            return "serves one head size for q, k and v, a multiple of 8"
        return refuse_unless_half_on_gpu(case, 256)

    def forward(self, q, k, v, scale, causal, mask=None):
        q, k, v = (rows_first(x) for x in (q, k, v))
        out, lse, *_ = _call(load(VERSION_3)._flash_attn_forward, q=q, k=k, v=v, softmax_scale=scale, causal=causal)
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        dout, q, k, v, out = (rows_first(x) for x in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _call(
            load(VERSION_3)._flash_attn_backward,
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse.contiguous(), dq=dq, dk=dk, dv=dv, softmax_scale=scale,
            causal=causal,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _call(function, **arguments):
    """Call version 3's function under the names that the installed version has; what it wants beside that is None."""
    # a custom operator keeps its Python function in `_init_fn`
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    if "is_causal" in parameters:
        arguments["is_causal"] = arguments.pop("causal")
    wanted = {name: None for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return function(**{**wanted, **arguments})


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """[n, h, r, d] -> [n, r, h, d], a view."""
    return own_batch(x).transpose(1, 2)
