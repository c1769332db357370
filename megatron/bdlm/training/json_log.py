"""The metrics of a run as lines of JSON: what TensorBoard gets, under the same names, in one file that is appended to.

    {"time": "2026-03-01T10:00:00+00:00", "kind": "train", "iteration": 7, "consumed samples": 56, "lm loss": 3.21, ..}

Three kinds of line: `start` (a run begins or goes on, with its world size), `train` (one logged iteration) and
`validation` or `test` (one evaluation). A value that is not finite is null.

How it sits on the engine: `tee_scalars` stands where the engine keeps its TensorBoard writer, hands everything on to it
(if there is one) and remembers the scalars; `hooks.install` calls `JsonLog.write` when the engine has logged an
iteration or an evaluation. So whatever the engine logs is in the line, with and without --tensorboard-dir.

A line is one write to a file opened for appending. What a kill or a full disk leaves behind of a line is cut off when
the log is opened or written next.
"""

import json
import math
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from megatron.bdlm.config import BDLMConfigError

FLAG = "--bdlm-json-log"
FIELDS = ("time", "kind", "iteration", "consumed samples")
"""First fields of every line."""

KINDS = ("start", "train", "validation", "test")

LONGEST_LINE = 2**20
"""Bytes; more than any line of a run needs."""

_AGAINST_SAMPLES = " vs samples"  # the engine logs every scalar a second time, over samples instead of iterations


class ScalarTee:
    """A TensorBoard writer that remembers scalars on their way to another writer, or to none."""

    def __init__(self, writer: Optional[Any]) -> None:
        self._writer, self._scalars = writer, {}

    def add_scalar(self, tag: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not tag.endswith(_AGAINST_SAMPLES):
            self._scalars[tag] = float(value)
        if self._writer is not None:
            self._writer.add_scalar(tag, value, *args, **kwargs)

    def take(self) -> dict[str, float]:
        """The scalars since the last call."""
        taken, self._scalars = self._scalars, {}
        return taken

    def __getattr__(self, name: str) -> Any:
        """Every other method is the writer's, or does nothing."""
        return getattr(self._writer, name) if self._writer is not None else lambda *args, **kwargs: None


class JsonLog:
    """A file of JSON lines to append to.

    Raises:
        BDLMConfigError: the path cannot be written, or holds something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._failed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._size = self._cut_torn_line()
        except OSError as error:
            raise BDLMConfigError(
                f"{FLAG} {path}: it cannot be written ({error.strerror}). A legal value: a file in a folder of yours"
            ) from None

    def write(self, kind: str, iteration: int, samples: int, values: dict[str, Any]) -> None:
        """Append one line. A line that cannot be written is left out with one warning: a log does not end a run."""
        line = dict(zip(FIELDS, (datetime.now(timezone.utc).isoformat(timespec="milliseconds"), kind, iteration, samples)))
        line |= {name: _plain(value) for name, value in values.items()}
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size)
                raise OSError(None, "no space for a whole line")
            self._size += written
            self._failed = False
        except OSError as error:
            if not self._failed:
                print(f"warning: {FLAG} {self.path}: line left out ({error.strerror}); the run goes on", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        os.close(self._file)

    def _cut_torn_line(self) -> int:
        """Remove the end of a line that was never finished; returns the size of what stays."""
        size = os.fstat(self._file).st_size
        last = os.pread(self._file, LONGEST_LINE, max(0, size - LONGEST_LINE))
        end = last.rfind(b"\n") + 1
        whole = size - len(last) + end
        if os.pread(self._file, 1, 0) not in (b"", b"{") or last[end : end + 1] not in (b"", b"{") or (end == 0 and whole > 0):
            raise BDLMConfigError(f"{FLAG} {self.path}: it holds something else than lines of JSON. A legal value: a new file")
        os.ftruncate(self._file, whole)
        return whole


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tee_scalars() -> ScalarTee:
    """Put a `ScalarTee` in the place of the engine's TensorBoard writer, once; returns it."""
    from megatron.training import global_vars

    writer = global_vars.get_tensorboard_writer()
    if not isinstance(writer, ScalarTee):
        writer = global_vars._GLOBAL_TENSORBOARD_WRITER = ScalarTee(writer)
    return writer


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Every whole line of a log, in the order of the file; a torn last line is left out.

    Raises:
        ValueError: naming the first line that is not one of a log.
    """
    lines = []
    for number, text in enumerate(Path(path).read_text().split("\n")[:-1], 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or line["kind"] not in KINDS or not isinstance(line["iteration"], int):
                raise ValueError
        except (ValueError, KeyError):
            raise ValueError(f"{path}:{number}: not a line of {FLAG}") from None
        lines.append(line)
    return lines
