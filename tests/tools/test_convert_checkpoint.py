"""tools/convert_checkpoint.py and evaluate.py as users call them, around a training run with tensor parallel."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from megatron.bdlm.testing.training_run import REPOSITORY, RunFailure, environment, launch
from tests.checkpoint.tiny import save_model

TRAINING = (
    "--use-checkpoint-args --seq-length 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 "
    "--min-lr 1e-3 --mock-data --num-workers 0 --no-mmap-bin-files --eval-iters 1 --eval-interval 100 "
    "--save-interval 2 --ckpt-format torch_dist"
).split()


def tool(name, *flags, ok=True):
    """Run a tool to its end; its output."""
    command = [sys.executable, str(REPOSITORY / "tools" / name), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source, its import, and the block diffusion model before and after two steps on two tensor-parallel ranks."""
    root = tmp_path_factory.mktemp("conversion")
    save_model(root / "source", "qwen3 tied", tokenizer=True)
    tool("convert_checkpoint.py", "import", "--source", root / "source", "--save", root / "ar")
    chosen = ["--mask-token", "<|mask|>", "--bdlm-recipe", "fast-dllm-v2", "--bdlm-block-size", "8"]
    tool("convert_checkpoint.py", "to-bdlm", "--load", root / "ar", "--save", root / "bdlm", *chosen)
    paths = ["--pretrained-checkpoint", str(root / "bdlm"), "--load", str(root / "run"), "--save", str(root / "run")]
    run = launch(
        "pretrain_bdlm.py",
        [*TRAINING, *paths, "--tensor-model-parallel-size", "2"],
        processes=2,
        folder=root / "events",
    )
    (root / "log").write_text(run.output)
    return root


def test_verify_and_roundtrip(folder):
    said = tool(
        "convert_checkpoint.py", "verify", "--source", folder / "source", "--load", folder / "ar", "--tolerance", "1e-5"
    )
    assert said.count("same most probable token at 100.0%") == 5 and "tolerance 1.0e-05: ok" in said
    said = tool("convert_checkpoint.py", "roundtrip", "--source", folder / "source")
    assert "24 tensors identical bit by bit" in said and "different" not in said and "missing" not in said


def test_the_run_took_everything_from_the_checkpoint(folder):
    log = (folder / "log").read_text()
    for line in ("bdlm_block_size", "bdlm_mask_token_id", "bdlm_label_shift"):
        assert line in log
    options = json.loads((folder / "run" / "bdlm_options.json").read_text())
    chosen = {
        name: options[f"bdlm_{name}"] for name in ("block_size", "mask_token_id", "label_shift", "keep_mask_logit")
    }
    assert chosen == dict(block_size=8, mask_token_id=100, label_shift="next", keep_mask_logit=True)
    assert options["qk_layernorm"] and options["num_layers"] == 2 and options["padded_vocab_size"] == 256


def test_a_conflicting_flag_names_both_values(folder):
    load = ["--load", str(folder / "bdlm"), "--bdlm-label-shift", "none"]
    with pytest.raises(RunFailure, match="--bdlm-label-shift none: the checkpoint in .* was written with next"):
        launch("pretrain_bdlm.py", [*TRAINING, *load], processes=1, folder=folder / "refused")


def test_an_autoregressive_checkpoint_is_not_trained(folder):
    with pytest.raises(RunFailure, match="it holds an autoregressive model"):
        launch("pretrain_bdlm.py", [*TRAINING, "--load", str(folder / "ar")], processes=1, folder=folder / "refused")


