"""Check indexed data against its manifest and a tokenizer: the long checks, before a long run.

What `check_pair` sees from sizes is repeated at every start of a run; here every token is read: ids in range,
the mask token nowhere, checksums. A prefix written by Megatron's own tool has no manifest, so that only a
tokenizer given beside it can be compared with the ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tqdm import tqdm

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.indexed import (
    HEADER_BYTES,
    IndexSummary,
    bin_path,
    check_pair,
    check_tokenizer,
    file_sha256,
    idx_path,
    read_manifest,
)
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer, resolve_vocabulary, tokenizer_identity

CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Finding:
    """One result; `fault` is False for a remark."""

    fault: bool
    message: str


def token_chunks(prefix: str, summary: IndexSummary, progress: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """(place of the first token, ids) of consecutive parts of a token file."""
    # A plain memory map keeps its file open as long as its arrays live; the engine's closes it under them.
    tokens = (
        np.memmap(bin_path(prefix), dtype=summary.dtype, mode="r", shape=(summary.tokens,))
        if summary.tokens
        else np.zeros(0)
    )
    with tqdm(total=summary.tokens, unit="tok", unit_scale=True, desc=Path(prefix).name, disable=not progress) as bar:
        for start in range(0, summary.tokens, CHUNK_TOKENS):
            part = tokens[start : start + CHUNK_TOKENS]
            yield start, part
            bar.update(len(part))


def sequence_lengths(prefix: str, summary: IndexSummary) -> np.ndarray:
    """Tokens of each sequence, int32 [n]."""
    return np.fromfile(idx_path(prefix), dtype=np.int32, count=summary.sequences, offset=HEADER_BYTES)


def verify_prefix(
    prefix: str,
    source: Optional[TokenizerSource] = None,
    mask_token_id: Optional[int] = None,
    checksums: bool = True,
    progress: bool = False,
) -> list[Finding]:
    """All checks of one prefix.

    Args:
        source: tokenizer of the run; default: the one that the manifest names.
        mask_token_id: the run's --bdlm-mask-token-id; default: as in a run.
    """
    try:
        summary = check_pair(prefix)
        manifest = read_manifest(prefix)
    except DataError as error:
        return [Finding(True, str(error))]
    findings = []
    if manifest is None:
        findings.append(Finding(False, f"{prefix}: no manifest; checksums and tokenizer identity cannot be checked"))
    else:
        findings += _manifest_findings(prefix, manifest, summary, checksums)
        if source is None:
            source = _source_of(manifest)
    vocabulary = None
    if source is None:
        findings.append(
            Finding(False, f"{prefix}: no tokenizer given (--tokenizer-model); ids are checked for their sign only")
        )
    else:
        try:
            tokenizer = load_tokenizer(source)
            vocabulary = resolve_vocabulary(tokenizer, mask_token_id)
            if manifest is not None:
                check_tokenizer(prefix, manifest, tokenizer_identity(tokenizer, source))
        except DataError as error:
            findings.append(Finding(True, str(error)))
    findings += _index_findings(prefix, summary)
    size, mask = (None, mask_token_id) if vocabulary is None else (vocabulary.tokenizer_size, vocabulary.mask_token_id)
    return findings + _token_findings(prefix, summary, size, mask, progress)


def _source_of(manifest: dict[str, Any]) -> TokenizerSource:
    written = manifest["tokenizer"]
    size = written["vocabulary_size"] if written["type"] == "NullTokenizer" else None
    return TokenizerSource(written["type"], written["model"], vocab_size=size)


def _manifest_findings(prefix: str, manifest: dict[str, Any], summary: IndexSummary, checksums: bool) -> list[Finding]:
    findings = []
    for path, entry in zip((bin_path(prefix), idx_path(prefix)), manifest["files"].values()):
        size = path.stat().st_size
        if size != entry["bytes"]:
            findings.append(Finding(True, f"{path}: {size} bytes, the manifest says {entry['bytes']}"))
        elif checksums and (digest := file_sha256(path)) != entry["sha256"]:
            findings.append(
                Finding(
                    True,
                    f"{path}: its SHA-256 is {digest[:12]}.., the manifest says {entry['sha256'][:12]}..: the file was "
                    "changed",
                )
            )
    for name, held in (("documents", summary.documents), ("tokens", summary.tokens)):
        if manifest[name] != held:
            findings.append(
                Finding(True, f"{prefix}: the index holds {held} {name}, the manifest says {manifest[name]}")
            )
    return findings


def _index_findings(prefix: str, summary: IndexSummary) -> list[Finding]:
    """Offsets follow from the lengths and documents are in order; empty ones are a remark."""
    lengths = sequence_lengths(prefix, summary)
    rest = HEADER_BYTES + 4 * summary.sequences
    offsets = np.fromfile(idx_path(prefix), dtype=np.int64, count=summary.sequences, offset=rest)
    boundaries = np.fromfile(
        idx_path(prefix), dtype=np.int64, count=summary.documents + 1, offset=rest + 8 * summary.sequences
    )
    findings = []
    expected = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * summary.dtype.itemsize
    if (wrong := np.flatnonzero(offsets != expected)).size:
        findings.append(
            Finding(
                True,
                f"{idx_path(prefix)}: sequence {wrong[0]} starts at byte {offsets[wrong[0]]}, its predecessors end at "
                f"{expected[wrong[0]]}",
            )
        )
    if boundaries[0] != 0 or boundaries[-1] != summary.sequences or (np.diff(boundaries) < 0).any():
        findings.append(
            Finding(True, f"{idx_path(prefix)}: document boundaries do not rise from 0 to {summary.sequences}")
        )
    if empty := int((lengths == 0).sum()):
        findings.append(Finding(False, f"{prefix}: {empty} sequences are empty"))
    return findings


def _token_findings(
    prefix: str, summary: IndexSummary, size: Optional[int], mask: Optional[int], progress: bool
) -> list[Finding]:
    """First id out of range and first mask token, each with the sequence and place it stands at."""
    findings, outside, masked = [], None, None
    for start, part in token_chunks(prefix, summary, progress):
        bad = part < 0 if size is None else (part < 0) | (part >= size)
        if outside is None and bad.any():
            outside = start + int(bad.argmax())
            findings.append(
                Finding(
                    True,
                    f"{_place(prefix, summary, outside)}: id {part[bad.argmax()]} is outside the tokenizer's {size} "
                    "tokens",
                )
            )
        if masked is None and mask is not None and (hit := part == mask).any():
            masked = start + int(hit.argmax())
            findings.append(
                Finding(
                    True,
                    f"{_place(prefix, summary, masked)}: the mask token {mask} is a real token here; prepare the data "
                    "again without it",
                )
            )
    return findings


def _place(prefix: str, summary: IndexSummary, token: int) -> str:
    ends = np.cumsum(sequence_lengths(prefix, summary), dtype=np.int64)
    sequence = int(np.searchsorted(ends, token, side="right"))
    begin = int(ends[sequence - 1]) if sequence else 0
    return f"{bin_path(prefix)}: document {sequence}, token {token - begin}"
