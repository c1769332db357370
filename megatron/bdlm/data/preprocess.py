"""Text to tokens: documents in, a Megatron `.bin/.idx` pair with a manifest out.

Documents are grouped into chunks of about a megabyte; worker processes parse and encode them, and the
results are written in input order, with a bounded number of chunks in flight. One document is one
sequence of the index. The corpus' unigram entropy, H = -sum_v f_v ln f_v over token frequencies f in
nats per token, is what a model that knows frequencies only would score: the first line to get below.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tqdm import tqdm

from megatron.bdlm import __version__
from megatron.bdlm.data.command import STOP_SIGNALS, stop_signals_deferred
from megatron.bdlm.data.documents import DataError, Record, input_files, iterate_records, record_text
from megatron.bdlm.data.indexed import IndexedWriter
from megatron.bdlm.data.tokenizers import (
    TokenizerSource,
    end_of_document_id,
    load_tokenizer,
    mask_token_id,
    tokenizer_identity,
    vocabulary_size,
)

CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True)
class PreprocessOptions:
    """What to encode, how, and where to."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSource
    json_key: str = "text"
    append_eod: bool = False
    workers: int = 1
    overwrite: bool = False
    skip_mask_token: bool = False
    """Leave out documents whose text contains the mask token, instead of an error."""


@dataclass(frozen=True)
class Encoded:
    """One document's ids (None: left out because it contains the mask token)."""

    ids: Optional[np.ndarray]
    data_bytes: int


