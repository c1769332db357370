"""Corrupted ids are bit-identical on every rank of every topology and for any number of data workers (faults D1)."""

import numpy as np
import pytest

from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import launch

ENTRY = "tests/functional/recording_entry.py"
ITERATIONS, GLOBAL_BATCH = 2, 4
LAYOUTS = [
    (2, "--context-parallel-size 2 --num-workers 0"),
    (2, "--tensor-model-parallel-size 2 --num-workers 4"),
    (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-workers 0"),
]


def _recorded(folder, processes, flags):
    folder.mkdir()
    launch(ENTRY, toy_flags(ITERATIONS, *flags.split()), processes=processes, folder=folder, RECORD_NOISE=str(folder))
    samples = {}
    for path in folder.glob("*.npy"):
        index, _ = path.stem.split("-")
        samples.setdefault(int(index), []).append(np.load(path))
    return samples


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return {index: copies[0] for index, copies in _recorded(tmp_path_factory.mktemp("noise") / "one", 1, "").items()}


def test_every_sample_is_drawn_once(alone):
    assert sorted(alone) == list(range(ITERATIONS * GLOBAL_BATCH))


@pytest.mark.parametrize("processes, flags", LAYOUTS, ids=[flags for _, flags in LAYOUTS])
def test_ids_are_those_of_one_process(processes, flags, alone, tmp_path):
    recorded = _recorded(tmp_path / "run", processes, flags)
    assert sorted(recorded) == sorted(alone)
    for index, copies in recorded.items():
        for copy in copies:
            np.testing.assert_array_equal(copy, alone[index])
