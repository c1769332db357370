"""Every published recipe on an example of at most 12 tokens, its numbers worked out in the docstring.

The price of a row is agreed (hand.py): predicting token i costs i + 1 on a noisy row, (i + 1)/10 on a clean one.
The linear schedule gives p(t) = .999 t + .001: p(.25) = .25075, p(.5) = .5005, p(.8) = .8002; the weights 1/p are
3.988036, 1.998002 and 1.249688.
"""

import numpy as np
import pytest

from megatron.bdlm.config import RECIPES
from megatron.bdlm.data.noise import corrupt
from megatron.bdlm.objective.loss import select_rows
from tests.objective.hand import MASK, all_rows, loss_by_hand, make, targets_by_hand, tokens_of


def test_bd3lm():
    """8 tokens, S = 4, t = .5 in block 0 and .8 in block 1; tokens 1, 2 and 5 corrupted.

    (2 + 3) * 1.998002 + 6 * 1.249688 = 9.990010 + 7.498125 = 17.488135; over 8 supervised tokens: 2.186017.
    """
    config = make("bd3lm", block_size=4)
    loss, metrics = loss_by_hand(config, targets_by_hand(config, 8, [[1, 2, 5]], [0.5] * 4 + [0.8] * 4))
    assert loss == pytest.approx(2.186017, abs=1e-6)
    assert metrics["nelbo"] == pytest.approx((17.488135, 8), abs=1e-5)
    assert metrics["masked cross entropy"] == (11.0, 3.0)
    assert metrics["masked fraction"] == (3.0, 8.0)
    assert metrics["nelbo t 0.5-0.6"] == pytest.approx((9.990010, 4), abs=1e-5)
    assert metrics["nelbo t 0.8-0.9"] == pytest.approx((7.498125, 4), abs=1e-5)
    assert metrics["nelbo t 0.0-0.1"] == (0.0, 0.0)


def test_sdar():
    """Documents of 5 and 3 tokens, S = 4, t per document (.25 and .5); blocks 0..3, 4 (its token is forced), 5..7.

    Tokens 0, 4, 6: (1 + 5) * 3.988036 + 7 * 1.998002 = 23.928215 + 13.986014 = 37.914229; over 8: 4.739279.
    """
    config = make("sdar", block_size=4)
    targets = targets_by_hand(config, 8, [[0, 4, 6]], [0.25] * 5 + [0.5] * 3, documents=[5, 3])
    assert loss_by_hand(config, targets)[0] == pytest.approx(4.739279, abs=1e-6)


def test_sdar_draws_one_level_a_document_and_forces_a_token():
    config = make("sdar", block_size=4, t_min=1e-9, t_max=1e-9)
    noised = corrupt(tokens_of(8), np.ones(8, bool), config, documents=[5, 3])
    assert all(noised.corrupted[0, start:stop].any() for start, stop in ((0, 4), (4, 5), (5, 8)))
    varied = make("sdar", block_size=4)
    assert len(set(corrupt(tokens_of(8), np.ones(8, bool), varied, documents=[5, 3]).t[0])) == 2


def test_fast_dllm_v2():
    """8 tokens, S = 4, row i predicts token i+1. View 1 corrupts 0, 2, 3, 5, view 2 the others: 1, 4, 6, 7.

    Token 0 has no row. Tokens 1..7 are scored once over the pair with weight 1: 2 + 3 + .. + 8 = 35 over 7 = 5.
    Token 4, the first of block 1, is predicted by row 3 of view 2 (global row 8 + 3 = 11), in block 0.
    """
    config = make("fast-dllm-v2", block_size=4)
    targets = targets_by_hand(config, 8, [[0, 2, 3, 5], [1, 4, 6, 7]], [0.5] * 8)
    loss, metrics = loss_by_hand(config, targets)
    assert loss == 5.0
    assert metrics["masked fraction"] == (7.0, 14.0)
    assert metrics["supervised tokens"] == (7.0, 1.0)
    rows = select_rows([targets], all_rows(targets))
    assert rows.index.tolist() == [1, 2, 4, 8 + 0, 8 + 3, 8 + 5, 8 + 6]
    assert rows.target.tolist() == [12, 13, 15, 11, 14, 16, 17]
    # the mask logit stays in the softmax: a mask target is possible, and no error
    assert config.bdlm_keep_mask_logit and MASK == config.bdlm_mask_token_id


