"""What attention keeps and how much it needs: saved tensors, peak memory, reduced precision, bytes on real ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.parallel.exchange import traffic
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.distributed import run_distributed
from tests.attention.attention_cases import Case, assembled, reference, run_case

HEADS, SIZE = 2, 16


def inputs(plan, dtype=torch.float32):
    generator = torch.Generator().manual_seed(plan.rank)
    return [
        torch.randn(plan.s_local, 1, HEADS, SIZE, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)
    ]


def saved_elements(plan, **options) -> list[int]:
    """Elements of every tensor that autograd keeps between forward and backward."""
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        block_diffusion_attention(*inputs(plan), plan, **options)
    return sizes


def peak_bytes(plan, **options) -> int:
    """Most memory held at a time by forward and backward beyond their inputs, by the allocator's own record."""
    q, k, v = inputs(plan)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        out = block_diffusion_attention(q, k, v, plan, **options)
        out.backward(torch.ones_like(out))
        del out
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profiler.kineto_results.events() if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def measure_on_rank(lengths, ways) -> dict:
    """Body of a spawned rank: {(length, way): (saved elements, peak bytes)}."""
    found = {}
    for way in ways:
        for length in lengths:
            plan = SequencePlan.build(
                length, 8, dist.get_world_size(), rank=dist.get_rank(), strategy=way.get("strategy", "csbp")
            )
            options = {name: value for name, value in way.items() if name != "strategy"}
            block_diffusion_attention(
                *inputs(plan), plan, **options
            )  # plan and index tensors are made once, not counted
            found[length, str(way)] = plan.s_local, saved_elements(plan, **options), peak_bytes(plan, **options)
    return found


WAYS = (
    dict(transport="direct"),
    dict(transport="ring"),
    dict(transport="ring", strategy="cp"),
    dict(transport="hierarchical", ranks_per_node=2),
)


def test_memory_on_four_ranks():
    lengths = (512, 1024)
    for per_rank in run_distributed(measure_on_rank, 4, lengths, WAYS):
        for way in WAYS:
            for length in lengths:
                rows, saved, _ = per_rank[length, str(way)]
                assert rows == length // 2
                # q, k, v, out and the log-sum-exp of the local rows: nothing of length L
                assert sorted(saved) == sorted([rows * HEADS * SIZE] * 4 + [rows * HEADS])
            small, large = (per_rank[length, str(way)][2] for length in lengths)
            assert 1.5 * small < large <= 2.1 * small, (
                f"{way}: peak {small} bytes at {lengths[0]}, {large} at {lengths[1]}"
            )


@pytest.mark.parametrize("block_size", [4, 32])
def test_peak_memory_of_one_rank_is_linear_in_the_length(block_size):
    """Fault A4."""
    peaks = []
    for length in (2048, 4096):  # above the row counts at which the kernel takes larger buffers
        plan = SequencePlan.build(length, block_size)
        block_diffusion_attention(*inputs(plan), plan)
        peaks.append(peak_bytes(plan))
    assert peaks[1] <= 2.1 * peaks[0], peaks


def test_peak_memory_of_32768_tokens_on_one_rank():
    """Fault A4: forward of L = 32768 holds some dozens of numbers a row; a mask of [2L, 2L] bytes would be 4 GiB."""
    plan = SequencePlan.build(32768, 32)
    x = torch.randn(plan.s_local, 1, 1, 8)
    with torch.no_grad(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        block_diffusion_attention(x, x, x, plan)
    held = peak = 0
    for event in sorted((e for e in profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert plan.s_local == 65536 and peak < 400 * plan.s_local, peak


# ---- reduced precision ----------------------------------------------------------------------------------

BF16 = dict(dtype=torch.bfloat16, heads=(4, 2, 32, 32))


def bfloat16_cases(size):
    ways = [dict(transport=transport) for transport in ("direct", "ring", "allgather")]
    ways.append(dict(transport="hierarchical", ranks_per_node=max(1, size // 2)))
    return [Case(dict(seq_length=256, block_size=8), **BF16, **way) for way in ways]


def bfloat16_on_rank(cases):
    return [run_case(case, dist.get_world_size(), dist.get_rank()) for case in cases]


def root_mean_square_errors(shards, case):
    return [
        (ours - expected).square().mean().sqrt().item()
        for ours, expected in zip(assembled(shards, case), reference(case))
    ]


def test_bfloat16_error_does_not_grow_with_the_ring():
    """Fault A6."""
    cases = bfloat16_cases(4)
    results = run_distributed(bfloat16_on_rank, 4, cases)
    alone = root_mean_square_errors([run_case(cases[0], 1, 0)], cases[0])
    for number, case in enumerate(cases):
        together = root_mean_square_errors([shards[number] for shards in results], case)
        for name, one, four in zip(("out", "dq", "dk", "dv"), alone, together):
            assert four <= 1.5 * one, f"{case.transport}: error of {name} {four:.2e} on 4 ranks, {one:.2e} on one"


# ---- bytes on real ranks -----------------------------------------------------------------------------------


def traffic_on_rank():
    found = {}
    for strategy, transport in (("csbp", "direct"), ("cp", "ring"), ("csbp", "allgather")):
        plan = SequencePlan.build(128, 4, dist.get_world_size(), rank=dist.get_rank(), strategy=strategy)
        traffic()
        out = block_diffusion_attention(*inputs(plan), plan, transport=transport, ranks_per_node=2)
        out.sum().backward()
        found[strategy, transport] = traffic()
    return found


def test_counters_on_four_ranks():
    results = run_distributed(traffic_on_rank, 4)

    def total(way, direction, count="sent"):
        return sum(found[way][direction][count] for found in results)

    direct, ring, gathered = ("csbp", "direct"), ("cp", "ring"), ("csbp", "allgather")
    half_chunk = 128 // 8 * HEADS * 2 * SIZE * 4  # bytes of K and V of L/(2P) tokens
    assert total(direct, "forward") == total(direct, "forward", "received") == 4 * 4.5 * half_chunk
    assert total(ring, "forward") == 4 * 3 * 4 * half_chunk
    assert total(gathered, "forward") == 4 * 3 * 2 * half_chunk
    for direction in ("forward", "backward"):
        assert total(direct, direction) * 8 == total(ring, direction) * 3
        inside, between = (total(direct, direction, f"sent_{place}") for place in ("intra_node", "inter_node"))
        assert inside + between == total(direct, direction) and inside > 0 and between > 0
