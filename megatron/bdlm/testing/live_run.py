"""A run in the background, to be disturbed while it trains.

    with LiveRun("pretrain_bdlm.py", flags, processes=2, folder=tmp_path) as run:
        run.wait_for("iteration        3/")
        os.kill(run.ranks()[1], signal.SIGSTOP)
        code = run.end(timeout=60)

With one process the script is started directly, so `end` gives its own exit code; torchrun, which ends with 1 after any fault,
starts more.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron.bdlm.testing.training_run import REPOSITORY, RunFailure, command, environment, free_port


class LiveRun:
    """A started run; leaving the `with` block kills whatever of it is left."""

    def __init__(self, script: str, flags: list[str], *, processes: int, folder: Path, **extra: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "live.log"
        if processes == 1:
            extra = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **extra)
            words = [sys.executable, str(REPOSITORY / script), *flags]
        else:
            words = command(script, flags, processes)
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                words, env=environment(**extra), cwd=REPOSITORY, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> "LiveRun":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.descendants(), self._process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Wait until the log has `text`.

        Raises:
            RunFailure: the run ended, or the time is over.
        """
        deadline = time.monotonic() + timeout
        while text not in self.output:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RunFailure(f"no {text!r} in the log:\n{self.output[-6000:]}")
            time.sleep(0.05)

    def end(self, timeout: float) -> int:
        """The exit code.

        Raises:
            RunFailure: it runs on.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RunFailure(f"no end after {timeout:g} s:\n{self.output[-6000:]}") from None

    def descendants(self) -> list[int]:
        """Every process below the started one, parents first."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue
                children.setdefault(parent, []).append(int(entry.name))
        found = [self._process.pid]
        for pid in found:
            found.extend(children.get(pid, []))
        return found[1:]

    def ranks(self) -> dict[int, int]:
        """Process id by rank: the children of torchrun."""
        found = {}
        for pid in self.descendants():
            try:
                words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
            if rank is not None:
                found.setdefault(rank, pid)
        return found
