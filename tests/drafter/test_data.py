"""Samples and features on disk: round trips, refusals, only the rows asked for."""

import json

import numpy as np
import pytest
import torch

from megatron.bdlm.drafter.data import DraftDataset, PreparedFeatures, read_samples, samples_of, split_numbers, write_features
from megatron.bdlm.drafter.format import DrafterError
from tests.drafter import tiny
from tests.drafter.tiny_target import make_samples


@pytest.fixture
def samples(tmp_path):
    make_samples(tmp_path / "samples", count=5)
    return read_samples(tmp_path / "samples")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_round_trip(samples, tmp_path, dtype):
    source = tiny.RandomFeatures(tiny.V1, torch.float32)
    write_features(tmp_path / "features", samples, source, (1, 4), dtype, True, samples_per_file=2)
    kept = PreparedFeatures(tmp_path / "features", samples, (1, 4), torch.float32)
    rows, kind = np.array([3, 4, 30]), getattr(torch, dtype)
    for number in (0, 3, 4):
        sample = samples.sample(number)
        assert torch.equal(kept.features(sample, rows), source.features(sample, rows).to(kind).float())
        assert torch.equal(kept.last_hidden(sample, rows), source.last_hidden(sample, rows).to(kind).float())


def test_features_of_something_else_are_refused(samples, tmp_path):
    write_features(tmp_path / "features", samples, tiny.RandomFeatures(tiny.V1, torch.float32), (1, 4), "bfloat16", False)
    with pytest.raises(DrafterError, match=r"--dflash-layer-ids \[1, 3\]: .* holds others. A legal value: \[1, 4\]"):
        PreparedFeatures(tmp_path / "features", samples, (1, 3), torch.float32)
    kept = PreparedFeatures(tmp_path / "features", samples, (1, 4), torch.float32)
    with pytest.raises(DrafterError, match="kl needs the last hidden state. A legal value: features prepared with --last-hidden"):
        kept.last_hidden(samples.sample(0), np.array([0]))
    make_samples(tmp_path / "others", count=4)
    with pytest.raises(DrafterError, match="they are of other tokens than --dflash-data"):
        PreparedFeatures(tmp_path / "features", read_samples(tmp_path / "others"), (1, 4), torch.float32)


def test_changed_tokens_are_refused(samples, tmp_path):
    folder = tmp_path / "samples"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokens_sha256": "0"}))
    with pytest.raises(DrafterError, match="tokens.npy is not that of its manifest"):
        read_samples(folder)


def test_order_is_a_function_of_seed_and_place(samples):
    data = DraftDataset(samples, np.arange(4), length=12, seed=3)
    seen = [(int(data[place]["sample_index"]), int(data[place]["epoch"])) for place in range(12)]
    assert [epoch for _, epoch in seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(sorted(n for n, _ in seen[first : first + 4]) == [0, 1, 2, 3] for first in (0, 4, 8))
    again = samples_of(torch.utils.data.default_collate([data[5], data[6]]))
    assert [(s.sample_index, s.epoch) for s in again] == seen[5:7]
    assert (again[0].tokens == samples.tokens[seen[5][0]]).all()


def test_every_validation_sees_the_same(samples):
    data = DraftDataset(samples, np.array([3, 4]), length=6, repeat=3)
    assert [(int(data[place]["sample_index"]), int(data[place]["epoch"])) for place in range(6)] == [(3, 0), (4, 0), (3, 0)] * 2


def test_held_out_samples():
    assert split_numbers(5, 2)[1].tolist() == [3, 4] and split_numbers(5, 0)[1] is None
    with pytest.raises(DrafterError, match="--dflash-held-out 5: fewer than the 5 samples"):
        split_numbers(5, 5)
