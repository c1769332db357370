"""Loss and every gradient are those of one rank, in float64, for every layout; ranks without anchors still meet."""

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.attention.functional import DraftLink
from megatron.bdlm.drafter.batch import Cell
from megatron.bdlm.drafter.objective import DraftObjective
from megatron.bdlm.testing.distributed import run_distributed
from tests.drafter import tiny

OBJECTIVES = {"v1": DraftObjective(), "v2": DraftObjective("dpace"), "windowed": DraftObjective("kl"), "mixed": DraftObjective("dpace", lk="tv")}
WAYS = {name: dict(transport=name, movement="keys") for name in ("direct", "ring", "allgather")}
WAYS |= {name: dict(movement=name) for name in ("queries", "auto")}
CONFIGS = {"v1": tiny.V1, "v2": tiny.V2, "windowed": tiny.WINDOWED, "mixed": tiny.MIXED}
DATA = {"two samples": tiny.samples(2), "one anchor": tiny.samples(1), "no anchor": tiny.samples(1, supervised=False)}


def _cases():
    """(name, config, samples, anchors of a sample, objective)."""
    for name, config in CONFIGS.items():
        yield name, config, DATA["two samples"], 6, OBJECTIVES[name]
    yield "one anchor", tiny.V1, DATA["one anchor"], 1, DraftObjective()
    yield "no anchor", tiny.V2, DATA["no anchor"], 6, DraftObjective()


def _link(size: int, slots: int, way: str) -> tuple[Cell, DraftLink]:
    """This rank's cell and groups among `size` ranks, rank = inner + I * slot; every rank makes every group."""
    rank, inner = dist.get_rank(), size // slots
    across = [dist.new_group([i + inner * slot for slot in range(slots)]) for i in range(inner)]
    within = [dist.new_group([i + inner * slot for i in range(inner)]) for slot in range(slots)]
    return Cell(size, slots, rank), DraftLink(across[rank % inner], within[rank // inner], **WAYS[way])


def _rank_main(layouts):
    found = {}
    for slots, way in layouts:
        cell, link = _link(dist.get_world_size(), slots, way)
        for name, config, data, count, objective in _cases():
            total, weight, gradients = tiny.loss_and_gradients(config, data, cell, link, objective, count)
            for tensor in (total, weight, *gradients.values()):
                dist.all_reduce(tensor)
            found[slots, way, name] = (total, weight, gradients)
    return found if dist.get_rank() == 0 else None


@pytest.mark.parametrize("size, layouts", [
    (2, [(1, "direct"), (2, "direct"), (2, "queries")]),
    pytest.param(
        4,
        [(1, "direct"), (2, "direct"), (2, "queries"), (4, "direct"), (4, "ring"), (4, "allgather"), (4, "queries"), (4, "auto")],
        marks=pytest.mark.long,
    ),
])
def test_every_layout_equals_one_rank(size, layouts):
    found = run_distributed(_rank_main, size, layouts)[0]
    for name, config, data, count, objective in _cases():
        wanted = tiny.loss_and_gradients(config, data, objective=objective, count=count)
        for slots, way in layouts:
            total, weight, gradients = found[slots, way, name]
            assert torch.allclose(total, wanted[0], atol=1e-10, rtol=0), (name, slots, way)
            assert torch.allclose(weight, wanted[1], atol=1e-10, rtol=0), (name, slots, way)
            for tensor, gradient in wanted[2].items():
                assert torch.allclose(gradients[tensor], gradient, atol=1e-10, rtol=0), (name, slots, way, tensor)
