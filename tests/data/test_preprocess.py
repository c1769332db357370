"""Text to `.bin/.idx`: order, faults with file and line, nothing half-written, checks of the pair (fault C7)."""

import json
import math
import os
import signal
import struct

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron.bdlm.data import indexed, preprocess
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.preprocess import PreprocessOptions, unigram_entropy
from megatron.bdlm.data.tokenizer_training import byte_tokenizer, save_tokenizer
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer, tokenizer_identity


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bytes"
    save_tokenizer(byte_tokenizer(), path)
    return TokenizerSource(tokenizer_model=str(path))


def write_lines(path, *lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(path)


def run(tmp_path, source, *inputs, **options):
    options = PreprocessOptions(tuple(map(str, inputs)), str(tmp_path / "out" / "data"), source, **options)
    return preprocess.preprocess(options, progress=False)


def ids(tmp_path):
    data = IndexedDataset(str(tmp_path / "out" / "data"))  # its arrays must not outlive it: they are views of its file
    return [data[i].tolist() for i in range(len(data))]


def documents(tmp_path):
    return [bytes(document) for document in ids(tmp_path)]


def test_json_lines_in_order(tmp_path, source):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "one"}', '{"text": ""}', "", '{"text": "zwei €"}')
    manifest = run(tmp_path, source, path)
    assert documents(tmp_path) == [b"one", "zwei €".encode()]
    assert (manifest["documents"], manifest["tokens"], manifest["empty_documents_left_out"]) == (2, 11, 1)
    assert manifest["longest_document_tokens"] == 8


def test_text_files_folder_and_other_key(tmp_path, source):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bee\n")
    (folder / "sub" / "a.md").write_text("ay")
    (folder / "ignored.png").write_bytes(b"\xff")
    write_lines(folder / "a.jsonl", '{"body": "jay"}')
    run(tmp_path, source, folder, json_key="body")
    assert documents(tmp_path) == [b"jay", b"bee\n", b"ay"]


def test_append_eod_and_id_zero(tmp_path, source):
    run(tmp_path, source, write_lines(tmp_path / "a.jsonl", json.dumps({"text": "\x00x"})), append_eod=True)
    assert ids(tmp_path) == [[0, 120, 256]]


def test_workers_do_not_change_the_output(tmp_path, source, monkeypatch):
    monkeypatch.setattr(preprocess, "CHUNK_BYTES", 50)
    path = write_lines(tmp_path / "a.jsonl", *(json.dumps({"text": "x" * (i % 17) + str(i)}) for i in range(100)))
    one = run(tmp_path / "1", source, path, workers=1)
    two = run(tmp_path / "2", source, path, workers=2)
    assert one == two and one["documents"] == 100


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "x"', r"a\.jsonl:2: broken JSON at column 13"),
        ('{"txt": "x"}', r"a\.jsonl:2: no key 'text' \(--json-key\); the object has: 'txt'"),
        ('{"text": 5}', r"a\.jsonl:2: the value of 'text' must be a string, this one is a int"),
        ('{"text": null}', r"a\.jsonl:2: .*must be a string"),
        ("[1]", r"a\.jsonl:2: a line must be a JSON object, this one is a list"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: byte 10 is not UTF-8"),
        ('{"text": "\\ud800"}', r"a\.jsonl:2: character 0 of 'text' is a lone surrogate"),
        ('{"text": "a <|mask|> b"}', r"a\.jsonl:2: the text contains the mask token \(id 257\).*--skip-mask-token"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_faults_name_file_and_line_and_leave_nothing(tmp_path, source, line, message, workers):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "fine"}', line, '{"text": "fine"}')
    with pytest.raises(DataError, match=message):
        run(tmp_path, source, path, workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


def test_documents_with_the_mask_token_can_be_left_out(tmp_path, source):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "a <|mask|> b"}', '{"text": "fine"}')
    manifest = run(tmp_path, source, path, skip_mask_token=True)
    assert documents(tmp_path) == [b"fine"] and manifest["mask_token_documents_left_out"] == 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: write_lines(p / "empty.jsonl"), "no document with a token in 1 files"),
        (lambda p: write_lines(p / "blank.jsonl", '{"text": ""}'), "no document with a token.*1 empty ones"),
        (lambda p: str(p / "nowhere.jsonl"), "nowhere.jsonl: no such file or folder"),
        (lambda p: str((p / "folder").mkdir() or p / "folder"), "the folder holds no file that ends in"),
    ],
)
def test_inputs_without_a_document_are_refused(tmp_path, source, make, message):
    with pytest.raises(DataError, match=message):
        run(tmp_path, source, make(tmp_path))
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "1 2 3"}', '{"text": "1 200"}')
    with pytest.raises(DataError, match=r"a\.jsonl:2: token id 200 is outside the vocabulary of 100"):
        run(tmp_path, TokenizerSource("NullTokenizer", vocab_size=100), path)


def test_append_eod_needs_an_end_token(tmp_path, source, monkeypatch):
    monkeypatch.setattr(preprocess, "end_of_document_id", lambda tokenizer: None)
    with pytest.raises(DataError, match="--append-eod: .*no end-of-document token"):
        run(tmp_path, source, write_lines(tmp_path / "a.jsonl", '{"text": "x"}'), append_eod=True)


