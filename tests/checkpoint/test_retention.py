"""Old checkpoints go, the newest complete ones stay, and a crash in the middle of a deletion harms nothing."""

import os
import shutil

import pytest

from megatron.bdlm.checkpoint.retention import delete_surplus, surplus
from megatron.bdlm.checkpoint.tracker import newest_checkpoint
from tests.checkpoint.folder_of_checkpoints import checkpoint, track


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_newest_stay(tmp_path):
    for iteration in (5, 10, 15, 20):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "20")
    assert delete_surplus(str(tmp_path), 2) == ["iter_0000005", "iter_0000010"]
    assert names(tmp_path) == ["iter_0000015", "iter_0000020"]
    assert delete_surplus(str(tmp_path), 2) == []


def test_nothing_goes_before_the_tracker_has_moved(tmp_path):
    for iteration in (5, 10, 15):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "10")  # 15 is complete, but nothing says so yet
    assert [path.name for path in surplus(str(tmp_path), 1)] == ["iter_0000005"]
    track(tmp_path, "garbage")
    assert surplus(str(tmp_path), 1) == []


def test_an_incomplete_checkpoint_neither_counts_nor_goes(tmp_path):
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10, complete=False)
    checkpoint(tmp_path, 15)
    track(tmp_path, "15")
    assert surplus(str(tmp_path), 2) == []
    assert delete_surplus(str(tmp_path), 1) == ["iter_0000005"]
    assert names(tmp_path) == ["iter_0000010", "iter_0000015"]


def test_what_is_newer_than_the_tracked_checkpoint_stays(tmp_path):
    for iteration in (5, 10, 15):
        later = checkpoint(tmp_path, iteration)
    track(tmp_path, "10", seconds_after=1.0, of=later)  # a run set back to 10
    assert delete_surplus(str(tmp_path), 1) == ["iter_0000005"]
    assert names(tmp_path) == ["iter_0000010", "iter_0000015"]


def test_a_crash_in_the_middle_of_a_deletion(tmp_path, monkeypatch):
    for iteration in (5, 10):
        newest = checkpoint(tmp_path, iteration)
    track(tmp_path, "10")

    def crash(path, **_):
        os.unlink(path / ".metadata")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            delete_surplus(str(tmp_path), 1)
    assert names(tmp_path) == [".deleted-iter_0000005", "iter_0000010"]
    assert newest_checkpoint(str(tmp_path)) == newest
    assert delete_surplus(str(tmp_path), 1) == [] and names(tmp_path) == ["iter_0000010"]


def test_what_an_earlier_run_left_under_the_same_name_is_no_obstacle(tmp_path):
    for iteration in (5, 10):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "10")
    left = tmp_path / ".deleted-iter_0000005"
    left.mkdir()
    (left / "shard").touch()
    assert delete_surplus(str(tmp_path), 1) == ["iter_0000005"]
    assert names(tmp_path) == ["iter_0000010"]


def test_a_folder_that_cannot_go_is_named_and_stops_no_other(tmp_path, monkeypatch):
    for iteration in (5, 10, 15):
        checkpoint(tmp_path, iteration)
    track(tmp_path, "15")
    rename = os.rename

    def stubborn(path, to):
        if path.name == "iter_0000005":
            raise PermissionError(13, "Permission denied", str(path))
        rename(path, to)

    monkeypatch.setattr(os, "rename", stubborn)
    with pytest.raises(PermissionError, match="iter_0000005"):
        delete_surplus(str(tmp_path), 1)
    assert names(tmp_path) == ["iter_0000005", "iter_0000015"]


def test_at_least_one_stays(tmp_path):
    with pytest.raises(ValueError, match="keep 0: at least one checkpoint is kept"):
        surplus(str(tmp_path), 0)