def test_export_of_the_trained_model(folder):
    """Vocabulary without padding rows, options in config.json, plain `transformers` with Megatron's logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tool("convert_checkpoint.py", "export", "--load", folder / "run", "--save", folder / "exported")
    config = json.loads((folder / "exported" / "config.json").read_text())
    expected = dict(
        block_size=8,
        mask_token_id=100,
        label_shift="next",
        clean_attention="block-causal",
        noisy_attention="bidirectional",
        keep_mask_logit=True,
        candidate_tokens=101,
        corruption="absorbing",
        vocab_size=101,
        model_type="qwen3",
        tie_word_embeddings=True,
    )
    assert {name: config[name] for name in expected} == expected
    model, loading = AutoModelForCausalLM.from_pretrained(folder / "exported", output_loading_info=True)
    assert not any(loading.values()) and model.config.block_size == 8
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    assert tokenizer.mask_token_id == 100 and tokenizer.chat_template
    before = AutoModelForCausalLM.from_pretrained(folder / "source")
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)
    said = tool(
        "convert_checkpoint.py",
        "verify",
        "--source",
        folder / "exported",
        "--load",
        folder / "run",
        "--tolerance",
        "1e-5",
    )
    assert "tolerance 1.0e-05: ok" in said


def test_an_export_is_sampled_by_transformers_alone(folder):
    """`generate.py --hf` writes what the checkpoint writes, with the label shift and block size of its config.json (fault E6)."""
    if not (folder / "exported").exists():
        tool("convert_checkpoint.py", "export", "--load", folder / "run", "--save", folder / "exported")
    asked = ["--prompt", "the quick", "--prompt", "a", "--max-new-tokens", 19, "--ignore-eos"]
    ours, theirs = (tool("generate.py", *source, *asked) for source in (["--load", folder / "run"], ["--hf", folder / "exported"]))
    assert "block size 8, label shift next" in ours and "block size 8, label shift next" in theirs

    def written(said):
        return said[said.index("--- prompt 0") : said.index("\n---\n")]

    assert written(ours) == written(theirs) and "19 new (length)" in written(ours)
    said = tool("generate.py", "--hf", folder / "exported", *asked, "--bdlm-label-shift", "none", ok=False)
    assert "--bdlm-label-shift none: config.json in" in said and "says next. A legal value: next" in said
    said = tool("generate.py", "--hf", folder / "exported", *asked, "--tensor-model-parallel-size", 2, ok=False)
    assert "--tensor-model-parallel-size 2" in said


def test_evaluation(folder):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": "the quick brown fox " * n}) + "\n" for n in (3, 5)))
    questions = [
        {"context": "ab", "choices": [" ab", " zzz"], "answer": 0},
        {"context": "q", "choices": ["r", "s", "tu"], "answer": 2},
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    flags = [
        "--load",
        folder / "run",
        "--text",
        folder / "text.jsonl",
        "--choices",
        folder / "questions.jsonl",
        "--draws",
        3,
    ]
    said = tool("evaluate.py", *flags, "--seq-length", 24, "--output", folder / "result.json")
    result = json.loads((folder / "result.json").read_text())
    text, choices = result["text"], result["choices"]
    assert 2 < text["nelbo"] < 12 and text["nelbo_95"] > 0 and len(text["nelbo_of_draws"]) == 3 and text["tokens"] > 100
    assert choices["questions"] == 2 and [len(d["nelbo_of_choices"]) for d in choices["details"]] == [2, 3]
    assert "PPL bound" in said and "accuracy" in said
    (folder / "broken.jsonl").write_text('{"context": "a"}\n')
    said = tool("evaluate.py", "--load", folder / "run", "--choices", folder / "broken.jsonl", ok=False)
    assert "broken.jsonl:1: no question" in said


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.bdlm.platform import cpu
cpu.adapt_engine(cpu.enable())
from megatron.bdlm.checkpoint import huggingface
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder
from megatron.bdlm.training.arguments import arguments_of

def killed_at(count, read):
    def counted(*args):
        nonlocal count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(*args)
    return counted

verb, load, save = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if verb == "import":
    source = huggingface.open_source(load)
    source.tensors.read = killed_at(15, source.tensors.read)
    huggingface.import_model(source, save, arguments_of, overwrite=True)
else:
    checkpoint = CheckpointFolder(load)
    checkpoint.read_layer = killed_at(9, checkpoint.read_layer)
    huggingface.export_model(checkpoint, save, overwrite=True)
"""


@pytest.mark.parametrize("verb, load", [("import", "source"), ("export", "ar/release")])
def test_a_kill_leaves_the_old_result_or_none(verb, load, folder, tmp_path):
    """SIGKILL in the middle of the tensors, once with nothing there and once with an old result."""
    command = [sys.executable, "-c", KILLED, verb, str(folder / load), str(tmp_path / "result")]
    for old in (False, True):
        if old:
            tool(
                "convert_checkpoint.py",
                verb,
                "--source" if verb == "import" else "--load",
                folder / load,
                "--save",
                tmp_path / "result",
            )
        before = {p.name: p.read_bytes() for p in (tmp_path / "result").rglob("*") if p.is_file()}
        done = subprocess.run(command, env=environment(), cwd=REPOSITORY, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        assert list(tmp_path.glob(".result.partial-*"))  # it was at work
        assert {p.name: p.read_bytes() for p in (tmp_path / "result").rglob("*") if p.is_file()} == before
        assert (tmp_path / "result").exists() == old == bool(before)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["import", "--source", "nowhere", "--save", "x"], "error: nowhere: no such folder or file"),
        (["export", "--load", "{source}", "--save", "x"], "no complete torch_dist checkpoint in it"),
        (["import", "--source", "{source}", "--save", "{ar}"], "exists; name a new folder, or give --overwrite"),
    ],
)
def test_refusals(flags, message, folder):
    said = tool(
        "convert_checkpoint.py", *(flag.format(source=folder / "source", ar=folder / "ar") for flag in flags), ok=False
    )
    assert message in said and "Traceback" not in said
