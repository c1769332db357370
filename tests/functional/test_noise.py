"""Fault D1: corrupted ids are bit-identical on every rank of a layout and for any number of data workers.

`tools/check_topologies.py --noise` does this for every layout of `testing/topologies.py`.
"""

import numpy as np
import pytest

from megatron.bdlm.testing.topologies import ONE_PROCESS, TOPOLOGIES, recorded_noise

ITERATIONS, GLOBAL_BATCH = 2, 4
LAYOUTS = {"CP 2 / BP 2 (CSBP)": 0, "TP 2": 4, "CP 2 x PP 2": 0}  # name -> data workers


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    recorded = recorded_noise(ONE_PROCESS, 0, tmp_path_factory.mktemp("noise"), ITERATIONS)
    return {index: copies[0] for index, copies in recorded.items()}


def test_every_sample_is_drawn_once(alone):
    assert sorted(alone) == list(range(ITERATIONS * GLOBAL_BATCH))


@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.name in LAYOUTS], ids=lambda t: t.name)
def test_ids_are_those_of_one_process(topology, alone, tmp_path):
    """Fault D1."""
    recorded = recorded_noise(topology, LAYOUTS[topology.name], tmp_path, ITERATIONS)
    assert sorted(recorded) == sorted(alone)
    for index, copies in recorded.items():
        for copy in copies:
            np.testing.assert_array_equal(copy, alone[index])
