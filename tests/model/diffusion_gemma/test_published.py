"""Our model against the published one: every row, every gradient, in float32 (tests 1 to 7 of the model)."""

import numpy as np
import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

pytest.importorskip("transformers.models.diffusion_gemma")

from transformers import DynamicCache  # noqa: E402

from megatron.bdlm.model.diffusion_gemma import attention, norms, rotary  # noqa: E402
from megatron.bdlm.parallel import relations  # noqa: E402
from megatron.bdlm.parallel.staircase import Staircase  # noqa: E402
from tests.model.diffusion_gemma import models  # noqa: E402

# length, start of the response, block size, window: whole blocks; a ragged last one and a canvas longer than the window;
# a response from the first token on
SHAPES = [(23, 5, 6, 8), (40, 9, 12, 5), (13, 0, 6, 8)]
TOLERANCE = dict(rtol=0, atol=5e-5)


def sample(length, batch=1, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, models.VOCABULARY, (batch, length), generator=generator) for _ in range(2))


def blocks(length, first, size):
    return [(start, min(start + size, length)) for start in range(first, length, size)]


def empty_cache(model, batch):
    """A cache without a token: what stands before a response that starts at once."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for layer, of in zip(cache.layers, model.model.decoder.layers):
        size = of.self_attn.head_dim
        layer.keys = layer.values = torch.zeros(batch, of.self_attn.k_proj.out_features // size, 0, size)
    return cache


def published_logits(model, x0, xt, first, size, **kwargs):
    """Noisy rows block by block, as the published model computes them, and clean rows: logits [b, rows, V]."""
    parts = []
    for start, stop in blocks(x0.size(1), first, size):
        given = {name: value[:, start - first : stop - first] for name, value in kwargs.items() if name == "self_conditioning_logits"}
        prefix = dict(input_ids=x0[:, :start]) if start else dict(cache=empty_cache(model, len(x0)))
        parts.append(model(decoder_input_ids=xt[:, start:stop], **prefix, **{**kwargs, **given}).logits)
    clean = model.model.encoder(x0).last_hidden_state
    return torch.cat(parts, dim=1), 30 * torch.tanh(model.lm_head(clean) / 30)


@pytest.fixture(scope="module")
def pair():
    made = {}

    def of(window):
        if window not in made:
            models.start()
            theirs = models.published(window)
            made[window] = theirs, models.load(models.ours(window), models.joined(theirs)).eval()
        return made[window]

    return of


@pytest.mark.parametrize("length, first, size, window", SHAPES)
def test_noisy_and_clean_rows(pair, length, first, size, window):
    theirs, ours = pair(window)
    x0, xt = sample(length)
    with torch.no_grad():
        noisy, clean = published_logits(theirs, x0, xt, first, size)
        logits = models.run(ours, models.plan_of(length, first, size), x0, xt)[..., : models.VOCABULARY]
    assert noisy.abs().max() > 3
    torch.testing.assert_close(logits, torch.cat((noisy, clean), dim=1), **TOLERANCE)


def test_self_conditioning_of_one_of_two_samples(pair):
    theirs, ours = pair(8)
    x0, xt = sample(23, batch=2)
    plan, chosen = models.plan_of(23, 5, 6), torch.tensor([True, False])
    with torch.no_grad():
        first, _ = published_logits(theirs, x0, xt, 5, 6)
        noisy, clean = published_logits(theirs, x0, xt, 5, 6, self_conditioning_logits=first, self_conditioning_mask=chosen)
        logits = models.run(ours, plan, x0, xt, self_conditioned=chosen)[..., : models.VOCABULARY]
    torch.testing.assert_close(logits, torch.cat((noisy, clean), dim=1), **TOLERANCE)
    moved = (noisy - first).abs().amax((1, 2))
    assert moved[0] > 0.1 and moved[1] < 1e-5


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def test_gradients():
    """Of the sum over noisy rows (row i predicts token i) and clean rows (token i + 1), every parameter."""
    models.start()
    theirs = models.published()
    ours = models.load(models.ours(bdlm=models.options(bdlm_freeze_router=False)), models.joined(theirs))
    x0, xt = sample(23)
    x0[0, 3] = xt[0, 9] = 0  # pad tokens: their row of the embedding gets no gradient from the lookup
    noisy, clean = published_logits(theirs, x0, xt, 5, 6)
    wanted = cross_entropy(noisy, x0[:, 5:]) + cross_entropy(clean[:, :-1], x0[:, 1:])
    wanted.backward()

    plan = models.plan_of(23, 5, 6)
    scored = torch.cat((torch.arange(18), 18 + torch.arange(22)))
    rows = type("Rows", (), dict(index=scored, target=torch.cat((x0[0, 5:], x0[0, 1:]))))
    found = models.run(ours, plan, x0, xt, scored_rows=rows).sum()
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)

    expected = {name: parameter.grad for name, parameter in theirs.named_parameters(remove_duplicate=False)}
    compared = 0
    for name, parameter in ours.named_parameters():
        their_parts = [part.name for each in models.tensors() if each.target == _whole(name) for part in each.parts]
        gradient = next(each for each in models.tensors() if each.target == _whole(name)).join(
            {part: expected[part] if expected[part] is not None else torch.zeros_like(theirs.get_parameter(part)) for part in their_parts}
        )
        if "local_experts" in name:
            gradient = gradient[int(name.split("local_experts.")[1].split(".")[0])]
        error = (parameter.grad - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-5, (name, float(error))
        compared += 1
    assert compared == len(list(ours.named_parameters())) > 40


def _whole(name):
    """Name of the tensor of all experts for that of one."""
    if "local_experts" not in name:
        return name
    head, tail = name.split("local_experts.")
    return f"{head}experts.{tail.split('.', 1)[1]}"


# ---- variants that are wrong -------------------------------------------------------------------


def _window_of_all_keys(ours, patch):
    for layer in ours.decoder.layers:
        core = layer.self_attention.core_attention
        patch.setattr(core, "window", None if core.window is None else core.window + 1)


def _window_from_the_query(ours, patch):
    right = relations.noisy_earlier

    def earlier(table, rows, keys, window):
        if window is None:
            return right(table, rows, keys, None)
        tokens = rows.tokens()  # one segment a row: from its own window's start to its block's start
        block = table.of_tokens(tokens)
        low = keys.rank_of(np.maximum(tokens - (window - 1), table.document_starts[block]))
        high = np.maximum(keys.rank_of(table.starts[block]), low)
        still = np.zeros(len(block), bool)
        return Staircase(np.arange(len(block)), np.ones_like(low), low, high, still, still, block)

    patch.setattr(relations, "noisy_earlier", earlier)


def _no_self_conditioning(ours, patch):
    patch.setattr(ours, "_inputs", lambda embedded, *_: embedded)


def _value_from_normed_keys(ours, patch):
    right = attention.GemmaSelfAttention.get_query_key_value_tensors

    def wrong(self, *args, **kwargs):
        query, key, value = right(self, *args, **kwargs)
        return query, key, norms.unweighted_norm(key, 1e-6) if self.is_full else value

    patch.setattr(attention.GemmaSelfAttention, "get_query_key_value_tensors", wrong)


def _every_pair_turns(ours, patch):
    patch.setattr(ours.rotary_pos_emb, "full", rotary.frequencies(32, 1e6))


def _weight_plus_one(ours, patch):
    patch.setattr(norms.GemmaRMSNorm, "forward", lambda self, x: norms.rms(x, self.eps) * (1 + self.weight))


def _scaled_scores(ours, patch):
    for layer in ours.decoder.layers:
        core = layer.self_attention.core_attention
        patch.setattr(core, "softmax_scale", layer.self_attention.hidden_size_per_attention_head**-0.5)


def _one_scalar(ours, patch):
    for layer in ours.decoder.layers:
        patch.setattr(layer, "clean_layer_scalar", layer.layer_scalar)


WRONG = [
    _window_of_all_keys, _window_from_the_query, _no_self_conditioning, _value_from_normed_keys, _every_pair_turns,
    _weight_plus_one, _scaled_scores, _one_scalar,
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__.strip("_"))
def test_a_wrong_variant_would_be_seen(pair, change, monkeypatch):
    theirs, ours = pair(8)
    x0, xt = sample(23)
    with torch.no_grad():
        right = torch.cat(published_logits(theirs, x0, xt, 5, 6), dim=1)
        change(ours, monkeypatch)
        wrong = models.run(ours, models.plan_of(23, 5, 6), x0, xt)[..., : models.VOCABULARY]
    assert (wrong - right).abs().max() > 0.1