def test_existing_output_is_kept_unless_overwritten(tmp_path, source):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "old"}')
    run(tmp_path, source, path)
    with pytest.raises(DataError, match="--output-prefix .*exists already.*--overwrite"):
        run(tmp_path, source, path)
    run(tmp_path, source, write_lines(tmp_path / "a.jsonl", '{"text": "new!"}'), overwrite=True)
    assert documents(tmp_path) == [b"new!"]


def test_a_failed_overwrite_keeps_the_old_files(tmp_path, source):
    path = write_lines(tmp_path / "a.jsonl", '{"text": "old"}')
    before = run(tmp_path, source, path)
    with pytest.raises(DataError):
        run(tmp_path, source, write_lines(tmp_path / "a.jsonl", '{"text": "x"}', "{"), overwrite=True)
    assert documents(tmp_path) == [b"old"] and indexed.read_manifest(str(tmp_path / "out" / "data")) == before


def test_a_dead_worker_is_an_error(tmp_path, source, monkeypatch):
    parent = os.getpid()

    def die(self, record):
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(preprocess.Encoder, "encode", die)
    with pytest.raises(DataError, match="a worker process died"):
        run(tmp_path, source, write_lines(tmp_path / "a.jsonl", '{"text": "x"}'), workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_unigram_entropy():
    assert unigram_entropy(np.array([2, 0, 2])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.array([5])) == 0.0


def test_manifest_names_entropy_checksums_and_tokenizer(tmp_path, source):
    manifest = run(tmp_path, source, write_lines(tmp_path / "a.jsonl", '{"text": "aabb"}'))
    prefix = str(tmp_path / "out" / "data")
    assert manifest["unigram_entropy_nats_per_token"] == pytest.approx(math.log(2))
    assert manifest["files"]["data.bin"] == {"bytes": 8, "sha256": indexed.file_sha256(indexed.bin_path(prefix))}
    assert manifest["tokenizer"] == tokenizer_identity(load_tokenizer(source), source)
    assert indexed.read_manifest(prefix) == manifest


# ---- checks of a pair -----------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path):
    """A pair written by the engine's builder alone, as Megatron's own tool does: no manifest."""
    path = str(tmp_path / "stock")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for length in (3, 0, 7):
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{path}.idx")
    return path


def test_stock_pair_is_consistent(prefix):
    summary = indexed.check_pair(prefix)
    assert (summary.sequences, summary.documents, summary.tokens, summary.dtype) == (3, 3, 10, np.uint16)
    assert indexed.read_manifest(prefix) is None


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        (".bin", lambda b: b[:-2], r"stock\.bin: truncated.*10 tokens of 2 bytes = 20 bytes, the file has 18"),
        (".bin", lambda b: b + b"xx", r"stock\.bin: too long"),
        (".idx", lambda b: b[:-1], r"stock\.idx: truncated: 3 sequences and 3 documents need 102 bytes, it has 101"),
        (".idx", lambda b: b[:20], r"stock\.idx: no Megatron index.*truncated: 20 bytes"),
        (".idx", lambda b: b"X" + b[1:], r"stock\.idx: no Megatron index"),
        (".idx", lambda b: b[:17] + b"\x63" + b[18:], r"stock\.idx: version 1 with data type code 99"),
        (".idx", lambda b: b + b"1234", r"stock\.idx: too long"),
    ],
)
def test_damaged_pairs_are_found(tmp_path, prefix, suffix, change, message):
    path = tmp_path / f"stock{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        indexed.check_pair(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_half_is_found(tmp_path, prefix, suffix):
    (tmp_path / f"stock{suffix}").unlink()
    with pytest.raises(DataError, match=rf"stock\{suffix}: missing"):
        indexed.check_pair(prefix)


def test_empty_index_is_found(tmp_path):
    (tmp_path / "e.bin").write_bytes(b"")
    (tmp_path / "e.idx").write_bytes(indexed.MAGIC + struct.pack("<QBQQ", 1, 8, 0, 1) + bytes(8))
    with pytest.raises(DataError, match="holds no sequence"):
        indexed.check_pair(str(tmp_path / "e"))


def test_fingerprint_follows_content(tmp_path, prefix):
    before = indexed.pair_fingerprint(prefix)
    os.utime(f"{prefix}.bin")
    assert indexed.pair_fingerprint(prefix) == before
    data = bytearray((tmp_path / "stock.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "stock.bin").write_bytes(data)
    assert indexed.pair_fingerprint(prefix) != before


def test_broken_manifest_is_an_error(tmp_path, prefix):
    indexed.manifest_path(prefix).write_text("{")
    with pytest.raises(DataError, match="not a readable manifest"):
        indexed.read_manifest(prefix)
    indexed.manifest_path(prefix).write_text("{}")
    with pytest.raises(DataError, match="not a manifest of the format"):
        indexed.read_manifest(prefix)


def test_the_engines_own_dataset_reads_the_output(tmp_path, source):
    """Stock `GPTDataset`, as Megatron's pretraining scripts use it."""
    run(tmp_path, source, write_lines(tmp_path / "a.jsonl", *['{"text": "0123456789"}'] * 20), append_eod=True)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=11,
        blend=([str(tmp_path / "out" / "data")], None),
        split="1,0,0",
        tokenizer=load_tokenizer(source),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(tmp_path / "cache"),
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config).build()[0]
    assert train[3]["tokens"].tolist() == [*b"0123456789", 256]
