"""What every attention kernel adapter offers: dense attention with its log-sum-exp, forward and backward.

    n batch of equal rectangles    h heads of keys (query heads fold into rows)
    r rows (queries)               c keys                d, dv head sizes of q/k and of v

A kernel sees only dense `[n, h, r, d]` x `[n, h, c, d]` batches, or causal squares (r == c, row i sees keys 0..i),
never an empty batch, and takes any strides as long as the last dimension is contiguous. A kernel with `takes_mask` is
also given small tiles under one additive mask `[r, c]`. Backward takes the *final* out and lse of a row, which cover
keys of other rectangles too: p = exp(scale * q.k - lse) is then this rectangle's share of the row's probabilities, so
the shares of all rectangles add up to the exact gradient.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.functional import pad


@dataclass(frozen=True)
class KernelCase:
    """What a kernel is asked to serve."""

    device: str  # "cpu" | "cuda"
    dtype: torch.dtype
    head_size: int  # of q and k
    value_head_size: int
    capability: tuple[int, int] | None = None  # CUDA compute capability

    @staticmethod
    def of(q: torch.Tensor, v: torch.Tensor) -> "KernelCase":
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        return KernelCase(q.device.type, q.dtype, q.shape[-1], v.shape[-1], capability)

    def __str__(self) -> str:
        heads = f"head size {self.head_size}"
        if self.value_head_size != self.head_size:
            heads += f" (v {self.value_head_size})"
        device = self.device
        if self.capability is not None:
            device += f" {self.capability[0]}.{self.capability[1]}"
        return f"{device}, {str(self.dtype).removeprefix('torch.')}, {heads}"


class AttentionKernel(ABC):
    """Adapter of one library's dense attention."""

    name: str
    note: str  # why `auto` takes it where it can, in a few words
    takes_mask: bool = False
    keys_by_head: bool = False  # forward reads keys and values faster where the rows of a head are contiguous

    @abstractmethod
    def refusal(self, case: KernelCase) -> str | None:
        """Why this kernel cannot serve the case (package missing, data type, head size); None when it can."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: bool,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [n, h, r, dv] in q's type and the natural log-sum-exp [n, h, r] (float32, or float64)."""

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        causal: bool,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk, dv of this rectangle; `out` and `lse` are the row's final ones."""


def own_batch(x: torch.Tensor) -> torch.Tensor:
    """A batch that repeats one element (stride 0) as a real one: GPU kernels address a batch by its stride."""
    return x.contiguous() if x.shape[0] > 1 and x.stride(0) == 0 else x


def pad_head(x: torch.Tensor, size: int) -> torch.Tensor:
    """Append zeros to the last dimension up to `size`: zero columns change no product and no gradient of the others."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))
