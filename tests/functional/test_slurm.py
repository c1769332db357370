"""Under a real Slurm of one node: a job is submitted, gets the signal of an approaching time limit, goes back into the queue, resumes.

The same scripts under stand-ins, for several nodes: tests/test_slurm_scripts.py.
"""

import os
import re
import sys

import pytest

from megatron.bdlm.testing.training_run import REPOSITORY
from tests.functional.slurm_cluster import Cluster, why_not

STEPS = 80

BATCH_SCRIPT = """#!/usr/bin/env bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=30
#SBATCH --signal=SIGUSR2@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd -- "$SLURM_SUBMIT_DIR"
export DEVICE=cpu NPROC=2 EXIT_SIGNAL=SIGUSR2
source examples/slurm/launch.sh
"""


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_submit_signal_requeue_resume(tmp_path):
    script, log, run = tmp_path / "job.sbatch", tmp_path / "job.log", tmp_path / "run"
    script.write_text(BATCH_SCRIPT)
    settings = dict(
        RUN_DIR=str(run), TRAIN_ITERS=str(STEPS), SEQ_LENGTH="64", BLOCK_SIZE="8", GLOBAL_BATCH_SIZE="2", LOG_INTERVAL="1", EVAL_ITERS="1",
        SAVE_INTERVAL="1000", BDLM_PYTHON=sys.executable, PYTHONPATH=str(REPOSITORY), PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    )

    def output():
        files = [log, *run.glob("train.*.log")]
        return "\n".join(path.read_text(errors="replace") for path in files if path.exists())

    def steps():
        path = run / "train.0.log"
        return [int(step) for step in re.findall(rf"iteration +(\d+)/ +{STEPS}", path.read_text())] if path.exists() else []

    with Cluster(tmp_path / "slurm") as cluster:
        submitted = cluster.command("sbatch", f"--output={log}", str(script), **settings)
        number = submitted.split()[-1]
        cluster.wait(lambda: steps() and max(steps()) >= 10, 180, "no tenth step")
        cluster.command("scancel", "--signal=USR2", number)  # what --signal does before the time limit, to the same processes
        cluster.wait(lambda: "back into the queue" in output(), 120, "not put back")
        before = max(steps())
        assert 10 <= before < STEPS and (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(before)
        assert f"=== ended: 75 saved step {before} of {STEPS} is done" in output()
        cluster.wait(lambda: cluster.job(number)["JobState"] == "PENDING", 60, "not pending")
        cluster.command("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm lets a requeued job rest for two minutes
        cluster.wait(lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED"), 240, "no end")
        job = cluster.job(number)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "1", (job, output()[-4000:])
    assert f"from step {before} of {STEPS}" in output() and f"done: step {STEPS}" in output()
    assert steps() == list(range(1, STEPS + 1))  # every step once: nothing was lost, nothing was done twice
