"""Checkpoints: bit-exact resume, resharding, and a kill in the middle of a save (faults D2, D4, E5)."""

import os
import signal
import subprocess
import time

import pytest
import torch

from megatron.bdlm.checkpoint.tracker import TRACKER, newest_checkpoint
from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import REPOSITORY, RunFailure, checkpoint_tensors, command, environment, launch
from megatron.bdlm.training.json_log import read_lines

SCRIPT = "pretrain_bdlm.py"
CSBP = ["--context-parallel-size", "2", "--block-parallel-size", "2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Ten steps in one go, saved after five and ten."""
    folder = tmp_path_factory.mktemp("straight")
    run = launch(
        SCRIPT, toy_flags(10, *CSBP, "--save", str(folder / "checkpoint"), "--save-interval", "5"), processes=2, folder=folder
    )
    return folder / "checkpoint", run


def _copy_at_five(checkpoint, target):
    target.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(checkpoint / "iter_0000005"), str(target)], check=True)
    (target / TRACKER).write_text("5")


def test_ten_steps_are_five_save_five(straight, tmp_path):
    """Fault D2: loss, gradient norm and weights bit for bit; noise has no state to lose."""
    checkpoint, run = straight
    _copy_at_five(checkpoint, tmp_path / "checkpoint")
    folder = ["--load", str(tmp_path / "checkpoint"), "--save", str(tmp_path / "checkpoint"), "--save-interval", "5"]
    resumed = launch(SCRIPT, toy_flags(10, *CSBP, *folder), processes=2, folder=tmp_path)
    assert sorted(resumed.scalars["lm loss"]) == [6, 7, 8, 9, 10]
    for name in ("lm loss", "grad-norm"):
        for step, value in resumed.scalars[name].items():
            assert value == run.scalars[name][step], (name, step)
    ours, theirs = (checkpoint_tensors(path / "iter_0000010") for path in (tmp_path / "checkpoint", checkpoint))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_resharded_checkpoint_continues_the_same_curve(straight, tmp_path):
    """Saved at TP 2 x CP 2, loaded at TP 1, DP 2; the log of JSON lines is appended to."""
    log = ["--bdlm-json-log", str(tmp_path / "run.jsonl")]
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "5"]
    both = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2"]
    # the engine keeps the length of its schedules in the checkpoint, so both runs have ten iterations
    launch(SCRIPT, toy_flags(10, *both, *save, *log, "--exit-interval", "5"), processes=4, folder=tmp_path / "first")
    resumed = launch(SCRIPT, toy_flags(10, *log, "--load", str(tmp_path / "checkpoint")), processes=2, folder=tmp_path / "second")
    lines = read_lines(tmp_path / "run.jsonl")
    assert [line["iteration"] for line in lines if line["kind"] == "train"] == list(range(1, 11))
    assert [(line["iteration"], line["world size"]) for line in lines if line["kind"] == "start"] == [(0, 4), (5, 2)]
    _, run = straight
    for name in ("lm loss", "grad-norm"):
        for step, value in resumed.scalars[name].items():
            assert abs(value - run.scalars[name][step]) <= 1e-5 * abs(value), (name, step)


def test_conflicting_model_option_is_refused(straight, tmp_path):
    checkpoint, _ = straight
    with pytest.raises(RunFailure, match="--bdlm-block-size 16: the checkpoint in .* was written with 8"):
        launch(
            SCRIPT, toy_flags(10, *CSBP, "--bdlm-block-size", "16", "--load", str(checkpoint)), processes=2, folder=tmp_path
        )


@pytest.mark.long  # tests/tools/test_kill_runs.py kills runs in their saves too
def test_kill_during_a_save_keeps_the_last_checkpoint(straight, tmp_path):
    """Fault D4: SIGKILL as soon as the next checkpoint folder appears; the run resumes from the complete one before it."""
    checkpoint, _ = straight
    _copy_at_five(checkpoint, tmp_path / "checkpoint")
    folder = ["--load", str(tmp_path / "checkpoint"), "--save", str(tmp_path / "checkpoint"), "--save-interval", "1"]
    flags = toy_flags(10, *CSBP, *folder)
    process = subprocess.Popen(
        command(SCRIPT, flags, 2), env=environment(), cwd=REPOSITORY, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint" / "iter_0000006").exists():
        assert time.monotonic() < deadline and process.poll() is None, "no save began"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(["pkill", "-KILL", "-f", str(tmp_path)], check=False)  # ranks live in sessions of their own
    newest = newest_checkpoint(str(tmp_path / "checkpoint"))
    assert newest is not None
    resumed = launch(SCRIPT, toy_flags(10, *CSBP, *folder[:2]), processes=2, folder=tmp_path)
    first = int(newest.name[len("iter_") :]) + 1
    assert sorted(resumed.scalars["lm loss"]) == list(range(first, 11))
