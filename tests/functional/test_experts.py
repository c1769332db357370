"""Experts: the same curve on another layout, router losses included; a checkpoint goes on at another expert-parallel size.

tools/check_topologies.py --experts runs every layout.
"""

import dataclasses

import pytest

from megatron.bdlm.testing.distributed import run_distributed
from megatron.bdlm.testing.topologies import (
    EXPERT_TOPOLOGIES,
    RECORDING_ENTRY,
    TOY_EXPERTS,
    agreement,
    reference_run,
    topology_run,
    toy_flags,
)
from megatron.bdlm.testing.training_run import Run, launch
from tests.functional.test_resume import _copy_at_five
from tests.generation.test_checkpoint_sampling import check_loaded_model

SCRIPT = "pretrain_bdlm.py"
ITERATIONS = 10
METRICS = ("lm loss", "load_balancing_loss", "z_loss", "grad-norm")
IN_CI = {topology.name: topology for topology in EXPERT_TOPOLOGIES}["experts: EP 2, CP 2 / BP 2, TP 2"]
FROM_CHECKPOINT = [topology for topology in EXPERT_TOPOLOGIES if topology.from_checkpoint]


def _train(folder, processes, *flags) -> Run:
    return launch(SCRIPT, toy_flags(ITERATIONS, *TOY_EXPERTS, *flags), processes=processes, folder=folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Ten steps on one process, saved after five and ten: the folder, and the run."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, _train(folder, 1, "--save", str(folder / "checkpoint"), "--save-interval", "5")


def test_experts_learn_and_their_load_is_logged(alone):
    _, run = alone
    assert run.scalars["lm loss"][ITERATIONS] < run.scalars["lm loss"][1]
    for name in ("expert load clean", "expert load noisy"):
        assert all(1.0 <= value <= 4.0 for value in run.scalars[name].values()) and len(run.scalars[name]) == ITERATIONS


@pytest.mark.long
def test_a_layout_with_every_kind_of_parallelism_agrees(alone):
    """Ten steps in float32: losses of model and routers and the gradient norm, from the same fresh weights; fast twin: the next."""
    folder, run = alone
    result = agreement(topology_run(IN_CI, folder, ITERATIONS, extra=tuple(TOY_EXPERTS)), run)
    assert result.steps == ITERATIONS
    assert result.loss <= 1e-5 and result.gradient_norm <= 1e-5, result


def test_a_checkpoint_goes_on_at_another_expert_parallel_size(alone, tmp_path):
    """Five steps at EP 1, three at EP 2 x CP 2, two at EP 1 again, all on the curve of one process."""
    folder, reference = alone
    _copy_at_five(folder / "checkpoint", tmp_path / "five")
    shared = ["--expert-model-parallel-size", "2", "--context-parallel-size", "2", "--load", str(tmp_path / "five")]
    save = ["--save", str(tmp_path / "eight"), "--save-interval", "8", "--exit-interval", "8"]
    first = _train(tmp_path / "first", 2, *shared, *save)
    second = _train(tmp_path / "second", 1, "--load", str(tmp_path / "eight"))
    assert sorted(first.scalars["lm loss"]) == [6, 7, 8] and sorted(second.scalars["lm loss"]) == [9, 10]
    for name in METRICS:
        for step, value in {**first.scalars[name], **second.scalars[name]}.items():
            assert value == pytest.approx(reference.scalars[name][step], rel=1e-5), (name, step)


def test_neither_views_nor_ranks_nor_supervised_tokens_change_router_losses(tmp_path):
    """Fault B8: one step without a model loss, so that gradients are those of router losses; then two views on two ranks, and
    a sample without supervised tokens: another divisor, other noisy rows.
    """
    flags = toy_flags(1, *TOY_EXPERTS, "--bdlm-diffusion-loss-weight", "1e-12")
    one = launch(SCRIPT, flags, processes=1, folder=tmp_path / "one")
    both = ["--bdlm-views", "2", "--context-parallel-size", "2", "--expert-model-parallel-size", "2"]
    two = launch(RECORDING_ENTRY, [*flags, *both], processes=2, folder=tmp_path / "two", EMPTY_SAMPLES="1")
    assert two.scalars["supervised tokens"][1] == 0.75 * one.scalars["supervised tokens"][1]
    for name in METRICS[1:]:
        assert two.scalars[name][1] == pytest.approx(one.scalars[name][1], rel=1e-5), name


def test_the_sampler_has_the_logits_of_training(alone):
    ((difference, _),) = run_distributed(check_loaded_model, 1, str(alone[0] / "checkpoint"))
    assert difference < 2e-5


@pytest.mark.long
def test_pipelines_of_experts_agree(tmp_path):
    """Their stages start from the reference's weights (the engine seeds stages apart); fast twin: the layout above."""
    extra = tuple(TOY_EXPERTS)
    reference = reference_run(tmp_path, ITERATIONS, extra=extra)
    for topology in FROM_CHECKPOINT:
        result = dataclasses.asdict(agreement(topology_run(topology, tmp_path, ITERATIONS, extra=extra), reference))
        assert max(result["loss"], result["gradient_norm"]) <= 1e-5, (topology.name, result)