def test_llada2_sft():
    """Prompt of 3, answer of 5, S = 4. View 1 corrupts 3 and 6, view 2 corrupts 4, 5, 7; weight 1, per masked token.

    4 + 7 + 5 + 6 + 8 = 30 over 5 corrupted = 6.
    """
    config = make("llada2-sft", block_size=4)
    targets = targets_by_hand(config, 8, [[3, 6], [4, 5, 7]], [0.5] * 8, eligible=range(3, 8))
    loss, metrics = loss_by_hand(config, targets)
    assert loss == 6.0
    assert metrics["diffusion loss per masked token"] == (30.0, 5.0)
    assert metrics["diffusion loss per supervised token"] == (30.0, 5.0)


def test_nemotron_joint():
    """6 tokens, S = 4, t = .5 and .25, tokens 1 and 4 corrupted. Clean rows 0..4 predict tokens 1..5.

    Noisy: 2 * 1.998002 + 5 * 3.988036 = 23.936184 over 6. Clean: .2 + .3 + .4 + .5 + .6 = 2 over 5.
    .3 * 23.936184 / 6 + 1 * 2 / 5 = 1.196809 + .4 = 1.596809.
    """
    config = make("nemotron-joint", block_size=4)
    targets = targets_by_hand(config, 6, [[1, 4]], [0.5] * 4 + [0.25] * 2)
    loss, metrics = loss_by_hand(config, targets)
    assert loss == pytest.approx(1.596809, abs=1e-6)
    assert metrics["clean cross entropy"] == pytest.approx((2.0, 5.0))
    assert metrics["nelbo"] == pytest.approx((23.936184, 6), abs=1e-5)


def test_i_dlm():
    """6 tokens, S = 3, every noisy row masked (t = 1), label shift, weight 1, and .2 of the clean rows' loss.

    Noisy: 2 + 3 + 4 + 5 + 6 = 20 over 5 = 4. Clean: .2 * 2 / 5 = .08. Together 4.08.
    """
    config = make("i-dlm")
    noised = corrupt(tokens_of(6), np.ones(6, bool), config)
    assert noised.corrupted.all()
    targets = targets_by_hand(config, 6, [range(6)], [1.0] * 6)
    assert loss_by_hand(config, targets)[0] == pytest.approx(4.08)


def test_mean_of_block_means():
    """DiffusionGemma: documents of 6 and 3 tokens, S = 4, a prompt of 2, every supervised row scored.

    Document 0: block 0 scores tokens 2, 3: (3 + 4)/2 = 3.5; block 1 tokens 4, 5: (5 + 6)/2 = 5.5; mean 4.5.
    Document 1: tokens 6, 7, 8: 8. Over 2 documents: 6.25. Which tokens were replaced does not matter.
    """
    config = make(corruption="uniform", loss_weight="unit", loss_denominator="block-mean", block_size=4)
    targets = targets_by_hand(config, 9, [[2, 7]], [0.5] * 9, documents=[6, 3], eligible=range(2, 9))
    loss, metrics = loss_by_hand(config, targets)
    assert loss == pytest.approx(6.25)
    assert metrics["lm loss"] == pytest.approx((12.5, 2.0))
    assert "nelbo" not in metrics


def test_uniform_corruption_scores_every_supervised_token():
    """5 tokens, the first a prompt, only token 3 replaced: 2 + 3 + 4 + 5 = 14 over 4 = 3.5."""
    config = make(corruption="uniform", loss_weight="unit", block_size=4)
    targets = targets_by_hand(config, 5, [[3]], [0.5] * 5, eligible=range(1, 5))
    assert loss_by_hand(config, targets)[0] == 3.5


def test_complementary_views_with_the_nelbo_weight():
    """4 tokens at t = .25: view 1 corrupts token 0 (weight 1/p), view 2 tokens 1..3 (1/(1-p) = 1.334668).

    The loss is the mean of two estimates: (1 * 3.988036 + (2 + 3 + 4) * 1.334668) / 2 = 8.000024; over 4: 2.000006.
    The logged NELBO is view 1 alone: 3.988036 over 4.
    """
    config = make(views=2, block_size=4)
    loss, metrics = loss_by_hand(config, targets_by_hand(config, 4, [[0], [1, 2, 3]], [0.25] * 4))
    assert loss == pytest.approx(2.000006, abs=1e-6)
    assert metrics["nelbo"] == pytest.approx((3.988036, 4), abs=1e-5)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recipes_are_valid(recipe):
    assert make(recipe).bdlm_recipe == recipe
