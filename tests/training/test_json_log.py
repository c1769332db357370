"""The log of JSON lines: whole lines only, whatever happened to the file before."""

import json
import os

import pytest

from megatron.bdlm.config import BDLMConfigError
from megatron.bdlm.training.json_log import JsonLog, ScalarTee, read_lines


def test_lines_are_appended_by_every_start(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    for iteration in (1, 2):
        log = JsonLog(path)
        log.write("train", iteration, 8 * iteration, {"lm loss": 2.5, "nelbo": float("nan")})
        log.close()
    lines = read_lines(path)
    assert [line["iteration"] for line in lines] == [1, 2] and lines[1]["consumed samples"] == 16
    assert lines[0]["lm loss"] == 2.5 and lines[0]["nelbo"] is None  # JSON has no NaN
    assert all(json.loads(text) for text in path.read_text().splitlines())


def test_a_torn_line_is_cut_off_at_the_next_start(tmp_path):
    path = tmp_path / "run.jsonl"
    log = JsonLog(path)
    log.write("train", 1, 8, {})
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])  # what a kill in the middle of a write leaves
    assert len(read_lines(path)) == 1
    log = JsonLog(path)
    log.write("train", 2, 16, {})
    log.close()
    assert path.read_bytes().startswith(whole) and [line["iteration"] for line in read_lines(path)] == [1, 2]


def test_a_full_disk_costs_lines_not_the_run(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.jsonl"
    log, write = JsonLog(path), os.write
    log.write("train", 1, 8, {})
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    log.write("train", 2, 16, {})
    log.write("train", 3, 24, {})
    monkeypatch.undo()
    log.write("train", 4, 32, {})
    assert [line["iteration"] for line in read_lines(path)] == [1, 4]
    assert capsys.readouterr().err == f"warning: --bdlm-json-log {path}: line left out (no space for a whole line); the run goes on\n"


@pytest.mark.parametrize("content", [b"\x00binary", b"notes of mine\n", b'{"a": 1}\nhalf'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(BDLMConfigError, match=r"--bdlm-json-log .*run.jsonl: it holds something else .* A legal value: a new file"):
        JsonLog(path)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(BDLMConfigError, match=r"--bdlm-json-log .*: it cannot be written \(Is a directory\). A legal value: a file"):
        JsonLog(tmp_path)


def test_a_line_of_something_else_is_named(tmp_path):
    (tmp_path / "x").write_text('{"kind": "train", "iteration": 1}\n{"kind": "other"}\n')
    with pytest.raises(ValueError, match="x:2: not a line of --bdlm-json-log"):
        read_lines(tmp_path / "x")


def test_scalars_are_remembered_on_their_way():
    class Writer:
        def __init__(self):
            self.seen = []

        def add_scalar(self, *arguments):
            self.seen.append(arguments)

        def add_text(self, text):
            return text

    writer = Writer()
    tee = ScalarTee(writer)
    tee.add_scalar("lm loss", 2.0, 1)
    tee.add_scalar("lm loss vs samples", 2.0, 8)
    assert tee.take() == {"lm loss": 2.0} and tee.take() == {}
    assert writer.seen == [("lm loss", 2.0, 1), ("lm loss vs samples", 2.0, 8)] and tee.add_text("x") == "x"
    alone = ScalarTee(None)
    alone.add_scalar("lm loss", 3.0, 1)
    alone.flush()
    assert alone.take() == {"lm loss": 3.0}
