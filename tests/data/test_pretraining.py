"""Pretraining samples: exactly L clean tokens, eligibility by place, identity, cache key, refusals.

Faults C1, C2, C3, C6, C7.
"""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bdlm.data import indexed, mock
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.pretraining import (
    BDLMDatasetConfig,
    build_numbered_datasets,
    check_data_tokenizer,
    document_lengths,
    documents_are_separate,
    number_documents,
)
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer, tokenizer_identity

SOURCE = TokenizerSource("NullTokenizer", vocab_size=100)  # eod 99, no padding, no mask token
L = 16


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SOURCE)


def write(prefix, documents):
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.asarray(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path):
    """60 documents whose tokens tell document and place: id = (7 * document + place) % 90, the last one eod."""
    lengths = np.random.default_rng(0).integers(1, 40, 60)
    return write(str(tmp_path / "d"), [[(7 * d + i) % 90 for i in range(n - 1)] + [99] for d, n in enumerate(lengths)])


def config(tokenizer, prefix, tmp_path, **changes):
    values = dict(
        random_seed=5,
        sequence_length=L,
        blend=([prefix], None) if prefix else None,
        split="80,10,10",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(tmp_path / "cache"),
        mask_token_id=100,
    )
    return BDLMDatasetConfig(**{**values, **changes})


def build(tokenizer, prefix, tmp_path, counts=(40, 12, 4), evaluation_samples=4, **changes):
    return build_numbered_datasets(config(tokenizer, prefix, tmp_path, **changes), counts, evaluation_samples)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_sample_format_and_collate(tokenizer, prefix, tmp_path):
    train, valid, test = build(tokenizer, prefix, tmp_path, separate_documents=True)
    for dataset, name in ((train, "train"), (valid, "valid"), (test, "test")):
        assert dataset.split.name == name
        sample = dataset[1]
        assert {key: (value.dtype, tuple(value.shape)) for key, value in sample.items()} == {
            "tokens": (torch.int64, (L,)),
            "eligible": (torch.bool, (L,)),
            "documents": (torch.int32, (L,)),
            "sample_index": (torch.int64, ()),
            "epoch": (torch.int64, ()),
        }
    batch = next(iter(torch.utils.data.DataLoader(train, batch_size=3)))
    assert batch["tokens"].shape == (3, L) and batch["sample_index"].tolist() == [0, 1, 2]


def test_one_pass_reads_every_token_once(tokenizer, tmp_path):
    """Samples are exactly L tokens of the document stream, without an extra token between them."""
    stream = np.arange(6 * L) % 90
    data = write(str(tmp_path / "one"), [stream])
    train, _, _ = build(tokenizer, data, tmp_path, counts=(6, 0, 0), split="1,0,0")
    assert len(train) == 6
    assert sorted(train[i]["tokens"].tolist() for i in range(6)) == sorted(stream.reshape(6, L).tolist())


def test_zero_and_eos_keep_their_loss(tokenizer, tmp_path):
    """C1, C2: id 0, and an eos that equals the padding id, are real tokens wherever they stand."""
    same_pad = load_tokenizer(SOURCE)
    same_pad._tokenizer._pad_id = 99
    assert same_pad.pad == same_pad.eod == 99
    data = write(str(tmp_path / "zeros"), [[0] * 7 + [99]] * 20)
    train, _, _ = build(same_pad, data, tmp_path, counts=(4, 0, 0), split="1,0,0")
    for i in range(4):
        assert train[i]["tokens"].tolist() == ([0] * 7 + [99]) * 2
        assert train[i]["eligible"].all()


def test_eod_mask_loss_takes_only_eod(tokenizer, tmp_path):
    data = write(str(tmp_path / "zeros"), [[0] * 7 + [99]] * 20)
    train, _, _ = build(tokenizer, data, tmp_path, counts=(4, 0, 0), split="1,0,0", eod_mask_loss=True)
    assert torch.equal(train[0]["eligible"], train[0]["tokens"] != 99)


def test_reading_twice_gives_the_same(tokenizer, prefix, tmp_path):
    """C3: also after a reader wrote into what it got."""
    train, _, _ = build(tokenizer, prefix, tmp_path, separate_documents=True)
    first = {key: value.clone() for key, value in train[3].items()}
    spoiled = train[3]
    spoiled["tokens"].fill_(1)
    spoiled["eligible"].fill_(False)
    assert same(train[3], first)


def test_partial_last_validation_sample_is_padding_not_tokens(tokenizer, tmp_path):
    data = write(str(tmp_path / "v"), [list(range(1, 21))])
    _, valid, _ = build_numbered_datasets(
        config(
            tokenizer,
            None,
            tmp_path,
            blend_per_split=[None, ([data], None), None],
            split=None,
            blend=None,
            drop_last_partial_validation_sequence=False,
            separate_documents=True,
            full_validation=True,
        ),
        (0, None, 0),
        4,
    )
    assert len(valid) == 2
    tail = next(s for s in (valid[0], valid[1]) if not s["eligible"].all())
    assert tail["tokens"].tolist() == [17, 18, 19, 20] + [0] * 12
    assert tail["eligible"].tolist() == [True] * 4 + [False] * 12
    assert document_lengths(tail["documents"]) == [4, 12]


