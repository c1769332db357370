"""Weights and losses, to the digits of the specification's hand-computed values."""

import pytest
import torch

from megatron.bdlm.drafter.losses import default_gamma, dpace_weights, lk_loss, position_weights, weighted_sum


@pytest.mark.parametrize("block_size, gamma, total", [(8, 4, 3.7352), (10, 5, 4.6048), (16, 7, 6.6306)])
def test_position_weights(block_size, gamma, total):
    assert default_gamma(block_size) == gamma
    assert position_weights(block_size, gamma).sum() == pytest.approx(total, abs=5e-5)


def test_position_weights_by_position():
    expected = [0, 1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]
    assert position_weights(8, 4).tolist() == pytest.approx(expected, abs=5e-5)
    assert position_weights(16, 7)[-1] == pytest.approx(0.1353, abs=5e-5)


def test_weighted_mean_of_a_whole_block_and_of_a_tail():
    losses, weights = torch.arange(8.0), position_weights(8, 4)
    total, weight = weighted_sum(losses, weights)
    assert total / weight == pytest.approx(3.04855, abs=5e-6)
    assert total / (7 + 1e-5) == pytest.approx(1.62671, abs=5e-6)  # divided by the count of rows, as others do
    total, weight = weighted_sum(losses[:3], weights[:3])
    assert total / weight == pytest.approx(1.43782, abs=5e-6)


@pytest.mark.parametrize("variant, expected", [
    ("suffix", [2.09, 1.14, 0.4275]), ("prefix", [0.95, 0.7125, 0.4275]), ("continuation", [2.2, 1.6, 1.0]),
])
def test_dpace(variant, expected):
    p = torch.tensor([[0.3, 0.9, 0.5, 0.2]], dtype=torch.float64, requires_grad=True)
    scored = torch.tensor([[False, True, True, True]])
    weights = dpace_weights(p, scored, 0.5, variant)
    assert weights[0].tolist() == pytest.approx([0, *expected], abs=1e-9)
    assert not weights.requires_grad


def test_dpace_passes_over_a_hole():
    p, scored = torch.tensor([[1.0, 0.8, 0.1, 0.4]]), torch.tensor([[False, True, False, True]])
    # s = .9, 1, .7: P = .9, .9, .63
    assert dpace_weights(p, scored, 0.5)[0].tolist() == pytest.approx([0, 1.53, 0, 0.63])


def test_lk_losses():
    p = torch.tensor([0.5, 0.25], dtype=torch.float64)
    nll = -p.log()
    assert torch.equal(lk_loss(nll, "none"), nll)
    assert lk_loss(nll, "tv").tolist() == pytest.approx([0.5, 0.75])
    c = 0.8 * torch.exp(torch.tensor(-2.0 * 0.375, dtype=torch.float64))
    expected = c * nll + (1 - c) * (1 - p)
    assert torch.allclose(lk_loss(nll, "lambda", 0.8, 2.0), expected)


def test_no_row_is_a_finite_zero_with_a_graph():
    nll = torch.zeros(0, requires_grad=True)
    for kind in ("none", "tv", "lambda"):
        total, weight = weighted_sum(lk_loss(nll, kind), torch.zeros(0))
        assert total.item() == 0 and weight.item() == 0 and total.requires_grad
