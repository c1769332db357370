"""Plain matrix products: any device, data type and head size, in chunks of rows so that memory stays bounded.

The fallback where no fused kernel serves (float64 on a GPU), and the reference that the other adapters'
tests compare with. Formulas: Dao et al., FlashAttention (2022), appendix B.2:
p = exp(s - lse), dv = p^T dout, ds = p * (dout v^T - rowsum(dout * out)), dq = ds k, dk = ds^T q.
"""

import torch

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase

SCORES_AT_A_TIME = 1 << 24  # 64 MiB in float32


class MathKernel(AttentionKernel):
    name = "math"
    note = "plain matrix products: slow, serves everything"
    takes_mask = True

    def refusal(self, case: KernelCase) -> str | None:
        return None

    def forward(self, q, k, v, scale, causal, mask=None):
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=_accumulation_dtype(q), device=q.device)
        for rows in _chunks(q, k):
            scores = _scores(q, k, rows, scale, causal, mask)  # [n, h, rows, c]
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            p = torch.exp(scores - lse[:, :, rows, None])
            out[:, :, rows] = (p @ v.to(p.dtype)).to(out.dtype)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, scale, causal, mask=None):
        dtype = _accumulation_dtype(q)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for rows in _chunks(q, k):
            d = dout[:, :, rows].to(dtype)
            p = torch.exp(_scores(q, k, rows, scale, causal, mask) - lse[:, :, rows, None])
            delta = (d * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
            ds = p * (d @ v.to(dtype).transpose(-1, -2) - delta) * scale
            dv += p.transpose(-1, -2) @ d
            dk += ds.transpose(-1, -2) @ q[:, :, rows].to(dtype)
            dq[:, :, rows] = ds @ k.to(dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _accumulation_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _chunks(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    """Slices of the rows such that the scores of one slice stay below SCORES_AT_A_TIME."""
    rows = q.shape[2]
    step = max(1, SCORES_AT_A_TIME // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _scores(
    q: torch.Tensor, k: torch.Tensor, rows: slice, scale: float, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    """scale * q k^T of some rows, [n, h, rows, c], plus the mask; above the diagonal -inf when causal."""
    dtype = _accumulation_dtype(q)
    scores = (q[:, :, rows].to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
    if mask is not None:
        scores += mask[rows].to(dtype)
    if causal:
        row = torch.arange(rows.start, rows.stop, device=q.device)
        key = torch.arange(k.shape[2], device=q.device)
        scores.masked_fill_(key[None, :] > row[:, None], float("-inf"))
    return scores
