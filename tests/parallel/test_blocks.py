"""The block table: restarts at documents, origins and turns; short blocks; refusals; areas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.parallel.blocks import PlanError, build_blocks
from megatron.bdlm.testing.oracle import tokens_of_sample, visible


def edges(table) -> list[tuple[int, int]]:
    return list(zip(table.starts.tolist(), table.stops.tolist()))


def test_blocks_restart_at_documents():
    table = build_blocks(12, 4, documents=(5, 0, 7))
    assert edges(table) == [(0, 4), (4, 5), (5, 9), (9, 12)]
    assert table.documents.tolist() == [0, 0, 2, 2] and table.document_starts.tolist() == [0, 0, 5, 5]


def test_blocks_count_from_an_origin():
    assert edges(build_blocks(12, 4, block_origin=2)) == [(0, 2), (2, 6), (6, 10), (10, 12)]
    assert edges(build_blocks(12, 4, block_origin=5)) == [(0, 4), (4, 5), (5, 9), (9, 12)]
    per_document = build_blocks(12, 4, documents=(5, 7), block_origin=(0, 3))
    assert edges(per_document) == [(0, 4), (4, 5), (5, 8), (8, 12)]
    assert edges(build_blocks(6, 4, block_origin=9)) == [(0, 4), (4, 6)]  # beyond the document: no response


def test_blocks_restart_at_turns():
    assert edges(build_blocks(12, 4, block_restarts=(5, 5))) == [(0, 4), (4, 5), (5, 9), (9, 12)]


def test_targets():
    assert build_blocks(12, 4, target_blocks=(2, 0)).is_target.tolist() == [True, False, True]
    assert build_blocks(12, 4, target_blocks=()).is_target.tolist() == [False, False, False]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum), st.integers(1, 6), st.integers(0, 7), st.data())
def test_the_oracle_walks_over_the_same_blocks(documents, size, origin, data):
    length = sum(documents)
    restarts = data.draw(st.lists(st.integers(0, length - 1), max_size=2))
    table = build_blocks(length, size, documents, origin, restarts)
    walked = tokens_of_sample(length, size, documents, origin, restarts)
    assert table.of_tokens(np.arange(length)).tolist() == [token.block for token in walked]
    assert table.documents[table.of_tokens(np.arange(length))].tolist() == [token.document for token in walked]


@pytest.mark.parametrize("causal", [False, True])
def test_area_counts_visible_pairs(causal):
    table = build_blocks(20, 4, documents=(9, 11))
    clean_attention = "token-causal" if causal else "block-causal"
    mask = visible(seq_length=20, block_size=4, documents=(9, 11), clean_attention=clean_attention)
    assert table.area(table.starts, table.stops, causal).sum() == mask[20:].sum()
    assert table.area(np.array([10]), np.array([12]), causal).sum() == mask[30:32].sum()  # part of a block


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(seq_length=0, block_size=4), "--seq-length 0: .* A legal value: 4096"),
        (dict(seq_length=8, block_size=0), "--bdlm-block-size 0: .* A legal value: 32"),
        (dict(seq_length=8, block_size=4, documents=(5, 4)), "2 lengths that sum to 9; .* --seq-length 8. A legal value: 8"),
        (dict(seq_length=8, block_size=4, documents=(9, -1)), "2 lengths with a length of -1; none may be negative, .* A legal value: 8"),
        (dict(seq_length=8, block_size=4, block_origin=-1), "block_origin -1: .* A legal value: 0"),
        (dict(seq_length=8, block_size=4, documents=(3, 5), block_origin=(1,)), "one per document"),
        (dict(seq_length=8, block_size=4, block_restarts=(8,)), r"block_restarts \[8\]: .* --seq-length 8"),
        (dict(seq_length=8, block_size=4, target_blocks=(2,)), "target_blocks 2 to 2: the sample has blocks 0 to 1"),
        (dict(seq_length=8, block_size=4, target_blocks=(1, 1)), "named twice"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(PlanError, match=message):
        build_blocks(**arguments)
