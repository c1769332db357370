"""Every published recipe trains; two losses with two denominators are the same on two ranks as on one."""

import math

import pytest

from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import launch

SCRIPT = "pretrain_bdlm.py"


def _run(recipe, folder, processes, *flags):
    return launch(
        SCRIPT, toy_flags(2, "--bdlm-recipe", recipe, "--bdlm-block-size", "8", *flags), processes=processes, folder=folder
    )


@pytest.mark.parametrize("recipe", ["sdar", "fast-dllm-v2", "llada2-sft", "i-dlm"])
def test_recipe_trains_on_two_ranks(recipe, tmp_path):
    run = _run(recipe, tmp_path, 2, "--context-parallel-size", "2")
    assert sorted(run.scalars["lm loss"]) == [1, 2]
    assert all(math.isfinite(value) and value > 0 for value in run.scalars["lm loss"].values())
    assert all(value > 0 for value in run.scalars["grad-norm"].values())


def test_joint_loss_on_two_ranks_is_that_of_one(tmp_path):
    """nemotron-joint: 0.3 x NELBO + 1.0 x next-token loss of the clean rows, each over its own count."""
    alone = _run("nemotron-joint", tmp_path / "alone", 1)
    both = _run("nemotron-joint", tmp_path / "both", 2, "--context-parallel-size", "2")
    data = _run("nemotron-joint", tmp_path / "data", 2)
    for name in ("lm loss", "clean cross entropy", "grad-norm"):
        for step, value in alone.scalars[name].items():
            assert abs(both.scalars[name][step] - value) <= 1e-5 * value, (name, step)
            assert abs(data.scalars[name][step] - value) <= 1e-5 * value, (name, step)
    for step, value in alone.scalars["lm loss"].items():
        parts = 0.3 * alone.scalars["nelbo"][step] + 1.0 * alone.scalars["clean cross entropy"][step]
        assert abs(value - parts) <= 1e-5 * value
