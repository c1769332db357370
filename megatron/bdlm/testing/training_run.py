"""Start an entry script as users do, with torchrun, and read what it logged.

    run = launch("pretrain_bdlm.py", ["--num-layers", "2", ...], processes=2, folder=tmp_path)
    run.scalars["lm loss"][5]            # value of step 5, float32 as logged to TensorBoard
    checkpoint_tensors(folder / "iter_0000010")   # whole tensors by name, whatever layout saved them

Runs are separate processes: the engine keeps its state in module globals.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[3]


class RunFailure(RuntimeError):
    """A run ended with an error; the message holds the end of its output."""


@dataclass(frozen=True)
class Run:
    """A finished run: its output and its logged scalars, by name and step."""

    output: str
    scalars: dict[str, dict[int, float]]


def command(script: str, flags: list[str], processes: int) -> list[str]:
    """The torchrun command line of a script of this repository."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(REPOSITORY / script), *flags,
    ]


def environment(**extra: str) -> dict[str, str]:
    """One thread a process, no visible GPU, quiet imports."""
    quiet = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    return {**os.environ, **quiet, **extra}


def launch(script: str, flags: list[str], *, processes: int, folder: Path, timeout: float = 300.0, **extra: str) -> Run:
    """Run a script to its end.

    Args:
        folder: receives the TensorBoard events.
        timeout: seconds.
        extra: further environment variables.

    Raises:
        RunFailure: a non-zero exit or a timeout.
    """
    events = Path(folder) / "tensorboard"
    done = subprocess.run(
        command(script, [*flags, "--tensorboard-dir", str(events)], processes),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, env=environment(**extra), cwd=REPOSITORY,
    )
    if done.returncode:
        raise RunFailure(f"{script} on {processes} processes ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return Run(done.stdout, read_scalars(events))


def read_scalars(events: Path) -> dict[str, dict[int, float]]:
    """Scalars of a TensorBoard folder by name and step; a later event of the same step wins."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)}
        for tag in accumulator.Tags()["scalars"]
    }


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a `torch_dist` checkpoint, whole, by its name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    _load_state_dict(state, storage_reader=FileSystemReader(str(folder)), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
