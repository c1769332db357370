"""Sampling block by block: the cache changes nothing, the label shift is obeyed, and commits are counted right."""

import itertools

import pytest
import torch

from megatron.bdlm.generation.policy import SamplingOptions
from megatron.bdlm.generation.rows import NOISY, BlockRules
from megatron.bdlm.generation.sampler import sample
from tests.generation.tiny import MASK, PADDED, VOCAB, TinyModel, overfit, plain_greedy

S = 4


def rules(**changes):
    return BlockRules(**{"block_size": S, "mask_token_id": MASK, "vocab_size": VOCAB, **changes})


class Recorder:
    """A model that keeps the logits of every noisy row."""

    def __init__(self, model):
        self.model, self.noisy, self.widths = model, [], []

    def __call__(self, input_ids, position_ids, params):
        logits = self.model(input_ids, position_ids, params)
        self.noisy.append(logits[params.rows.kind == NOISY])
        self.widths.append(input_ids.size(1))
        return logits


@pytest.mark.parametrize("shift", ["none", "next"])
@pytest.mark.parametrize("clean, noisy", [("block-causal", "bidirectional"), ("token-causal", "causal")])
@pytest.mark.parametrize("prompt_length", [1, 4, 7])
def test_greedy_equals_a_plain_sampler_without_cache(shift, clean, noisy, prompt_length):
    model = TinyModel(seed=3)
    prompt = [(5 * i + 2) % VOCAB for i in range(prompt_length)]
    expected, expected_logits = plain_greedy(model, prompt, 9, S, shift, clean, noisy)
    recorder = Recorder(model)
    result = sample(
        recorder, [prompt], rules(label_shift=shift, clean_attention=clean, noisy_attention=noisy), SamplingOptions(max_new_tokens=9)
    )
    assert list(result.sequences[0].tokens) == expected
    logits = torch.stack([x for x in recorder.noisy if len(x)])
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-10)


PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [7, 7, 7, 7], [20, 4, 9, 30, 2, 11]]


@pytest.mark.parametrize("shift", ["none", "next"])
@pytest.mark.parametrize("choice", [{}, {"temperature": 0.8, "top_p": 0.9}, {"steps": 3}, {"threshold": 0.06}])
def test_the_cache_changes_nothing_in_a_batch(shift, choice):
    options = SamplingOptions(max_new_tokens=10, eos_token_ids=(5,), **choice)
    with_cache, without = Recorder(TinyModel(seed=5)), Recorder(TinyModel(seed=5))
    cached = sample(with_cache, PROMPTS, rules(label_shift=shift), options)
    plain = sample(without, PROMPTS, rules(label_shift=shift), options, use_cache=False)
    assert cached.sequences == plain.sequences
    assert cached.statistics.clean_rows < plain.statistics.clean_rows
    torch.testing.assert_close(torch.cat(with_cache.noisy), torch.cat(without.noisy), rtol=0, atol=1e-10)


@pytest.mark.parametrize("choice", [{}, {"temperature": 1.0}])
def test_a_sequence_does_not_depend_on_the_batch(choice):
    options = SamplingOptions(max_new_tokens=7, **choice)
    model = Recorder(TinyModel(seed=5))
    batch = sample(model, PROMPTS, rules(), options).sequences
    if not choice:
        for prompt, expected in zip(PROMPTS, batch):
            assert sample(model, [prompt], rules(), options).sequences[0] == expected
    # a later prompt is never noticed by an earlier one, not even through the random numbers
    assert sample(model, PROMPTS[:2], rules(), options).sequences == batch[:2]


