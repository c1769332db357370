"""Every published recipe trains; two losses with two denominators are the same on two ranks as on one."""

import math
import re

import pytest

from megatron.bdlm.config import RECIPES
from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import launch

SCRIPT = "pretrain_bdlm.py"


def _run(recipe, folder, processes, *flags):
    return launch(
        SCRIPT, toy_flags(2, "--bdlm-recipe", recipe, "--bdlm-block-size", "8", *flags), processes=processes, folder=folder
    )


@pytest.mark.parametrize("recipe", ["sdar", "fast-dllm-v2", "llada2-sft", "i-dlm"])
def test_recipe_trains_on_two_ranks(recipe, tmp_path):
    """Faults F1: the resolved flags are printed. F2: useful tokens and processed rows under their own names, each per
    rank: 1 + V rows a token. F3: the bound, the unweighted cross entropy and the perplexity bound in one line.
    """
    run = _run(recipe, tmp_path, 2, "--context-parallel-size", "2")
    assert sorted(run.scalars["lm loss"]) == [1, 2]
    for name, value in {**RECIPES[recipe], "bdlm_block_size": 8}.items():
        assert re.search(rf"^  {name} \.+ {re.escape(str(value))}$", run.output, re.MULTILINE), name
    views = RECIPES[recipe].get("bdlm_views", 1)
    for step in (1, 2):
        clean, rows = run.scalars["clean tokens/s"][step], run.scalars["processed rows/s"][step]
        assert rows == pytest.approx((1 + views) * clean, rel=1e-5)
        assert run.scalars["ppl bound"][step] == pytest.approx(math.exp(min(20.0, run.scalars["nelbo"][step])), rel=1e-5)
    line = next(line for line in run.output.splitlines() if "lm loss:" in line)
    assert all(f" {name}: " in line for name in ("nelbo", "masked cross entropy", "ppl bound", "clean tokens/s", "processed rows/s"))
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