def test_batch_padding_sample_has_nothing_to_score(tokenizer, prefix, tmp_path):
    train, _, _ = build(tokenizer, prefix, tmp_path)
    assert not train[None]["eligible"].any()


def test_documents_follow_the_index(tokenizer, prefix, tmp_path):
    train, _, _ = build(tokenizer, prefix, tmp_path, separate_documents=True)
    for i in range(len(train)):
        sample = train[i]
        lengths = document_lengths(sample["documents"])
        assert sum(lengths) == L and min(lengths) > 0
        # every document but the last ends in its own eod, and no eod stands elsewhere
        ends = np.cumsum(lengths) - 1
        eods = np.flatnonzero(sample["tokens"].numpy() == 99)
        assert set(ends[:-1]) <= set(eods) <= set(ends)


@pytest.mark.parametrize(
    "lengths, total, numbers",
    [
        ([2, 0, 1], 5, [0, 0, 1, -1, -1]),
        ([0, 3], 3, [0, 0, 0]),
        ([], 2, [-1, -1]),
        ([1, 1], 2, [0, 1]),
    ],
)
def test_number_documents(lengths, total, numbers):
    assert number_documents(lengths, total).tolist() == numbers
    assert sum(document_lengths(numbers)) == total


def test_identity_is_the_place_in_the_order(tokenizer, prefix, tmp_path):
    """Several passes over the data lie in one order: indices never repeat, the split's text does."""
    train, _, _ = build(tokenizer, prefix, tmp_path, counts=(300, 0, 0))
    assert [int(train[i]["sample_index"]) for i in range(300)] == list(range(300))
    again, _, _ = build(tokenizer, prefix, tmp_path, counts=(300, 0, 0))
    assert all(same(train[i], again[i]) for i in range(0, 300, 17))


def test_workers_do_not_change_samples(tokenizer, prefix, tmp_path):
    train, _, _ = build(tokenizer, prefix, tmp_path)
    batches = [list(torch.utils.data.DataLoader(train, batch_size=4, num_workers=n)) for n in (0, 2)]
    assert len(batches[0]) == len(batches[1]) and all(map(same, *batches))


def test_blend_has_one_identity_for_each_sample(tokenizer, prefix, tmp_path):
    other = write(str(tmp_path / "other"), [[90 + d % 9] * 30 for d in range(40)])
    train, valid, _ = build(tokenizer, None, tmp_path, blend=([prefix, other], [0.5, 0.5]))
    indices = [int(train[i]["sample_index"]) for i in range(len(train))]
    assert indices == list(range(40))
    assert "dataset_id" not in train[0]
    from_other = [bool((train[i]["tokens"] >= 90).float().mean() > 0.9) for i in range(40)]
    assert 15 <= sum(from_other) <= 25
    assert len(valid) == 12


def test_validation_repeats_the_same_samples(tokenizer, prefix, tmp_path):
    _, valid, test = build(tokenizer, prefix, tmp_path, counts=(10, 12, 4), evaluation_samples=4)
    assert len(valid) == 12
    assert all(same(valid[i], valid[i + 4]) and same(valid[i], valid[i + 8]) for i in range(4))
    assert [int(valid[i]["sample_index"]) for i in range(12)] == [0, 1, 2, 3] * 3


def test_prefixes_without_weights_that_do_not_suffice_are_refused(tokenizer, prefix, tmp_path):
    other = write(str(tmp_path / "other"), [[1] * 30] * 40)
    with pytest.raises(DataError, match="--data-path: prefixes without weights.*the run asks for 5000"):
        build(tokenizer, None, tmp_path, counts=(5000, 4, 4), blend=([prefix, other], None))


def cache_keys(tmp_path):
    return {path.name for path in (tmp_path / "cache").glob("*train-description.txt")}


def test_cache_key_names_what_changes_the_samples(tokenizer, prefix, tmp_path):
    """C6: another length, seed, or other data under the same prefix never meet the old cache."""
    train, _, _ = build(tokenizer, prefix, tmp_path)
    assert len(cache_keys(tmp_path)) == 1
    build(tokenizer, prefix, tmp_path)
    build(tokenizer, prefix, tmp_path, separate_documents=True)  # numbers documents, moves no token
    assert len(cache_keys(tmp_path)) == 1
    build(tokenizer, prefix, tmp_path, sequence_length=L + 1)
    build(tokenizer, prefix, tmp_path, random_seed=6)
    assert len(cache_keys(tmp_path)) == 3
    write(prefix, [[d + 1] * 25 for d in range(50)])
    rebuilt, _, _ = build(tokenizer, prefix, tmp_path)
    assert len(cache_keys(tmp_path)) == 4
    assert not same(train[0], rebuilt[0])
    description = json.loads((tmp_path / "cache" / sorted(cache_keys(tmp_path))[0]).read_text())
    assert description["class"] == "BDLMPretrainingDataset" and "data" in description
    assert description["add_extra_token_to_sequence"] is False


