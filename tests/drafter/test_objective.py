"""The loss on scored rows: chunks, variants, the selector, nothing to score."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.bdlm.drafter.batch import build_batch
from megatron.bdlm.drafter.format import DrafterError
from megatron.bdlm.drafter.losses import position_weights
from megatron.bdlm.drafter.objective import DraftObjective, draft_loss
from tests.drafter import tiny
from tests.drafter.test_model import _batch, _forward
from tests.drafter.tiny import Fixed


@pytest.mark.parametrize("objective", [
    DraftObjective(), DraftObjective("dpace"), DraftObjective("dpace", lk="lambda"), DraftObjective(lk="tv"), DraftObjective("kl"),
], ids=["ce", "dpace", "dpace-lambda", "tv", "kl"])
@pytest.mark.parametrize("config", [tiny.V1, tiny.V2, replace(tiny.V1, final_logit_softcapping=3.0)], ids=["v1", "v2", "softcap"])
def test_chunks_change_nothing(config, objective):
    data = tiny.samples(2)
    whole = tiny.loss_and_gradients(config, data, objective=replace(objective, chunk=1000))
    parts = tiny.loss_and_gradients(config, data, objective=replace(objective, chunk=7))
    assert torch.allclose(whole[0], parts[0], atol=1e-12) and torch.allclose(whole[1], parts[1])
    for name in whole[2]:
        assert torch.allclose(whole[2][name], parts[2][name], atol=1e-11), name


def test_cross_entropy_by_hand():
    config, data = tiny.V1, tiny.samples(1)
    batch, model = _batch(config, data), tiny.drafter(config)
    hidden, head = _forward(model, batch, config), tiny.target_tables(config)[1]
    loss = draft_loss(hidden, batch, head, model, DraftObjective(gamma=2.0))
    total, weight, weights = 0.0, 0.0, position_weights(4, 2.0).double()
    for slot in range(len(batch.tokens)):
        for k in range(1, 4):
            if batch.scored[slot, k]:
                logits = hidden[slot * 4 + k] @ head.t()
                total += weights[k] * cross_entropy(logits[None], batch.labels[slot, k][None])
                weight += weights[k]
    assert torch.allclose(loss.total, total, atol=1e-6) and torch.allclose(loss.weight, weight.double(), atol=1e-6)


def test_selector_over_the_whole_vocabulary_is_the_full_cross_entropy():
    config = replace(tiny.V2, selector_top_k=tiny.V2.vocab_size)
    batch, model = _batch(config, tiny.samples(1)), tiny.drafter(config)
    torch.nn.init.zeros_(model.candidate_selector.successor_codebook)
    loss = draft_loss(_forward(model, batch, config), batch, tiny.target_tables(config)[1], model, DraftObjective())
    assert torch.allclose(loss.parts["selector loss"][0], loss.parts["draft cross entropy"][0], atol=1e-10)
    assert torch.equal(loss.parts["candidate recall"][0], loss.parts["candidate recall"][1])


def test_the_selector_is_given_the_true_token_before_also_across_a_hole():
    sample = replace(tiny.samples(1)[0], documents=np.zeros(24, np.int64), loss_mask=np.ones(24, bool))
    holed = replace(sample, loss_mask=sample.loss_mask & (np.arange(24) != 7))
    batch = build_batch([holed], tiny.RandomFeatures(tiny.V2), tiny.V2, Fixed([5]))
    assert batch.scored[0].tolist() == [False, True, False, True]
    assert batch.labels[0].tolist() == sample.tokens[5:9].tolist()


@pytest.mark.parametrize("config", [tiny.V1, tiny.V2], ids=["v1", "v2"])
@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_no_anchor_is_a_finite_zero(config, kind):
    for data in (tiny.samples(1, supervised=False), [replace(tiny.samples(1, 1)[0], documents=np.zeros(1, np.int64))]):
        total, weight, gradients = tiny.loss_and_gradients(config, data, objective=DraftObjective(kind))
        assert total == 0 and weight == 0
        assert all((gradient == 0).all() for gradient in gradients.values())


def test_unknown_choices_are_refused():
    with pytest.raises(DrafterError, match="--dflash-loss mse: known values are ce, kl, dpace. A legal value: ce"):
        DraftObjective("mse")
    with pytest.raises(DrafterError, match="--dflash-lk-loss tv: kl has no label. A legal value: none"):
        DraftObjective("kl", lk="tv")
    with pytest.raises(DrafterError, match="--dflash-dpace-alpha 2: between 0 and 1. A legal value: 0.5"):
        DraftObjective("dpace", dpace_alpha=2)
