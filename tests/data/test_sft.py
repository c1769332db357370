"""Fine-tuning samples: policies with counts, cache key, order, resume (faults A8, B4, B7, C3, C4, C6)."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data import sft
from megatron.bdlm.data.conversations import ConversationEncoder
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.noise import block_starts_of, corrupt
from megatron.bdlm.data.sft import ConversationSamples, Order, Policies, prepare_items, split_items
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer

SOURCE = TokenizerSource("NullTokenizer", vocab_size=100)
L = 16


@pytest.fixture(scope="module")
def encoder():
    return ConversationEncoder(load_tokenizer(SOURCE))


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return [str(path)]


def item(prompt, answer, first=0):
    """An item of prompt + answer tokens."""
    return {"tokens": list(range(first, first + prompt + answer)), "mask": [0] * prompt + [1] * answer}


def prepare(paths, encoder, cache=None, **policies):
    return prepare_items(paths, encoder, SOURCE, Policies(**{"seq_length": L, **policies}), cache)


@pytest.fixture
def paths(tmp_path):
    generator = np.random.default_rng(0)
    return write(
        tmp_path / "a.jsonl",
        [item(*generator.integers(1, 8, 2).tolist(), int(generator.integers(0, 80))) for _ in range(40)],
    )


def samples_of(prepared, method="first-fit", split=Split.train, shuffle=True, **options):
    return ConversationSamples(
        prepared, np.arange(len(prepared)), L, method, Order(5, shuffle, options.pop("bucket", 0)), split, **options
    )


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_sample_format_and_collate(paths, encoder):
    samples = samples_of(prepare(paths, encoder))
    assert {key: (value.dtype, tuple(value.shape)) for key, value in samples[0].items()} == {
        "tokens": (torch.int64, (L,)),
        "eligible": (torch.bool, (L,)),
        "documents": (torch.int32, (L,)),
        "restarts": (torch.bool, (L,)),
        "sample_index": (torch.int64, ()),
        "epoch": (torch.int64, ()),
    }
    assert samples.split is Split.train
    assert next(iter(torch.utils.data.DataLoader(samples, batch_size=2)))["restarts"].shape == (2, L)


@pytest.mark.parametrize("method", ["first-fit", "sequential", "none"])
def test_every_item_comes_once_a_pass(paths, encoder, method):
    prepared = prepare(paths, encoder)
    samples = samples_of(prepared, method)
    for epoch in (0, 1):
        seen = []
        for place in range(len(samples.samples)):
            sample = samples[epoch * len(samples.samples) + place]
            assert int(sample["epoch"]) == epoch
            ids = sample["documents"].numpy()
            seen += [tuple(sample["tokens"].numpy()[ids == number].tolist()) for number in range(ids.max() + 1)]
        assert sorted(seen) == sorted(tuple(prepared.piece(i).tokens.tolist()) for i in range(len(prepared)))


def test_order_depends_on_seed_and_pass_only(paths, encoder):
    prepared = prepare(paths, encoder)
    one, other = samples_of(prepared, length=100), samples_of(prepared, length=50)
    places = [0, 49, 3, 20, 49]  # a resume starts anywhere, workers read in any order
    assert all(same(one[place], other[place]) for place in places)
    passes = [[int(one[p * len(one.samples) + i]["sample_index"]) for i in range(len(one.samples))] for p in (0, 1)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == list(range(len(one.samples)))


def test_reading_twice_gives_the_same(paths, encoder, tmp_path):
    """C3, with the arrays in memory and from the cache."""
    for cache in (None, tmp_path / "cache"):
        samples = samples_of(prepare(paths, encoder, cache))
        first = {key: value.clone() for key, value in samples[1].items()}
        for value in samples[1].values():
            value.zero_()
        assert same(samples[1], first)


def test_workers_do_not_change_samples(paths, encoder, tmp_path):
    samples = samples_of(prepare(paths, encoder, tmp_path / "cache"), length=60)
    batches = [list(torch.utils.data.DataLoader(samples, batch_size=4, num_workers=n)) for n in (0, 2)]
    assert len(batches[0]) == 15 and all(map(same, *batches))


def test_validation_repeats_without_shuffling(paths, encoder):
    samples = samples_of(prepare(paths, encoder), "sequential", Split.valid, shuffle=False, length=9, repeat=3)
    assert [(int(samples[i]["sample_index"]), int(samples[i]["epoch"])) for i in range(9)] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ] * 3
    assert samples[0]["tokens"][0] == prepare(paths, encoder).piece(0).tokens[0]


def test_batch_padding_sample_has_nothing_to_score(paths, encoder):
    assert not samples_of(prepare(paths, encoder))[None]["eligible"].any()


def test_one_a_sample_puts_like_lengths_together(paths, encoder):
    samples = samples_of(prepare(paths, encoder), "none", bucket=4)
    lengths = [int((samples[i]["documents"] >= 0).sum()) for i in range(40)]
    spread = max(max(lengths[i : i + 4]) - min(lengths[i : i + 4]) for i in range(0, 40, 4))
    assert len(samples) == 40 and spread <= 4


# ---- policies -------------------------------------------------------------------------------


def test_items_with_nothing_to_score_are_left_out_and_named(tmp_path, encoder):
    """B4: also a prompt that fills the window alone."""
    paths = write(tmp_path / "a.jsonl", [item(3, 2), item(5, 0), item(20, 1), item(4, 4)])
    prepared = prepare(paths, encoder, too_long="truncate-left")
    assert len(prepared) == 3
    assert prepared.report["without_target"] == {"count": 1, "first": [f"{paths[0]}:2"]}
    assert prepared.report["truncated"] == {"count": 1, "first": [f"{paths[0]}:3"]}
    assert "without target: 1 (first: " in sft.report_line(prepared.report)
    assert all(samples_of(prepared)[i]["eligible"].any() for i in range(len(samples_of(prepared))))


def test_too_long_policies(tmp_path, encoder):
    """C4: one above the limit."""
    paths = write(tmp_path / "a.jsonl", [item(3, 2), item(L - 3, 4)])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {L + 1} tokens do not fit --seq-length {L}"):
        prepare(paths, encoder)
    dropped = prepare(paths, encoder, too_long="drop")
    assert len(dropped) == 1 and dropped.report["too_long"]["first"] == [f"{paths[0]}:2"]
    cut = prepare(paths, encoder, too_long="truncate-left")
    assert cut.piece(1).tokens.tolist() == list(range(1, L + 1)) and cut.piece(1).restarts == (L - 4,)


def test_nothing_left_is_refused(tmp_path, encoder):
    with pytest.raises(DataError, match="no item that can be trained on .*without target 2"):
        prepare(write(tmp_path / "a.jsonl", [item(5, 0)] * 2), encoder)


def test_text_files_are_refused(tmp_path, encoder):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="a.txt: fine-tuning data are JSON lines"):
        prepare([str(tmp_path / "a.txt")], encoder)


@pytest.mark.parametrize("tail", ["ragged", "eos-fill", "pad"])
def test_corruption_stays_inside_the_answer(tmp_path, encoder, tail):
    """B7: prompt 5, answer 4; in 1000 draws every answer position is hit and no other."""
    prepared = prepare(write(tmp_path / "a.jsonl", [item(5, 4, 10)]), encoder, tail=tail, block_size=4)
    sample = {key: value.numpy() for key, value in samples_of(prepared)[0].items()}
    assert sample["eligible"].nonzero()[0].tolist() == [5, 6, 7, 8]
    config = BDLMConfig(bdlm_block_size=4, bdlm_mask_token_id=100)
    starts = block_starts_of(L, 4, None, np.flatnonzero(sample["restarts"]))
    hits = sum(
        corrupt(sample["tokens"], sample["eligible"], config, 1, draw, 0, block_starts=starts).corrupted[0].astype(int)
        for draw in range(1000)
    )
    assert hits.nonzero()[0].tolist() == [5, 6, 7, 8]


def test_no_block_holds_an_answer_and_the_next_prompt(tmp_path, encoder):
    """A8: turns of 5 and 7 tokens, S = 4."""
    turns = {"tokens": list(range(15)), "mask": [0] * 3 + [1] * 5 + [0] * 7}
    sample = samples_of(prepare(write(tmp_path / "a.jsonl", [turns]), encoder))[0]
    starts = block_starts_of(L, 4, None, np.flatnonzero(sample["restarts"]))
    assert starts.tolist() == [0, 3, 7, 8, 12, 15]


def test_eos_fill_supervises_the_filled_tail(tmp_path, encoder):
    piece = prepare(write(tmp_path / "a.jsonl", [item(3, 5)]), encoder, tail="eos-fill", block_size=4).piece(0)
    assert piece.tokens.tolist() == [*range(8), 99, 99, 99] and piece.eligible.tolist() == [False] * 3 + [True] * 8


# ---- cache and splits -----------------------------------------------------------------------


def test_cache_key_names_what_changes_the_items(paths, encoder, tmp_path):
    """C6: another block size matters only where the tail policy needs it."""
    cache = tmp_path / "cache"

    def count(**changes):
        values = {"seq_length": L, "too_long": "drop", "tail": "ragged", "block_size": 4, **changes}
        prepare_items(paths, encoder, SOURCE, Policies.of(**values), cache)
        return len(list(cache.iterdir()))

    assert count() == count() == count(block_size=8) == 1
    assert count(tail="eos-fill") == 2
    assert count(tail="eos-fill", block_size=8) == 3
    assert count(seq_length=L + 1) == 4
    write(tmp_path / "a.jsonl", [item(1, 1)])
    assert count() == 5


def test_a_broken_item_leaves_no_cache(tmp_path, encoder):
    (tmp_path / "a.jsonl").write_text(json.dumps(item(2, 2)) + "\n{")
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON"):
        prepare([str(tmp_path / "a.jsonl")], encoder, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_split_items():
    assert [part.tolist() for part in split_items(10, "80,10,10")] == [list(range(8)), [8], [9]]
    assert [len(part) for part in split_items(3, "1,0,0")] == [3, 0, 0]
    with pytest.raises(DataError, match="--split 0,1,0: the train split gets none of 3 items"):
        split_items(3, "0,1,0")


def test_build_from_arguments(paths, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.training.get_tokenizer", lambda: encoder.tokenizer)
    args = SimpleNamespace(
        bdlm_mask_token_id=100,
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        vocab_file=None,
        merge_file=None,
        vocab_size=100,
        seq_length=L,
        bdlm_sft_too_long="error",
        bdlm_sft_packing="first-fit",
        bdlm_tail_policy="ragged",
        bdlm_block_size=4,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        data_path=paths,
        data_cache_path=str(tmp_path / "cache"),
        split="80,20,0",
        eval_iters=2,
        global_batch_size=3,
        seed=1,
    )
    train, valid, test = sft.build_finetuning_datasets(args, (100, 24, 6))
    assert (len(train), len(valid), test) == (100, 24, None)
    assert same(valid[0], valid[min(6, len(valid.samples))])
    assert int(train[99]["epoch"]) > 0
    apart = SimpleNamespace(**{**vars(args), "data_path": None, "train_data_path": paths, "valid_data_path": paths})
    assert [dataset is None for dataset in sft.build_finetuning_datasets(apart, (100, 24, 6))] == [False, False, True]
    nothing = SimpleNamespace(**{**vars(args), "split": "1,0,0"})
    with pytest.raises(DataError, match="--split 1,0,0: the validation split is empty"):
        sft.build_finetuning_datasets(nothing, (100, 24, 6))
    with pytest.raises(DataError, match="--data-path .*fine-tuning needs JSON lines"):
        sft.build_finetuning_datasets(SimpleNamespace(**{**vars(args), "data_path": None}), (1, 1, 1))
