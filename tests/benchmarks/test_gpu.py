"""benchmarks/gpu.py at toy size on a CPU: that it runs, that its ways compute the same pairs, and its arithmetic."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import context_strategies, gpu  # noqa: E402
from benchmarks.gpu_attention import MODELS, Heads, Point, mask_of, measure_way, ratios, rows_and_keys  # noqa: E402

FLOAT32 = {"dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize("window", [None, 9])
def test_the_mask_of_flexattention_shows_the_pairs_of_the_plan(window):
    point, heads = Point("toy", 64, 4, 4), Heads(4, 2, 16, window)
    rows, keys = rows_and_keys(point, heads)
    visible = mask_of(point, heads, rows, keys)(0, 0, torch.arange(len(rows))[:, None], torch.arange(len(keys))[None])
    assert int(visible.sum()) == point.plan(point.rank).program(window).area


def test_toy_attention_runs_and_writes_figures(tmp_path, monkeypatch, capsys):
    command = ["gpu.py", "--toy", "--repeats", "1", "--step-lengths"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")])
    gpu.main()
    assert "figures mean nothing" in capsys.readouterr().out
    result = json.loads((tmp_path / "gpu.json").read_text())
    (point,) = result["attention"]
    assert point["area"] == 512 * (512 + 8) / 4 and result["training"] == []
    assert point["ways"].pop("flex")["forward_tflops"] > 0
    for row in point["ways"].values():
        rate = row["backward_tflops"] * 1e12
        assert rate * row["backward_seconds"] == pytest.approx(10 * 4 * 16 * point["area"])
        assert row["backward_share_of_peak"] == pytest.approx(rate / result["matmul_peak"])
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_several_processes_share_a_toy_sample(tmp_path):
    """multi_gpu.sh on a CPU: every way, over gloo."""
    result = tmp_path / "result"
    settings = {"DEVICE": "cpu", "RESULT": str(result), "MASTER_PORT": str(free_port()), "BDLM_PYTHON": sys.executable}
    command = ["bash", "benchmarks/multi_gpu.sh", "--ways", "cp/ring", "csbp/direct", "ulysses"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.with_suffix(".json").read_text())
    assert found["settings"]["network"] == "as it is: gloo" and found["settings"]["ranks_per_node"] == 2
    (point,) = found["points"]
    assert all(row["step"] > 0 for row in point["ways"].values()) and set(point["ways"]) == set(found["ways"])
    ring, direct = (sum(found["ways"][name]["sent"]) for name in ("cp/ring", "csbp/direct"))
    assert direct * 8 == ring * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"DEVICE": "tpu"}, "error: DEVICE=tpu: a legal value: cuda or cpu"),
        ({"DEVICE": "cpu", "NPROC": "1"}, "error: NPROC=1: sharing needs at least 2 processes"),
    ],
)
def test_what_multi_gpu_refuses(settings, message):
    environment = {**os.environ, **settings, "BDLM_PYTHON": sys.executable}
    done = subprocess.run(["bash", "benchmarks/multi_gpu.sh"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr


def test_cuda_ranks_need_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["context_strategies.py", "--device", "cuda"])
    with pytest.raises(SystemExit):
        context_strategies.parse()
    assert "--device cuda: needs GPUs and torchrun" in capsys.readouterr().err


def test_a_way_that_fails_leaves_its_reason():
    found = measure_way("maskless", Point("toy", 64, 4, 8), Heads(4, 2, 0), 1, FLOAT32)
    assert set(found) == {"error"} and "Error" in found["error"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.long
def test_toy_training_step():
    step = gpu.measure_step(64, 4, True, 1e12)
    assert step["tokens_per_second"] > 0 and 0 < step["mfu"] < 1 and step["peak_memory_gib"] > 0


def test_rates_by_hand():
    scalars = {"clean tokens/s": {1: 1.0, 2: 1.0, 3: 100.0, 4: 300.0, 5: 200.0}, "peak memory GiB": {1: 2.0, 2: 3.5}}
    one, double = (gpu.rates(scalars, gpu.ONE_BILLION, 4096, peak) for peak in (1e12, 2e12))
    assert one["tokens_per_second"] == 200.0 and one["peak_memory_gib"] == 3.5
    # 2 rows a token through 0.97e9 weights of the layers (6 flops each), and a head of 0.26e9 on half of the noisy rows
    dense = 200.0 * (2 * 6 * 0.97e9 + 0.5 * 6 * 0.26e9) / 1e12
    assert dense < one["mfu"] < 1.2 * dense and double["mfu"] == pytest.approx(one["mfu"] / 2)


def test_ratios_and_reasons():
    found = {"ours": {"forward_seconds": 2.0, "backward_seconds": 4.0}, "flex": {"forward_seconds": 3.0}, "causal": {"error": "x"}}
    assert ratios(found) == {"forward flex": 1.5}
    assert gpu.reason("start\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nChildFailedError") == "torch.OutOfMemoryError: CUDA out of memory. Tried"


def test_without_a_gpu_it_says_what_is_legal(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.parse()
    assert "no GPU is visible. A legal value here: --toy" in capsys.readouterr().err


def test_every_model_of_the_command_has_heads_in_whole_groups():
    assert all(heads.query % heads.key == 0 for heads in MODELS.values())
