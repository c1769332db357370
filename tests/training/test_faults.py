"""Which kind of fault stands behind an exception, and what a requeue loop reads about it."""

import errno

import pytest

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.bdlm.checkpoint.tracker import IncompleteCheckpoint  # noqa: E402
from megatron.bdlm.config import BDLMConfigError  # noqa: E402
from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.training import faults  # noqa: E402

GLOO = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"


def caused_by(cause):
    try:
        raise RuntimeError("a writer failed") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error, code, state",
    [
        (BDLMConfigError("--bdlm-block-size 0: a block holds at least one token. A legal value: 32"), 78, "options"),
        (OSError(errno.ENOSPC, "No space left on device"), 74, "disk"),
        (caused_by(OSError(errno.EDQUOT, "Disk quota exceeded")), 74, "disk"),
        (RuntimeError("Local rank: 0, [Errno 28] No space left on device: 'x.distcp'"), 74, "disk"),
        (faults.SaveFailed("the checkpoint of iteration 3 could not be written to x, where 0.0 MiB are free"), 74, "disk"),
        (IncompleteCheckpoint("x.distcp: 5 bytes, the index needs 9 bytes"), 74, "disk"),
        (DataError("a.bin: truncated"), 66, "data"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), 71, "worker"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), 71, "worker"),
        (RuntimeError("Rank 0, node a, device cpu, iteration 3: Unexpected result nan (message='x')"), 17, "not a number"),
        (RuntimeError(GLOO), 76, "peer"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4"), 76, "peer"),
        (KeyError("layer"), 1, "error"),
    ],
)
def test_kinds(error, code, state):
    ending = faults.classify(error)
    assert (ending.code, ending.state) == (code, state) and ending.text


def test_a_lost_worker_over_a_broken_file_is_the_files_fault(tmp_path):
    (tmp_path / "d.bin").write_bytes(b"")
    (tmp_path / "d.idx").write_bytes(b"no index")
    ending = faults.classify(RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. "), (str(tmp_path / "d"),))
    assert ending.code == 66 and "d.idx: no Megatron index" in ending.text


@pytest.mark.parametrize("code, step, expected", [(0, 10, 0), (None, 10, 0), (0, 4, 75), (16, 4, 16), (17, 4, 17), (3, 4, 3), ("text", 4, 1)])
def test_endings_in_order(code, step, expected):
    assert faults.of_exit(code, step, 10).code == expected


def test_the_first_word_stands(tmp_path):
    """Ranks fall over the fault of the first one; its word is the one to read."""
    faults.write(faults.Ending(74, "disk", "full"), str(tmp_path))
    faults.write(faults.Ending(76, "peer", "rank 0 is gone"), str(tmp_path))
    assert (tmp_path / faults.FILE_NAME).read_text() == "74 disk full\n"
    faults.forget(str(tmp_path))
    faults.write(faults.Ending(17, "not a number", "nan"), str(tmp_path))
    assert (tmp_path / faults.FILE_NAME).read_text() == "17 not-a-number nan\n"
    faults.write(faults.Ending(0, "finished", ""), str(tmp_path / "no such folder"))  # no second fault
