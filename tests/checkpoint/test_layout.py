"""Layouts are exact inverses, and in the order that the engine reads."""

import pytest
import torch

from megatron.bdlm.checkpoint.layout import LAYOUTS, Sizes

SIZES = Sizes(layers=2, hidden=6, ffn=10, heads=4, groups=2, head=3, vocab=7, padded_vocab=8, experts=3, expert_ffn=5)

SHAPES = {
    "same": [(5, 6)],
    "qkv": [(12, 6), (6, 6), (6, 6)],
    "qk": [(12, 6), (6, 6)],
    "gate_up": [(10, 6), (10, 6)],
    "experts": [(5, 6)] * 6,
    "rows": [(7, 6)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_undoes_join(name):
    parts = [torch.randn(shape) for shape in SHAPES[name]]
    joined = LAYOUTS[name].join(parts, SIZES)
    again = LAYOUTS[name].split(joined, SIZES)
    assert len(again) == len(parts) and all(map(torch.equal, again, parts))


def test_down_projections_of_experts():
    parts = [torch.randn(6, 5) for _ in range(3)]
    joined = LAYOUTS["experts"].join(parts, SIZES)
    assert joined.shape == (3, 6, 5) and all(map(torch.equal, LAYOUTS["experts"].split(joined, SIZES), parts))


def test_query_heads_stand_with_their_key_head():
    sizes = Sizes(layers=1, hidden=1, ffn=1, heads=4, groups=2, head=1, vocab=1, padded_vocab=1)
    query, key, value = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert LAYOUTS["qkv"].join([query, key, value], sizes).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gate_before_up_and_padding_rows_are_zero():
    joined = LAYOUTS["gate_up"].join([torch.zeros(10, 6), torch.ones(10, 6)], SIZES)
    assert joined[:10].eq(0).all() and joined[10:].eq(1).all()
    assert LAYOUTS["rows"].join([torch.ones(7, 6)], SIZES)[7:].eq(0).all()
