"""How a run ended: exit codes, one plain message for each kind of fault, and a file that a requeue loop reads.

    code  state       when
       0  finished    all --train-iters steps are done
      75  saved       a signal or a limit (--exit-duration-in-mins, --exit-interval) ended it early; a checkpoint was written
      16  rerun       a value was not a number, and again when the step was rerun: a checkpoint waits for another GPU
      17  not a number  .. and the rerun differed, or reruns are off: suspect the machine, or the model
      66  data        a file of the data cannot be read any more
      71  worker      a data-loader worker is gone
      74  disk        a checkpoint could not be written
      76  peer        another rank did not answer in time, or is gone
      78  options     refused at start
       1  error       anything else; the traceback says what

`torchrun` itself ends with 1 for every code but 0, so the code, the state and a line of text also stand in
`<save folder>/bdlm_exit.txt`. The first rank that meets a fault writes it, since others fall over the first. Codes 64 to 78 are
those of BSD's sysexits.h, 16 and 17 the engine's own (`megatron.core.rerun_state_machine`).
"""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional

from megatron.core.rerun_state_machine import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE

from megatron.bdlm.checkpoint.tracker import IncompleteCheckpoint
from megatron.bdlm.config import BDLMConfigError
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.indexed import check_pair, idx_path

FILE_NAME = "bdlm_exit.txt"


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The engine's writers keep no word of the reason, so the message tells the space that is left."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: an exit code, its name, and what to know."""

    code: int
    state: str
    text: str


def classify(error: BaseException, data_prefixes: tuple[str, ...] = ()) -> Ending:
    """The kind of fault behind an exception.

    Args:
        data_prefixes: `.bin/.idx` pairs that the run reads; looked at again when reading them may have failed.
    """
    chain = list(_chain(error))
    text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    if any(isinstance(link, BDLMConfigError) for link in chain):
        return Ending(78, "options", _first_line(error))
    if any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in chain) or _NO_SPACE.search(text):
        return Ending(74, "disk", "no space is left where a file was written; free some, and start the same command again")
    if any(isinstance(link, SaveFailed) for link in chain) and not _LOST_PEER.search(text):
        return Ending(74, "disk", _first_line(error))
    if any(isinstance(link, IncompleteCheckpoint) for link in chain):
        return Ending(74, "disk", f"a checkpoint is not whole and was not made the newest: {_first_line(error)}")
    unreadable = _unreadable(data_prefixes)
    if unreadable is not None:
        return Ending(66, "data", unreadable)
    if any(isinstance(link, DataError) for link in chain):
        return Ending(66, "data", _first_line(error))
    lost = _LOST_WORKER.search(text)
    if lost:
        return Ending(71, "worker", f"{lost.group(0)}; out of memory, if nobody killed it (--num-workers)")
    if "Unexpected result" in text:  # the engine's, with --rerun-mode disabled
        return Ending(EXIT_CODE_FAILED_ON_RESULT_VALIDATION, "not a number", _first_line(error))
    if _LOST_PEER.search(text):
        return Ending(76, "peer", _first_line(error))
    return Ending(1, "error", f"{type(error).__name__}: {_first_line(error)}")


def of_exit(code: Any, step: int, steps: int) -> Ending:
    """The ending that a run without an exception, or the engine's `sys.exit(code)`, means after `step` of `steps` steps."""
    code = code if isinstance(code, int) else int(code is not None)
    if code == 0 and step < steps:
        return Ending(75, "saved", f"step {step} of {steps} is done; start the same command again to go on")
    if code == 0:
        return Ending(0, "finished", f"all {steps} steps are done")
    if code == EXIT_CODE_RESUME_TO_DISAMBIGUATE:
        return Ending(code, "rerun", f"a result of step {step + 1} was refused twice; start again on other GPUs to learn whether these are at fault")
    if code == EXIT_CODE_FAILED_ON_RESULT_VALIDATION:
        return Ending(code, "not a number", f"a result of step {step + 1} was refused; the log above says which, on which rank")
    return Ending(code, "error", f"the engine left with {code}")


def forget(folder: Optional[str]) -> None:
    """Remove the file of an earlier launch."""
    if folder:
        (Path(folder) / FILE_NAME).unlink(missing_ok=True)


def write(ending: Ending, folder: Optional[str]) -> None:
    """Write `CODE STATE TEXT` to the save folder, unless a rank was first; a full disk is no further fault."""
    if not folder:
        return
    path = Path(folder) / FILE_NAME
    try:
        with open(path, "x") as stream:
            stream.write(f"{ending.code} {ending.state.replace(' ', '-')} {ending.text}\n")
    except FileExistsError:
        pass
    except OSError:
        path.unlink(missing_ok=True)  # created, but there was no room for its words


def data_prefixes(args: Any) -> tuple[str, ...]:
    """The `.bin/.idx` pairs among a run's data flags, whatever weights stand between them."""
    words = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
    listed = [word for given in words if given for word in ([given] if isinstance(given, str) else given)]
    return tuple(word for word in listed if idx_path(word).is_file())


_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_LOST_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: [\w ]+|exited unexpectedly[^.\n]*)")
_LOST_PEER = re.compile(
    r"DistBackendError|DistNetworkError|Timed out waiting|Operation timed out|Connection closed by peer|Connection reset by peer|"
    r"Application timeout caused pair closure|Broken pipe|gloo.*(?:[Tt]imeout|Connect)"
)


def _chain(error: Optional[BaseException]) -> Iterator[BaseException]:
    """An exception, what caused it, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _unreadable(prefixes: tuple[str, ...]) -> Optional[str]:
    """What is wrong with the first pair that is no longer whole, else None."""
    for prefix in prefixes:
        try:
            check_pair(prefix)
        except (DataError, OSError) as error:
            return str(error)
    return None
