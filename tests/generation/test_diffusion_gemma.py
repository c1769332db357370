"""The canvas sampler: its rules by hand, and step by step against transformers with the same random numbers (test 11)."""

import json

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

pytest.importorskip("transformers.models.diffusion_gemma")

from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig  # noqa: E402

from megatron.bdlm.generation.diffusion_gemma import (  # noqa: E402
    CanvasOptions,
    Stopping,
    _finished,
    accepted,
    entropies,
    sample_canvases,
    temperature,
)
from tests.model.diffusion_gemma import models  # noqa: E402


def test_rows_are_accepted_by_ascending_entropy():
    entropy = torch.tensor([[0.1985, 0.0079, 0.6730, 0.0560]])
    assert accepted(entropy, 0.1).tolist() == [[True, True, False, True]]
    assert accepted(entropy, 0.0).tolist() == [[False, True, False, False]]  # the lowest always


def test_temperature_never_reaches_its_floor():
    values = [temperature(remaining, CanvasOptions()) for remaining in (48, 24, 1)]
    assert values == pytest.approx([0.8, 0.6, 0.4 + 0.4 / 48])


def test_a_canvas_settles_when_it_repeats_with_little_entropy():
    stopping = Stopping(CanvasOptions(confidence_threshold=0.1))
    canvas, other = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[3, 4], [5, 7]])
    low = torch.full((2, 2), 0.05)
    assert stopping.settled(canvas, low).tolist() == [False, False]  # the first step never
    assert stopping.settled(other, low).tolist() == [True, False]
    assert stopping.settled(other, 4 * low).tolist() == [False, False]
    assert Stopping(CanvasOptions(stability_threshold=0, confidence_threshold=0.1)).settled(canvas, low).all()


def test_entropy_of_even_logits():
    assert float(entropies(torch.zeros(1, 8))) == pytest.approx(2.0794415)


def test_padding_behind_the_end():
    options = CanvasOptions(eos_token_ids=(1,), pad_token_id=0)
    canvas, ended = _finished(torch.tensor([[5, 1, 7, 1], [5, 6, 7, 8], [5, 1, 7, 8]]), torch.tensor([False, False, True]), options)
    assert canvas.tolist() == [[5, 1, 0, 0], [5, 6, 7, 8], [0, 0, 0, 0]] and ended.tolist() == [True, False, True]


@pytest.mark.parametrize("settings", [dict(), dict(entropy_bound=3.0, confidence_threshold=2.1, stability_threshold=0, eos_token_ids=(5,))], ids=["published", "stops early"])
def test_the_same_tokens_as_transformers(settings):
    """Two prompts, three canvases, prompts longer than the window; the same seed gives the same tokens."""
    models.start()
    theirs = models.published(window=8, canvas=6)
    ours = models.load(models.ours(window=8), models.joined(theirs)).eval()
    prompts = torch.randint(0, models.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(2))
    options = CanvasOptions(max_new_tokens=18, max_denoising_steps=6, pad_token_id=0, **{**dict(eos_token_ids=(1,)), **settings})
    torch.manual_seed(8)
    found = sample_canvases(ours, prompts, 6, options)
    torch.manual_seed(8)
    wanted = theirs.generate(
        prompts, max_new_tokens=18, max_denoising_steps=6, t_min=0.4, t_max=0.8, eos_token_id=list(options.eos_token_ids),
        pad_token_id=0, stability_threshold=options.stability_threshold, confidence_threshold=options.confidence_threshold,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=options.entropy_bound),
    )
    assert not settings or found.decoder_passes.min() < 18
    assert found.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(found.tokens_per_forward.float(), wanted.tokens_per_forward.float())


def test_prompts_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="prompts: .* one length of at least 1"):
        sample_canvases(None, [[1, 2], [3]], 6, CanvasOptions())


def test_options_of_a_folder(tmp_path):
    """generation_config.json over config.json, wishes over both; the published defaults without a folder."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 1, "pad_token_id": 0}}))
    assert CanvasOptions.of_folder(tmp_path).eos_token_ids == (1,) and CanvasOptions.of_folder(tmp_path).pad_token_id == 0
    settings = {"eos_token_id": [1, 106], "t_max": 0.7, "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2}}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    options = CanvasOptions.of_folder(tmp_path, max_denoising_steps=7, max_new_tokens=None)
    assert options == CanvasOptions(
        eos_token_ids=(1, 106), t_max=0.7, entropy_bound=0.2, max_denoising_steps=7, max_new_tokens=256, pad_token_id=0
    )
    assert CanvasOptions.of_folder(None) == CanvasOptions()
    with pytest.raises(ValueError, match="max_denoising_steps 0: at least one. A legal value: 48"):
        CanvasOptions(max_denoising_steps=0)
