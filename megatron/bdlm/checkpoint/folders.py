"""Folders that appear whole or not at all.

A result is built in a hidden folder beside its place and renamed at the end. A process killed at any moment leaves
the old result, or none, and a hidden folder that the next run on this machine removes.
"""

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import Iterator

from megatron.bdlm.checkpoint.layout import ConversionError


@contextlib.contextmanager
def new_folder(target: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends without an exception.

    Args:
        overwrite: replace an existing `target` that was made here.

    Raises:
        ConversionError: `target` exists and may not be replaced.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    for left_over in target.parent.glob(f"{prefix}*"):
        if not _is_running(left_over.name.removeprefix(prefix)):
            _clear(left_over, target)
    partial = target.parent / f"{prefix}{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        (partial / MARK).write_text("This folder was written as a whole and may be replaced as a whole.\n")
        _swap(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


MARK = ".bdlm-conversion"


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a place that is taken.

    Raises:
        ConversionError: it exists, and `overwrite` is off or it was not made here.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ConversionError(f"{target} exists; name a new folder, or give --overwrite")
    trained = sorted(path.name for path in target.glob("iter_*"))
    if trained:
        raise ConversionError(f"{target}: a run has saved {trained[-1]} in it; name a new folder")
    if not (target / MARK).is_file():
        raise ConversionError(
            f"{target}: --overwrite replaces folders written by this tool only; remove it yourself or name a new one"
        )


def _swap(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`; a kill between the two renames leaves no `target`, never half of one."""
    if not target.exists():
        os.rename(partial, target)
        return
    old = partial.with_name(partial.name + "-old")
    os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old)


def _clear(left_over: Path, target: Path) -> None:
    """Remove what a killed process left; an old result that it had moved away goes back to its place."""
    if left_over.name.endswith("-old") and not target.exists():
        os.rename(left_over, target)
    else:
        shutil.rmtree(left_over)


def _is_running(process: str) -> bool:
    """Whether a process of this machine is alive; what is no process id counts as running."""
    number = process.removesuffix("-old")
    if not number.isdecimal():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
