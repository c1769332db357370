"""Draft costs against hand-computed figures, and the parameters against a real drafter."""

import pytest

from megatron.bdlm.drafter.model import Drafter
from megatron.bdlm.planner.drafts import GIB, PUBLISHED, DraftShape, draft_cost
from tests.drafter import tiny


def test_figures_of_a_million_tokens_by_hand():
    cost = draft_cost(PUBLISHED, 1 << 20, 2048, 1, 1)
    assert cost.memory["features"] / GIB == 50.0  # 51.2 KB a token
    assert cost.memory["context"] / GIB == 20.0  # 10 KB a token, twice
    assert cost.memory["keys"] / GIB == 20.0  # 4 KB a token and layer
    assert draft_cost(PUBLISHED, 1 << 19, 2048, 8, 8).memory["features"] / GIB == 3.125
    assert PUBLISHED.layer_parameters == pytest.approx(320e6, rel=0.02) and PUBLISHED.parameters == pytest.approx(1.73e9, rel=0.02)


def test_block_parallelism_divides_the_draft_work_and_context_parallelism_does_not():
    one, cp, bp = (draft_cost(PUBLISHED, 1 << 16, 512, *layout) for layout in ((1, 1), (8, 1), (8, 8)))
    assert cp.memory["drafts"] == one.memory["drafts"] == 8 * bp.memory["drafts"]
    assert one.context_flops == 8 * cp.context_flops == 8 * bp.context_flops
    assert one.draft_flops == 8 * bp.draft_flops and cp.draft_flops > 4 * bp.draft_flops
    assert cp.sent_bytes == 0 < bp.sent_bytes


def test_parameters_are_those_of_the_model():
    config = tiny.V1
    shape = DraftShape(32, 48, 2, 4, 2, 8, 2, 50)
    matrices = sum(p.numel() for p in Drafter(config).parameters() if p.dim() == 2)
    assert shape.parameters == matrices
