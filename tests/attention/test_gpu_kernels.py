"""Every adapter that a GPU can run against float64 on the CPU; and the bounds themselves, on the CPU's 16-bit kernels.

    bash tests/run.sh -m gpu tests/attention/test_gpu_kernels.py
"""

import pytest
import torch

from megatron.bdlm.attention import kernels
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.attention.kernels.math import MathKernel
from megatron.bdlm.attention.kernels.torch_cpu import TorchCpuKernel
from tests.attention.rounding import assert_within, exact_and_bounds
from tests.attention.test_kernels import combined

SHAPES = {  # n, h, rows, keys, d, dv
    "one head size": (2, 3, 96, 160, 64, 64),
    "128": (1, 2, 256, 256, 128, 128),
    "256": (1, 2, 130, 70, 256, 256),
    "short and ragged": (5, 2, 33, 7, 128, 128),
    "another size for v": (2, 2, 64, 64, 128, 64),
}


def drawn(name, causal, dtype, device="cpu"):
    """q, k, v, dout as the tile math passes them: [n, h, rows, d] views of [n, rows, h, d] memory."""
    n, h, rows, keys, d, dv = SHAPES[name]
    keys = rows if causal else keys
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(n, length, h, size, generator=generator).to(device, dtype).transpose(1, 2)
        for length, size in ((rows, d), (keys, d), (keys, dv), (rows, dv))
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bounds_hold_for_the_cpu_kernel_and_notice_a_wrong_scale(dtype, name, causal):
    given = drawn(name, causal, dtype)
    exact, bounds = exact_and_bounds(*given, 0.1, causal, dtype)
    assert_within(combined(TorchCpuKernel(), *given, 0.1, causal), exact, bounds)
    if dtype == torch.bfloat16:  # what the bounds are for: a tenth more in the scores does not pass
        with pytest.raises(AssertionError, match="times the bound"):
            assert_within(combined(MathKernel(), *given, 0.11, causal), exact, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", kernels.PREFERENCE[1:], ids=lambda kernel: type(kernel).__name__)
def test_a_gpu_kernel_is_within_the_rounding_of_its_type(kernel, dtype, name, causal):
    given = drawn(name, causal, dtype, "cuda")
    refusal = kernel.refusal(KernelCase.of(given[0], given[2]))
    if refusal is not None:
        pytest.skip(f"{type(kernel).__name__} {refusal}")
    exact, bounds = exact_and_bounds(*given, 0.1, causal, dtype)
    assert_within(combined(kernel, *given, 0.1, causal), exact, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", kernels.PREFERENCE[1:], ids=lambda kernel: type(kernel).__name__)
def test_keys_that_a_batch_repeats(kernel):
    """A batch whose keys have stride 0: several streams see the same clean keys."""
    q, k, v, dout = drawn("one head size", False, torch.bfloat16, "cuda")
    refusal = kernel.refusal(KernelCase.of(q, v))
    if refusal is not None:
        pytest.skip(f"{type(kernel).__name__} {refusal}")
    k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    exact, bounds = exact_and_bounds(q, k, v, dout, 0.1, False, torch.bfloat16)
    assert_within(combined(kernel, q, k, v, dout, 0.1, False), exact, bounds)
