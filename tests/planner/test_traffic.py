"""The planner's bytes are the counters' bytes, on real ranks; the closed form is the plan's; balance is the measured areas'."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.parallel.exchange import traffic
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.planner.memory import layer_buffers
from megatron.bdlm.planner.search import exact_balance
from megatron.bdlm.planner.traffic import Sizes, exact, needs
from megatron.bdlm.planner.work import Layout, Workload
from megatron.bdlm.testing.distributed import run_distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8
CASES = [
    (dict(seq_length=128, block_size=4, strategy=strategy), transport, window)
    for strategy, transport, window in (
        ("csbp", "direct", None), ("csbp", "hierarchical", None), ("csbp", "ring", None), ("csbp", "allgather", None),
        ("cp", "ring", None), ("cp", "allgather", None), ("cp", "direct", None), ("bp", "direct", None),
        ("csbp", "direct", 24), ("csbp", "hierarchical", 24),
    )
] + [
    (dict(seq_length=110, block_size=3, documents=[41, 69], views=2), "hierarchical", None),
    (dict(seq_length=110, block_size=3, documents=[41, 69], views=2), "allgather", None),
    (dict(seq_length=96, block_size=12, strategy="hybrid", block_parallel_size=2), "direct", None),
    (dict(seq_length=96, block_size=12, strategy="hybrid", block_parallel_size=2), "ring", None),
]


def measured_and_predicted(cases):
    sizes = Sizes.of(KEY_HEADS, HEAD_SIZE, HEAD_SIZE, 2)
    found = []
    for arguments, transport, window in cases:
        plan = SequencePlan.build(context_parallel_size=dist.get_world_size(), rank=dist.get_rank(), **arguments)
        q, k, v = (
            torch.zeros(plan.s_local, 1, heads, HEAD_SIZE, dtype=torch.bfloat16, requires_grad=True)
            for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
        )
        traffic()
        out = block_diffusion_attention(q, k, v, plan, transport=transport, window=window, ranks_per_node=2)
        out.sum().backward()
        found.append((traffic(), exact(plan, transport, sizes, 2, window)))
    return found


def test_predicted_bytes_are_the_counted_ones_on_four_ranks():
    for rank, found in enumerate(run_distributed(measured_and_predicted, 4, CASES)):
        for case, (measured, predicted) in zip(CASES, found):
            assert measured == predicted, f"rank {rank}, {case}"


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 4), (4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize(("strategy", "transport"), [("csbp", "direct"), ("csbp", "hierarchical"), ("csbp", "ring"), ("cp", "ring")])
def test_closed_form_is_the_plans(strategy, transport, ranks, per_node, window):
    length = 32 * ranks
    plans = [SequencePlan.build(length, 4, ranks, rank=rank, strategy=strategy) for rank in range(ranks)]
    counted = [exact(plan, transport, Sizes(1, 0, 0), per_node, window)["forward"] for plan in plans]
    form = needs(length, ranks, per_node, transport, 1 if strategy == "csbp" else 2, window)
    between = [count["received_inter_node"] for count in counted]
    assert (max(between), sum(between)) == (form.most_between, pytest.approx(form.mean_between * ranks))
    if transport == "hierarchical":  # what is handed on inside a node comes on top
        return
    received = [count["received"] for count in counted]
    assert (max(received), sum(received)) == (form.most, pytest.approx(form.mean * ranks))


@pytest.mark.parametrize(("length", "block"), [(512, 4), (500, 7), (96, 12)])
def test_balance_is_that_of_the_computed_areas(length, block):
    workload, layout = Workload(length, block, 1), Layout(cp=4, bp=4)
    areas = [SequencePlan.build(length, block, 4, rank=rank).program().area for rank in range(4)]
    assert exact_balance(workload, layout) == pytest.approx(max(areas) * 4 / sum(areas), rel=0.02)


def peaks_on_rank(ways):
    from benchmarks.context_ways import Shape, make_way

    shape = Shape(length=2048, block_size=32, query_heads=8, key_heads=2, head_size=64)
    found = {}
    for name in ways:
        way = make_way(name, shape, 2)
        way.step()  # plans and index tensors are made once, not counted
        found[name] = way.peak_bytes(), way.plan.s_local, len(way.program.shared[0])
    return found


def test_predicted_peak_of_attention_is_within_ten_percent_of_the_measured_one():
    ways = ["csbp/direct", "csbp/ring", "csbp/hierarchical", "cp/ring"]
    for found in run_distributed(peaks_on_rank, 4, ways):
        for name, (peak, rows, shared) in found.items():
            predicted = layer_buffers(rows, shared, 4, name.partition("/")[2], 8 * 64, 2 * 64, item=4)
            assert predicted == pytest.approx(peak, rel=0.10), name
