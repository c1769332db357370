"""The numbered scripts one after the other at toy size, as examples/README.md chains them: from raw text to a sampled model on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TOY = dict(
    MOCK=1, DEVICE="cpu", NPROC=1, CORPUS_MB=0.3, VOCAB_SIZE=512, WORKERS=1, SEQ_LENGTH=64, TRAIN_ITERS=2, GLOBAL_BATCH_SIZE=2, EVAL_ITERS=1,
    LIMIT=2, DRAWS=1, MAX_NEW_TOKENS=16, LOG_INTERVAL=1, BDLM_PYTHON=sys.executable, PYTHONWARNINGS="ignore",
)


def run(script: str, runs: Path, *flags: str, **environment: object) -> subprocess.CompletedProcess:
    """A script of examples/, its folders under `runs`."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    given = {name: str(value) for name, value in {**TOY, "RUNS": runs, **environment}.items()}
    return subprocess.run(
        ["bash", ROOT / "examples" / script, *flags], env={**kept, **given}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )


@pytest.mark.slow
def test_from_raw_text_to_a_sampled_model(tmp_path):
    """Every step finds what the one before it wrote, and says what it should."""
    steps = [
        ("01_prepare_data.sh", {}, "no fault"),
        ("02_convert_ar.sh", {}, "tolerance 2.0e-04: ok"),
        ("03_pretrain.sh", dict(MOCK=0, NPROC=2, PRETRAINED=tmp_path / "convert" / "block-diffusion"), "validation loss at iteration 2"),
        ("04_finetune.sh", dict(PRETRAINED=tmp_path / "pretrain-toy" / "checkpoints"), "validation loss at iteration 2"),
        ("05_export.sh", {}, "tolerance 2.0e-04: ok"),
        ("06_evaluate.sh", {}, "16 tokens in"),
    ]
    for script, environment, said in steps:
        done = run(script, tmp_path, **environment)
        assert done.returncode == 0 and said in done.stdout, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    first, second = (json.loads((tmp_path / run / "checkpoints" / "bdlm_options.json").read_text()) for run in ("pretrain-toy", "finetune"))
    assert (first["context_parallel_size"], first["block_parallel_size"], first["bdlm_block_size"]) == (2, 2, 16)
    assert second["pretrained_checkpoint"] == str(tmp_path / "pretrain-toy" / "checkpoints") and second["num_layers"] == 4
    assert json.loads((tmp_path / "evaluate" / "result.json").read_text())["text"]["nelbo"] > 0
    launches = (tmp_path / "pretrain-toy" / "launches.log").read_text()
    assert "'pretrain_bdlm.py'" in launches and "'--pretrained-checkpoint'" in launches


@pytest.mark.slow
def test_a_recipe_trains_on_mock_data_and_a_second_launch_adds_to_its_logs(tmp_path):
    """The arguments of a script are flags that win."""
    for iterations in (1, 2):
        done = run("recipes/i-dlm.sh", tmp_path, "--bdlm-block-size", "4", "--log-interval", "1", TRAIN_ITERS=iterations)
        assert done.returncode == 0, done.stdout[-3000:]
    log = (tmp_path / "recipe-i-dlm" / "train.0.log").read_text()
    assert "iteration        1/       1" in log and "iteration        2/       2" in log
    assert (tmp_path / "recipe-i-dlm" / "launches.log").read_text().count("pretrain_bdlm.py") == 2
    assert json.loads((tmp_path / "recipe-i-dlm" / "checkpoints" / "bdlm_options.json").read_text())["bdlm_block_size"] == 4


@pytest.mark.parametrize(
    "script, environment, message",
    [
        ("03_pretrain.sh", dict(DEVICE="tpu"), "error: DEVICE=tpu: a legal value: gpu or cpu"),
        ("03_pretrain.sh", dict(MODEL="llama"), "error: MODEL=llama: a legal value: toy, qwen3-8b or qwen3-30b-a3b"),
        ("03_pretrain.sh", dict(MOCK="yes"), "error: MOCK=yes: a legal value: 1 or 0"),
        ("03_pretrain.sh", dict(MOCK=0), "data/train.idx is missing: MOCK=0 needs DATA_PATH"),
        ("03_pretrain.sh", dict(PRETRAINED=ROOT), "with MOCK=1: mock data are ids of another vocabulary. A legal value: MOCK=0"),
        ("03_pretrain.sh", dict(PRETRAINED="/nowhere"), "error: /nowhere is missing: PRETRAINED names a checkpoint folder"),
        ("01_prepare_data.sh", dict(MOCK=0), "MOCK=0 needs INPUT"),
        ("02_convert_ar.sh", {}, "data/tokenizer is missing: the mock model takes the tokenizer of 01_prepare_data.sh"),
        ("04_finetune.sh", {}, "data/tokenizer is missing: TOKENIZER names the folder"),
        ("05_export.sh", {}, "finetune/checkpoints is missing: LOAD names"),
        ("06_evaluate.sh", {}, "finetune/checkpoints is missing: LOAD names"),
    ],
)
def test_what_is_missing_is_named_with_the_step_that_makes_it(script, environment, message, tmp_path):
    done = run(script, tmp_path, **environment)
    assert done.returncode != 0 and message in done.stderr, done.stderr
