"""What stands in the way of a run on this machine: versions, devices, communication, kernels, environment, folders, the run itself.

Every check is a function that returns `Check`s and raises nothing; a *fault* would stop a run, a *note* deserves a look.
`tools/doctor.py` prints them. Started by torchrun on several nodes, folders are checked to be the same ones everywhere.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from megatron.bdlm.attention.diagonal_tile import uses_triton
from megatron.bdlm.attention.kernels import PREFERENCE, KernelUnavailable, choose
from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.planner.models import AttentionLayers, Model
from megatron.bdlm.platform.cpu import ENGINE_VERSION

PACKAGES = {
    "torch": "needed", "megatron-core": "needed", "numpy": "needed", "transformer-engine": "fused layers on GPUs",
    "flash-attn": "the kernel flash_attn", "flash-attn-3": "the kernel flash_attn on Hopper", "triton": "small rectangles on GPUs",
    "transformers": "HuggingFaceTokenizer and conversion",
}
"""Packages, and what each is for."""

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "overlay")
"""Kinds of filesystems that no other node sees and that a restart may empty."""


@dataclass(frozen=True)
class Check:
    """One answer."""

    topic: str
    status: str  # "ok" | "note" | "fault"
    message: str


# ---- this machine ----------------------------------------------------------------------------------


def versions() -> list[Check]:
    """Python and the packages; a missing needed one, or another engine than the tested one, is a fault."""
    found = [Check("python", "ok", platform.python_version())]
    for name, use in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(Check(name, "fault" if use == "needed" else "note", f"not installed ({use})"))
            continue
        if name == "megatron-core" and version != ENGINE_VERSION:
            found.append(Check(name, "fault", f"{version}: this project needs {ENGINE_VERSION}: pip install megatron-core=={ENGINE_VERSION}"))
        else:
            found.append(Check(name, "ok", version))
    return found


def devices() -> list[Check]:
    """GPUs that are visible, with memory free and in all."""
    if not torch.cuda.is_available():
        return [Check("gpu", "note", f"none is visible (torch {torch.__version__}): runs take the CPU")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        found.append(Check(f"gpu {index}", "note" if busy else "ok", text + (": something else uses it" if busy else "")))
    return found


def communication() -> list[Check]:
    """NCCL and gloo; gloo is tried on this process alone, which needs an address that this host's name leads to."""
    gpus = torch.cuda.is_available()
    if dist.is_nccl_available():
        found = [Check("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))]
    else:
        found = [Check("nccl", "fault" if gpus else "note", "this torch was built without it; GPUs need it")]
    if dist.is_initialized():
        return [*found, Check("gloo", "ok", f"{dist.get_world_size()} processes have met")]
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        return [*found, Check("gloo", "ok", f"works on {socket.gethostname()}")]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return [*found, Check("gloo", "fault", f"{reason}; GLOO_SOCKET_IFNAME names the network interface, for example eth0")]


def kernels(case: KernelCase, name: str = "auto", diagonal: str = "auto") -> list[Check]:
    """Every attention kernel, whether it serves `case` and why not; and what `name` picks, and `diagonal` for small rectangles."""
    found = []
    for kernel in PREFERENCE:
        refusal = kernel.refusal(case)
        found.append(Check(f"kernel {type(kernel).__name__}", "ok" if refusal is None else "note", refusal or f"serves {case}"))
    try:
        choice = choose(name, case)
        found.append(Check(f"--bdlm-attention-kernel {name}", "ok", f"{type(choice.kernel).__name__}: {choice.reason}"))
    except KernelUnavailable as error:
        found.append(Check(f"--bdlm-attention-kernel {name}", "fault", str(error)))
    try:
        text = "the Triton kernels" if uses_triton(diagonal, case) else "the kernel above"
        found.append(Check(f"--bdlm-diagonal-kernel {diagonal}", "ok", text))
    except KernelUnavailable as error:
        found.append(Check(f"--bdlm-diagonal-kernel {diagonal}", "fault", str(error)))
    return found


def usual_case(head_size: int = 128) -> KernelCase:
    """bfloat16 on the first GPU, float32 on a CPU."""
    if torch.cuda.is_available():
        return KernelCase("cuda", torch.bfloat16, head_size, head_size, torch.cuda.get_device_capability(0))
    return KernelCase("cpu", torch.float32, head_size, head_size)


def environment() -> list[Check]:
    """CUDA_DEVICE_MAX_CONNECTIONS, which the engine wants to be 1 before Blackwell where a layer is split over ranks."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        return [Check(name, "ok", "1")]
    if not torch.cuda.is_available():
        return [Check(name, "ok", f"{value or 'not set'}; it matters on GPUs only")]
    if torch.cuda.get_device_capability(0)[0] >= 10:
        return [Check(name, "ok", f"{value or 'not set'}; these GPUs do not need it")]
    return [Check(name, "fault", f"{value or 'not set'}: tensor and context parallelism need 1 here: export {name}=1")]


# ---- folders ---------------------------------------------------------------------------------------


def folder(path: str, needed: Optional[float] = None) -> Check:
    """Whether a folder can be written, really written; and its free space.

    Args:
        path: it need not exist: then the nearest existing folder above it is tried.
        needed: bytes that the run is about to write.
    """
    there = Path(path).resolve()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        return Check(f"folder {path}", "fault", f"{there} is no folder")
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check(f"folder {path}", "fault", f"cannot be written: {error}")
    free = shutil.disk_usage(there).free
    kind = filesystem(there)
    text = f"{free / 1e9:.1f} GB free on {kind}" + ("" if there == Path(path).resolve() else f"; it will be made in {there}")
    if needed is not None and free < needed:
        return Check(f"folder {path}", "fault", f"{text}; one checkpoint takes about {needed / 1e9:.1f} GB")
    if needed is not None and free < 2 * needed:
        return Check(f"folder {path}", "note", f"{text}; room for one checkpoint of {needed / 1e9:.1f} GB, and the next is written before one is deleted")
    if kind in MEMORY_FILESYSTEMS:
        return Check(f"folder {path}", "note", f"{text}: no other node sees it, and it may not outlive this machine")
    return Check(f"folder {path}", "ok", text)


def filesystem(path: Path) -> str:
    """Kind of the filesystem that a path is on, "unknown" where the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    mounts = {words[1]: words[2] for words in map(str.split, lines)}
    return next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "unknown")


def shared_folder(path: str) -> Check:
    """Whether all processes of the group see one and the same folder: rank 0 writes a secret, every other one reads it."""
    topic, rank, size = f"shared {path}", dist.get_rank(), dist.get_world_size()
    secret = [secrets.token_hex(16)]
    dist.broadcast_object_list(secret)
    place = Path(path) / f".doctor-{secret[0][:8]}"
    problem = ""
    try:
        if rank == 0:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(secret[0])
    except OSError as error:
        problem = f"cannot be written: {error}"
    dist.barrier()
    try:
        if not problem and place.read_text() != secret[0]:
            problem = "holds another file of that name"
    except OSError:
        problem = "what rank 0 wrote is not there"
    problems: list[str] = [""] * size
    dist.all_gather_object(problems, f"rank {rank} on {socket.gethostname()}: {problem}" if problem else "")
    if rank == 0:
        place.unlink(missing_ok=True)
    faults = [problem for problem in problems if problem]
    return Check(topic, "fault", "; ".join(faults)) if faults else Check(topic, "ok", f"the same for all {size} processes")


# ---- a run -----------------------------------------------------------------------------------------


def run(words: Sequence[str], repository: Path) -> tuple[Check, dict]:
    """Whether a run would start, by its dry run in a process of its own.

    Args:
        words: the run's flags; an entry script may stand before them.

    Returns:
        the answer, and the dry run's report ({} where the run would not start).
    """
    script = "pretrain_bdlm.py"
    if words and not words[0].startswith("-"):
        script, words = words[0], words[1:]
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "report.json")
        command = [sys.executable, str(repository / script), *words, "--dry-run", "--dry-run-json", str(out)]
        quiet = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
        if done.returncode == 0:
            report = json.loads(out.read_text())
            said = [line.strip() for line in done.stdout.splitlines() if line.startswith(("  layout", "  memory", "  speed", "  note"))]
            status = "ok" if report["prediction"]["fits"] else "note"
            return Check("run", status, f"{script} would start: " + "; ".join(said)), report
    told = [line for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in told if line.startswith("dry run:") or "error:" in line] or told[-1:]
    return Check("run", "fault", f"{script}: {' '.join(lines)}"), {}


