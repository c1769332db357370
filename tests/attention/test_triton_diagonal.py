"""The Triton kernels in interpreter mode against the dense oracle, forward and backward, through the whole attention.

The interpreter is slow, and a process in which Triton was imported without it cannot switch: the cases run in
processes of their own.
"""

import pytest
import torch

from megatron.bdlm.attention.diagonal_tile import uses_triton
from megatron.bdlm.attention.kernels import KernelUnavailable
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.testing.distributed import run_distributed
from tests.attention.attention_cases import SHAPES, Case, errors, run_case, run_cases_on_rank

pytest.importorskip("triton")
INTERPRETED = {"TRITON_INTERPRET": "1"}


def cases() -> list[Case]:
    """Every shape of the grid, and sizes that the kernels pad or cut."""
    shapes = [dict(shape, plan={**shape["plan"], "strategy": "csbp"}) for shape in SHAPES]
    shapes += [
        dict(plan=dict(seq_length=80, block_size=64), heads=(3, 1, 24, 40)),
        dict(plan=dict(seq_length=150, block_size=1), heads=(2, 2, 16, 16)),
        dict(plan=dict(seq_length=140, block_size=16, views=2), heads=(2, 1, 64, 64)),
    ]
    return [Case(**shape, seed=number, dtype=torch.float32, diagonal_kernel="triton") for number, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("size", "every"), [(1, 4), (2, 7), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_equals_the_oracle(size, every):
    chosen = cases()[::every]
    shards = run_distributed(run_cases_on_rank, size, chosen, environment=INTERPRETED)
    for case, *of_case in zip(chosen, *shards):
        for name, error in errors(of_case, case).items():
            assert error < 1e-5, (str(case), name, error)


GPU = KernelCase("cuda", torch.bfloat16, 128, 128, (9, 0))


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        ("auto", GPU, True),
        ("dense", GPU, False),
        ("triton", GPU, True),
        ("auto", KernelCase("cuda", torch.float32, 128, 128, (9, 0)), False),
        ("triton", KernelCase("cuda", torch.float32, 128, 128, (9, 0)), True),
        ("auto", KernelCase("cuda", torch.bfloat16, 512, 512, (9, 0)), False),
        ("auto", KernelCase("cpu", torch.float32, 64, 64), False),
    ],
)
def test_who_computes_small_rectangles(name, case, expected):
    assert uses_triton(name, case) == expected


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        ("none", GPU, "--bdlm-diagonal-kernel none: no such kernel; legal values: auto, triton, dense"),
        ("triton", KernelCase("cpu", torch.float32, 64, 64), "--bdlm-diagonal-kernel triton: serves GPUs, not cpu .* legal values here: auto, dense"),
        ("triton", KernelCase("cuda", torch.float16, 64, 64, (7, 5)), "triton: needs compute capability 8.0, this GPU has 7.5"),
        ("triton", KernelCase("cuda", torch.float64, 64, 64, (9, 0)), "triton: serves float16, bfloat16 and float32, not float64"),
        ("triton", KernelCase("cuda", torch.float16, 64, 264, (9, 0)), "triton: serves head sizes up to 256, not 264"),
    ],
)
def test_refusals(name, case, message):
    with pytest.raises(KernelUnavailable, match=message):
        uses_triton(name, case)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_gpus_that_are_not_here_without_spilling(capability):
    """The default tile of head size 128; tools/compile_kernels.py prints every one."""
    from megatron.bdlm.attention.kernels import triton_diagonal
    from tools.compile_kernels import compile_kernel

    for name, kernel in triton_diagonal.KERNELS.items():
        cost = compile_kernel(kernel, "bf16", 128, 4, capability)
        assert cost.stack == 0 and 0 < cost.registers <= 255 and 0 < cost.shared < 160_000, (name, cost)


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_dense_tiles_of_the_oracle():
    """bfloat16: products are rounded to 8 bits, so a sum of n terms of order one is off by about 2^-8 of its largest."""
    for shape in SHAPES:
        case = Case(**dict(shape, heads=(4, 2, 64, 64), plan={**shape["plan"], "strategy": "csbp"}), dtype=torch.bfloat16, diagonal_kernel="triton", device="cuda")
        for name, error in errors([run_case(case, 1, 0)], case).items():
            assert error < 4 * 2**-8, (str(case), name, error)
