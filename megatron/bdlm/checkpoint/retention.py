"""Keep the newest N checkpoints of a run, and survive a crash in the middle of a deletion.

A folder is first renamed to a hidden name, then emptied: whatever stops the process, no half-deleted folder is left under
the name of a checkpoint. Hidden folders of an interrupted deletion go with the next one.
"""

import os
import shutil
from pathlib import Path

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
    """Delete what `surplus` lists, and what an interrupted deletion left; the names of the deleted checkpoints.

    Call on one process, when the newest checkpoint is complete and the tracker names it.
    """
    old = surplus(folder, keep)
    for path in old:
        os.rename(path, path.with_name(CONDEMNED + path.name))
    for path in Path(folder).glob(f"{CONDEMNED}iter_*"):
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in old]
