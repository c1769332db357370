"""The batch scripts under stand-ins for srun, scontrol and torchrun: ranks, addresses, flags, and what goes back into the queue."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.training.arguments import parse_args  # noqa: E402

from megatron.bdlm.training import arguments  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
JOBS = {"qwen3_8b_256k_2x8.sbatch": (2, 262144, 8), "qwen3_8b_1m_8x8.sbatch": (8, 1048576, 16)}
"""Nodes, clean tokens, context-parallel size."""

STAND_INS = {
    "python": f'exec "{sys.executable}" "$@"',
    "scontrol": """case $1 in
        show) for node in $(seq "$SLURM_JOB_NUM_NODES"); do printf 'gpu%03d\\n' "$node"; done ;;
        requeue) echo "$2" >>"$STAND_IN_LOG/requeued" ;;
    esac""",
    "srun": """while [[ $1 == --* ]]; do shift; done
    for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" || exit; done""",
    "torchrun": """printf '%s\\n' "$@" >"$STAND_IN_LOG/node$NODE_RANK"
    mkdir -p "$RUN_DIR/checkpoints"; echo "$STAND_IN_REACHED" >"$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt\"""",
}


def submit(script, folder, reached, nodes=2):
    """Run a batch script as Slurm would; the finished process."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    job = dict(
        SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="70123", SLURM_JOB_NODELIST="gpu[001-008]", SLURM_JOB_NUM_NODES=str(nodes),
        STAND_IN_LOG=str(folder), STAND_IN_REACHED=str(reached), RUN_DIR=str(folder / "run"), BDLM_PYTHON=str(commands / "python"),
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CP", "TP", "PP", "BP", "MODEL", "DEVICE")}
    return subprocess.run(
        ["bash", ROOT / "examples" / "slurm" / script], capture_output=True, text=True,
        env={**environment, **job, "PATH": f"{commands}:{os.environ['PATH']}"},
    )


def value(flags, name):
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize("script", JOBS)
def test_every_node_starts_its_ranks(script, tmp_path, monkeypatch):
    nodes, length, ranks = JOBS[script]
    done = submit(script, tmp_path, reached=1000, nodes=nodes)
    assert done.returncode == 0, done.stderr
    assert "done: step 1000" in done.stdout and not (tmp_path / "requeued").exists()
    for node in range(nodes):
        flags = (tmp_path / f"node{node}").read_text().splitlines()
        placed = {name: value(flags, name) for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")}
        assert list(placed.values()) == [str(nodes), str(node), "8", "gpu001", str(20000 + 70123 % 20000)]
        assert value(flags, "--exit-signal") == "SIGUSR2" and "--exit-signal-handler" in flags
        assert value(flags, "--load") == value(flags, "--save") == str(tmp_path / "run" / "checkpoints")
    # the engine's parser and our rules take them
    monkeypatch.setenv("WORLD_SIZE", str(8 * nodes))
    monkeypatch.setattr(sys, "argv", flags[flags.index("pretrain_bdlm.py") :])
    args = parse_args(arguments.add_bdlm_arguments)
    arguments._check_before_engine(args)
    assert (args.seq_length, args.context_parallel_size, args.block_parallel_size) == (length, ranks, ranks)
    assert 8 * nodes % ranks == 0 and args.global_batch_size % (8 * nodes // ranks) == 0


def test_directives():
    """Nodes, GPUs and the signal that the script's text and the run rely on."""
    for script, (nodes, _, _) in JOBS.items():
        directives = re.findall(r"^#SBATCH (\S+)$", (ROOT / "examples" / "slurm" / script).read_text(), re.M)
        assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=SIGUSR2@600", "--requeue"} <= set(directives)


def test_an_unfinished_job_goes_back_into_the_queue_and_a_stuck_one_does_not(tmp_path):
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=40)
    assert done.returncode == 0 and "step 40 of 1000: back into the queue" in done.stdout, done.stderr
    assert (tmp_path / "requeued").read_text() == "70123\n"
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=40)
    assert done.returncode == 1 and "no step was added to 40" in done.stderr
    assert (tmp_path / "requeued").read_text() == "70123\n"
