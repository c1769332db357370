"""Verdicts of paired runs from given outcomes; the sides' options; one real pair of identical commands."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from megatron.bdlm.testing.topologies import toy_flags

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("compare_runs", ROOT / "tools" / "compare_runs.py")
tool = importlib.util.module_from_spec(spec)
sys.modules["compare_runs"] = tool  # dataclasses look their module up
spec.loader.exec_module(tool)


def arguments(*extra):
    return tool.parse(["--baseline=--block-parallel-size 1", "--candidate=--block-parallel-size 2", "--pairs", "4", *extra, "--", "x"])


def outcomes(quality=(0.0, 0.001, -0.001, 0.0), time=1.0, failure=None):
    found = []
    for pair, change in enumerate(quality):
        found.append(tool.Outcome("baseline", pair, "", 5.0, 1.0 + 0.01 * pair, 1e9, 10, 10.0))
        text = "RuntimeError: gone" if pair == failure else ""
        found.append(tool.Outcome("candidate", pair, text, 5.0 * (1 + change), time * (1.0 + 0.01 * pair), 1e9, 10, 10.0 * time))
    return found


def test_equal_runs_are_kept_and_differ_in_nothing():
    judged = tool.judge(arguments(), outcomes())
    assert judged["verdict"] == "keep" and judged["different"] == []


@pytest.mark.parametrize(
    ("extra", "given", "reason"),
    [
        ((), dict(quality=(0.02, 0.021, 0.019, 0.02)), "quality: the interval"),
        ((), dict(quality=(0.1, -0.1, 0.1, -0.1)), "quality: the interval"),  # noise too large to tell
        (("--max-time-ratio", "1.05"), dict(time=1.2), "time: the interval"),
        ((), dict(failure=2), r"1 run\(s\) failed"),
    ],
)
def test_what_misses_a_limit_retains_the_baseline(extra, given, reason):
    judged = tool.judge(arguments(*extra), outcomes(**given))
    assert judged["verdict"] == "retain-baseline"
    assert re.search(reason, judged["reasons"][0])


def test_a_slower_candidate_is_told_even_without_a_limit():
    judged = tool.judge(arguments(), outcomes(time=1.5))
    assert judged["verdict"] == "keep" and judged["different"] == ["time", "seconds to target"]


def test_options_may_differ_only_where_named():
    options = {
        "baseline": dict(block_parallel_size=1, lr=1e-3, seed=1, save="a"),
        "candidate": dict(block_parallel_size=2, lr=2e-3, seed=1, save="b"),
    }
    assert tool.unwanted_differences(arguments(), options) == ["lr: 0.001 against 0.002"]
    assert tool.unwanted_differences(arguments("--may-differ", "lr"), options) == []


def test_one_pair_is_refused(capsys):
    with pytest.raises(SystemExit):
        tool.parse(["--baseline=", "--candidate=", "--pairs", "1", "--", "x"])
    assert "--pairs 1: a spread needs at least two" in capsys.readouterr().err


def test_identical_commands_show_no_difference_in_quality(tmp_path):
    flags = [flag if flag != "1000" else "4" for flag in toy_flags(4)]  # --eval-interval
    code = tool.main(["--baseline=", "--candidate=", "--pairs", "2", "--processes", "1", "--report", str(tmp_path), "--", *flags])
    text = (tmp_path / "report.md").read_text()
    assert code == 0, text
    assert text.startswith("# keep") and "0.0000 [0.0000, 0.0000]" in text
    assert (tmp_path / "report.png").exists() and (tmp_path / "report.json").exists()
