"""One process against other layouts: loss and gradient norm agree at every step (tools/check_topologies.py runs them all)."""

import pytest

from megatron.bdlm.testing.topologies import TOPOLOGIES, agreement, reference_run, topology_run

ITERATIONS = 6
IN_CI = ("TP 2 + sequence parallel", "PP 2 interleaved", "DP 2 + distributed optimizer, overlap", "CP 2 / BP 2 (CSBP)", "CP 4 / BP 2 (hybrid)", "CP 2 x PP 2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topologies")
    return folder, reference_run(folder, ITERATIONS)


def test_the_reference_learns(reference):
    _, run = reference
    losses = run.scalars["lm loss"]
    assert len(losses) == ITERATIONS and losses[ITERATIONS] < losses[1]


@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.name in IN_CI], ids=lambda t: t.name)
def test_topology_agrees_with_one_process(topology, reference):
    folder, run = reference
    result = agreement(topology_run(topology, folder, ITERATIONS), run)
    assert result.steps == ITERATIONS
    assert result.loss <= 1e-5 and result.gradient_norm <= 1e-5, result
