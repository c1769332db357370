"""Packing of whole items: nothing lost, nothing split, nothing trimmed in silence (faults C4, C5)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.noise import block_starts_of
from megatron.bdlm.data.packing import Piece, assemble, epoch_order, fill, fit, pack

S = 4


def piece(length, first=0, restarts=()):
    return Piece(np.arange(first, first + length), np.arange(length) % 3 != 0, restarts)


@pytest.mark.parametrize("method", ["first-fit", "sequential", "none"])
@settings(max_examples=60, deadline=None)
@given(rooms=st.lists(st.integers(0, 20), max_size=60), window=st.integers(1, 30))
def test_every_item_is_in_exactly_one_sample(method, rooms, window):
    packing = pack(rooms, 20, method, window)
    packed = [item for sample in packing.samples for item in sample]
    assert sorted([*packed, *packing.empty]) == list(range(len(rooms)))
    assert all(0 < sum(rooms[item] for item in sample) <= 20 for sample in packing.samples)
    assert all(list(sample) == sorted(sample) for sample in packing.samples)
    assert packing == pack(rooms, 20, method, window)


def test_sequential_keeps_the_order():
    assert pack([3, 4, 0, 2, 8, 1], 8, "sequential").samples == ((0, 1), (3,), (4,), (5,))


def test_first_fit_decreasing_fills_better():
    # sorted 6 5 3 2: 6+2, 5+3
    assert pack([5, 6, 2, 3], 8).samples == ((1, 2), (0, 3))
    assert pack([5, 6, 2, 3], 8, window=2).samples == ((1,), (0,), (2, 3))


def test_an_item_one_above_the_limit_is_refused():
    """C4: it must not push later blocks."""
    with pytest.raises(DataError, match="item 1: 9 tokens do not fit --seq-length 8; a legal value: 9"):
        pack([8, 9], 8)
    with pytest.raises(
        DataError, match=r"a\.jsonl:3: 9 tokens do not fit --seq-length 8; a legal value: 9, or drop or truncate-left"
    ):
        fit(piece(9), 8, "error", "a.jsonl:3")
    with pytest.raises(DataError, match="2 pieces take 9 tokens, a sample holds --seq-length 8"):
        assemble([piece(4), piece(5)], 8)


def test_policies_for_too_long_items():
    assert fit(piece(8), 8, "error", "") is not None
    assert fit(piece(9), 8, "drop", "") is None
    cut = fit(piece(10, restarts=(1, 2, 5)), 8, "truncate-left", "")
    assert cut.tokens.tolist() == list(range(2, 10))
    assert cut.eligible.tolist() == piece(10).eligible[2:].tolist()
    assert cut.restarts == (3,)  # the restart at token 2 is the new start


@pytest.mark.parametrize(
    "length, restarts, missing",
    [
        (0, (), 0),
        (1, (), 3),
        (S - 1, (), 1),
        (S, (), 0),
        (S + 1, (), 3),
        (6, (1,), 3),
        (7, (3,), 0),
        (7, (3, 5), 2),
    ],
)
def test_tails(length, restarts, missing):
    p = Piece(np.arange(length), np.arange(length) >= length // 2, restarts)  # ends in an answer
    assert fill(p, 100, S, "ragged", 9) is p
    filled = fill(p, 100, S, "eos-fill", 9)
    assert filled.tokens.tolist() == [*range(length), *[9] * missing]
    assert filled.eligible[length:].all() and filled.eligible[:length].tolist() == p.eligible.tolist()
    padded = fill(p, 100, S, "pad", None)
    assert (len(padded), padded.padding) == (length, missing)
    if length:
        starts = block_starts_of(filled.tokens.size, S, None, restarts)
        assert filled.tokens.size - starts[-1] == S


def test_a_prompt_at_the_end_is_not_filled_with_supervised_tokens():
    """Else the model would learn to stop behind a prompt, or behind what a chat template appends to an answer."""
    for eligible in ([0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]):
        p = Piece(np.arange(6), np.array(eligible, bool), ())
        assert fill(p, 100, S, "eos-fill", 9) is p


def test_a_tail_stops_at_the_limit():
    assert len(fill(piece(9), 10, S, "eos-fill", 1)) == 10
    assert fill(piece(9), 10, S, "pad", 1).room == 10


def test_eos_fill_needs_an_end_token():
    with pytest.raises(DataError, match="--bdlm-tail-policy eos-fill: .*A legal value: ragged"):
        fill(piece(3), 8, S, "eos-fill", None)


def test_assembled_sample():
    pieces = [
        piece(3, 10, restarts=(2,)),
        Piece(np.array([], dtype=np.int64), np.array([], dtype=bool)),
        fill(piece(2, 20), 8, S, "pad", None),
    ]
    sample = assemble(pieces, 9, padding_token=7)
    assert sample["tokens"].tolist() == [10, 11, 12, 20, 21, 7, 7, 7, 7]
    assert sample["eligible"].tolist() == [False, True, True, False, True, False, False, False, False]
    assert sample["documents"].tolist() == [0, 0, 0, 1, 1, -1, -1, -1, -1]
    assert np.flatnonzero(sample["restarts"]).tolist() == [0, 2, 3, 5]


def test_padding_between_pieces_belongs_to_nobody():
    sample = assemble([fill(piece(3), 12, S, "pad", None), piece(5)], 12)
    assert sample["documents"].tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1]
    assert not sample["eligible"][[3, 9, 10, 11]].any()


@pytest.mark.parametrize("lengths", [[0], [1], [S - 1], [S], [S + 1], [1, 0, S, S - 1, S + 1, 7, 1]])
@pytest.mark.parametrize("tail", ["ragged", "eos-fill", "pad"])
def test_awkward_lengths_alone_and_together(lengths, tail):
    """C5: each document's tokens, eligibility and blocks are the same packed and alone."""
    limit = 40
    pieces = [fill(piece(length, 100 * i), limit, S, tail, 9) for i, length in enumerate(lengths)]
    sample = assemble(pieces, limit)
    starts = np.flatnonzero(sample["restarts"])
    blocks = block_starts_of(limit, S, None, starts)
    begin, number = 0, 0
    for p in pieces:
        if not len(p):
            continue
        end = begin + len(p)
        assert sample["tokens"][begin:end].tolist() == p.tokens.tolist()
        assert sample["eligible"][begin:end].tolist() == p.eligible.tolist()
        assert (sample["documents"][begin:end] == number).all()
        inside = blocks[(blocks >= begin) & (blocks < end)] - begin
        assert inside.tolist() == block_starts_of(len(p), S).tolist()
        begin, number = begin + p.room, number + 1
    assert (sample["documents"] >= 0).sum() == sum(map(len, pieces))
    # no block spans two documents, or a document and padding
    ids = sample["documents"]
    assert all((ids[a:b] == ids[a]).all() for a, b in zip(blocks, [*blocks[1:], limit]))


def test_epoch_order_is_a_permutation_that_epochs_change():
    orders = [epoch_order(50, 1, epoch) for epoch in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(50))
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()
    assert epoch_order(0, 1, 0, np.array([]), 4).tolist() == []


def test_bucketed_order_puts_like_lengths_side_by_side():
    lengths = np.random.default_rng(0).integers(1, 1000, 640)
    plain, bucketed = epoch_order(640, 1, 0), epoch_order(640, 1, 0, lengths, bucket=8)
    assert sorted(bucketed) == list(range(640))

    def waste(order):
        groups = lengths[order].reshape(-1, 8)
        return (groups.max(1, keepdims=True) - groups).sum() / lengths.sum()

    assert waste(bucketed) < 0.1 * waste(plain)
