"""The doctor finds what would stop a run, and says so in one line each."""

import json

import pytest
import torch

from megatron.bdlm.attention.kernels.base import KernelCase
from megatron.bdlm.testing.distributed import run_distributed
from megatron.bdlm.testing.training_run import REPOSITORY
from megatron.bdlm.training import doctor
from tools.doctor import main

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-4 --bdlm-block-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
).split()


def statuses(checks):
    return {check.topic: check.status for check in checks}


def test_versions(monkeypatch):
    assert "fault" not in statuses(doctor.versions()).values()
    monkeypatch.setattr(doctor, "ENGINE_VERSION", "0.0.1")
    monkeypatch.setattr(doctor, "PACKAGES", {**doctor.PACKAGES, "no-such-package": "needed", "nor-this-one": "pictures"})
    found = statuses(doctor.versions())
    assert found["megatron-core"] == found["no-such-package"] == "fault" and found["nor-this-one"] == "note"


def test_kernels_and_why_not():
    found = {check.topic: check for check in doctor.kernels(KernelCase("cpu", torch.float32, 64, 64))}
    assert found["kernel TorchCpuKernel"].status == found["--bdlm-attention-kernel auto"].status == "ok"
    assert "not cpu" in found["kernel TorchFlashKernel"].message
    faults = [check for check in doctor.kernels(KernelCase("cpu", torch.float32, 64, 64), "flash_attn", "triton") if check.status == "fault"]
    assert ["legal values here" in check.message for check in faults] == [True, True]


def test_connections_matter_before_blackwell(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, status in (((9, 0), "fault"), ((10, 0), "ok")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0, c=capability: c)
        assert [check.status for check in doctor.environment()] == [status]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert doctor.environment()[0].status == "ok"


def test_folders(tmp_path, monkeypatch):
    made = tmp_path / "to" / "be" / "made"
    assert str(tmp_path) in doctor.folder(str(made)).message and not made.exists()
    (tmp_path / "file").write_text("x")
    assert "is no folder" in doctor.folder(str(tmp_path / "file" / "below")).message
    assert doctor.folder("/proc").status == "fault"
    free = 1000.0
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: type("Usage", (), {"free": free}))
    monkeypatch.setattr(doctor, "filesystem", lambda place: "ext4")
    assert [doctor.folder(str(tmp_path), needed).status for needed in (400, 600, 1200)] == ["ok", "note", "fault"]
    assert doctor.folders_of("--lr 1 --save runs/a --tensorboard-dir runs/b".split()) == {"--save": "runs/a", "--tensorboard-dir": "runs/b"}


def shared_on_rank(folders):
    return [doctor.shared_folder(folder[min(torch.distributed.get_rank(), len(folder) - 1)]) for folder in folders]


def test_shared_folders_on_two_ranks(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    same, apart = [str(tmp_path / "one")], [str(tmp_path / "one"), str(tmp_path / "other")]
    for found in run_distributed(shared_on_rank, 2, [same, apart]):
        assert [check.status for check in found] == ["ok", "fault"]
        assert "rank 1" in found[1].message and "is not there" in found[1].message
    assert not list(tmp_path.glob("*/.doctor-*"))


def test_a_run_that_would_start(tmp_path, capsys):
    code = main(["--json", "--folder", str(tmp_path), "--", *TINY, "--save", str(tmp_path / "runs"), "--save-interval", "5"])
    answer = json.loads(capsys.readouterr().out)
    found = {check["topic"]: check for check in answer["checks"]}
    assert code == 0 and answer["faults"] == 0
    assert found["run"]["status"] == "ok" and "pretrain_bdlm.py would start" in found["run"]["message"]
    assert found[f"folder {tmp_path / 'runs'}"]["status"] in ("ok", "note") and not (tmp_path / "runs").exists()
    assert torch.cuda.is_available() or "head size 16" in found["kernel TorchCpuKernel"]["message"]


@pytest.mark.slow
def test_a_run_that_would_not_start():
    """Its dry run says why (tests/training/test_dry_run.py)."""
    check, report = doctor.run(["finetune_bdlm.py", *TINY, "--context-parallel-size", "3"], REPOSITORY)
    assert check.status == "fault" and "--seq-length 128" in check.message and report == {}


def test_text_and_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "ENGINE_VERSION", "0.0.1")
    assert main(["--shared", "somewhere"]) == 1
    out = capsys.readouterr().out
    assert "FAULT megatron-core: " in out and "note  shared somewhere: one process cannot tell" in out and out.endswith("1 faults\n")
