"""Proposals and commits as pure functions."""

import numpy as np
import pytest
import torch

from megatron.bdlm.generation.policy import SamplingOptions, propose, select_commits
from megatron.bdlm.generation.rows import BlockRules

RULES = BlockRules(block_size=4, mask_token_id=3, vocab_size=5)
LOGITS = torch.tensor([[0.0, 2.0, 1.0, 9.0, 0.5, 99.0]], dtype=torch.float64)  # id 3 is the mask, id 5 padding


def test_mask_and_padded_rows_are_never_proposed_and_carry_no_probability():
    tokens, confidence = propose(LOGITS, RULES, SamplingOptions())
    assert tokens.tolist() == [1]
    assert confidence.item() == pytest.approx(torch.tensor([0.0, 2.0, 1.0, 0.5]).softmax(0)[1].item())


def test_a_kept_mask_logit_lowers_the_confidence_but_is_not_proposed():
    kept = BlockRules(block_size=4, mask_token_id=3, vocab_size=5, keep_mask_logit=True)
    tokens, confidence = propose(LOGITS, kept, SamplingOptions())
    assert tokens.tolist() == [1]
    assert confidence.item() == pytest.approx(LOGITS[0, :5].softmax(0)[1].item())


def test_draws_follow_the_tempered_distribution():
    count = 20000
    options = SamplingOptions(temperature=0.7)
    uniforms = (np.arange(count) + 0.5) / count
    tokens, _ = propose(LOGITS.repeat(count, 1), RULES, options, uniforms)
    share = torch.bincount(tokens, minlength=5).double() / count
    expected = (torch.tensor([0.0, 2.0, 1.0, -torch.inf, 0.5], dtype=torch.float64) / 0.7).softmax(0)
    torch.testing.assert_close(share, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("top_p, kept", [(0.1, {1}), (0.6, {1, 2}), (0.9, {1, 2, 4}), (1.0, {0, 1, 2, 4})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    # probabilities 0.56, 0.21, 0.13, 0.08 in the order of ids 1, 2, 4, 0
    uniforms = np.append(np.linspace(0, 1, 500, endpoint=False), np.nextafter(1.0, 0.0))
    tokens, _ = propose(LOGITS.repeat(501, 1), RULES, SamplingOptions(temperature=1.0, top_p=top_p), uniforms)
    assert set(tokens.tolist()) == kept


def test_of_equal_confidences_the_earlier_position_goes_first():
    chosen = select_commits(np.array([0.5, 0.5, 0.5, 0.5]), np.array([False, True, True, True]), SamplingOptions(), 0)
    assert chosen.tolist() == [False, True, False, False]


def test_only_candidates_are_committed():
    candidates = np.array([False, True, False, True])
    chosen = select_commits(np.array([0.9, 0.1, 0.9, 0.2]), candidates, SamplingOptions(threshold=0.05), 0)
    assert (chosen == candidates).all()


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0: at least 1. A legal value: 128"),
        ({"steps": 0}, "--steps 0: at least 1. A legal value: 8"),
        ({"tokens_per_step": 0}, "--tokens-per-step 0: at least 1"),
        ({"steps": 2, "tokens_per_step": 3}, "--tokens-per-step 3: --steps 2 already says"),
        ({"threshold": 0.0}, "--threshold 0.0: 0 < threshold <= 1"),
        ({"threshold": 1.5}, "--threshold 1.5: 0 < threshold <= 1"),
        ({"temperature": -1.0}, "--temperature -1.0: finite and not negative"),
        ({"top_p": 0.0}, "--top-p 0.0: 0 < top-p <= 1"),
    ],
)
def test_options_that_cannot_run_are_refused(choice, message):
    with pytest.raises(ValueError, match=message.replace("<", "\\<")):
        SamplingOptions(**choice)


def test_a_mask_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="--bdlm-mask-token-id 5: it must be a real row of the vocabulary. A legal value: 4"):
        BlockRules(block_size=4, mask_token_id=5, vocab_size=5)
