"""Visibility of the rows of a sampling forward, pair by pair; the cache's rows."""

import itertools

import pytest
import torch

from megatron.bdlm.generation.cache import KeyValueCache
from megatron.bdlm.generation.rows import CLEAN, NOISY, PADDING, BlockRules, SamplingParams, SamplingRows, visibility

S = 4
# sequence 0: 4 cached, clean block 1, noisy block 2; sequence 1: 8 cached, noisy block 2, padding; sequence 2: clean only
LENGTHS = torch.tensor([4, 8, 0])
PARTS = [
    [(CLEAN, i) for i in range(4, 8)] + [(NOISY, i) for i in range(8, 12)],
    [(NOISY, i) for i in range(8, 12)] + [(PADDING, 0)] * 4,
    [(CLEAN, i) for i in range(8)],
]


def rows():
    kind = torch.tensor([[k for k, _ in part] for part in PARTS], dtype=torch.int8)
    position = torch.tensor([[p for _, p in part] for part in PARTS])
    return SamplingRows(torch.zeros_like(position), position, kind, clean_counts=(kind == CLEAN).sum(1))


def sees(query, key, clean_attention, noisy_attention, window):
    """The block diffusion mask, said plainly."""
    (kind, position), (key_kind, key_position) = query, key
    start = position // S * S
    if kind == NOISY and key_kind == NOISY:
        return key_position // S == position // S and (noisy_attention == "bidirectional" or key_position <= position)
    if kind == NOISY and key_kind == CLEAN:
        return key_position < start and (window is None or key_position >= start - (window - 1))
    if kind == CLEAN and key_kind == CLEAN:
        allowed = key_position // S <= position // S if clean_attention == "block-causal" else key_position <= position
        return allowed and (window is None or key_position >= position - (window - 1))
    return False


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("noisy_attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("clean_attention", ["block-causal", "token-causal"])
def test_visibility_pair_by_pair(clean_attention, noisy_attention, window):
    rules = BlockRules(S, 0, 1, clean_attention=clean_attention, noisy_attention=noisy_attention)
    visible = visibility(rows(), LENGTHS, rules, window)
    assert visible.shape == (3, 8, 16)
    for i, part in enumerate(PARTS):
        keys = [(CLEAN, t) for t in range(LENGTHS[i])] + part
        keys += [(PADDING, 0)] * (16 - len(keys))
        for (r, query), (c, key) in itertools.product(enumerate(part), enumerate(keys)):
            if query[0] == PADDING:
                expected = c == LENGTHS[i] + r
            else:
                expected = sees(query, key, clean_attention, noisy_attention, window)
            assert visible[i, r, c] == expected, (i, query, key)


def test_attend_folds_grouped_heads_and_keeps_only_clean_rows():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    cache = KeyValueCache(3)
    cached = {name: draw(8, 3, 2, 5) for name in ("k", "v")}
    cache.write(1, cached["k"], cached["v"])
    cache.advance(LENGTHS)
    query, key, value = draw(8, 3, 6, 5), draw(8, 3, 2, 5), draw(8, 3, 2, 5)
    params = SamplingParams.of(rows(), BlockRules(S, 0, 1), cache)
    out = params.attend(query, key, value, layer_number=1, softmax_scale=0.3, window=None)
    for i in range(3):
        keys = torch.cat([cached["k"][: LENGTHS[i], i], key[:, i]]).repeat_interleave(3, 1)  # [m, n, d]
        values = torch.cat([cached["v"][: LENGTHS[i], i], value[:, i]]).repeat_interleave(3, 1)
        visible = visibility(rows(), LENGTHS, BlockRules(S, 0, 1))[i, :, : len(keys)]
        scores = 0.3 * torch.einsum("snd,mnd->nsm", query[:, i], keys)
        expected = torch.einsum("nsm,mnd->snd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(out[:, i], expected, rtol=0, atol=1e-12)
    cache.advance(rows().clean_counts)
    assert cache.lengths.tolist() == [8, 8, 8]
    keys, _ = cache.write(1, key[:1], value[:1])
    torch.testing.assert_close(keys[4:8, 0], key[:4, 0])
    torch.testing.assert_close(keys[:8, 1], cached["k"][:, 1])
    torch.testing.assert_close(keys[8, 1], key[0, 1])  # over the noisy row that stood there


def test_a_cache_grows_and_drops_sequences():
    cache = KeyValueCache(2)
    written = []
    for step in range(9):
        key = torch.full((2, 2, 1, 1), float(step))
        key[:, 1] += 100
        keys, _ = cache.write(1, key, key)
        cache.advance(torch.tensor([2, 1]))
        written.append(step)
    assert keys[:18, 0].flatten().tolist() == [float(s) for s in written for _ in range(2)]
    cache.keep([1])
    keys, _ = cache.write(1, torch.full((1, 1, 1, 1), -1.0), torch.zeros(1, 1, 1, 1))
    assert keys.flatten().tolist() == [100.0 + s for s in written] + [-1.0]


def test_keys_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="a cache of 2 sequences was given keys of 3"):
        KeyValueCache(2).write(1, torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 1))
