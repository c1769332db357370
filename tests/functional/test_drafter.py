"""Drafter training as users start it: layouts agree, online features are the prepared ones, resume is exact."""

import shutil

import numpy as np
import pytest
import torch

from megatron.bdlm.checkpoint.tracker import TRACKER
from megatron.bdlm.drafter.data import read_samples, write_features
from megatron.bdlm.drafter.target import OnlineFeatures, load_target
from megatron.bdlm.testing.training_run import checkpoint_tensors, launch
from tests.drafter.tiny_target import MASK, make_samples, make_target

SCRIPT = "pretrain_dflash.py"
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --lr-decay-style constant --lr-decay-iters 4 --eval-iters 1 "
    "--eval-interval 4 --log-interval 1 --tensorboard-log-interval 1 --ckpt-format torch_dist --num-workers 0 --seed 1234 "
    "--dist-ckpt-optim-fully-reshardable --save-interval 2 "
    f"--dflash-layers 2 --dflash-layer-ids 1,3 --dflash-block-size 4 --dflash-anchors 6 --dflash-mask-token-id {MASK} "
    "--dflash-held-out 2 --dflash-loss dpace --dflash-version 2 --dflash-conv-group-size 8 --dflash-selector-rank 4 --dflash-selector-top-k 5"
).split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Target, samples, features and a run of four steps on one process, features online, saved after two and four."""
    folder = tmp_path_factory.mktemp("drafter")
    make_target(folder / "target")
    make_samples(folder / "samples")
    samples = read_samples(folder / "samples")
    source = OnlineFeatures(load_target(folder / "target", torch.float32), (1, 3), torch.float32)
    write_features(folder / "features", samples, source, (1, 3), "float32", False)
    flags = [*TRAINING, "--dflash-target", str(folder / "target"), "--dflash-data", str(folder / "samples")]
    run = launch(SCRIPT, [*flags, "--save", str(folder / "checkpoint")], processes=1, folder=folder / "straight")
    return folder, flags, run


def _from_two(folder, target):
    target.mkdir(parents=True)
    shutil.copytree(folder / "checkpoint" / "iter_0000002", target / "iter_0000002")
    (target / TRACKER).write_text("2")
    return ["--load", str(target), "--save", str(target)]


def test_resume_is_exact(made, tmp_path):
    folder, flags, run = made
    assert "validation loss at iteration 4" in run.output
    resumed = launch(SCRIPT, [*flags, *_from_two(folder, tmp_path / "checkpoint")], processes=1, folder=tmp_path)
    assert sorted(resumed.scalars["lm loss"]) == [3, 4]
    for name in ("lm loss", "grad-norm", "selector loss", "supervised tokens", "anchors"):
        for step, value in resumed.scalars[name].items():
            assert value == run.scalars[name][step], (name, step)
    ours, theirs = (checkpoint_tensors(path / "iter_0000004") for path in (tmp_path / "checkpoint", folder / "checkpoint"))
    assert len(ours) > 30
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_block_parallel_ranks_with_prepared_features_go_on_alike(made, tmp_path):
    folder, flags, run = made
    layout = ["--context-parallel-size", "2", "--dflash-features", str(folder / "features")]
    resumed = launch(SCRIPT, [*flags, *layout, *_from_two(folder, tmp_path / "checkpoint")], processes=2, folder=tmp_path)
    assert sorted(resumed.scalars["lm loss"]) == [3, 4]
    for name in ("lm loss", "grad-norm", "selector loss", "supervised tokens", "anchors"):
        for step, value in resumed.scalars[name].items():
            assert np.isclose(value, run.scalars[name][step], rtol=2e-5), (name, step)

