"""Which checkpoint of a folder is the newest complete one.

A `torch_dist` checkpoint folder `iter_0000010` (or `release`) is complete when it holds `metadata.json`, which is
written last, and every file that its `.metadata` names, in full length.

The engine names the newest checkpoint in `latest_checkpointed_iteration.txt`, after the checkpoint is whole. A process
killed around that moment leaves no tracker, an empty one, or one that still names the checkpoint before:

    iter_0000005 complete, iter_0000010 complete, tracker "5", written before iter_0000010   -> start from 10
    iter_0000005 complete, iter_0000010 complete, tracker "5", written after iter_0000010    -> start from 5: someone
                                                                                                chose it, to go back

`repair_tracker` puts the tracker right before a run loads.
"""

import functools
import os
import re
from pathlib import Path
from typing import Iterator, Optional

from megatron.bdlm.config import BDLMConfigError

TRACKER = "latest_checkpointed_iteration.txt"
LAST_WRITTEN = "metadata.json"
INDEX = ".metadata"


class IncompleteCheckpoint(RuntimeError):
    """A checkpoint that lacks a file or a part of one."""


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint folder was written to its end."""
    if not (folder / LAST_WRITTEN).is_file() or not (folder / INDEX).is_file():
        return False
    try:
        check_files(folder)
    except IncompleteCheckpoint:
        return False
    return True


def check_files(folder: Path) -> None:
    """Hold the files of a checkpoint against its index.

    Raises:
        IncompleteCheckpoint: naming the file, its length and the length that the index needs.
    """
    index = folder / INDEX
    try:
        needed = _needed_bytes(str(index), index.stat().st_mtime_ns)
    except Exception as error:  # a pickle cut short raises one of many
        raise IncompleteCheckpoint(f"{index}: cannot be read ({type(error).__name__}: {error})") from error
    for name, length in needed.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or found < length:
            raise IncompleteCheckpoint(f"{path}: {'missing' if found is None else f'{found} bytes'}, the index needs {length} bytes")


@functools.lru_cache(maxsize=64)
def _needed_bytes(index: str, modified: int) -> dict[str, int]:
    """Bytes that an index expects of each file; `modified` is part of the key, so that a new index is read again."""
    from torch.distributed.checkpoint import FileSystemReader

    needed: dict[str, int] = {}
    for place in FileSystemReader(os.path.dirname(index)).read_metadata().storage_data.values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    return needed


def iteration_folder(folder: Path, iteration: int) -> Path:
    """The checkpoint folder of an iteration, as the engine names it."""
    return folder / f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """10 of iter_0000010; -1 of release."""
    return -1 if checkpoint.name == "release" else int(checkpoint.name.removeprefix("iter_"))


def tracked_checkpoint(load: Optional[str]) -> Optional[Path]:
    """The complete checkpoint folder that the tracker of `load` names, else None."""
    if not load or not (Path(load) / TRACKER).is_file():
        return None
    text = (Path(load) / TRACKER).read_text().strip()
    if text == "release":
        folder = Path(load) / "release"
    elif text.isdecimal():
        folder = iteration_folder(Path(load), int(text))
    else:
        return None
    return folder if is_complete(folder) else None


def complete_checkpoints(load: str) -> Iterator[Path]:
    """Complete `iter_*` folders of `load`, newest first; each is looked into only when its turn comes."""
    found = [path for path in Path(load).glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name)]
    return filter(is_complete, sorted(found, key=iteration_of, reverse=True))


def newest_checkpoint(load: Optional[str]) -> Optional[Path]:
    """The checkpoint that a run loading from `load` starts from, by the rules of the module docstring."""
    if not load:
        return None
    tracked = tracked_checkpoint(load)
    if tracked is None:
        return next(complete_checkpoints(load), None)
    told = (Path(load) / TRACKER).stat().st_mtime_ns
    for path in complete_checkpoints(load):
        if iteration_of(path) <= iteration_of(tracked):
            break
        if (path / LAST_WRITTEN).stat().st_mtime_ns > told:
            return path
    return tracked


def repair_tracker(load: Optional[str]) -> Optional[str]:
    """Make the tracker of `load` name the checkpoint to start from, where there is one.

    Call on one process before the engine loads, which looks at the tracker only.

    Returns:
        A line saying what was repaired, or None.

    Raises:
        BDLMConfigError: the tracker names nothing, and nothing is there that it could name.
    """
    newest = newest_checkpoint(load)
    if newest is None and load and (Path(load) / TRACKER).is_file():
        _refuse_empty(Path(load))
    if newest is None or newest == tracked_checkpoint(load):
        return None
    path = Path(load) / TRACKER
    before = repr(path.read_text().strip()) if path.is_file() else "nothing"
    iteration = str(iteration_of(newest))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(iteration)
    os.replace(temporary, path)
    return f"{path} named {before}, which is not the newest complete checkpoint; it now names {iteration}"


def _refuse_empty(load: Path) -> None:
    """Refuse a tracker that names no folder; the engine would leave without a word, with exit code 0.

    (A folder that it names may hold a checkpoint of another format, which only the engine knows.)
    """
    text = (load / TRACKER).read_text(errors="replace").strip()
    named = load / "release" if text == "release" else iteration_folder(load, int(text)) if text.isdecimal() else None
    if named is None or not named.is_dir():
        raise BDLMConfigError(
            f"--load {load}: {TRACKER} says {text[:40]!r}, but no complete checkpoint is there. A legal value: a folder with one, or "
            f"this folder without that file, to begin at step 0"
        )
