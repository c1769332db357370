"""Megatron's `.bin/.idx` pair with a manifest beside it: written whole or not at all, checked before use.

`prefix.bin` holds the token ids one after another, `prefix.idx` the lengths, byte offsets and
document boundaries (the engine's `IndexedDataset`); `prefix.manifest.json` is ours: tokenizer
identity, counts, checksums. A pair without a manifest (written by Megatron's own tool) is read
unchanged; what needs the manifest is then not checked.

    idx: 9 magic, 8 version, 1 dtype code, 8 sequences n, 8 boundaries d, 4n lengths, 8n offsets,
         8d boundaries, (n modes)
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.partial import partial_output

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
MANIFEST_FORMAT = "megatron-bdlm indexed data 1"
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def bin_path(prefix: str) -> Path:
    """Token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str) -> Path:
    """Index file of a prefix."""
    return Path(f"{prefix}.idx")


def manifest_path(prefix: str) -> Path:
    """Manifest of a prefix."""
    return Path(f"{prefix}.manifest.json")


@dataclass(frozen=True)
class IndexSummary:
    """What a consistent pair holds."""

    sequences: int
    documents: int
    tokens: int
    dtype: np.dtype


def check_pair(prefix: str) -> IndexSummary:
    """Check that both files are there, whole and belong together, from sizes and the index alone.

    Raises:
        DataError: a file is missing, truncated, too long, or no Megatron index.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise DataError(f"{path}: missing; a data prefix needs both its .bin and its .idx")
    index, size = idx_path(prefix), idx_path(prefix).stat().st_size
    with open(index, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or header[:9] != MAGIC:
        raise DataError(
            f"{index}: no Megatron index (its first bytes are not {MAGIC[:7].decode()}, or it is truncated: {size} "
            "bytes)"
        )
    version, code, sequences, boundaries = struct.unpack("<QBQQ", header[9:])
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{index}: version {version} with data type code {code} is not readable; version 1 with an integer type is"
        )
    expected = HEADER_BYTES + 12 * sequences + 8 * boundaries
    if size not in (expected, expected + sequences):
        state = "truncated" if size < expected else "too long"
        raise DataError(
            f"{index}: {state}: {sequences} sequences and {boundaries - 1} documents need {expected} bytes, it has "
            f"{size}"
        )
    if sequences == 0:
        raise DataError(f"{index}: it holds no sequence")
    lengths = np.memmap(index, dtype=np.int32, mode="r", offset=HEADER_BYTES, shape=(sequences,))
    tokens, dtype = int(lengths.sum(dtype=np.int64)), np.dtype(_DTYPES[code])
    held = bin_path(prefix).stat().st_size
    if held != tokens * dtype.itemsize:
        state = "truncated" if held < tokens * dtype.itemsize else "too long"
        raise DataError(
            f"{bin_path(prefix)}: {state}, or from another index: the index counts {tokens} tokens of {dtype.itemsize} "
            f"bytes = {tokens * dtype.itemsize} bytes, the file has {held}"
        )
    return IndexSummary(sequences, boundaries - 1, tokens, dtype)


def pair_fingerprint(prefix: str) -> str:
    """A cheap content key for caches: sizes, first and last 64 KiB of both files (not times: a copy changes them)."""
    digest = hashlib.sha256()
    for path in (bin_path(prefix), idx_path(prefix)):
        size = path.stat().st_size
        with open(path, "rb") as stream:
            digest.update(struct.pack("<Q", size) + stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read(1 << 16))
    return digest.hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(prefix: str) -> Optional[dict[str, Any]]:
    """The manifest of a prefix, None if it has none.

    Raises:
        DataError: it is there but not readable as one.
    """
    path = manifest_path(prefix)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable manifest ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise DataError(f"{path}: not a manifest of the format {MANIFEST_FORMAT!r}")
    return manifest


def check_tokenizer(prefix: str, manifest: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse data that another tokenizer wrote.

    Raises:
        DataError: the identities differ; the message shows both.
    """
    written = manifest["tokenizer"]
    if written["content_sha256"] != identity["content_sha256"]:
        raise DataError(
            f"{prefix}: its tokens come from another tokenizer: written by {written['type']} {written['model']} "
            f"({written['vocabulary_size']} tokens, {written['content_sha256'][:12]}), the run has {identity['type']} "
            f"{identity['model']} ({identity['vocabulary_size']} tokens, {identity['content_sha256'][:12]})"
        )


class IndexedWriter:
    """Write a `.bin/.idx` pair and its manifest; nothing appears under the final names before `commit`.

    A context manager: leaving it without a commit removes what was written.

    Raises:
        DataError: the output exists and `overwrite` is off.
    """

    def __init__(self, prefix: str, vocab_size: int, overwrite: bool = False) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.prefix = prefix
        self.final = [bin_path(prefix), idx_path(prefix), manifest_path(prefix)]
        for path in self.final:
            if path.exists() and not overwrite:
                raise DataError(f"--output-prefix {prefix}: {path} exists already; give another prefix or --overwrite")
        self._open = contextlib.ExitStack()
        self.partial = [self._open.enter_context(partial_output(path)) for path in self.final]
        self.dtype = np.dtype(DType.optimal_dtype(vocab_size))
        self._builder = IndexedDatasetBuilder(str(self.partial[0]), dtype=self.dtype.type)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._builder.data_file.close()
        self._open.close()

    def add_document(self, ids: np.ndarray) -> None:
        """Append one document, int ids that fit the vocabulary."""
        self._builder.add_document(ids, [len(ids)])

    def commit(self, manifest: Callable[[dict[str, dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
        """Finish: `manifest` gets {file name: {bytes, sha256}} and returns the manifest's contents.

        The manifest is renamed last and an old one removed first, so that a manifest never describes other files.
        """
        self._builder.finalize(str(self.partial[1]))
        files = {
            final.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for final, path in zip(self.final[:2], self.partial[:2])
        }
        contents = {"format": MANIFEST_FORMAT, **manifest(files)}
        self.partial[2].write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        for path in self.partial:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
        self.final[2].unlink(missing_ok=True)
        for path, final in zip(self.partial, self.final):
            os.replace(path, final)
        return contents
