"""The drafter against a plain oracle, its modules against loops, training against the client."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.bdlm.drafter.anchors import AnchorDraw
from megatron.bdlm.drafter.attention import PlannedAttention
from megatron.bdlm.drafter.batch import build_batch
from megatron.bdlm.drafter.client import DraftSession
from megatron.bdlm.drafter.dflash2 import BlockConvolution, CandidateSelector
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError, default_layer_ids
from megatron.bdlm.drafter.model import Drafter
from megatron.bdlm.drafter.objective import draft_forward
from megatron.bdlm.testing.drafter_oracle import draft_mask, drafter_forward
from tests.drafter import tiny


def _batch(config, data, count=6):
    return build_batch(data, tiny.RandomFeatures(config), config, AnchorDraw(count, config.block_size, seed=5))


def _forward(model, batch, config):
    return draft_forward(model, batch, tiny.target_tables(config)[0], PlannedAttention(batch.plan, config))


@pytest.mark.parametrize("config", [tiny.V1, tiny.MIXED, replace(tiny.MIXED, causal=False)], ids=["full", "mixed", "non-causal"])
def test_forward_equals_the_oracle(config):
    data, model = tiny.samples(2), tiny.drafter(config)
    batch = _batch(config, data)
    length, anchors = len(data[0].tokens), batch.plan.anchors

    def mask(layer):
        return draft_mask(
            2 * length, anchors.positions, config.block_size, anchors.context_starts, config.window(layer), config.is_causal(layer)
        )

    rows = tiny.target_tables(config)[0][batch.tokens.reshape(-1)]
    wanted = drafter_forward(
        dict(model.named_parameters()), config.num_hidden_layers, rows, batch.features, batch.positions.tolist(),
        batch.context_positions.tolist(), mask, config.rope_theta, config.rms_norm_eps,
    )
    assert torch.allclose(_forward(model, batch, config), wanted, atol=1e-12, rtol=0)


def test_features_behind_an_anchor_do_not_matter():
    config = replace(tiny.V1, block_size=8, mask_token_id=49)
    data = tiny.samples(1, 32)
    data = [replace(data[0], loss_mask=np.ones(32, bool), documents=np.zeros(32, np.int64))]
    model, draw = tiny.drafter(config), tiny.Fixed([10, 13])
    batch = build_batch(data, tiny.RandomFeatures(config), config, draw)
    before = _forward(model, batch, config).unflatten(0, (2, 8))
    changed = batch.features.clone()
    changed[13:] += 1
    assert torch.equal(_forward(model, replace(batch, features=changed), config).unflatten(0, (2, 8)), before)
    changed = batch.features.clone()
    changed[11] += 1
    after = _forward(model, replace(batch, features=changed), config).unflatten(0, (2, 8))
    assert torch.equal(after[0], before[0]) and (after[1] - before[1]).abs().amax(1).min() > 1e-6


@pytest.mark.parametrize("config", [tiny.V1, tiny.MIXED, tiny.V2], ids=["full", "mixed", "dflash2"])
def test_training_equals_the_client_with_its_cache(config):
    """One anchor as trained, against the client's first call and its call after an accepted step."""
    sample = replace(tiny.samples(1, 24)[0], loss_mask=np.ones(24, bool), documents=np.zeros(24, np.int64))
    model, (embedding, head) = tiny.drafter(config), tiny.target_tables(config)
    session, source = DraftSession(model, embedding, head), tiny.RandomFeatures(config)
    done = 0
    for anchor in (9, 12, 13, 20):
        batch = build_batch([sample], source, config, tiny.Fixed([anchor]))
        trained = _forward(model, batch, config)
        drafted = session.hidden(source.features(sample, np.arange(done, anchor)), int(sample.tokens[anchor]))
        done = anchor
        assert torch.allclose(trained, drafted, atol=1e-10, rtol=0)
        assert torch.allclose(session.logits(trained[1:]), session.logits(drafted[1:]), atol=1e-9, rtol=0)


# ---- DFlash2 ------------------------------------------------------------------------------------


