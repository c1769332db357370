"""One run that logs everywhere: TensorBoard, W&B, lines of JSON, a trace a rank (a resume that appends: `test_resume.py`)."""

import json
import os

import pytest

from megatron.bdlm.platform.ranges import RANGES
from megatron.bdlm.testing.topologies import toy_flags
from megatron.bdlm.testing.training_run import launch
from megatron.bdlm.training.json_log import FIELDS, read_lines
from megatron.bdlm.training.traces import read_trace
from tests.test_public_names import LOGGED, VALIDATION_METRICS

STAND_IN_FOR_WANDB = '''
import json
from unittest.mock import MagicMock

def __getattr__(name):
    return MagicMock()

def init(**settings):
    globals()["folder"] = settings["dir"]

def log(values, step):
    with open(folder + "/log.jsonl", "a") as file:
        file.write(json.dumps([step, sorted(values)]) + "\\n")
'''


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    (folder / "wandb.py").write_text(STAND_IN_FOR_WANDB)
    flags = toy_flags(
        3, "--context-parallel-size", "2", "--eval-interval", "2", "--bdlm-json-log", str(folder / "run.jsonl"),
        "--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(folder),
        "--profile", "--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2",
    )
    paths = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return folder, launch("pretrain_bdlm.py", flags, processes=2, folder=folder, PYTHONPATH=paths)


def test_names_in_tensorboard_are_the_documented_ones(observed):
    _, run = observed
    names = {name for name in run.scalars if not name.endswith(" vs samples")}
    assert names - {name for name in names if name.startswith("nelbo t ")} == LOGGED | VALIDATION_METRICS
    assert {name for name in names if name.startswith("nelbo t ")}


def test_wandb_gets_the_same_names(observed):
    folder, run = observed
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    names = {name for _, values in lines for name in values}
    assert names - {"samples vs steps"} == {name for name in run.scalars if not name.endswith(" vs samples")}


def test_lines_of_json_are_what_tensorboard_has(observed):
    folder, run = observed
    lines = read_lines(folder / "run.jsonl")
    assert [(line["kind"], line["iteration"]) for line in lines] == [
        ("start", 0), ("train", 1), ("train", 2), ("validation", 2), ("train", 3), ("validation", 3), ("test", 3),
    ]
    assert lines[0]["world size"] == 2
    for line in lines:
        assert tuple(line)[:4] == FIELDS and line["consumed samples"] == 4 * line["iteration"]
    del lines[5]  # the test set's values stand in its place in TensorBoard
    for line in lines[1:]:
        for name in line.keys() - set(FIELDS):
            assert line[name] == pytest.approx(run.scalars[name][line["iteration"]], rel=1e-6), (line["kind"], name)
    assert set(lines[1]) - set(FIELDS) >= LOGGED
    assert set(lines[3]) - set(FIELDS) == set(lines[-1]) - set(FIELDS) == VALIDATION_METRICS


def test_every_rank_has_a_trace_with_every_range(observed):
    folder, _ = observed
    for rank in (0, 1):
        totals = read_trace(folder / "torch_profile" / f"rank-{rank}.json.gz")
        assert set(totals) == set(RANGES)
        assert totals["bdlm/step"].calls == 1 and totals["bdlm/batch"].calls == 4  # one iteration of four micro-batches
        assert totals["bdlm/attention"].calls == totals["bdlm/attention backward"].calls == 4 * 4  # and four layers
        assert totals["bdlm/step"].seconds > totals["bdlm/attention"].seconds > totals["bdlm/tiles"].seconds > 0
