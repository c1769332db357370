"""The newest complete checkpoint is found whatever a kill left behind (faults D4)."""

import pytest

from megatron.bdlm.checkpoint.tracker import (
    TRACKER,
    IncompleteCheckpoint,
    check_files,
    complete_checkpoints,
    is_complete,
    newest_checkpoint,
    repair_tracker,
)
from megatron.bdlm.config import BDLMConfigError
from tests.checkpoint.folder_of_checkpoints import checkpoint, track


def test_tracked_checkpoint_is_the_newest(tmp_path):
    checkpoint(tmp_path, 5)
    path = checkpoint(tmp_path, 10)
    track(tmp_path, "10")
    assert newest_checkpoint(str(tmp_path)) == path
    assert repair_tracker(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "garbage", "15", "20"])
def test_broken_tracker_falls_back_to_the_newest_complete_checkpoint(tmp_path, text):
    checkpoint(tmp_path, 5)
    path = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 15, complete=False)
    track(tmp_path, text)
    assert newest_checkpoint(str(tmp_path)) == path
    assert "now names 10" in repair_tracker(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == "10"
    assert [p.name for p in complete_checkpoints(str(tmp_path))] == ["iter_0000010", "iter_0000005"]


def test_a_kill_between_checkpoint_and_tracker_loses_nothing(tmp_path):
    checkpoint(tmp_path, 5)
    path = checkpoint(tmp_path, 10)
    track(tmp_path, "5", seconds_after=-1.0, of=path)
    assert newest_checkpoint(str(tmp_path)) == path
    assert "named '5', which is not the newest complete checkpoint; it now names 10" in repair_tracker(str(tmp_path))


def test_a_kill_before_the_first_tracker(tmp_path):
    path = checkpoint(tmp_path, 5)
    assert newest_checkpoint(str(tmp_path)) == path
    assert "named nothing, which is not the newest complete checkpoint; it now names 5" in repair_tracker(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == "5"


def test_a_tracker_that_was_set_back_is_obeyed(tmp_path):
    earlier = checkpoint(tmp_path, 5)
    later = checkpoint(tmp_path, 10)
    track(tmp_path, "5", seconds_after=1.0, of=later)
    assert newest_checkpoint(str(tmp_path)) == earlier
    assert repair_tracker(str(tmp_path)) is None and (tmp_path / TRACKER).read_text() == "5"


@pytest.mark.parametrize("harm", ["cut", "missing", "index"])
def test_a_checkpoint_that_lacks_a_part_is_passed_over(tmp_path, harm):
    path = checkpoint(tmp_path, 5)
    broken = checkpoint(tmp_path, 10)
    track(tmp_path, "10")
    shard = next(broken.glob("*.distcp"))
    if harm == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif harm == "missing":
        shard.unlink()
    else:
        (broken / ".metadata").write_bytes((broken / ".metadata").read_bytes()[:20])
    assert not is_complete(broken)
    with pytest.raises(IncompleteCheckpoint, match={"cut": "the index needs", "missing": "missing", "index": "cannot be read"}[harm]):
        check_files(broken)
    assert newest_checkpoint(str(tmp_path)) == path


def test_nothing_to_load(tmp_path):
    assert newest_checkpoint(None) is None
    assert newest_checkpoint(str(tmp_path)) is None
    assert repair_tracker(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "garbage", "5", "release"])
def test_a_tracker_that_names_nothing_is_refused(tmp_path, text):
    """The engine would end the run with exit code 0."""
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(BDLMConfigError, match=f"--load .*: {TRACKER} says '{text}', but no complete checkpoint is there. A legal value"):
        repair_tracker(str(tmp_path))


def test_a_folder_of_another_format_is_the_engines_matter(tmp_path):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / TRACKER).write_text("5")
    assert repair_tracker(str(tmp_path)) is None


def test_release_checkpoint(tmp_path):
    path = checkpoint(tmp_path, 0).rename(tmp_path / "release")
    track(tmp_path, "release")
    assert newest_checkpoint(str(tmp_path)) == path