def test_identity_convolution_is_dflash_bit_for_bit():
    plain, with_modules = Drafter(tiny.V1).double().initialise(1), Drafter(tiny.V2).double().initialise(2)
    told = with_modules.load_state_dict(plain.state_dict(), strict=False)
    assert not told.unexpected_keys and all("conv" in key or "selector" in key for key in told.missing_keys)
    batch = _batch(tiny.V1, tiny.samples(1))
    assert torch.equal(_forward(plain, batch, tiny.V1), _forward(with_modules, batch, tiny.V2))


def test_convolution_equals_loops_and_stays_in_its_block():
    torch.manual_seed(0)
    conv = BlockConvolution(8, taps=3, group=4, block_size=4).double()
    torch.nn.init.normal_(conv.base_kernel)
    torch.nn.init.normal_(conv.kernel_projection.weight)
    x = torch.randn(8, 8, dtype=torch.float64)
    delta = conv.deltas(x)
    wanted = torch.zeros_like(x)
    for row in range(8):
        for channel in range(8):
            for tap in range(3):
                if row % 4 - tap >= 0:
                    kernel = conv.base_kernel[1, tap, channel] + delta[row, 1, tap, channel // 4]
                    wanted[row, channel] += kernel * x[row - tap, channel]
    assert torch.allclose(conv.convolve(x, delta, 1), wanted, atol=1e-12)
    changed = x.clone()
    changed[3] += 1
    assert torch.equal(conv.convolve(changed, delta, 1)[4:], conv.convolve(x, delta, 1)[4:])


def test_selector_at_its_start_is_the_argmax():
    selector = CandidateSelector(vocab=20, hidden=6, rank=3, top_k=4)
    logits, hidden = torch.randn(2, 5, 20), torch.randn(2, 5, 6)
    assert torch.equal(selector.walk(logits, hidden, torch.tensor([1, 2])), logits.argmax(-1))


def test_selector_walk_equals_loops():
    torch.manual_seed(0)
    selector = CandidateSelector(vocab=20, hidden=6, rank=3, top_k=4)
    torch.nn.init.normal_(selector.successor_codebook)
    torch.nn.init.normal_(selector.predecessor_codebook)
    logits, hidden = torch.randn(1, 5, 20), torch.randn(1, 5, 6)
    before, wanted = 7, []
    for row in range(5):
        best = sorted(range(20), key=lambda c: -logits[0, row, c])[:4]
        key = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ hidden[0, row])
        before = max(best, key=lambda c: float(logits[0, row, c] + key @ selector.successor_codebook[c]))
        wanted.append(before)
    assert selector.walk(logits, hidden, torch.tensor([7]))[0].tolist() == wanted


# ---- shape --------------------------------------------------------------------------------------


def test_layer_ids():
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33) and default_layer_ids(36, 1) == (18,)
    with pytest.raises(DrafterError, match=r"target_layer_ids \[6\]: layers 0..5 of the target, counted from 0. A legal value: \[1, 3\]"):
        replace(tiny.V1, target_layer_ids=(6,))


@pytest.mark.parametrize("config", [tiny.V1, tiny.V2, tiny.MIXED], ids=["dflash", "dflash2", "mixed"])
def test_inventory_and_config_file(config):
    assert {name: tuple(p.shape) for name, p in Drafter(config).state_dict().items()} == config.tensor_shapes()
    published = config.published()
    assert published["block_size"] == published["dflash_config"]["block_size"] == config.block_size
    assert DrafterConfig.from_published(published) == config


def test_contradicting_config_files_are_refused():
    with pytest.raises(DrafterError, match="block_size 8: equal at both levels. A legal value: 4"):
        DrafterConfig.from_published({**tiny.V1.published(), "block_size": 8})
    with pytest.raises(DrafterError, match="is_causal .*must agree"):
        DrafterConfig.from_published({**tiny.V1.published(), "is_causal": True, "sliding_window_non_causal": True})
    with pytest.raises(DrafterError, match="dflash_config None: a published drafter has it"):
        DrafterConfig.from_published({"model_type": "qwen3"})
