"""tools/generate.py on checkpoints of real runs: an overfitted text comes back, options are the checkpoint's, TP changes nothing."""

import json
import re
import subprocess
import sys

import pytest

from megatron.bdlm.testing.training_run import REPOSITORY, environment, launch

TEXT = [(7 * i * i + 3 * i + 5) % 61 for i in range(32)]
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 16 --qk-layernorm --swiglu --disable-bias-linear --seq-length 32 --max-position-embeddings 32 --bdlm-block-size 8 "
    "--micro-batch-size 16 --global-batch-size 16 --train-iters 70 --lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0 --eval-iters 0 --eval-interval 1000 --save-interval 70 --log-interval 35 --num-workers 0 --ckpt-format torch_dist --split 100,0,0"
).split()
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "62"]


def words(tokens):
    return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents that are all the same text."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text((json.dumps({"text": words(TEXT)}) + "\n") * 64)
    tool = [sys.executable, REPOSITORY / "tools" / "preprocess_data.py", "--input", folder / "text.jsonl", "--output-prefix", folder / "text"]
    subprocess.run([*map(str, tool), *TOKENIZER], check=True, capture_output=True, env=environment())
    return folder / "text"


@pytest.fixture(scope="module", params=["none", "next"])
def run(request, data, tmp_path_factory):
    """Label shift and checkpoint folder of a model overfitted to the text."""
    folder = tmp_path_factory.mktemp(f"run-{request.param}")
    flags = ["--data-path", str(data), "--data-cache-path", str(folder / "cache"), "--save", str(folder / "checkpoints")]
    launch(
        "pretrain_bdlm.py", [*MODEL, *TOKENIZER, *flags, "--bdlm-label-shift", request.param, "--bdlm-noise-level-per", "block"],
        processes=1, folder=folder,
    )
    return request.param, folder / "checkpoints"


def generate(checkpoints, *flags, processes=1):
    command = [sys.executable, str(REPOSITORY / "tools" / "generate.py")]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        flags = [*flags, "--tensor-model-parallel-size", str(processes)]
    return subprocess.run([*command, "--load", str(checkpoints), *flags], capture_output=True, text=True, env=environment())


def continuations(output):
    """The text of every prompt with its continuation, out of what the tool prints."""
    return [[int(t) for t in text.split()] for text in re.findall(r"^--- prompt .*\n(.*)\n", output, re.M)]


def test_an_overfitted_text_comes_back_whatever_the_layout(run):
    shift, checkpoints = run
    prompts = [TEXT[:3], TEXT[:13], TEXT[:8]]
    for processes in (1, 2):
        flags = [flag for prompt in prompts for flag in ("--prompt", words(prompt))]
        result = generate(checkpoints, *flags, "--max-new-tokens", "19", "--steps", "4", processes=processes)
        assert result.returncode == 0, result.stderr[-3000:]
        assert f"label shift {shift}" in result.stderr
        assert continuations(result.stdout) == [TEXT[: len(p) + 19] for p in prompts]
        assert re.search(r"^57 tokens in .* tokens per forward; \d+ forwards of the model", result.stdout, re.M)


def test_a_conflicting_option_is_refused_with_both_values(run):
    shift, checkpoints = run
    other = {"none": "next", "next": "none"}[shift]
    result = generate(checkpoints, "--prompt", "1", "--bdlm-label-shift", other)
    assert result.returncode == 2
    assert f"error: --bdlm-label-shift {other}: the checkpoint was written with {shift}" in result.stderr


def test_a_folder_without_checkpoint_is_a_clear_error(tmp_path):
    result = generate(tmp_path, "--prompt", "1")
    assert result.returncode == 2
    assert f"error: --load {tmp_path}: no complete checkpoint in it" in result.stderr
