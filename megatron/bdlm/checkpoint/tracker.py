"""Which checkpoint of a folder is the newest complete one.

The engine names it in `latest_checkpointed_iteration.txt`, written after a checkpoint is whole,
but not atomically: a process killed at that instant leaves an empty file, although every
checkpoint is intact. `repair_tracker` puts that right before a run loads.

A `torch_dist` checkpoint folder `iter_0000010` (or `release`) is complete once it holds
`metadata.json`, which is written last, and the files it names.
"""

import os
import re
from pathlib import Path
from typing import Optional

TRACKER = "latest_checkpointed_iteration.txt"


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint folder was written to its end."""
    return all((folder / name).is_file() for name in ("metadata.json", ".metadata"))


def tracked_checkpoint(load: Optional[str]) -> Optional[Path]:
    """The complete checkpoint folder that the tracker of `load` names, else None."""
    if not load or not (Path(load) / TRACKER).is_file():
        return None
    text = (Path(load) / TRACKER).read_text().strip()
    if text == "release":
        folder = Path(load) / "release"
    elif text.isdecimal():
        folder = Path(load) / f"iter_{int(text):07d}"
    else:
        return None
    return folder if is_complete(folder) else None


def complete_checkpoints(load: str) -> list[Path]:
    """Complete `iter_*` folders of `load`, oldest first."""
    found = [p for p in Path(load).glob("iter_*") if re.fullmatch(r"iter_\d{7,}", p.name) and is_complete(p)]
    return sorted(found, key=lambda p: int(p.name[len("iter_") :]))


def newest_checkpoint(load: Optional[str]) -> Optional[Path]:
    """The checkpoint that a run loading from `load` starts from: the tracked one, else the newest complete one."""
    tracked = tracked_checkpoint(load)
    if tracked is not None or not load:
        return tracked
    complete = complete_checkpoints(load)
    return complete[-1] if complete else None


def repair_tracker(load: Optional[str]) -> Optional[str]:
    """Make the tracker of `load` name a complete checkpoint, if it exists and does not.

    Call on one process before the engine loads.

    Returns:
        A line saying what was repaired, or None.
    """
    if not load or not (Path(load) / TRACKER).is_file() or tracked_checkpoint(load) is not None:
        return None
    path = Path(load) / TRACKER
    before = path.read_text().strip()
    newest = newest_checkpoint(load)
    if newest is None:
        return None
    iteration = str(int(newest.name[len("iter_") :]))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(iteration)
    os.replace(temporary, path)
    return f"{path} named {before!r}, which is no complete checkpoint; it now names {iteration}"
