"""`tools/check_topologies.py --noise`: what it says of identical, differing and failing layouts (runs are stood in for)."""

import importlib.util

import numpy as np

from megatron.bdlm.testing.training_run import REPOSITORY, RunFailure

SPEC = importlib.util.spec_from_file_location("check_topologies", REPOSITORY / "tools" / "check_topologies.py")
check_topologies = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_topologies)


def test_noise_is_compared_bit_by_bit(monkeypatch, capsys):
    """Fault D1: one changed id, a missing sample and a failed run are each found and counted."""
    def recorded(topology, workers, folder):
        if topology.name == "PP 2":
            raise RunFailure("first line\nValueError: no such thing\n")
        samples = {0: [np.arange(4), np.arange(4)], 1: [np.arange(4)]}
        if topology.name == "TP 2":
            samples[0][1] = np.array([0, 1, 2, 9])
        if topology.name == "DP 2":
            del samples[1]
        return samples

    monkeypatch.setattr(check_topologies, "recorded_noise", recorded)
    assert check_topologies.check_noise("", [0]) == 3
    lines = {line[:42].strip(): line[42:] for line in capsys.readouterr().out.splitlines()}
    assert lines["CP 2 / BP 2 (CSBP)"].split() == ["0", "2", "3", "identical"]
    assert lines["TP 2"].endswith("DIFFERS") and lines["DP 2"].endswith("DIFFERS")
    assert "FAILED: ValueError: no such thing" in lines["PP 2"]
