"""A corpus that every machine has: Python's own standard library, one document a source file.

Quick starts and tests need a few megabytes of real, structured text without a download. The order
is by a hash of the relative path, so that a size limit cuts a mixture and not the letter A to C,
and is the same on every machine with the same Python.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.partial import partial_output

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class CorpusSummary:
    """What was written."""

    documents: int
    text_bytes: int
    skipped: int


def standard_library() -> Path:
    """Folder of the running Python's standard library sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(folder: Path, suffix: str = ".py", with_tests: bool = False) -> list[Path]:
    """Files of `folder` that end in `suffix`, in the order of a hash of their relative path.

    Raises:
        DataError: the folder does not exist.
    """
    if not folder.is_dir():
        raise DataError(f"--source {folder}: no such folder")
    skipped = SKIPPED_FOLDERS - ({"test", "tests", "idle_test"} if with_tests else set())
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(root) / name for name in names if name.endswith(suffix)]
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def _documents(folder: Path, files: list[Path], say: Callable[[str], None]) -> Iterator[tuple[str, str] | None]:
    """(relative path, text) of each file that is text; None for one that cannot be used."""
    for path in files:
        name = path.relative_to(folder).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            say(f"skipped {path}: {error}")
            yield None
            continue
        if text.strip():
            yield name, text


def build_corpus(
    output: Path,
    source: Path | None = None,
    suffix: str = ".py",
    size_limit: int | None = None,
    file_limit: int = 200_000,
    with_tests: bool = False,
    say: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
) -> CorpusSummary:
    """Write `output` as JSON lines with the fields `text` and `path`, at most `size_limit` bytes of text.

    Files above `file_limit` bytes are left out: in the standard library they are tables, and one of them would be a
    tenth of a small corpus. The file appears under its name only when it is complete. A file that cannot be read as
    text is skipped with a message.

    Raises:
        DataError: no document was found.
    """
    folder = source or standard_library()
    documents = text_bytes = skipped = 0
    with partial_output(output) as partial:
        with open(partial, "w", encoding="utf-8") as stream:
            for document in _documents(folder, source_files(folder, suffix, with_tests), say):
                if document is None:
                    skipped += 1
                    continue
                name, text = document
                size = len(text.encode("utf-8"))
                if size > file_limit or (size_limit is not None and text_bytes + size > size_limit):
                    continue
                stream.write(json.dumps({"text": text, "path": name}) + "\n")
                documents, text_bytes = documents + 1, text_bytes + size
        if documents == 0:
            limit = "" if size_limit is None else f" within {size_limit} bytes"
            raise DataError(f"{folder}: no readable file that ends in {suffix}{limit}")
        os.replace(partial, output)
    return CorpusSummary(documents, text_bytes, skipped)
