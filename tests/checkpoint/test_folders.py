"""A folder appears whole or not at all, also when the process is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.bdlm.checkpoint.folders import MARK, new_folder
from megatron.bdlm.checkpoint.layout import ConversionError

WRITER = """
import sys, time
from pathlib import Path
from megatron.bdlm.checkpoint.folders import new_folder
with new_folder(Path(sys.argv[1]), overwrite=True) as folder:
    for number in range(1000):
        (folder / str(number)).write_text("new")
        time.sleep(0.001)
"""


def _entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_whole_or_nothing(tmp_path):
    with new_folder(tmp_path / "a" / "result") as folder:
        (folder / "file").write_text("1")
        assert not (tmp_path / "a" / "result").exists()
    assert _entries(tmp_path / "a") == ["result"] and _entries(tmp_path / "a" / "result") == [MARK, "file"]
    with pytest.raises(RuntimeError, match="half"):
        with new_folder(tmp_path / "other") as folder:
            (folder / "file").write_text("1")
            raise RuntimeError("half")
    assert _entries(tmp_path) == ["a"]


def test_what_is_there_is_kept_unless_it_was_made_here(tmp_path):
    target = tmp_path / "result"
    with new_folder(target) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(ConversionError, match="exists; name a new folder, or give --overwrite"):
        with new_folder(target):
            raise AssertionError("not reached")
    with new_folder(target, overwrite=True) as folder:
        (folder / "file").write_text("new")
    assert (target / "file").read_text() == "new" and _entries(tmp_path) == ["result"]

    (target / "iter_0000010").mkdir()
    with pytest.raises(ConversionError, match="a run has saved iter_0000010 in it"):
        with new_folder(target, overwrite=True):
            raise AssertionError("not reached")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("precious")
    with pytest.raises(ConversionError, match="replaces folders written by this tool only"):
        with new_folder(tmp_path / "mine", overwrite=True):
            raise AssertionError("not reached")
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "file").write_text("1")
    assert _entries(tmp_path / "empty") == [MARK, "file"]


def test_kill_leaves_the_old_result_and_the_next_run_cleans_up(tmp_path):
    target = tmp_path / "result"
    with new_folder(target) as folder:
        (folder / "file").write_text("old")
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(target)])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".result.partial-*/5")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert _entries(target) == [MARK, "file"] and len(_entries(tmp_path)) == 2
    with new_folder(target, overwrite=True) as folder:
        (folder / "file").write_text("new")
    assert _entries(tmp_path) == ["result"] and (target / "file").read_text() == "new"


def test_kill_between_the_two_renames_loses_nothing(tmp_path):
    """The old result, moved away by a process that died, returns before anything else is done."""
    import socket

    target = tmp_path / "result"
    with new_folder(target) as folder:
        (folder / "file").write_text("old")
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    target.rename(tmp_path / f".result.partial-{socket.gethostname()}-{dead.pid}-old")
    with pytest.raises(RuntimeError):
        with new_folder(target, overwrite=True):
            raise RuntimeError
    assert (target / "file").read_text() == "old" and _entries(tmp_path) == ["result"]
