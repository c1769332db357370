"""What shares one clean stream gives the same loss and gradients: two views in one pass, prompts without noisy rows."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.noise import corrupt
from megatron.bdlm.testing.tiny_model import TinyModel, TinySample, TinyShape, step_loss

LENGTH, MASK = 96, 63


def _sample(config, documents=None, prompt=0):
    generator = np.random.default_rng(3)
    tokens = generator.integers(0, MASK, LENGTH)
    eligible = np.arange(LENGTH) >= prompt
    return TinySample(tokens, eligible, corrupt(tokens, eligible, config, documents=documents), documents)


def _gradients(samples, config, factor=1.0):
    model = TinyModel(TinyShape(), dtype=torch.float64)
    total, count = step_loss(model, samples, config)
    (total * factor).backward()
    return total.item() * factor, count, [p.grad.clone() for p in model.parameters()]


def _assert_equal(ours, theirs):
    assert abs(ours[0] - theirs[0]) <= 1e-12 * abs(theirs[0])
    for a, b in zip(ours[2], theirs[2], strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@pytest.mark.parametrize("shift", ["none", "next"])
@pytest.mark.parametrize("documents", [None, (41, 55)])
def test_two_views_in_one_pass_equal_two_passes(shift, documents):
    """View v of the pair, alone over its own clean stream; the sums add up."""
    config = BDLMConfig(
        bdlm_block_size=8, bdlm_views=2, bdlm_loss_weight="unit", bdlm_label_shift=shift, bdlm_mask_token_id=MASK
    )
    both = _sample(config, documents)
    noised = both.noised
    one_pass = _gradients([both], config)

    def view(v):
        part = {
            f.name: getattr(noised, f.name)[v : v + 1]
            for f in dataclasses.fields(noised)
            if isinstance(getattr(noised, f.name), np.ndarray) and getattr(noised, f.name).ndim == 2
        }
        return TinySample(both.tokens, both.eligible, dataclasses.replace(noised, **part), documents)

    two_passes = _gradients([view(0), view(1)], dataclasses.replace(config, bdlm_views=1))
    _assert_equal(one_pass, two_passes)
    assert two_passes[1] == 2 * one_pass[1]  # the pair scores each token once, so its denominator counts it once


@pytest.mark.parametrize("shift", ["none", "next"])
@pytest.mark.parametrize("prompt", [72, 70, 96])
def test_prompts_need_no_noisy_rows(shift, prompt):
    config = BDLMConfig(bdlm_block_size=8, bdlm_label_shift=shift, bdlm_mask_token_id=MASK)
    sample = _sample(config, prompt=prompt)
    targets = _gradients([sample], config)
    everything = _gradients([sample], dataclasses.replace(config, bdlm_noisy_rows="all"))
    assert targets[1] == everything[1] == LENGTH - prompt
    if prompt == LENGTH:
        assert targets[0] == everything[0] == 0.0 and all(g.abs().max() == 0 for g in targets[2])
    else:
        _assert_equal(targets, everything)
