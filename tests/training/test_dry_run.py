"""A dry run answers as the planner does, for the planner's own flags; a run that would not start ends with one error and exit code 1."""

import json
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.bdlm.platform import cpu

ON_CPU = cpu.enable()

from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator  # noqa: E402
from megatron.training.global_vars import unset_global_variables  # noqa: E402

from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.data.sft import FinetuneOptions  # noqa: E402
from megatron.bdlm.planner.hardware import GPUS  # noqa: E402
from megatron.bdlm.planner.models import from_flags  # noqa: E402
from megatron.bdlm.planner.search import flags, search  # noqa: E402
from megatron.bdlm.planner.work import Machine, Workload  # noqa: E402
from megatron.bdlm.testing.training_run import REPOSITORY, environment  # noqa: E402
from megatron.bdlm.training import dry_run  # noqa: E402

EIGHT_BILLION = (
    "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --kv-channels 128 --group-query-attention "
    "--num-query-groups 8 --qk-layernorm --untie-embeddings-and-output-weights --swiglu --disable-bias-linear --padded-vocab-size 152064"
).split()
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-4 --bdlm-block-size 8"
).split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 99".split()


def test_a_million_tokens_on_64_gpus_with_the_planners_flags(tmp_path):
    workload = Workload(1048576, 32, 16)
    planned = search(from_flags(EIGHT_BILLION), Machine(GPUS["h200"], 64), workload).predictions[0]
    ready = flags(workload, planned.layout)
    rest = "--dry-run --dry-run-world-size 64 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 151935 --train-iters 9 --lr 1e-4"
    out = tmp_path / "report.json"
    command = [
        sys.executable, str(REPOSITORY / "pretrain_bdlm.py"), *EIGHT_BILLION, *ready.split(), *rest.split(),
        "--max-position-embeddings", "1048576", "--dry-run-json", str(out), "--tensorboard-dir", str(tmp_path / "log"),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-2000:]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
    report = json.loads(out.read_text())
    assert report["flags"] == ready and ready in done.stdout
    found = report["prediction"]
    assert found["memory"] == planned.memory and found["flops"] == planned.flops and found["bytes"] == planned.bytes
    assert found["seconds"] == planned.seconds and report["steps_per_hour"] == 3600 / planned.step_seconds
    assert len(report["ranks"]) == planned.layout.cp and report["balance"] == pytest.approx(1.0, abs=0.01)
    assert not (tmp_path / "log").exists()


@pytest.fixture
def answer(monkeypatch, capsys):
    """Runs a dry run in this process; returns (exit code, stdout, stderr)."""

    def run(arguments, group=None, world_size="1"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(sys, "argv", ["script.py", "--dry-run", *arguments])
        unset_global_variables()
        unset_num_microbatches_calculator()
        code = dry_run.main(group)
        unset_global_variables()
        unset_num_microbatches_calculator()
        return code, *capsys.readouterr()

    return run


def test_finetuning_and_its_notes(answer, tmp_path):
    data = tmp_path / "conversations.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    given = ["--data-path", str(data), "--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--context-parallel-size", "2"]
    code, out, _ = answer([*TINY, *given], FinetuneOptions, world_size="4")
    assert code == 0 and "would start on 4 h200 (4 a node)" in out and "CP 2 BP 2 EP 1 DP 2, csbp over direct" in out
    assert "training samples 40, tokens 5120" in out and "rows and bytes are those of one document" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conversations.jsonl"]


def test_counted_bytes_are_the_predicted_ones(answer, tmp_path):
    """On average over the ranks, where the closed form is exact (2P divides the blocks)."""
    out = tmp_path / "report.json"
    code, *_ = answer([*TINY, *MOCK, "--context-parallel-size", "4", "--dry-run-json", str(out), "--bf16"], world_size="4")
    report = json.loads(out.read_text())
    sent = [rank["sent"]["all"] for rank in report["ranks"]]
    assert code == 0 and sum(sent) / 4 * 4 == pytest.approx(report["prediction"]["bytes"]["attention"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--context-parallel-size", "4", "--dry-run-world-size", "10"], "--dry-run-world-size 10: .* = 4 must divide .* A legal value: 12"),
        (["--context-parallel-size", "4", "--dry-run-world-size=3"], "--dry-run-world-size 3: .* A legal value: 4"),
        (["--dry-run-world-size", "3"], "--global-batch-size 4: .* 3 data-parallel ranks = 3 must divide it. A legal value: 6"),
        (["--num-attention-heads", "3"], "AssertionError in .*line"),
        (["--attention-dropout", "0.1"], "--attention-dropout 0.1: .* A legal value: 0.0"),
    ],
)
def test_a_run_that_would_not_start_is_one_error(answer, arguments, message):
    code, out, error = answer([*TINY, *MOCK, *arguments])
    assert code == 1 and out == ""
    lines = [line for line in error.splitlines() if line.startswith("dry run:")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]


def test_no_number_of_processes_is_refused(answer, capsys):
    with pytest.raises(SystemExit) as ended:
        answer([*TINY, *MOCK, "--dry-run-world-size", "many"])
    assert ended.value.code == 1
    assert re.search("--dry-run-world-size many: .* A legal value: 64", capsys.readouterr().err)


@pytest.mark.parametrize("value", ["0", "many"])
def test_no_number_of_processes_of_a_node_is_refused(answer, monkeypatch, capsys, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(SystemExit) as ended:
        answer([*TINY, *MOCK])
    assert ended.value.code == 1 and f"LOCAL_WORLD_SIZE {value}: " in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_one_error(answer, tmp_path):
    code, out, error = answer([*TINY, *MOCK, "--dry-run-json", str(tmp_path / "no" / "report.json")])
    assert code == 1 and out == "" and re.search("--dry-run-json .*report.json: cannot be written .* A legal value: report.json", error)


def test_missing_data_is_refused(tmp_path):
    args = SimpleNamespace(
        data_path=[str(tmp_path / "corpus")], train_data_path=None, mock_data=False, global_batch_size=4, seq_length=128,
    )
    with pytest.raises(DataError, match="corpus"):
        dry_run.data_of(args, 10)
