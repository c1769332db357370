"""Faults provoked for real: what a run says, which code it ends with, and that its older checkpoint still loads."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bdlm.checkpoint.tracker import iteration_of, newest_checkpoint
from megatron.bdlm.testing.live_run import LiveRun
from megatron.bdlm.testing.topologies import TOY_DATA, TOY_MODEL, TOY_TRAINING, toy_flags
from megatron.bdlm.testing.training_run import checkpoint_tensors
from megatron.bdlm.training.faults import FILE_NAME

SCRIPT = "pretrain_bdlm.py"
CSBP = ["--context-parallel-size", "2", "--block-parallel-size", "2"]
ENDLESS = 100_000
"""Steps: more than a test waits for."""


def told(checkpoints):
    """Code and state in the file that a requeue loop reads."""
    code, state, _ = (checkpoints / FILE_NAME).read_text().split(" ", 2)
    return int(code), state


def test_a_stopped_peer_ends_the_job_in_time_and_is_named(tmp_path):
    """SIGSTOP to rank 1: rank 0 names it, where it waits and the last step, and leaves."""
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "100000"]
    flags = toy_flags(ENDLESS, *CSBP, *save, "--distributed-timeout-seconds-after-init", "4")
    with LiveRun(SCRIPT, flags, processes=2, folder=tmp_path) as run:
        run.wait_for("iteration        4/")
        peer = run.ranks()[1]
        os.kill(peer, signal.SIGSTOP)
        stopped = time.monotonic()
        run.wait_for("rank 0 ends with 76 (peer)", timeout=60)
        seconds = time.monotonic() - stopped
        assert seconds < 4 + 2 + 20, seconds  # timeout, looking for the silent rank, and some for a busy machine
        os.kill(peer, signal.SIGKILL)  # as torchrun does 30 s after its SIGTERM, which a stopped process does not take
        assert run.end(timeout=30) == 1  # torchrun's; the rank's own is in the file
        line = next(line for line in run.output.splitlines() if "rank 0 ends with 76 (peer)" in line)
    assert re.search(r"rank 0: last finished step \d+, waiting in .+, called by \w+ \(", line), line
    assert "no sign of life from rank 1 (last finished step" in line and "Timed out waiting" in line
    assert told(tmp_path / "checkpoints") == (76, "peer")


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    """A tmpfs with room for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root and the right to mount")
    try:
        checkpoints = disk / "checkpoints"
        save = ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1"]
        with LiveRun(SCRIPT, toy_flags(ENDLESS, *save), processes=1, folder=tmp_path) as run:
            assert run.end(timeout=120) == 74, run.output[-4000:]
            assert "ends with 74 (disk)" in run.output and f"could not be written to {checkpoints}, where " in run.output
        newest = newest_checkpoint(str(checkpoints))
        assert newest is not None and len(checkpoint_tensors(newest)) > 20
        assert f"saved checkpoint from iteration {iteration_of(newest):7d}" in run.output
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def data_run(folder, *, workers):
    """A run over 400,000 tokens in a real `.bin/.idx` pair, and the pair's prefix."""
    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in np.random.default_rng(0).integers(0, 255, (400, 1000)):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    kept = [word for word in TOY_DATA if word not in ("--mock-data", "--num-workers", "0", "--no-mmap-bin-files")]
    data = [*kept, "--data-path", prefix, "--split", "90,5,5", "--num-workers", str(workers), "--data-cache-path", str(folder / "cache")]
    save = ["--save", str(folder / "checkpoints"), "--save-interval", "2"]
    flags = [*TOY_MODEL, *data, *TOY_TRAINING, "--train-iters", str(ENDLESS), *save]
    return LiveRun(SCRIPT, flags, processes=1, folder=folder), prefix


def test_a_data_file_cut_short_during_the_run(tmp_path):
    """The reading worker dies of a bus error, which torch takes for a lack of shared memory; the file is named instead."""
    run, prefix = data_run(tmp_path, workers=1)
    with run:
        run.wait_for("saved checkpoint from iteration       2")
        os.truncate(f"{prefix}.bin", 1000)
        assert run.end(timeout=60) == 66, run.output[-4000:]
        assert "ends with 66 (data)" in run.output and f"{prefix}.bin: truncated" in run.output
    assert told(tmp_path / "checkpoints") == (66, "data")
    assert checkpoint_tensors(newest_checkpoint(str(tmp_path / "checkpoints")))


def test_a_lost_data_worker(tmp_path):
    run, _ = data_run(tmp_path, workers=1)
    with run:
        run.wait_for("saved checkpoint from iteration       2")
        workers = [pid for pid in run.descendants() if open(f"/proc/{pid}/comm").read().strip() == "pt_data_worker"]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert workers
        assert run.end(timeout=60) == 71, run.output[-4000:]
        assert "ends with 71 (worker)" in run.output and "is killed by signal: Killed" in run.output
    assert told(tmp_path / "checkpoints") == (71, "worker")


@pytest.mark.parametrize("mode, code, state", [("validate_results", 16, "rerun"), ("disabled", 17, "not-a-number")])
def test_not_a_number(tmp_path, mode, code, state):
    """A learning rate that overflows float32; the engine's rerun gives the same and asks for another GPU."""
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "100000"]
    flags = toy_flags(ENDLESS, *save, "--lr", "1e38", "--min-lr", "1e37", "--clip-grad", "0", "--rerun-mode", mode)
    with LiveRun(SCRIPT, flags, processes=1, folder=tmp_path) as run:
        assert run.end(timeout=120) == code, run.output[-4000:]
        assert "NaN" in run.output or "Inf" in run.output
    assert told(tmp_path / "checkpoints") == (code, state)
