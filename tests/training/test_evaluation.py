"""Monte Carlo likelihoods against what is known exactly: constant logits, a table of probabilities."""

import math

import numpy as np
import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.bdlm.config import BDLMConfig, BDLMConfigError  # noqa: E402
from megatron.bdlm.training import evaluation  # noqa: E402
from megatron.bdlm.training.evaluation import (  # noqa: E402
    Likelihood,
    Question,
    Text,
    cut,
    evaluate_choices,
    evaluate_text,
    interval,
)

TOKENS = 50


def uniform(input_ids, position_ids, params, rows):
    """Constant logits over `TOKENS` candidates."""
    return torch.full(rows.target.shape, math.log(TOKENS))


def unigram(input_ids, position_ids, params, rows):
    """Token k has probability proportional to 1 / (k + 1), whatever surrounds it."""
    return -torch.log_softmax(-torch.arange(1, TOKENS + 1).log(), 0)[rows.target]


def _likelihood(model=uniform, **options):
    config = BDLMConfig(**{"bdlm_block_size": 8, "bdlm_mask_token_id": TOKENS, **options})
    return Likelihood(model, config, seed=5, vocab_size=TOKENS, device=torch.device("cpu"))


def _samples(count, length=64):
    generator = np.random.default_rng(1)
    return [Text(generator.integers(0, TOKENS, length), np.ones(length, dtype=bool), index) for index in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(bdlm_label_shift="next"),
        dict(bdlm_block_size=1),
        dict(bdlm_block_size=64),
        dict(bdlm_block_size_schedule="0:4,5:8"),
        dict(bdlm_views=2, bdlm_loss_weight="unit", bdlm_t_min=0.3, bdlm_t_max=0.8, bdlm_keep_mask_logit=True),
        dict(bdlm_noise_schedule="cosine"),
        dict(bdlm_clean_attention="token-causal", bdlm_clean_loss_weight=1.0),
    ],
)
def test_constant_logits_give_ln_n(options):
    """For every block size, schedule and training objective: the objective of evaluation is the bound."""
    result = evaluate_text(_likelihood(**options), _samples(24), draws=6, batch=5)
    assert result["tokens"] == 24 * (63 if options.get("bdlm_label_shift") == "next" else 64)
    assert abs(result["nelbo"] - math.log(TOKENS)) < 1.5 * result["nelbo_95"] < 0.5
    assert result["masked_cross_entropy"] == pytest.approx(math.log(TOKENS), rel=1e-6)
    assert result["ppl_bound"] == pytest.approx(math.exp(result["nelbo"]))


def test_noise_levels_add_up_and_draws_are_fixed():
    samples, counted = _samples(10), []
    result = evaluate_text(_likelihood(unigram), samples, draws=3, batch=4, size_bytes=1000, progress=counted.append)
    assert sum(counted) == 30 and len(result["by_noise_level"]) == 10
    levels = [level for level in result["by_noise_level"] if level["nelbo"] is not None]
    assert sum(level["masked_tokens"] for level in levels) > 300
    assert result["bits_per_byte_bound"] == pytest.approx(result["nelbo"] * 640 / 1000 / math.log(2))
    again = evaluate_text(_likelihood(unigram), samples, draws=3, batch=1)
    assert again["nelbo_of_draws"] == pytest.approx(result["nelbo_of_draws"])  # neither the batch nor the call matters
    assert len(set(result["nelbo_of_draws"])) == 3


def test_interval():
    assert interval([2.0]) == (2.0, None)
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert interval([1.0, 2.0] * 40)[1] == pytest.approx(1.96 * math.sqrt(0.25 * 80 / 79 / 80))


def test_interval_covers_the_truth_about_as_often_as_it_says():
    inside = 0
    for trial in range(60):
        likelihood = Likelihood(
            uniform, BDLMConfig(bdlm_block_size=8, bdlm_mask_token_id=TOKENS), trial, TOKENS, torch.device("cpu")
        )
        result = evaluate_text(likelihood, _samples(3), draws=4, batch=3)
        inside += abs(result["nelbo"] - math.log(TOKENS)) <= result["nelbo_95"]
    assert inside >= 51  # 57 expected; fewer than 51 has probability 0.4%


def test_cut():
    pieces = cut(range(10), 4)
    assert [piece.tokens.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [piece.index for piece in pieces] == [0, 1, 2] and all(piece.eligible.all() for piece in pieces)
    assert len(cut(range(9), 4)) == 2  # a single token predicts nothing


def test_multiple_choice_scores_the_choices_alone():
    seen = []

    def model(input_ids, position_ids, params, rows):
        seen.append((input_ids, rows.target))
        return unigram(input_ids, position_ids, params, rows)

    questions = [
        Question("ab", ("bb", "zz"), 0),  # frequent tokens are likely
        Question("abababababab", ("yyy", "b"), 1),
        Question("a", ("z", "bbbbbbbbbbbb"), 1),  # by sum the short one, by byte the likely one
    ]
    result = evaluate_choices(
        _likelihood(model), questions, lambda text: [ord(c) - 96 for c in text], draws=40, batch=16
    )
    assert [d["chosen"] for d in result["details"]] == [0, 1, 0] and [
        d["chosen_per_byte"] for d in result["details"]
    ] == [0, 1, 1]
    assert result["accuracy"] == pytest.approx(2 / 3) and result["accuracy_per_byte"] == 1.0
    for ids, target in seen:
        assert ids.shape[0] in (16, 8)
    assert set(torch.cat([target for ids, target in seen[:3]]).tolist()) == {2}  # never a token of the context "ab"


def test_prompts_get_noisy_rows_only_where_a_choice_is():
    rows = []

    def model(input_ids, position_ids, params, scored):
        rows.append((params.plan.noisy_rows, input_ids.shape[1]))
        return uniform(input_ids, position_ids, params, scored)

    sample = Text(np.arange(1, 41), np.arange(40) >= 35, 0)
    _likelihood(model).score([sample], [0])
    assert rows == [(8, 48)]  # one block of 8 beside 40 clean rows


def test_a_choice_without_tokens_and_uniform_corruption_are_refused():
    with pytest.raises(ValueError, match="question 0: choice '' adds no token"):
        evaluate_choices(_likelihood(), [Question("ab", ("",), 0)], lambda text: list(text.encode()), draws=1, batch=1)
    with pytest.raises(BDLMConfigError, match="--bdlm-corruption uniform: its loss bounds no likelihood"):
        _likelihood(bdlm_corruption="uniform", bdlm_loss_weight="unit")


def test_quantiles_of_students_t():
    assert len(evaluation.STUDENT_T) == 30 and all(
        a > b > 1.96 for a, b in zip(evaluation.STUDENT_T, evaluation.STUDENT_T[1:])
    )
