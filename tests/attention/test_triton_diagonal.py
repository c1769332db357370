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
    ("size", "every"), [(1, 4), (2, 7), pytest.param(1, 1, marks=pytest.mark.long), pytest.param(2, 3, marks=pytest.mark.long)]
)
def test_equals_the_oracle(size, every):
    chosen = cases()[::every]
    shards = run_distributed(run_cases_on_rank, size, chosen, environment=INTERPRETED)
    for case, *of_case in zip(chosen, *shards):
        for name, error in errors(of_case, case).items():
            assert error < 1e-5, (str(case), name, error)


def in_16_bits(dtype: torch.dtype, device: str) -> list[Case]:
    shapes = (dict(shape, heads=(4, 2, 32, 32), plan={**shape["plan"], "strategy": "csbp"}) for shape in SHAPES)
    return [Case(**shape, dtype=dtype, device=device, diagonal_kernel="triton") for shape in shapes]


def assert_within_roundings(case: Case, found: dict[str, float]) -> None:
    """Probabilities, their gradients, results and sums are rounded to 16 bits: a few unit roundoffs (`rounding`)."""
    for name, error in found.items():
        assert error < 8 * torch.finfo(case.dtype).eps / 2, (str(case), name, error)


def test_float16_is_within_its_roundings():
    chosen = in_16_bits(torch.float16, "cpu")[::5]
    for case, shard in zip(chosen, run_distributed(run_cases_on_rank, 1, chosen, environment=INTERPRETED)[0]):
        assert_within_roundings(case, errors([shard], case))


def test_the_interpreter_is_not_asked_for_bfloat16(monkeypatch):
    """Its products in bfloat16 are wrong by orders of magnitude, without a word."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelUnavailable, match="triton: Triton's interpreter multiplies bfloat16 wrongly; legal values here: auto, dense"):
        uses_triton("triton", KernelCase("cpu", torch.bfloat16, 64, 64))


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_within_the_roundings_of_its_type(dtype):
    for case in in_16_bits(dtype, "cuda"):
        assert_within_roundings(case, errors([run_case(case, 1, 0)], case))
