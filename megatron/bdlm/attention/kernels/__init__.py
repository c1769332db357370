"""Which kernel computes the dense tiles: a registry, and a choice that can be explained.

`auto` takes the first adapter of PREFERENCE that serves the case (device, data type, head sizes, installed packages).
"""

from dataclasses import dataclass

from megatron.bdlm.attention.kernels.base import AttentionKernel, KernelCase
from megatron.bdlm.attention.kernels.flash_attn import FlashAttention2Kernel, FlashAttention3Kernel
from megatron.bdlm.attention.kernels.flex import FlexKernel
from megatron.bdlm.attention.kernels.math import MathKernel
from megatron.bdlm.attention.kernels.torch_cpu import TorchCpuKernel
from megatron.bdlm.attention.kernels.torch_cuda import TorchCudnnKernel, TorchFlashKernel
from megatron.bdlm.attention.kernels.transformer_engine import TransformerEngineKernel

PREFERENCE: tuple[AttentionKernel, ...] = (
    TorchCpuKernel(),
    FlashAttention3Kernel(),
    TorchCudnnKernel(),
    FlashAttention2Kernel(),
    TorchFlashKernel(),
    TransformerEngineKernel(),
    FlexKernel(),
    MathKernel(),
)
NAMES = ("auto", *dict.fromkeys(kernel.name for kernel in PREFERENCE))


class KernelUnavailable(ValueError):
    """The kernel asked for cannot serve this device, data type or head size."""


@dataclass(frozen=True)
class Choice:
    """A kernel and why it was taken."""

    kernel: AttentionKernel
    reason: str


def choose(name: str, case: KernelCase) -> Choice:
    """Return the kernel that serves `case`: the first willing adapter of that name, or of all for `auto`.

    Raises:
        KernelUnavailable: unknown name, or no adapter of that name serves the case.
    """
    if name not in NAMES:
        raise KernelUnavailable(f"--bdlm-attention-kernel {name}: no such kernel; legal values: {', '.join(NAMES)}")
    refusals = []
    for kernel in PREFERENCE:
        if name not in ("auto", kernel.name):
            continue
        refusal = kernel.refusal(case)
        if refusal is None:
            why = kernel.note if name == "auto" else "asked for by --bdlm-attention-kernel"
            return Choice(kernel, why)
        refusals.append(f"{type(kernel).__name__}: {refusal}")
    willing = [kernel.name for kernel in PREFERENCE if kernel.refusal(case) is None]
    raise KernelUnavailable(
        f"--bdlm-attention-kernel {name}: cannot serve {case} ({'; '.join(refusals)}); "
        f"legal values here: {', '.join(dict.fromkeys(['auto', *willing]))}"
    )


def table(case: KernelCase) -> str:
    """What `auto` goes through for `case`, a line an adapter in its order; an arrow marks the one it takes."""
    refusals = [(kernel, kernel.refusal(case)) for kernel in PREFERENCE]
    taken = next((kernel for kernel, refusal in refusals if refusal is None), None)
    lines = [f"attention kernels for {case}"]
    for kernel, refusal in refusals:
        mark, what = "->" if kernel is taken else "  ", f"no: {refusal}" if refusal else f"yes: {kernel.note}"
        lines.append(f"{mark} {type(kernel).__name__:24} {kernel.name:18} {what}")
    return "\n".join(lines)


def describe(name: str, case: KernelCase) -> str:
    """One line for the log: what `name` picks for `case`, and why."""
    choice = choose(name, case)
    passed = []
    for kernel in PREFERENCE:
        if kernel is choice.kernel:
            break
        passed.append(f"{type(kernel).__name__} {kernel.refusal(case) or 'not asked for'}")
    line = f"attention kernel: {type(choice.kernel).__name__} for {case} ({choice.reason})"
    return line + (f"; passed over: {'; '.join(passed)}" if passed else "")
