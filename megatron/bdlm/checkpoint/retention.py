"""Keep the newest N checkpoints of a run, and survive a crash in the middle of a deletion.

A folder is first renamed to a hidden name, then emptied: whatever stops the process, no half-deleted folder is left under
the name of a checkpoint. Hidden folders of an interrupted deletion go with the next one.
"""

import os
import shutil
from pathlib import Path
from typing import Callable

from megatron.bdlm.checkpoint.tracker import complete_checkpoints, iteration_of, tracked_checkpoint

CONDEMNED = ".deleted-"


def surplus(folder: str, keep: int) -> list[Path]:
    """Complete checkpoints of `folder` that `keep` leaves no room for, oldest first.

    Counted from the checkpoint that the tracker names, which is always kept; what is newer than it (after a run was set
    back) is left alone. Without a complete tracked checkpoint nothing is surplus.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one checkpoint is kept")
    tracked = tracked_checkpoint(folder)
    if tracked is None:
        return []
    known = [path for path in complete_checkpoints(folder) if iteration_of(path) <= iteration_of(tracked)]
    return [path for path in reversed(known[keep:]) if not path.is_symlink()]


def delete_surplus(folder: str, keep: int) -> list[str]:
    """Delete what an interrupted deletion left, and what `surplus` lists; the names of the deleted checkpoints.

    Call on one process, when the newest checkpoint is complete and the tracker names it.

    Raises:
        OSError: a folder that cannot be deleted, after all others were.
    """
    refused: list[OSError] = []
    for path in Path(folder).glob(f"{CONDEMNED}iter_*"):  # first, since their names are wanted again
        _attempt(refused, shutil.rmtree, path)
    gone = []
    for path in surplus(folder, keep):
        hidden = path.with_name(CONDEMNED + path.name)
        if _attempt(refused, os.rename, path, hidden) and _attempt(refused, shutil.rmtree, hidden):
            gone.append(path.name)
    if refused:
        raise refused[0]
    return gone


def _attempt(refused: list[OSError], do: Callable, *paths: Path) -> bool:
    """Whether it could be done; else the reason goes to `refused`."""
    try:
        do(*paths)
    except OSError as error:
        refused.append(error)
        return False
    return True
