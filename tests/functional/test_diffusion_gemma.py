"""DiffusionGemma from a Hugging Face folder through fine-tuning to an export: a resume is exact, layouts agree."""

import json
import shutil

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

pytest.importorskip("transformers.models.diffusion_gemma")

from megatron.bdlm.checkpoint import diffusion_gemma_files as files  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.testing.training_run import launch  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import save_tokenizer  # noqa: E402
from tests.model.diffusion_gemma import models  # noqa: E402

SCRIPT, LENGTH = "finetune_bdlm.py", 64


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    models.published(window=16, canvas=8, key_heads=2).save_pretrained(folder / "source")
    save_tokenizer(folder / "source", models.VOCABULARY)
    files.import_model(folder / "source", folder / "imported", arguments_of)
    generator = torch.Generator().manual_seed(0)
    with open(folder / "data.jsonl", "w") as stream:
        for number in range(24):
            prompt, answer = 5 + number % 9, 12 + number % 7
            tokens = torch.randint(5, models.VOCABULARY, (prompt + answer,), generator=generator).tolist()
            stream.write(json.dumps({"tokens": tokens, "mask": [0] * prompt + [1] * answer}) + "\n")
    return [
        "--pretrained-checkpoint", str(folder / "imported"), "--use-checkpoint-args", "--bdlm-recipe", "diffusion-gemma",
        "--seq-length", str(LENGTH), "--data-path", str(folder / "data.jsonl"), "--split", "100,0,0", "--num-workers", "0",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "imported" / "tokenizer"),
        "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "4", "--lr", "1e-3", "--lr-decay-style", "constant",
        "--log-interval", "1", "--eval-iters", "0", "--eval-interval", "100", "--save-interval", "2", "--ckpt-format", "torch_dist",
    ]


@pytest.fixture(scope="module")
def sharded(flags, tmp_path_factory):
    """Two ranks of context-sharded block parallelism."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, launch(SCRIPT, [*flags, "--context-parallel-size", "2", "--save", str(folder / "saved")], processes=2, folder=folder)


@pytest.mark.long  # layouts: tests/model/diffusion_gemma/test_layouts.py
def test_one_process_agrees(flags, tmp_path):
    """Plain gradient descent: Adam's division makes differences of the last bit grow within a few steps."""
    plain = [*flags, "--optimizer", "sgd"]
    runs = [
        launch(SCRIPT, [*plain, *extra], processes=ranks, folder=tmp_path / str(ranks))
        for ranks, extra in ((1, ()), (2, ("--context-parallel-size", "2")))
    ]
    alone, sharded = (run.scalars for run in runs)
    for name in ("lm loss", "grad-norm", "clean cross entropy"):
        assert sorted(alone[name]) == [1, 2, 3, 4]
        for step, value in alone[name].items():
            assert sharded[name][step] == pytest.approx(value, rel=1e-5), (name, step)


def test_a_resume_is_exact_and_an_export_generates(flags, sharded, tmp_path):
    from transformers import DiffusionGemmaForBlockDiffusion

    folder, run = sharded
    shutil.copytree(folder / "saved" / "iter_0000002", tmp_path / "half" / "iter_0000002")
    (tmp_path / "half" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = launch(SCRIPT, [*flags, "--context-parallel-size", "2", "--load", str(tmp_path / "half")], processes=2, folder=tmp_path)
    for name in ("lm loss", "grad-norm"):
        assert resumed.scalars[name] == {step: run.scalars[name][step] for step in (3, 4)}

    checkpoint = CheckpointFolder(folder / "saved" / "iter_0000004")
    files.export_model(checkpoint, tmp_path / "exported")
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "exported").eval()
    before = CheckpointFolder(folder / "saved" / "iter_0000002").read("decoder.layers.0.mlp.router.weight")
    assert torch.equal(model.model.decoder.layers[0].router.proj.weight, before)  # frozen
    out = model.generate(torch.randint(5, 90, (1, 9)), max_new_tokens=16, max_denoising_steps=3)
    assert out.sequences.shape == (1, 25)
