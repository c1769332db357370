"""tools/plot_run.py on event files made here."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron.bdlm.training.json_log import JsonLog
from megatron.bdlm.training.plots import PANELS, PlotError, draw, read_run, tags_of

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plot_run.py"


def write_events(folder, first=1, last=10, offset=0.0):
    writer = SummaryWriter(str(folder))
    for i in range(first, last + 1):
        writer.add_scalar("lm loss", 5.0 / i + offset, i)
        writer.add_scalar("lm loss vs samples", 5.0 / i + offset, 8 * i)
        writer.add_scalar("nelbo", 6.0 / i + offset, i)
        writer.add_scalar("masked cross entropy", 4.0 / i, i)
        writer.add_scalar("clean tokens/s", 1000.0 + i, i)
        writer.add_scalar("nelbo t 0.0-0.1", 1.0 / i, i)
        writer.add_scalar("nelbo t 0.9-1.0", float("nan") if i == 3 else 8.0 / i, i)
        if i % 5 == 0:
            writer.add_scalar("nelbo validation", 6.5 / i, i)
            writer.add_scalar("nelbo validation ppl", 600.0, i)
            writer.add_scalar("nelbo t 0.0-0.1 validation", 1.5, i)
    writer.close()


def run_tool(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)


def test_the_command_draws_two_runs_and_says_what_it_found(tmp_path):
    write_events(tmp_path / "a" / "tensorboard")
    write_events(tmp_path / "b", offset=1.0)
    output = tmp_path / "new" / "run.png"
    result = run_tool(f"first={tmp_path / 'a'}", tmp_path / "b", "--output", output, "--unigram-entropy", 5.1)
    assert result.returncode == 0, result.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "NELBO: nelbo, nelbo validation\n" in result.stdout
    assert "NELBO by noise level t: nelbo t 0.0-0.1, nelbo t 0.9-1.0\n" in result.stdout
    assert "Gradient norm: not in this run\n" in result.stdout


def test_a_resumed_run_is_one_curve_and_its_later_points_win(tmp_path):
    write_events(tmp_path, 1, 6)
    write_events(tmp_path / "second", 5, 8, offset=1.0)
    points = dict(read_run(tmp_path).scalars["lm loss"])
    assert sorted(points) == list(range(1, 9))
    assert points[6] == pytest.approx(5.0 / 6 + 1.0) and points[4] == pytest.approx(5.0 / 4)


def test_tags_match_without_case_and_hyphens(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for tag in ("NELBO", "Grad-Norm", "nelbo of something else"):
        writer.add_scalar(tag, 1.0, 1)
    writer.close()
    run = read_run(tmp_path)
    found = {panel.title: tags_of(run, panel) for panel in PANELS}
    assert found["NELBO"] == ["NELBO"] and found["Gradient norm"] == ["Grad-Norm"]


def test_the_last_value_of_a_metric_is_printed(tmp_path):
    write_events(tmp_path)
    result = run_tool(tmp_path, "--last", "nelbo validation")
    assert result.returncode == 0 and float(result.stdout) == pytest.approx(0.65)
    result = run_tool(tmp_path, "--last", "nothing")
    assert result.returncode == 1 and "no metric 'nothing'; there are clean tokens/s, lm loss," in result.stderr


def test_a_json_log_is_a_run_too_and_runs_are_compared_in_numbers(tmp_path):
    write_events(tmp_path / "a")
    log = JsonLog(tmp_path / "b.jsonl")
    log.write("start", 0, 0, {"world size": 2})
    for i, loss in [(1, 5.0), (2, 2.0), (2, 3.5), (3, math.nan)]:  # iteration 2 came again after a resume
        log.write("train", i, 8 * i, {"lm loss": loss, "only here": 1.0})
    log.write("test", 3, 24, {"lm loss validation": 9.0})
    run = read_run(tmp_path / "b.jsonl")
    assert run.scalars["lm loss"][:2] == [(1, 5.0), (2, 3.5)] and math.isnan(run.scalars["lm loss"][2][1])
    assert set(run.scalars) == {"lm loss", "only here"}
    result = run_tool(tmp_path / "a", f"json={tmp_path / 'b.jsonl'}", "--output", tmp_path / "x.png")
    assert result.returncode == 0, result.stderr
    table = result.stdout.split("metric ")[1].splitlines()
    assert table[0].split("  ")[-1].strip() == "json - a" and table[1].split() == ["lm", "loss", "3", "1.66667", "nan", "+nan"]
    assert len(table) == 3  # no metric that one run alone has


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda folder: None, "no TensorBoard event file"),
        (lambda folder: SummaryWriter(str(folder)).close(), "hold no scalar"),
    ],
)
def test_a_folder_without_data_is_a_clear_error(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(PlotError, match=message):
        read_run(tmp_path)


def test_a_missing_folder_is_a_clear_error(tmp_path):
    result = run_tool(tmp_path / "absent")
    assert result.returncode == 1
    assert result.stderr == f"error: {tmp_path / 'absent'}: no such folder. A run writes its events to --tensorboard-dir\n"


def test_runs_without_any_known_metric_name_their_tags(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("other", 1.0, 1)
    writer.close()
    with pytest.raises(PlotError, match="their tags: other"):
        draw([read_run(tmp_path)], tmp_path / "x.png")
