"""The command line of the planner: table, flags, JSON, PNG, refusals."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plan_run():
    spec = importlib.util.spec_from_file_location("plan_run", ROOT / "tools" / "plan_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_flags_json_and_picture(plan_run, tmp_path, capsys):
    out = tmp_path / "plan.json", tmp_path / "plan.png"
    code = plan_run.main(
        ["--model", "8b", "--gpus", "8", "--seq-length", "65536", "--global-batch-size", "8", "--json", str(out[0]), "--plot", str(out[1])]
    )
    text = capsys.readouterr().out
    assert code == 0 and "1. --tensor-model-parallel-size" in text and "balance 1.0" in text
    predictions = json.loads(out[0].read_text())["predictions"]
    assert len(predictions) > 20 and predictions[0]["fits"] and "--block-parallel-size" in predictions[0]["flags"]
    assert out[1].read_bytes()[:4] == b"\x89PNG"


def test_published_figures(plan_run, capsys):
    assert plan_run.main(["--published"]) == 0
    assert capsys.readouterr().out.count("210 -> 105 GiB") == 2


def test_megatron_flags(plan_run, capsys):
    model = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 32000".split()
    assert plan_run.main(["--gpus", "2", "--seq-length", "4096", "--global-batch-size", "2", "--", *model]) == 0
    assert "legal layouts" in capsys.readouterr().out


def test_no_model_is_refused(plan_run, capsys):
    assert plan_run.main([]) == 2
    assert "--model: missing" in capsys.readouterr().err


@pytest.mark.parametrize("flag, value", [("--seq-length", "0"), ("--gpus", "0"), ("--gpus", "-1"), ("--best", "0")])
def test_sizes_below_one_are_refused(plan_run, capsys, flag, value):
    assert plan_run.main(["--model", "8b", flag, value]) == 2
    assert f"{flag} {value}: at least 1. A legal value: " in capsys.readouterr().err
