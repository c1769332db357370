"""DiffusionGemma's objective: what is replaced, what is scored, with which weight (test 12 of the model)."""

import numpy as np
import pytest

from megatron.bdlm.config import BDLMConfig, BDLMConfigError, recipe_values
from megatron.bdlm.data.noise import block_starts_of, corrupt, is_self_conditioned
from megatron.bdlm.objective.targets import build_targets

VOCABULARY, SIZE, FIRST, LENGTH = 20, 8, 5, 32  # the response's blocks: [5, 13) [13, 21) [21, 29) [29, 32)
GEMMA = '{"vocab_size": 20, "full_head_size": 32, "full_key_heads": 1}'
CONFIG = BDLMConfig(**{**recipe_values("diffusion-gemma"), "bdlm_block_size": SIZE, "bdlm_diffusion_gemma": GEMMA})
ELIGIBLE = np.arange(LENGTH) >= FIRST
STARTS = block_starts_of(LENGTH, SIZE, restarts=(FIRST,))


def _noised(sample):
    tokens = np.random.default_rng(sample).integers(0, VOCABULARY, LENGTH)
    return tokens, corrupt(tokens, ELIGIBLE, CONFIG, 1, sample, 0, block_starts=STARTS, vocab_size=VOCABULARY)


def test_a_thousand_draws():
    """Only the response is replaced, by any token; with probability t a token is drawn, and 1 in V draws is the token itself."""
    changed, expected, seen = 0, 0.0, set()
    for sample in range(1000):
        tokens, noised = _noised(sample)
        differs = noised.xt[0] != tokens
        assert not differs[:FIRST].any()
        changed += int(differs.sum())
        expected += float(noised.t[0, FIRST:].sum()) * (1 - 1 / VOCABULARY)
        seen |= set(noised.xt[0][differs].tolist())
        levels = [len(set(part.tolist())) for part in np.split(noised.t[0], STARTS[1:])]
        assert levels == [1] * len(STARTS)  # one t a block
    assert changed == pytest.approx(expected, rel=0.02) and seen == set(range(VOCABULARY))


def test_every_response_row_is_scored_with_the_mean_of_block_means():
    tokens, noised = _noised(3)
    targets = build_targets(tokens, ELIGIBLE, noised, None, CONFIG, clean_eligible=np.ones(LENGTH, bool))
    assert (targets.scored[0] == ELIGIBLE).all() and (targets.target[0] == tokens)[FIRST:].all()
    assert targets.weight[0].sum() == pytest.approx(1.0) and targets.counted[0].sum() == 1
    assert targets.weight[0, -1] == pytest.approx(1 / 3 / 4)  # the last block has 3 rows, the sample 4 blocks
    # clean rows: every consecutive pair, prompt included
    assert targets.scored[1].sum() == targets.counted[1].sum() == LENGTH - 1
    assert (targets.target[1, :-1] == tokens[1:]).all() and (targets.weight[1, :-1] == 1).all()


def test_half_of_the_samples_run_twice():
    chosen = [is_self_conditioned(0.5, 1, sample, 0) for sample in range(2000)]
    assert sum(chosen) == pytest.approx(1000, abs=80)
    assert chosen == [is_self_conditioned(0.5, 1, sample, 0) for sample in range(2000)]
    assert not any(is_self_conditioned(0.0, 1, sample, 0) for sample in range(100))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(bdlm_diffusion_gemma="{"), "--bdlm-diffusion-gemma {: no JSON"),
        (dict(bdlm_diffusion_gemma='{"vocab_size": 20}'), "an object with vocab_size, full_head_size, full_key_heads; further keys are"),
        (dict(bdlm_diffusion_gemma=GEMMA.replace("32", "-1")), "positive numbers for full_head_size. A legal value"),
        (dict(bdlm_clean_attention="block-causal", bdlm_clean_loss_weight=0.0), "--bdlm-clean-attention block-causal: .* A legal value: token-causal"),
        (dict(bdlm_self_conditioning=1.5), "--bdlm-self-conditioning 1.5: a share of samples. A legal value: 0"),
    ],
)
def test_refused_options(changes, message):
    import dataclasses

    with pytest.raises(BDLMConfigError, match=message):
        dataclasses.replace(CONFIG, **changes).validate()