@pytest.mark.parametrize("prefill_rows", [1, 4, 9, 512])
def test_a_prompt_taken_in_pieces_gives_the_same(prefill_rows):
    prompts = [[(3 * i) % MASK for i in range(n)] for n in (26, 3)]
    recorder = Recorder(TinyModel(seed=5))
    result = sample(recorder, prompts, rules(), SamplingOptions(max_new_tokens=6), prefill_rows=prefill_rows)
    whole = sample(TinyModel(seed=5), prompts, rules(), SamplingOptions(max_new_tokens=6))
    assert result.sequences == whole.sequences
    assert max(recorder.widths) <= max(prefill_rows // S, 1) * S + S


@pytest.mark.parametrize("shift", ["none", "next"])
def test_a_model_overfitted_to_one_sample_reproduces_it(shift):
    text = [17, 3, 3, 21, 8, 30, 8, 2, 11, 3, 25, 8, 6, 19, 30, 1, 12, 5, 3, 33]
    model = overfit(text, S, shift)
    for prompt_length, steps in itertools.product((1, 4, 6), (1, 4)):
        result = sample(
            model, [text[:prompt_length]], rules(label_shift=shift),
            SamplingOptions(max_new_tokens=len(text) - prompt_length, steps=steps),
        )
        assert list(result.sequences[0].tokens) == text[prompt_length:], (prompt_length, steps)


def rigged(text, shift="none", sure=None):
    """A model that knows the token of every position, with a confidence for each."""

    def model(input_ids, position_ids, params):
        logits = torch.zeros(*input_ids.shape, PADDED, dtype=torch.float64)
        logits[..., MASK] = 50.0  # the mask token and the padded rows would win, if they were let
        logits[..., VOCAB:] = 60.0
        target = (position_ids + (shift == "next")).clamp(max=len(text) - 1)
        strength = torch.full((len(text),), 5.0) if sure is None else torch.tensor(sure)
        logits.scatter_(-1, torch.tensor(text)[target][..., None], strength.double()[target][..., None])
        return logits

    return model


@pytest.mark.parametrize("shift", ["none", "next"])
def test_end_of_text_inside_a_block_stops(shift):
    text = [1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12]
    options = SamplingOptions(max_new_tokens=9, eos_token_ids=(0,))
    result = sample(rigged(text, shift), [[1, 2, 3]], rules(label_shift=shift), options)
    assert result.sequences[0].tokens == (4, 5, 6, 0)
    assert result.sequences[0].finish == "eos"
    assert result.sequences[0].shown((0,)) == [1, 2, 3, 4, 5, 6]


def test_tokens_before_an_early_end_of_text_are_still_sampled():
    text = [1, 2, 3, 0, 5, 6, 7, 8]
    sure = [1.0, 2.0, 3.0, 9.0, 1.0, 1.0, 1.0, 1.0]  # the end of text is committed first
    result = sample(rigged(text, sure=sure), [[]], rules(), SamplingOptions(max_new_tokens=8, eos_token_ids=(0,)))
    assert result.sequences[0].tokens == (1, 2, 3, 0)
    assert result.sequences[0].commits == (1, 1, 1, 1)


def test_an_end_of_text_in_the_prompt_does_not_stop():
    text = [0, 2, 3, 4, 5, 6, 7, 8]
    result = sample(rigged(text), [[0, 2]], rules(), SamplingOptions(max_new_tokens=4, eos_token_ids=(0,)))
    assert result.sequences[0].tokens == (3, 4, 5, 6)
    assert result.sequences[0].finish == "length"
    assert result.sequences[0].shown((0,)) == [0, 2, 3, 4, 5, 6]  # what the prompt holds is shown


@pytest.mark.parametrize(
    "choice, commits",
    [
        ({}, (1, 1, 1, 1, 1, 1)),
        ({"tokens_per_step": 3}, (3, 1, 2)),
        ({"steps": 2}, (2, 2, 1, 1)),
        ({"steps": 9}, (1, 1, 1, 1, 1, 1)),
        ({"threshold": 0.5}, (3, 1, 1, 1)),  # 3 sure tokens at once in the first block, then one a step
        ({"threshold": 0.5, "tokens_per_step": 2}, (3, 1, 2)),
        ({"threshold": 1e-9}, (4, 2)),
    ],
)
def test_commits_a_step(choice, commits):
    sure = [5.0, 5.0, 5.0, 0.5, 0.5, 0.4, 0.5, 0.5]  # exp(5) of exp(5) + 38 is 0.80
    result = sample(rigged(list(range(1, 9)), sure=sure), [[]], rules(), SamplingOptions(max_new_tokens=6, **choice))
    assert result.sequences[0].tokens == (1, 2, 3, 4, 5, 6)
    assert result.sequences[0].commits == commits
    assert result.statistics.denoising_steps == len(commits)
    assert result.statistics.tokens_per_forward == pytest.approx(6 / len(commits))


def test_the_clean_run_of_a_block_costs_no_forward_of_its_own():
    result = sample(rigged(list(range(1, 17))), [[1] * 8], rules(), SamplingOptions(max_new_tokens=8, steps=1))
    assert (result.statistics.forwards, result.statistics.clean_rows, result.statistics.noisy_rows) == (2, 12, 8)


def test_an_empty_prompt_under_label_shift_next_is_refused():
    with pytest.raises(ValueError, match="prompt 1 is empty: with --bdlm-label-shift next"):
        sample(TinyModel(), [[1], []], rules(label_shift="next"), SamplingOptions())


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="prompt 0: token id 40 is outside the vocabulary of 40"):
        sample(TinyModel(), [[VOCAB]], rules(), SamplingOptions())
