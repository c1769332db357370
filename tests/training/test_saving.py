"""`metadata.json`, which makes a checkpoint complete, is written only over files that are all there."""

import pytest

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core.dist_checkpointing import serialization  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig  # noqa: E402

from megatron.bdlm.checkpoint.tracker import IncompleteCheckpoint, is_complete  # noqa: E402
from megatron.bdlm.training import saving  # noqa: E402
from tests.checkpoint.folder_of_checkpoints import checkpoint  # noqa: E402


@pytest.fixture
def verifying(monkeypatch):
    monkeypatch.setattr(serialization, "save_config", serialization.save_config)  # put back afterwards
    monkeypatch.setattr(saving, "VISIBLE_WITHIN", 0.0)
    saving._verify_before_completion()


def test_a_whole_checkpoint_becomes_complete(tmp_path, verifying):
    path = checkpoint(tmp_path, 5, complete=False)
    serialization.save_config(CheckpointingConfig("torch_dist", 1), str(path))
    assert is_complete(path)


def test_a_file_cut_short_keeps_it_incomplete(tmp_path, verifying):
    """Fault D4."""
    path = checkpoint(tmp_path, 5, complete=False)
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(IncompleteCheckpoint, match="the index needs"):
        serialization.save_config(CheckpointingConfig("torch_dist", 1), str(path))
    assert not (path / "metadata.json").exists() and not is_complete(path)
