"""The Triton kernels in interpreter mode against the dense oracle, forward and backward, through the whole attention.

The interpreter is slow, and a process in which Triton was imported without it cannot switch: the cases run in
processes of their own.
"""

import pytest
import torch

from megatron.bdlm.testing.distributed import run_distributed
from tests.attention.attention_cases import SHAPES, Case, errors, run_cases_on_rank

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


@pytest.mark.parametrize("size", [1, 2])
def test_equals_the_oracle(size):
    everything = cases()
    shards = run_distributed(run_cases_on_rank, size, everything, environment=INTERPRETED)
    for case, *of_case in zip(everything, *shards):
        for name, error in errors(of_case, case).items():
            assert error < 1e-5, (str(case), name, error)
