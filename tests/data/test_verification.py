"""The long checks of indexed data (faults C7, E1): each fault is found and placed."""

import json
import struct

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bdlm.data import indexed, preprocess, verification
from megatron.bdlm.data.preprocess import PreprocessOptions
from megatron.bdlm.data.tokenizer_training import byte_tokenizer, save_tokenizer
from megatron.bdlm.data.tokenizers import TokenizerSource
from megatron.bdlm.data.verification import verify_prefix


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "bytes"
    save_tokenizer(byte_tokenizer(), path)
    return TokenizerSource(tokenizer_model=str(path))


@pytest.fixture
def prefix(tmp_path, source):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two words", "3")))
    preprocess.preprocess(PreprocessOptions((str(tmp_path / "a.jsonl"),), str(tmp_path / "d"), source), progress=False)
    return str(tmp_path / "d")


def faults(*args, **kwargs):
    return [finding.message for finding in verify_prefix(*args, **kwargs) if finding.fault]


def put(prefix, token, value):
    data = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    data[token] = value
    data.tofile(f"{prefix}.bin")


def test_sound_data_have_no_fault(prefix, source):
    assert faults(prefix) == faults(prefix, source) == []


def test_a_changed_byte_is_found_by_its_checksum(prefix):
    put(prefix, 0, 65)
    assert [message for message in faults(prefix) if "SHA-256" in message]
    assert faults(prefix, checksums=False) == []


@pytest.mark.parametrize(
    "value, message",
    [
        (257, r"d.bin: document 1, token 2: the mask token 257 is a real token here"),
        (300, r"d.bin: document 1, token 2: id 300 is outside the tokenizer's 259 tokens"),
    ],
)
def test_ids_that_must_not_occur_are_placed(prefix, monkeypatch, value, message):
    monkeypatch.setattr(verification, "CHUNK_TOKENS", 2)
    put(prefix, 5, value)
    assert any(message in found for found in faults(prefix, checksums=False))


def test_another_tokenizer_is_found(prefix, tmp_path):
    save_tokenizer(byte_tokenizer(["<|more|>"]), tmp_path / "other")
    found = faults(prefix, TokenizerSource(tokenizer_model=str(tmp_path / "other")))
    assert len(found) == 1 and "another tokenizer" in found[0]


def test_truncation_and_missing_files_are_faults(prefix, tmp_path):
    data = (tmp_path / "d.bin").read_bytes()
    (tmp_path / "d.bin").write_bytes(data[:-1])
    assert "truncated" in faults(prefix)[0]
    (tmp_path / "d.bin").unlink()
    assert "missing" in faults(prefix)[0]


def test_offsets_that_do_not_follow_the_lengths_are_found(prefix, tmp_path):
    index = bytearray((tmp_path / "d.idx").read_bytes())
    place = indexed.HEADER_BYTES + 4 * 3 + 8  # offset of sequence 1
    index[place : place + 8] = struct.pack("<q", 4)
    (tmp_path / "d.idx").write_bytes(index)
    assert any(
        "sequence 1 starts at byte 4, its predecessors end at 6" in message
        for message in faults(prefix, checksums=False)
    )


def test_stock_data_are_checked_against_a_given_tokenizer(tmp_path, source):
    builder = IndexedDatasetBuilder(str(tmp_path / "s.bin"), dtype=np.uint16)
    builder.add_document(np.array([0, 1, 258]), [3])
    builder.add_document(np.array([], dtype=np.int64), [0])
    builder.finalize(str(tmp_path / "s.idx"))
    findings = verify_prefix(str(tmp_path / "s"), source)
    assert [finding.fault for finding in findings] == [False, False]
    assert "no manifest" in findings[0].message and "1 sequences are empty" in findings[1].message
    assert faults(str(tmp_path / "s"), source, mask_token_id=258)  # the padding token cannot be the mask
    null = TokenizerSource("NullTokenizer", vocab_size=200)
    assert "document 0, token 2: id 258 is outside the tokenizer's 200 tokens" in faults(str(tmp_path / "s"), null)[0]
