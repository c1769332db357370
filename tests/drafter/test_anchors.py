"""Anchors: the worked example of the module, the draw, the dealing."""

import numpy as np
import pytest

from megatron.bdlm.drafter.anchors import AnchorDraw, context_starts, coprime_stride, deal, eligible_anchors, scored_rows

MASK = np.array([int(c) for c in "001110111101"], bool)
DOCUMENTS = np.array([int(c) for c in "000000001111"])


def test_worked_example():
    anchors = eligible_anchors(MASK, DOCUMENTS)
    assert anchors.tolist() == [2, 3, 6, 8]
    rows = [np.flatnonzero(row).tolist() for row in scored_rows(anchors, MASK, DOCUMENTS, 4)]
    assert rows == [[1, 2], [1, 3], [1], [1, 3]]
    assert context_starts(anchors, DOCUMENTS).tolist() == [0, 0, 0, 8]


def test_segments_are_runs_and_padding_has_none():
    documents = np.array([5, 5, 6, 6, 5, 5, -1, -1])
    everything = np.ones(8, bool)
    assert eligible_anchors(everything, documents).tolist() == [0, 2, 4]
    assert context_starts(np.array([4]), documents).tolist() == [4]  # the second run of id 5 is another document


@pytest.mark.parametrize("size", [0, 1])
def test_short_samples_have_no_anchor(size):
    mask, documents = np.ones(size, bool), np.zeros(size, int)
    assert eligible_anchors(mask, documents).size == 0
    assert AnchorDraw(4, 4).draw(mask, documents, 0).size == 0
    assert scored_rows(np.zeros(0, int), mask, documents, 4).shape == (0, 4)


@pytest.mark.parametrize("mode", ["uniform", "locality"])
def test_draw_is_a_pure_function_without_replacement(mode):
    mask, documents = np.ones(200, bool), np.repeat([0, 1], 100)
    draw = AnchorDraw(count=24, block_size=8, mode=mode, seed=7)
    first = draw.draw(mask, documents, sample_index=3, epoch=1)
    assert len(np.unique(first)) == 24 and (np.diff(first) > 0).all()
    assert set(first) <= set(eligible_anchors(mask, documents))
    assert (first == draw.draw(mask, documents, 3, 1)).all()
    assert (first != draw.draw(mask, documents, 3, 2)).any() and (first != draw.draw(mask, documents, 4, 1)).any()


def test_locality_is_near_and_uniform_in_the_margin():
    mask, documents = np.ones(41, bool), np.zeros(41, int)  # 40 eligible
    assert coprime_stride(8, 40) == 9 and coprime_stride(8, 39) == 8
    hits = np.zeros(41, int)
    for sample in range(2000):
        hits[AnchorDraw(4, 8, "locality", seed=1).draw(mask, documents, sample)] += 1
    assert hits[40] == 0 and abs(hits[:40] - 200).max() < 70  # 5 standard deviations


def test_count_per_document():
    mask, documents = np.ones(110, bool), np.repeat([0, 1], [100, 10])
    anchors = AnchorDraw(8, 4, per="document").draw(mask, documents, 0)
    assert (anchors < 100).sum() == 8 and (anchors >= 100).sum() == 8


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 9, 33])
def test_dealing_gives_each_anchor_once_and_evenly(ranks, count):
    owners = deal(np.random.default_rng(count).integers(0, 1000, count), ranks)
    counts = np.bincount(owners, minlength=ranks)
    assert len(owners) == count and counts.sum() == count and np.ptp(counts) <= 2


def test_dealing_pairs_long_with_short():
    costs = np.arange(16) * 10
    owners = deal(costs, 4)
    assert {costs[owners == rank].sum() for rank in range(4)} == {300}
