"""No supervised token: finite zero loss, weights untouched, counted (faults B3)."""

import math

import torch

from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import checkpoint_tensors, launch

ENTRY = "megatron/bdlm/testing/recording_entry.py"


def _run(folder, iterations, empty, *flags, processes=2):
    save = ["--save", str(folder / "checkpoint"), "--save-interval", "1"]
    return launch(ENTRY, toy_flags(iterations, *save, *flags), processes=processes, folder=folder, EMPTY_SAMPLES=empty)


def test_empty_everywhere_leaves_weights_alone(tmp_path):
    """Fault B3: step 2 (samples 4 to 7) has no supervised token: weights and optimizer state stay as after step 1."""
    run = _run(tmp_path, 2, "4,5,6,7", "--context-parallel-size", "2")
    assert run.scalars["lm loss"][2] == 0.0 and run.scalars["supervised tokens"][2] == 0.0
    assert run.scalars["supervised tokens"][1] > 0
    assert "number of skipped iterations:   1" in run.output
    before, after = (checkpoint_tensors(tmp_path / "checkpoint" / f"iter_000000{i}") for i in (1, 2))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_empty_on_one_rank_is_finite(tmp_path):
    """Fault B3: data-parallel rank 1 gets only empty samples; the loss is that of the other rank's tokens."""
    run = _run(tmp_path, 2, "1,3,5,7")
    assert all(math.isfinite(value) and value > 0 for value in run.scalars["lm loss"].values())
    assert "number of skipped iterations:   0" in run.output
    alone = _run(tmp_path / "alone", 2, "1,3,5,7", processes=1)
    for step, value in alone.scalars["lm loss"].items():
        assert abs(run.scalars["lm loss"][step] - value) <= 1e-5 * value
