"""Metrics of the load of experts, and what a row is for the routers."""

import numpy as np
import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.bdlm.parallel.plan import SequencePlan  # noqa: E402
from megatron.bdlm.training.expert_load import LOAD_METRICS, load_metrics  # noqa: E402
from megatron.bdlm.training.step import row_classes  # noqa: E402


def test_load_metrics_by_hand():
    """Clean: 6, 2, 0, 0 rows (load 3, idle 0.5) and 2, 2, 2, 2; noisy: one layer with rows, the other without."""
    rows = torch.tensor([[[6, 2, 0, 0], [0, 0, 0, 4]], [[2, 2, 2, 2], [0, 0, 0, 0]]], dtype=torch.float64)
    found = {name: value.item() for name, value in load_metrics(rows).items()}
    assert found == {"expert load clean": 2.0, "expert load noisy": 4.0, "idle experts clean": 0.25, "idle experts noisy": 0.75}
    assert tuple(found) == LOAD_METRICS
    assert all(value.item() == 0 for value in load_metrics(torch.zeros(2, 2, 4)).values())


@pytest.mark.parametrize("strategy, ranks", [("csbp", 1), ("csbp", 2), ("bp", 2), ("cp", 2)])
@pytest.mark.parametrize("views", [1, 2])
def test_every_row_of_text_counts_once_on_all_ranks(strategy, ranks, views):
    """Fault B8: 13 tokens of text and 3 of padding; neither views, nor ranks, nor replicas, nor padding change clean counts."""
    documents = np.array([0] * 13 + [-1] * 3, dtype=np.int32)
    samples = [{"tokens": np.arange(16), "documents": documents}]
    total = {counted: torch.zeros(3, 16, dtype=torch.int64) for counted in ("clean", "noisy", "all")}
    for rank in range(ranks):
        plan = SequencePlan.build(
            16, 4, ranks, rank=rank, views=views, documents=[13, 3], strategy=strategy, row_multiple=3
        )
        for counted, sums in total.items():
            classes = row_classes(plan, samples, counted)
            assert classes.shape == (1, len(plan.rows), 3)
            for plane in range(3):
                sums[plane].index_add_(0, plan.rows.clamp(min=0) % 16, classes[0, :, plane].long())
    text = (torch.arange(16) < 13).long()
    for counted, factor in (("clean", 1), ("noisy", views), ("all", 1 + views)):
        assert total[counted].tolist() == [(factor * text).tolist(), text.tolist(), (views * text).tolist()]
