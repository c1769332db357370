"""The small rectangles of a piece as one tile, computed by Triton kernels; and when that is done.

It stands among the other tiles of a piece (`tiles.Tile`) and does what they do: forward merges into what the rows have
seen, backward adds to the gradients.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.bdlm.attention import diagonal
from megatron.bdlm.attention.kernels import KernelUnavailable
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.parallel.batches import RectangleBatch
from megatron.bdlm.parallel.device import to_device

NAMES = ("auto", "triton", "dense")
LARGEST_HEAD = 256


def refusal(case: KernelCase) -> str | None:
    """Why the Triton kernels cannot serve the case; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if case.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"serves GPUs, not {case.device} (but for TRITON_INTERPRET=1, which is slow)"
    if case.capability is not None and case.capability < (8, 0):
        return f"needs compute capability 8.0, this GPU has {case.capability[0]}.{case.capability[1]}"
    if case.device != "cuda" and case.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"  # 3.7.1: tl.dot takes its bits for integers
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"serves float16, bfloat16 and float32, not {str(case.dtype).removeprefix('torch.')}"
    size = max(case.head_size, case.value_head_size)
    return f"serves head sizes up to {LARGEST_HEAD}, not {size}" if size > LARGEST_HEAD else None


def uses_triton(name: str, case: KernelCase) -> bool:
    """Whether small rectangles go to the Triton kernels: `auto` says yes on a GPU that they serve, in 16 bits.

    (In float32 they use no tensor cores and spill registers.)

    Raises:
        KernelUnavailable: unknown name, or `triton` where it cannot serve.
    """
    if name not in NAMES:
        raise KernelUnavailable(f"--bdlm-diagonal-kernel {name}: no such kernel; legal values: {', '.join(NAMES)}")
    reason = refusal(case) if name != "dense" else None
    if name == "triton" and reason:
        raise KernelUnavailable(f"--bdlm-diagonal-kernel triton: {reason}; legal values here: auto, dense")
    return name == "triton" or (name == "auto" and case.device == "cuda" and case.dtype != torch.float32 and reason is None)


@dataclass(frozen=True, eq=False)
class DiagonalTile:
    """All small rectangles of a piece."""

    tables: object  # triton_diagonal.DeviceTables

    @staticmethod
    def split(
        batches: Sequence[RectangleBatch], g: int, head_size: int, device: torch.device
    ) -> tuple["tuple[DiagonalTile, ...]", tuple[RectangleBatch, ...]]:
        """(one tile, or none where nothing is small; the batches for a dense kernel)."""
        from megatron.bdlm.attention.kernels import triton_diagonal as kernels

        intervals, rest = diagonal.split(batches)
        sizes = kernels.tile_sizes(head_size, g)
        table = diagonal.tiled(intervals, max(1, sizes.rows // g), sizes.keys)
        if not len(table.tiles):
            return (), rest
        arrays = (table.intervals, table.tiles, table.key_tiles, table.seen_by)
        on_device = (to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in arrays)
        return (DiagonalTile(kernels.DeviceTables(*on_device, sizes, g)),), rest

    def attend(self, seen, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """As `tiles.attend`, of this tile."""
        from megatron.bdlm.attention.kernels import triton_diagonal as kernels

        kernels.forward(self.tables, q, k, v, scale, seen.out, seen.lse)

    def attend_backward(self, rows, k: torch.Tensor, v: torch.Tensor, scale: float, gradients: tuple) -> None:
        """As `tiles.attend_backward`, of this tile."""
        from megatron.bdlm.attention.kernels import triton_diagonal as kernels

        delta = (rows.dout.float() * rows.out).sum(-1)  # [s, g, h]
        kernels.backward(self.tables, (rows.q, k, v, rows.dout), scale, rows.lse.contiguous(), delta, gradients)