class Encoder:
    """Parses and encodes records with one tokenizer; lives once in each worker."""

    def __init__(self, options: PreprocessOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer(options.tokenizer)
        self.size = vocabulary_size(self.tokenizer)
        self.mask = mask_token_id(self.tokenizer)
        self.eod = end_of_document_id(self.tokenizer)
        if options.append_eod and self.eod is None:
            raise DataError(
                f"--append-eod: the tokenizer {options.tokenizer.tokenizer_model} has no end-of-document token; leave "
                "the flag out"
            )

    def encode(self, record: Record) -> Encoded:
        """Ids of one document.

        Raises:
            DataError: the record cannot be parsed, an id is outside the vocabulary, or the mask token occurs.
        """
        text = record_text(record, self.options.json_key)
        try:
            ids = np.asarray(self.tokenizer.tokenize(text) if text else [], dtype=np.int64)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{record.place}: the tokenizer cannot encode it: {error}") from error
        if ids.size and not (0 <= ids.min() and ids.max() < self.size):
            outside = int(ids.max() if ids.max() >= self.size else ids.min())
            raise DataError(f"{record.place}: token id {outside} is outside the vocabulary of {self.size} tokens")
        if self.mask is not None and (ids == self.mask).any():
            if self.options.skip_mask_token:
                return Encoded(None, len(record.data))
            raise DataError(
                f"{record.place}: the text contains the mask token (id {self.mask}), which must never be a real token; "
                "remove it from the text or leave such documents out with --skip-mask-token"
            )
        if self.options.append_eod and ids.size:
            ids = np.append(ids, self.eod)
        return Encoded(ids.astype(np.int32), len(record.data))


_encoder: Optional[Encoder] = None


def _start_worker(options: PreprocessOptions) -> None:
    global _encoder
    # The parent cleans up on Ctrl-C and ends its workers; their own tracebacks would only hide its message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(options)


def _encode_chunk(records: list[Record]) -> list[Encoded]:
    return [_encoder.encode(record) for record in records]


def _chunks(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Records grouped to about CHUNK_BYTES, order kept."""
    chunk, size = [], 0
    for record in records:
        chunk.append(record)
        size += len(record.data)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_pool(options: PreprocessOptions) -> ProcessPoolExecutor:
    """Workers, all running; a signal waits for that: one that is forked but not known yet would never be ended."""
    pool = ProcessPoolExecutor(options.workers, multiprocessing.get_context("fork"), _start_worker, (options,))
    with stop_signals_deferred():
        pool.submit(os.getpid)  # the first task forks all of them
    return pool


def encode_records(options: PreprocessOptions, encoder: Encoder, records: Iterator[Record]) -> Iterator[Encoded]:
    """Encode records in order, here or in worker processes.

    Raises:
        DataError: of the first faulty record, or a worker process died.
    """
    if options.workers <= 1:
        yield from map(encoder.encode, records)
        return
    others = set(multiprocessing.active_children())
    pool = _start_pool(options)
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for chunk in _chunks(records):
            pending.append(pool.submit(_encode_chunk, chunk))
            if len(pending) >= CHUNKS_IN_FLIGHT_PER_WORKER * options.workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a worker process died (out of memory?); try fewer --workers") from error
    except BaseException:
        # A fault or an interrupt: do not wait for the chunks that the workers hold.
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class Counts:
    """Running totals of a corpus."""

    frequencies: np.ndarray  # int64 [vocabulary]
    documents: int = 0
    empty_documents: int = 0
    mask_token_documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    longest: int = field(default=0)

    def add(self, document: Encoded) -> bool:
        """Count a document; whether it is to be written."""
        self.input_bytes += document.data_bytes
        if document.ids is None:
            self.mask_token_documents += 1
            return False
        if not document.ids.size:
            self.empty_documents += 1
            return False
        self.documents += 1
        self.tokens += document.ids.size
        self.longest = max(self.longest, document.ids.size)
        self.frequencies += np.bincount(document.ids, minlength=self.frequencies.size)
        return True


def unigram_entropy(frequencies: np.ndarray) -> float:
    """Entropy of token frequencies in nats per token."""
    share = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(share * np.log(share)).sum()) + 0.0


def preprocess(options: PreprocessOptions, progress: bool = True) -> dict[str, Any]:
    """Encode all inputs and write the pair and its manifest, whose contents are returned.

    Raises:
        DataError: naming file and line, or the option.
    """
    files = input_files(options.inputs)
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: at least 1")
    encoder = Encoder(options)
    counts = Counts(np.zeros(encoder.size, np.int64))
    total = sum(path.stat().st_size for path in files)
    with (
        IndexedWriter(options.output_prefix, encoder.size, options.overwrite) as writer,
        tqdm(total=total, unit="B", unit_scale=True, desc="encoding", disable=not progress) as bar,
    ):
        for document in encode_records(options, encoder, iterate_records(files)):
            if counts.add(document):
                writer.add_document(document.ids)
            bar.update(document.data_bytes)
            if counts.documents % 64 == 0 and (elapsed := bar.format_dict["elapsed"]):
                bar.set_postfix_str(f"{counts.documents / elapsed:.0f} docs/s", refresh=False)
        if not counts.documents:
            raise DataError(
                f"{', '.join(options.inputs)}: no document with a token in {len(files)} files "
                f"({counts.empty_documents} empty ones)"
            )
        return writer.commit(lambda written: _manifest(options, encoder, files, counts, written))


def _manifest(
    options: PreprocessOptions, encoder: Encoder, files: list[Path], counts: Counts, written: dict[str, Any]
) -> dict[str, Any]:
    return {
        "version": __version__,
        "tokenizer": tokenizer_identity(encoder.tokenizer, options.tokenizer),
        "append_eod": options.append_eod,
        "json_key": options.json_key,
        "inputs": [str(path) for path in files][:100],
        "input_files": len(files),
        "input_bytes": counts.input_bytes,
        "documents": counts.documents,
        "empty_documents_left_out": counts.empty_documents,
        "mask_token_documents_left_out": counts.mask_token_documents,
        "tokens": counts.tokens,
        "longest_document_tokens": counts.longest,
        "unigram_entropy_nats_per_token": unigram_entropy(counts.frequencies),
        "files": written,
    }
