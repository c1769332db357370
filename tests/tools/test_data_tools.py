"""The data tools as command lines: a corpus, a tokenizer, data, checks; exit codes and messages."""

import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(capsys, tool, *arguments):
    """(exit code, stdout, stderr) of a tool, run in this process: the engine's import takes seconds."""
    handler, level, argv = signal.getsignal(signal.SIGTERM), logging.getLogger("megatron").level, sys.argv
    sys.argv = [str(TOOLS / tool), *map(str, arguments)]
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOLS / tool), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)
        logging.getLogger("megatron").setLevel(level)
        sys.argv = argv
    return left.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tools")


@pytest.fixture
def corpus(folder, capsys):
    path = folder / "corpus.jsonl"
    if not path.exists():
        code, out, _ = run(capsys, "build_corpus.py", "--output", path, "--size-limit-mb", "0.3")
        assert code == 0 and re.search(r"\d+ documents, 0\.[23]\d MB of text", out)
    return path


@pytest.fixture
def tokenizer(folder, corpus, capsys):
    path = folder / "tokenizer"
    if not path.exists():
        code, out, _ = run(capsys, "train_tokenizer.py", "--input", corpus, "--vocab-size", 400, "--output", path)
        assert code == 0 and "400 tokens; <|endoftext|> 397, <|mask|> 398, <|pad|> 399" in out
    return path


@pytest.fixture
def prefix(folder, corpus, tokenizer, capsys):
    path = folder / "data"
    if not Path(f"{path}.bin").exists():
        code, out, err = run(
            capsys,
            "preprocess_data.py",
            "--input",
            corpus,
            "--output-prefix",
            path,
            "--tokenizer-model",
            tokenizer,
            "--append-eod",
        )
        assert code == 0 and re.search(r"unigram entropy: \d\.\d{4} nats/token", out) and "B/s" in err
    return path


def test_corpus_is_deterministic_and_named(folder, corpus, capsys):
    lines = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert len(lines) > 5 and all(set(line) == {"text", "path"} and line["path"].endswith(".py") for line in lines)
    assert sum(len(line["text"].encode()) for line in lines) <= 300_000
    assert not any("site-packages" in line["path"] or "test/" in line["path"] for line in lines)
    run(capsys, "build_corpus.py", "--output", folder / "again.jsonl", "--size-limit-mb", "0.3")
    assert (folder / "again.jsonl").read_bytes() == corpus.read_bytes()


def test_unreadable_files_are_skipped_with_a_message(folder, capsys):
    source = folder / "source"
    source.mkdir()
    (source / "good.py").write_text("x = 1\n")
    (source / "bad.py").write_bytes(b"\xff\xfe\x00")
    code, out, err = run(capsys, "build_corpus.py", "--source", source, "--output", folder / "s.jsonl")
    assert (
        code == 0
        and "1 documents" in out
        and "1 unreadable files skipped" in out
        and f"skipped {source / 'bad.py'}" in err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--source", "/nowhere"), "error: --source /nowhere: no such folder"),
        (("--suffix", ".none"), "no readable file that ends in .none"),
    ],
)
def test_corpus_refusals(folder, capsys, arguments, message):
    code, _, err = run(capsys, "build_corpus.py", "--output", folder / "no.jsonl", *arguments)
    assert code == 2 and message in err and not list(folder.glob("no.jsonl*"))


def test_preprocess_reports_faults(folder, tokenizer, capsys):
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    code, _, err = run(
        capsys,
        "preprocess_data.py",
        "--input",
        folder / "broken.jsonl",
        "--output-prefix",
        folder / "broken",
        "--tokenizer-model",
        tokenizer,
    )
    assert code == 2 and "broken.jsonl:2: broken JSON at column 10" in err
    assert [path.name for path in folder.glob("broken*")] == ["broken.jsonl"]


def test_validate(prefix, tokenizer, capsys):
    code, out, _ = run(capsys, "validate_data.py", prefix, "--tokenizer-model", tokenizer)
    assert code == 0 and f"{prefix}: no fault" in out
    data = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(data[:-10])
    code, out, err = run(capsys, "validate_data.py", prefix)
    Path(f"{prefix}.bin").write_bytes(data)
    assert code == 1 and "1 faults" in out and "data.bin: truncated" in err


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_inspect(prefix, tokenizer, folder):
    """In its own process: it enables the CPU platform."""
    done = subprocess.run(
        [
            sys.executable,
            TOOLS / "inspect_data.py",
            prefix,
            "--tokenizer-model",
            tokenizer,
            "--seq-length",
            "64",
            "--bdlm-recipe",
            "bd3lm",
            "--plot",
            folder / "plot.png",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "sample 0, view 0: 4 blocks" in done.stdout and "unigram entropy" in done.stdout
    levels = [float(level) for level in re.findall(r"\|(\d\.\d\d)\|", done.stdout)]
    assert len(levels) >= 4 and min(levels[:4]) >= 0.3 and max(levels[:4]) <= 0.8
    assert (folder / "plot.png").stat().st_size > 1000


def test_killed_preprocess_leaves_nothing(folder, tokenizer):
    """SIGTERM in the middle of the work, workers included."""
    text, output = folder / "long.jsonl", folder / "killed"
    text.write_text((json.dumps({"text": "def f(x):\n    return x + 1\n" * 2000}) + "\n") * 400)  # many seconds of work
    output.mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            TOOLS / "preprocess_data.py",
            "--input",
            text,
            "--output-prefix",
            output / "d",
            "--tokenizer-model",
            tokenizer,
            "--workers",
            "2",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 120
    while not list(output.glob("*.partial-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(output.iterdir()) == []


def test_interrupted_preprocess_leaves_nothing(folder, corpus, tokenizer, capsys, monkeypatch):
    def interrupt(self, record):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.bdlm.data.preprocess.Encoder.encode", interrupt)
    code, _, err = run(
        capsys,
        "preprocess_data.py",
        "--input",
        corpus,
        "--output-prefix",
        folder / "interrupted",
        "--tokenizer-model",
        tokenizer,
    )
    assert code == 130 and "interrupted" in err and not list(folder.glob("interrupted*"))
