"""Tokenizers: training, round trips, and which row is the mask token (fault E1)."""

import json

import pytest
from transformers import AutoTokenizer

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.tokenizer_training import byte_tokenizer, save_tokenizer, train_byte_pair_encoding
from megatron.bdlm.data.tokenizers import (
    TokenizerSource,
    end_of_document_id,
    load_tokenizer,
    mask_token_id,
    padding_id,
    resolve_vocabulary,
    tokenizer_identity,
    vocabulary_size,
    vocabulary_without_mask,
)

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "the cat sat on the mat, the dog too " * 20, "naïve café 你好\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers") / "bpe"
    save_tokenizer(train_byte_pair_encoding(TEXTS, 300, progress=False), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(TokenizerSource(tokenizer_model=str(folder)))


def null(size):
    return load_tokenizer(TokenizerSource("NullTokenizer", vocab_size=size))


def test_trained_folder_loads_and_decodes_to_the_text(folder, tokenizer):
    fast = AutoTokenizer.from_pretrained(folder)
    assert len(fast) == 300 == vocabulary_size(tokenizer)
    assert (fast.eos_token_id, fast.mask_token_id, fast.pad_token_id) == (297, 298, 299)
    assert (end_of_document_id(tokenizer), mask_token_id(tokenizer), padding_id(tokenizer)) == (297, 298, 299)
    for text in (*TEXTS, "\x00 unseen: ₿\t\r\n  x", " leading and trailing "):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize(TEXTS[1])) < len(TEXTS[1]) / 2


def test_training_is_deterministic():
    first, second = (train_byte_pair_encoding(iter(TEXTS), 300, progress=False).to_str() for _ in range(2))
    assert first == second


def test_byte_tokenizer_ids_are_bytes(tmp_path):
    save_tokenizer(byte_tokenizer(), tmp_path / "bytes")
    tokenizer = load_tokenizer(TokenizerSource(tokenizer_model=str(tmp_path / "bytes")))
    text = "hé\x00\n 你 "
    assert tokenizer.tokenize(text) == list(text.encode())
    assert tokenizer.detokenize(list(text.encode())) == text
    assert (vocabulary_size(tokenizer), mask_token_id(tokenizer)) == (259, 257)


def test_vocabulary_without_room_is_refused():
    with pytest.raises(DataError, match="--vocab-size 258: .*least legal value is 259"):
        train_byte_pair_encoding(TEXTS, 258, progress=False)


def test_existing_folder_is_kept(folder):
    before = (folder / "tokenizer.json").read_bytes()
    with pytest.raises(DataError, match="exists already"):
        save_tokenizer(byte_tokenizer(), folder)
    assert (folder / "tokenizer.json").read_bytes() == before


def test_default_mask_is_the_tokenizers_own(tokenizer):
    vocabulary = resolve_vocabulary(tokenizer)
    assert (vocabulary.size, vocabulary.mask_token_id, vocabulary.eod_token_id) == (300, 298, 297)
    assert not vocabulary.mask_is_new_row
    assert vocabulary.padded(128, 2) == 512


@pytest.mark.parametrize("size", [100, 128])
def test_without_a_mask_token_one_row_is_new(size):
    vocabulary = resolve_vocabulary(null(size))
    assert (vocabulary.size, vocabulary.mask_token_id) == (size + 1, size)
    assert vocabulary.mask_is_new_row
    # 128 tokens fill the padded rows: the new row needs another multiple, not a padding row
    assert vocabulary.padded(128) == (128 if size == 100 else 256)
    vocabulary.check_padded(vocabulary.padded(128))


@pytest.mark.parametrize(
    "requested, message",
    [
        (-1, "must be one of the tokenizer's 300 ids or 300"),
        (301, "not in the padding rows. A legal value: 298"),
        (297, "end-of-document token.*A legal value: 298"),
        (0, "ordinary token.*A legal value: 298"),
        (299, "ordinary token"),  # the padding token has a role
    ],
)
def test_mask_ids_that_text_could_contain_are_refused(tokenizer, requested, message):
    with pytest.raises(DataError, match=f"--bdlm-mask-token-id {requested}: .*{message}"):
        resolve_vocabulary(tokenizer, requested)


def test_a_reserved_token_or_a_new_row_may_be_the_mask(tmp_path, tokenizer):
    save_tokenizer(byte_tokenizer(["<|reserved|>"]), tmp_path / "reserved")
    reserved = load_tokenizer(TokenizerSource(tokenizer_model=str(tmp_path / "reserved")))
    assert resolve_vocabulary(reserved, 259).mask_token_id == 259
    assert resolve_vocabulary(tokenizer, 300).size == 301


def test_embedding_that_lacks_the_mask_row_is_refused():
    with pytest.raises(DataError, match="--padded-vocab-size 128: the vocabulary has 129 rows"):
        resolve_vocabulary(null(128)).check_padded(128)


def test_a_model_without_a_mask_token(tokenizer):
    vocabulary = vocabulary_without_mask(tokenizer, 384)
    assert (vocabulary.size, vocabulary.tokenizer_size, vocabulary.mask_token_id) == (384, 384, -1)
    with pytest.raises(DataError, match="--bdlm-diffusion-gemma: vocab_size 10, but the tokenizer has .* A legal value"):
        vocabulary_without_mask(tokenizer, 10)


def test_identity_follows_content_not_place(folder, tokenizer, tmp_path):
    source = TokenizerSource(tokenizer_model=str(folder))
    identity = tokenizer_identity(tokenizer, source)
    moved = TokenizerSource(tokenizer_model=str(folder.rename(tmp_path / "moved")))
    again = tokenizer_identity(load_tokenizer(moved), moved)
    (tmp_path / "moved").rename(folder)
    assert again["content_sha256"] == identity["content_sha256"] and again["model"] != identity["model"]
    # the same vocabulary with one merge less encodes otherwise
    stripped = json.loads((folder / "tokenizer.json").read_text())
    stripped["model"]["merges"] = stripped["model"]["merges"][1:]
    other = tmp_path / "other"
    other.mkdir()
    for name in folder.iterdir():
        (other / name.name).write_bytes(name.read_bytes())
    (other / "tokenizer.json").write_text(json.dumps(stripped))
    changed = TokenizerSource(tokenizer_model=str(other))
    assert tokenizer_identity(load_tokenizer(changed), changed)["content_sha256"] != identity["content_sha256"]


@pytest.mark.parametrize(
    "source, message",
    [
        (TokenizerSource("Nothing"), "--tokenizer-type Nothing: known types"),
        (TokenizerSource("NullTokenizer"), "needs --vocab-size"),
        (TokenizerSource("HuggingFaceTokenizer"), "needs --tokenizer-model"),
    ],
)
def test_sources_that_cannot_load_are_refused(source, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(source)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="--tokenizer-model .*nowhere: no such local folder"):
        load_tokenizer(TokenizerSource(tokenizer_model=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="HuggingFaceTokenizer cannot load it"):
        load_tokenizer(TokenizerSource(tokenizer_model=str(tmp_path)))
