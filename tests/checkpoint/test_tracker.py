"""The newest complete checkpoint is found whatever a kill left behind (faults D4)."""

import pytest

from megatron.bdlm.checkpoint.tracker import TRACKER, complete_checkpoints, newest_checkpoint, repair_tracker


def _checkpoint(folder, iteration, complete=True):
    path = folder / f"iter_{iteration:07d}"
    path.mkdir()
    for name in (".metadata",) + (("metadata.json",) if complete else ()):
        (path / name).write_text("{}")
    return path


def test_tracked_checkpoint_is_the_newest(tmp_path):
    _checkpoint(tmp_path, 5)
    path = _checkpoint(tmp_path, 10)
    (tmp_path / TRACKER).write_text("10")
    assert newest_checkpoint(str(tmp_path)) == path
    assert repair_tracker(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "garbage", "15", "20"])
def test_broken_tracker_falls_back_to_the_newest_complete_checkpoint(tmp_path, text):
    _checkpoint(tmp_path, 5)
    path = _checkpoint(tmp_path, 10)
    _checkpoint(tmp_path, 15, complete=False)
    (tmp_path / TRACKER).write_text(text)
    assert newest_checkpoint(str(tmp_path)) == path
    assert "now names 10" in repair_tracker(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == "10"
    assert [p.name for p in complete_checkpoints(str(tmp_path))] == ["iter_0000005", "iter_0000010"]


def test_nothing_to_load(tmp_path):
    assert newest_checkpoint(None) is None
    assert newest_checkpoint(str(tmp_path)) is None
    assert repair_tracker(str(tmp_path)) is None


def test_release_checkpoint(tmp_path):
    path = _checkpoint(tmp_path, 0).rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert newest_checkpoint(str(tmp_path)) == path
