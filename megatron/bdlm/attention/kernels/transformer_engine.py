"""Transformer Engine's fused attention (cuDNN), through `fused_attn_fwd` and `fused_attn_bwd`.

The softmax statistics `[n, heads, rows, 1]` it returns are the log-sum-exp; backward takes the merged ones in
`aux_ctx_tensors`. Arguments go by keyword only, because their order changes between minor versions; formats of the
output and of the gradients became arguments of their own on the way, so they are passed where the installed
function has them. Source: `transformer_engine/pytorch/cpp_extensions/fused_attn.py`.
"""

import importlib
import inspect
from functools import cache
from types import ModuleType
from typing import Any

import torch

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase
from megatron.bdlm.attention.kernels.torch_cuda import refuse_unless_half_on_gpu

MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
LAYOUT = "bshd_bshd_bshd"  # read as dense: strided inputs are made contiguous first
FORMATS = {"o_format": "bshd", "do_format": "bshd", "dqkv_layout": LAYOUT}  # later versions only


@cache
def load() -> ModuleType | str:
    """The library's module, or why it does not import."""
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its Python is there, its library is not
        return f"transformer_engine does not import ({error})"


class TransformerEngineKernel(AttentionKernel):
    name = "transformer_engine"
    note = "Transformer Engine's fused attention (cuDNN)"

    def refusal(self, case: KernelCase) -> str | None:
        library = load()
        if isinstance(library, str):
            return library
        if case.head_size % 8 or case.value_head_size % 8:
            return "serves head sizes that are multiples of 8"
        return refuse_unless_half_on_gpu(case, 128)

    def forward(self, q, k, v, scale, causal, mask=None):
        library = load()
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [n, r, h, d]
        arguments = common_arguments(library, q, k, v, scale, causal)
        out, statistics, *_ = library.fused_attn_fwd(**accepted(library.fused_attn_fwd, is_training=True, **arguments))
        return out.transpose(1, 2), statistics[0].squeeze(-1)

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        library = load()
        dout, q, k, v, out = (x.transpose(1, 2).contiguous() for x in (dout, q, k, v, out))
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # read only with dropout
        gradients = library.fused_attn_bwd(
            **accepted(
                library.fused_attn_bwd,
                o=out,
                d_o=dout,
                aux_ctx_tensors=[lse.contiguous().unsqueeze(-1), seed],
                **common_arguments(library, q, k, v, scale, causal),
            )
        )
        return tuple(x.transpose(1, 2) for x in gradients[:3])


def common_arguments(
    library: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> dict:
    """Keyword arguments that forward and backward share; q, k, v are [n, rows, heads, d]."""
    return dict(
        max_seqlen_q=q.shape[1],
        max_seqlen_kv=k.shape[1],
        cu_seqlens_q=_offsets(q),
        cu_seqlens_kv=_offsets(k),
        q=q,
        k=k,
        v=v,
        fake_dtype=q.dtype,
        fused_attention_backend=library.FusedAttnBackend["F16_arbitrary_seqlen"],
        attn_scale=scale,
        dropout=0.0,
        qkv_layout=LAYOUT,
        attn_bias_type="no_bias",
        attn_mask_type="causal" if causal else "no_mask",
        **FORMATS,
    )


def accepted(function: Any, **arguments: Any) -> dict:
    """Drop the format arguments that this version of the function does not have yet."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known or name not in FORMATS}


def _offsets(x: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths of n equal sequences, int32 [n + 1]."""
    n, rows = x.shape[:2]
    return torch.arange(0, (n + 1) * rows, rows, dtype=torch.int32, device=x.device)
