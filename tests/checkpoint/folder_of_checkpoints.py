"""Real, tiny `torch_dist` folders, for tests of which checkpoint counts."""

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron.bdlm.checkpoint.tracker import TRACKER


def checkpoint(folder: Path, iteration: int, complete: bool = True) -> Path:
    """A checkpoint of one tensor in two files' worth of bytes; `complete` decides whether its last file is there."""
    path = folder / f"iter_{iteration:07d}"
    save({"weight": torch.arange(64.0)}, storage_writer=FileSystemWriter(str(path)), no_dist=True)
    if complete:
        (path / "metadata.json").write_text("{}")
    return path


def track(folder: Path, text: str, seconds_after: float = 0.0, of: Path | None = None) -> None:
    """Write the tracker, as if that long after the last file of checkpoint `of`."""
    (folder / TRACKER).write_text(text)
    if of is not None:
        moment = (of / "metadata.json").stat().st_mtime + seconds_after
        os.utime(folder / TRACKER, (moment, moment))