def checkpoint_bytes(report: dict) -> float:
    """Of one checkpoint of the model that a dry run reports on: the weights and what the optimizer keeps of them."""
    model = report["model"]
    kinds = tuple(AttentionLayers(**kind) for kind in model["kinds"])
    precision = report["workload"]["precision"]
    return Model(**{**model, "kinds": kinds}).parameters * (precision["item"] + precision["optimizer"])


def folders_of(words: Iterable[str]) -> dict[str, str]:
    """Folders that a run writes to, by flag, as they stand in its flags."""
    words = list(words)
    flags = ("--save", "--tensorboard-dir", "--data-cache-path", "--wandb-save-dir")
    return {flag: value for flag, value in zip(words, [*words[1:], ""]) if flag in flags}


# ---- together --------------------------------------------------------------------------------------


def examine(folders: Sequence[str], shared: Sequence[str], words: Sequence[str], repository: Path) -> list[Check]:
    """All checks.

    Args:
        folders: to be written to; shared: of which every process must see the same.
        words: a run's flags, perhaps behind an entry script; empty for none.
    """
    answer, report = run(words, repository) if words else (None, {})
    given = dict(zip(words, [*words[1:], ""]))
    heads = {kind["head_size"] for kind in report["model"]["kinds"]} if report else {128}
    found = [*versions(), *devices(), *communication()]
    for size in sorted(heads):
        found += kernels(usual_case(size), given.get("--bdlm-attention-kernel", "auto"), given.get("--bdlm-diagonal-kernel", "auto"))
    found += [*environment(), *([answer] if answer else [])]
    needed = checkpoint_bytes(report) if report else None
    found += [folder(path) for path in folders]
    found += [folder(path, needed if flag == "--save" else None) for flag, path in folders_of(words).items()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found += [shared_folder(path) for path in shared]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [dataclasses.astuple(check) for check in found if check.status == "fault"])
        for rank, faults in enumerate(everyone):
            if rank != dist.get_rank():
                found += [Check(f"rank {rank}: {topic}", status, text) for topic, status, text in faults if not topic.startswith("shared")]
    elif shared:
        text = "one process cannot tell: torchrun --nnodes N --nproc-per-node 1 tools/doctor.py --shared .."
        found += [Check(f"shared {path}", "note", text) for path in shared]
    return found
