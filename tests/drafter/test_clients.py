"""Export, strict load, and real clients: what they generate with our drafters is plain greedy decoding."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from megatron.bdlm.drafter.acceptance import walk
from megatron.bdlm.drafter.batch import DraftSample
from megatron.bdlm.drafter.client import DraftSession
from megatron.bdlm.drafter.folder import read_drafter, target_tables, write_drafter
from megatron.bdlm.drafter.format import DrafterError
from megatron.bdlm.drafter.huggingface import assistant_of, assisted, reference_package, referenced
from megatron.bdlm.drafter.model import Drafter
from megatron.bdlm.drafter.target import OnlineFeatures, greedy_answers
from tests.drafter import tiny
from tests.drafter.tiny_target import MASK, drafter_config, make_target

NEW = 24
needs_reference = pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="the package dflash is not installed")


def _greedy(target, prompt):
    return greedy_answers(target, [prompt], NEW)[0]


def test_folder_round_trip_is_strict(tmp_path):
    for version in (1, 2):
        config = drafter_config(version)
        drafter = tiny.drafter(config, dtype=torch.float32)
        write_drafter(tmp_path / f"v{version}", config, drafter.state_dict(), torch.float32)
        again = read_drafter(tmp_path / f"v{version}")
        assert again.shape == config
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (tmp_path / "v1" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="missing: layers.2.input_layernorm.weight"):
        read_drafter(tmp_path / "v1")
    with pytest.raises(DrafterError, match="it is there already. A legal value: a new folder"):
        write_drafter(tmp_path / "v2", drafter_config(2), {}, torch.float32)


def test_the_feature_of_layer_i_is_its_output():
    """The index convention: layer ids count from 0, and the final norm is not in a feature."""
    target, tokens = make_target(), np.arange(9) % 7
    sample = DraftSample(tokens, np.ones(9, bool), np.zeros(9, np.int64), 0)
    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None]
        states = target.model(ids, output_hidden_states=True).hidden_states
        by_hand = target.model.embed_tokens(ids)
        rope = target.model.rotary_emb(by_hand, torch.arange(9)[None])
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        for layer in target.model.layers[:4]:
            by_hand = layer(by_hand, attention_mask=mask, position_embeddings=rope)
    source = OnlineFeatures(target, (1, 3), torch.float32)
    features = source.features(sample, np.arange(9))
    assert torch.equal(features, torch.cat((states[2][0], states[4][0]), -1))
    assert torch.allclose(features[:, 32:], by_hand[0] if by_hand.dim() == 3 else by_hand, atol=1e-5)
    assert torch.equal(source.last_hidden(sample, np.array([8])), states[-1][0, 8:])


def test_documents_of_a_sample_do_not_see_each_other():
    source = OnlineFeatures(make_target(), (3,), torch.float32)
    tokens = np.array([1, 2, 3, 4, 5, 6])
    both = source.features(DraftSample(tokens, np.ones(6, bool), np.array([0, 0, 0, 1, 1, -1]), 0), np.arange(6))
    alone = source.features(DraftSample(tokens[3:5], np.ones(2, bool), np.zeros(2, int), 1), np.arange(2))
    assert torch.equal(both[3:5], alone) and (both[5] == 0).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_transformers_client_equals_greedy_and_the_replayed_walk(kind):
    target, drafter = make_target(kind=kind), tiny.drafter(drafter_config(), dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    answer = _greedy(target, prompt)
    out, lengths = assisted(target, assistant_of(drafter), prompt, NEW)
    assert out == answer
    tokens = np.array(prompt + answer)
    sample = DraftSample(tokens, np.arange(len(tokens)) >= len(prompt), np.zeros(len(tokens), np.int64), 0)
    head = target.lm_head.weight
    replay = walk(drafter, sample, OnlineFeatures(target, (1, 3), torch.float32), target.model.embed_tokens.weight, head)
    # the client stops where its budget of tokens ends: the last verifications may be cut
    assert len(lengths) > 5 and list(replay.lengths)[: len(lengths) - 2] == lengths[: len(lengths) - 2]


def test_transformers_class_equals_the_client_of_the_project():
    from transformers.cache_utils import DFlashCache

    config = drafter_config()
    drafter, features = tiny.drafter(config, dtype=torch.float32), torch.randn(9, config.feature_size)
    assistant, embedding = assistant_of(drafter), torch.randn(config.vocab_size, config.hidden_size)
    session, cache = DraftSession(drafter, embedding, embedding), DFlashCache(config=assistant.config)
    cache.activate_past_recording()
    done = 0
    for anchor in (6, 9):
        rows = embedding[torch.tensor([7] + [MASK] * (config.block_size - 1))][None]
        cache.set_previous_accepted_tokens(anchor - done)
        if done:
            cache.crop(-config.block_size)
        positions = torch.arange(done, anchor + config.block_size)[None]
        with torch.no_grad():
            theirs = assistant(
                noise_embeds=rows, context_hidden_states=features[None, done:anchor], position_ids=positions,
                attention_mask=torch.ones(1, anchor + config.block_size), cache=cache,
            ).last_hidden_state[0]
        assert torch.allclose(session.hidden(features[done:anchor], 7), theirs, atol=1e-5)
        done = anchor


def test_clients_that_would_run_another_function_are_refused():
    with pytest.raises(DrafterError, match="--client transformers: it runs DFlash with full, bidirectional layers"):
        assistant_of(Drafter(drafter_config(2)))
    with pytest.raises(DrafterError, match="--client transformers"):
        assistant_of(Drafter(tiny.WINDOWED))


@needs_reference
@pytest.mark.parametrize("version", [1, 2])
def test_reference_package_equals_greedy_and_the_replayed_walk(version, tmp_path):
    target, config = make_target(kind="qwen3"), drafter_config(version)
    drafter = tiny.drafter(config, dtype=torch.float32)
    write_drafter(tmp_path / "drafter", config, drafter.state_dict(), torch.float32)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    answer = _greedy(target, prompt)
    out, lengths = referenced(target, tmp_path / "drafter", prompt, NEW)
    assert out == answer
    tokens = np.array(prompt + answer)
    sample = DraftSample(tokens, np.arange(len(tokens)) >= len(prompt), np.zeros(len(tokens), np.int64), 0)
    target.save_pretrained(tmp_path / "target")
    replay = walk(drafter, sample, OnlineFeatures(target, (1, 3), torch.float32), *target_tables(tmp_path / "target"))
    assert list(replay.lengths) == lengths


@needs_reference
@pytest.mark.parametrize("config", [drafter_config(1), drafter_config(2)], ids=["dflash", "dflash2"])
def test_reference_hidden_states_are_ours(config, tmp_path):
    drafter = tiny.drafter(config, dtype=torch.float32)
    write_drafter(tmp_path / "drafter", config, drafter.state_dict(), torch.float32)
    module = reference_package()
    name = "DFlash2DraftModel" if config.version == 2 else "DFlashDraftModel"
    theirs = getattr(module, name).from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    embedding, features = torch.randn(config.vocab_size, config.hidden_size), torch.randn(6, config.feature_size)
    session = DraftSession(drafter, embedding, embedding)
    ours = session.hidden(features, 7)
    rows = embedding[torch.tensor([7] + [MASK] * 3)][None]
    with torch.no_grad():
        hidden = theirs(position_ids=torch.arange(10)[None], noise_embedding=rows, target_hidden=features[None])[0]
    assert torch.allclose(ours, hidden, atol=1e-5)
