"""Documents of text inputs: JSON lines, plain text files, or folders of them.

A record is one document as raw bytes with the file and line it came from, so that whoever parses
it later (perhaps another process) can say exactly where a fault is. Order is the order of the
arguments, then sorted file names, then lines: the same on every machine.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md")


class DataError(ValueError):
    """Input or data files that cannot be used; the message names the file, the line and the rule."""


@dataclass(frozen=True)
class Record:
    """One document, not parsed yet: `line` counts from 1 in a JSON lines file, 0 is a whole text file."""

    path: str
    line: int
    data: bytes

    @property
    def place(self) -> str:
        """`file:line` or `file`, as messages show it."""
        return f"{self.path}:{self.line}" if self.line else self.path


def input_files(
    inputs: Iterable[str | os.PathLike], suffixes: Iterable[str] = JSON_SUFFIXES + TEXT_SUFFIXES
) -> list[Path]:
    """Files behind the arguments: a file is taken as it is, a folder gives its files with one of `suffixes`, sorted.

    Raises:
        DataError: a path does not exist, cannot be read, or a folder holds no such file.
    """
    suffixes = tuple(suffixes)
    files: list[Path] = []
    for entry in map(Path, inputs):
        if entry.is_dir():
            found = sorted(path for path in entry.rglob("*") if path.is_file() and path.suffix in suffixes)
            if not found:
                raise DataError(f"{entry}: the folder holds no file that ends in {', '.join(suffixes)}")
            files += found
        elif entry.is_file():
            files.append(entry)
        else:
            raise DataError(f"{entry}: no such file or folder")
    for path in files:
        if not os.access(path, os.R_OK):
            raise DataError(f"{path}: the file cannot be read (permission denied)")
    return files


def is_json_lines(path: Path) -> bool:
    """Whether a file holds one JSON object a line; any other file is one plain text document."""
    return path.suffix in JSON_SUFFIXES


def iterate_records(files: Iterable[Path]) -> Iterator[Record]:
    """Documents of the files, raw. Blank lines of a JSON lines file are passed over.

    Raises:
        DataError: a file cannot be read.
    """
    for path in files:
        try:
            if is_json_lines(path):
                with open(path, "rb") as stream:
                    for number, line in enumerate(stream, start=1):
                        if line.strip():
                            yield Record(str(path), number, line)
            else:
                yield Record(str(path), 0, path.read_bytes())
        except OSError as error:
            raise DataError(f"{path}: the file cannot be read ({error.strerror})") from error


def record_text(record: Record, json_key: str = "text") -> str:
    """Text of a record: the file itself, or the value under `json_key` of its JSON object.

    Raises:
        DataError: not UTF-8, broken JSON, not an object, key missing, or the value is no string.
    """
    try:
        text = record.data.decode("utf-8-sig" if record.line <= 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{record.place}: byte {error.start} is not UTF-8") from error
    if not record.line:
        return text
    try:
        fields = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise DataError(f"{record.place}: broken JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{record.place}: a line must be a JSON object, this one is a {type(fields).__name__}")
    if json_key not in fields:
        raise DataError(
            f"{record.place}: no key {json_key!r} (--json-key); the object has: "
            f"{', '.join(map(repr, fields)) or 'no key'}"
        )
    value = fields[json_key]
    if not isinstance(value, str):
        raise DataError(
            f"{record.place}: the value of {json_key!r} must be a string, this one is a {type(value).__name__}"
        )
    # A lone surrogate ("\\ud800") is legal JSON but no text: no tokenizer can encode it.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{record.place}: character {error.start} of {json_key!r} is a lone surrogate, not text"
        ) from error
    return value
