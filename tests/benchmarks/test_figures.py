"""Figures of the measuring scripts from given times and counts: no ranks are started."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import context_sweeps, peer_schedule  # noqa: E402


def test_mostly_windowed_model_is_five_and_one():
    def layer(seconds):
        return {"ways": {"bp": dict.fromkeys(("step", "compute_only", "communication_only", "ceiling"), seconds)}}

    mixed = context_sweeps.mostly_windowed({"window=128": layer(0.1), "base": layer(1.0)})
    assert mixed["bp"]["step"] == pytest.approx(1.5)


def test_rows_and_balance_where_halves_are_equal():
    ours = peer_schedule.of_ours(16, 4)
    assert (ours["balance"], ours["ring_rows"], ours["needed_rows_mean"]) == (1.0, 384.0, 288.0)
    assert ours["area"] == 2 * 32**2 * 16 * 17 // 2
