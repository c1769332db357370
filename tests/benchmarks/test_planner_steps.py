"""The planner against whole training steps: bytes of every part within 10%, attention FLOPs of the ranks as planned within 2%."""

import pytest

from benchmarks.planner_steps import balance, heaviest, measure
from megatron.bdlm.planner.search import exact_balance
from megatron.bdlm.planner.work import Layout, Workload


def check(ranks: int, way: str, length: int = 1024) -> None:
    found = measure(ranks, length, way)
    for part, (measured, predicted) in heaviest(found).items():
        assert predicted == pytest.approx(measured, rel=0.10), part
    layout = found[0]["layout"]
    planned = exact_balance(Workload(length, 32, 1), Layout(cp=ranks, bp=layout["bp"], strategy=layout["strategy"]))
    assert balance(found) == pytest.approx(planned, rel=0.02)
    for rank in found:  # two-ended placement: every rank computes what the heaviest is predicted to
        assert rank["flops"] == pytest.approx(rank["predicted flops"], rel=0.02)


def test_two_ranks():
    check(2, "csbp")


@pytest.mark.long
@pytest.mark.parametrize("way", ["csbp, full recompute", "cp/ring", "bp"])
def test_two_ranks_in_other_ways(way):
    check(2, way)


@pytest.mark.long
@pytest.mark.parametrize("way", ["csbp", "cp/ring"])
def test_four_ranks(way):
    check(4, way)
