"""The head-parallel baseline computes the same attention, every way has its parts, and bytes are what arithmetic says."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.context_strategies import speedups, summary  # noqa: E402
from benchmarks.context_ways import (  # noqa: E402
    WAYS, HeadsToRows, RowsToHeads, Shape, Ulysses, bytes_of_step, make_way,
)
from megatron.bdlm.attention.functional import block_diffusion_attention  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402

SHAPE = Shape(length=64, block_size=4, query_heads=4, key_heads=2, head_size=8)


def on_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    way = Ulysses(SHAPE)
    rows = 2 * SHAPE.length
    q, k, v = (torch.randn(rows, 1, heads, SHAPE.head_size, requires_grad=True) for heads in (4, 2, 2))
    expected = block_diffusion_attention(q, k, v, way.plan)
    expected.square().sum().backward()
    mine = slice(rank * rows // size, (rank + 1) * rows // size)
    grouped = [x[mine, 0].unflatten(1, (size, -1)) for x in (q, k, v)]  # [s, P, heads/P, d]
    inputs = torch.cat(grouped, dim=2).detach().requires_grad_()
    out = HeadsToRows.apply(way._attend(RowsToHeads.apply(inputs)))
    out.square().sum().backward()
    gradients = inputs.grad.split(way.heads, dim=2)
    errors = [(out.flatten(1, 2) - expected[mine, 0]).abs().max().item()]
    errors += [(g.flatten(1, 2) - x.grad[mine, 0]).abs().max().item() for g, x in zip(gradients, (q, k, v))]
    figures = {}
    for name in WAYS:
        other = make_way(name, SHAPE, 1)
        for part in ("step", "compute", "communicate"):
            getattr(other, part)()
        figures[name] = bytes_of_step(other, 1)["sent"], other.flops
    return errors, figures


def test_ways_on_two_ranks():
    for errors, figures in run_distributed(on_rank, 2):
        assert max(errors) < 1e-4, errors
        row = 2 * SHAPE.key_heads * SHAPE.head_size * 4  # K and V of a token
        assert figures["cp/ring"][0] == 3 * SHAPE.length * row  # 2L/P rows once, and again with gradients
        assert figures["csbp/ring"][0] * 2 == figures["cp/ring"][0]
        assert figures["ulysses"][0] == 2 * SHAPE.length // 2 * (4 + 4 + 4) * SHAPE.head_size * 4  # q, k, v, out; both directions
        assert figures["bp"][0] == 0 and figures["bp"][1] == 1.5 * figures["csbp/direct"][1]


def test_summary_takes_medians_and_ratios_within_rounds():
    seconds = {
        "cp/ring": {"step": [2.0, 4.0, 3.0], "compute": [1.0, 1.0, 1.0], "communicate": [1.5, 1.5, 1.5]},
        "csbp/direct": {"step": [1.0, 2.0, 2.0], "compute": [1.0, 1.0, 1.0], "communicate": [0.6]},
    }
    assert speedups(seconds, "csbp/direct") == {"cp/ring": 2.0, "best baseline": 2.0}
    row = summary({"ratio": 1.5, "rate_mbit": 10.0, "seconds": seconds})
    assert row["ratio_met"] == 1.5
    assert row["ways"]["csbp/direct"]["ceiling"] == 1.0 and row["ways"]["csbp/direct"]["exposed"] == 1.0
