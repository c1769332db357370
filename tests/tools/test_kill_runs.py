"""Runs killed at random moments resume to the same tensors: two of the twenty that the tool does, and that it can tell a difference."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kill_runs import main

ROOT = Path(__file__).resolve().parents[2]


def kill_runs(*words):
    return subprocess.run([sys.executable, "tools/kill_runs.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_two_killed_runs_end_as_the_undisturbed_one():
    """Fault D4: one killed at any moment, one while it saves."""
    done = kill_runs("--runs", "2", "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "2 of 2 killed runs resumed and ended with the same tensors, bit for bit" in done.stdout
    assert len(re.findall(r"run \d+: killed (?:in|out)side .*; resumed from (?:iter_\d+|the start); all \d+ tensors equal", done.stdout)) == 2


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "2"])
    assert "--steps 2: a kill needs a step before and one after it. A legal value: 6" in capsys.readouterr().err