def test_empty_split_is_refused(tokenizer, tmp_path):
    data = write(str(tmp_path / "few"), [[1] * 50] * 4)
    with pytest.raises(DataError, match="--split 99,1,0: the valid split of .* gets none of its 4 documents; .*90,5,5"):
        build(tokenizer, data, tmp_path, split="99,1,0")


def test_evaluations_without_data_are_refused(tokenizer, prefix, tmp_path):
    with pytest.raises(DataError, match="--split 1,0,0: the validation split is empty and --eval-iters is not 0"):
        build(tokenizer, prefix, tmp_path, split="1,0,0")
    assert build(tokenizer, prefix, tmp_path, split="1,0,0", counts=(40, 0, 0))[1] is None


def test_truncated_data_is_refused_at_start(tokenizer, prefix, tmp_path):
    """C7"""
    os.truncate(f"{prefix}.bin", os.path.getsize(f"{prefix}.bin") - 2)
    with pytest.raises(DataError, match=r"d\.bin: truncated"):
        build(tokenizer, prefix, tmp_path)


def test_data_of_another_tokenizer_is_refused(tokenizer, prefix):
    """C7; a prefix without a manifest is taken on trust."""
    check_data_tokenizer([prefix], tokenizer, SOURCE)
    manifest = {"format": indexed.MANIFEST_FORMAT, "tokenizer": tokenizer_identity(tokenizer, SOURCE)}
    indexed.manifest_path(prefix).write_text(json.dumps(manifest))
    check_data_tokenizer([prefix], tokenizer, SOURCE)
    other = TokenizerSource("NullTokenizer", vocab_size=101)
    with pytest.raises(
        DataError,
        match="another tokenizer: written by NullTokenizer .*100 tokens.*the run has NullTokenizer .*101 tokens",
    ):
        check_data_tokenizer([prefix], load_tokenizer(other), other)


@pytest.mark.parametrize(
    "positions, attention, inter, separate",
    [
        (False, False, False, False),
        (True, True, False, True),
        (False, False, True, True),
    ],
)
def test_flags_for_separate_documents(positions, attention, inter, separate):
    args = SimpleNamespace(
        reset_position_ids=positions, reset_attention_mask=attention, dataloader_inter_document_masking=inter
    )
    assert documents_are_separate(args) is separate


@pytest.mark.parametrize(
    "positions, given, other",
    [
        (True, "--reset-position-ids", "--reset-attention-mask"),
        (False, "--reset-attention-mask", "--reset-position-ids"),
    ],
)
def test_half_a_restart_is_refused(positions, given, other):
    args = SimpleNamespace(
        reset_position_ids=positions, reset_attention_mask=not positions, dataloader_inter_document_masking=False
    )
    with pytest.raises(DataError, match=f"{given}: .*give {other} too"):
        documents_are_separate(args)


# ---- mock data ------------------------------------------------------------------------------


def test_mock_samples_are_deterministic_and_inside_the_vocabulary(tokenizer, tmp_path):
    first, again = (
        build(tokenizer, None, tmp_path, path_to_cache=None, split=None, mask_token_id=3)[0] for _ in range(2)
    )
    tokens = torch.stack([first[i]["tokens"] for i in range(40)])
    assert torch.equal(tokens, torch.stack([again[i]["tokens"] for i in range(40)]))
    assert 0 <= tokens.min() and tokens.max() < 100 and not (tokens == 3).any()
    assert (tokens == 0).any()


def test_mock_documents_have_the_stated_entropies():
    documents = mock.MockDocuments(1000, eod=999)
    pairs = np.zeros((64, 64))
    for d in range(300):
        walk = documents[d][:-1]
        np.add.at(pairs, (walk[:-1], walk[1:]), 1)
    shares = pairs / pairs.sum()
    joint = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    row = shares.sum(1)
    unigram = -(row * np.log(row)).sum()
    assert unigram == pytest.approx(np.log(64), abs=0.01)
    assert joint - unigram == pytest.approx(mock.ENTROPY_RATE, abs=0.02)


def test_mock_parts_are_parts_of_the_document():
    documents = mock.MockDocuments(50, eod=49, excluded=frozenset({48, 0}))
    whole = documents[7]
    assert len(whole) == documents.sequence_lengths[7] and whole[-1] == 49
    assert not np.isin(whole[:-1], [0, 48, 49]).any()
    assert np.array_equal(documents.get(7, offset=5, length=9), whole[5:14])
    assert np.array_equal(documents.get(7, offset=5), whole[5:])


def test_mock_vocabulary_too_small_is_refused():
    with pytest.raises(DataError, match="--mock-data: a vocabulary of 9 leaves 6"):
        mock.MockDocuments(9, eod=8, excluded=frozenset({0, 1}))
