"""Published traffic of a model with windows, from its parts."""

import pytest

from megatron.bdlm.planner.window_traffic import GIB, accounts


def test_published_totals_and_ours():
    conventional, windowed, published, ours = accounts()
    assert (round(conventional.total, 1), round(published.total, 1)) == (433.1, 28.3)
    assert ours.total <= 14.5 and ours.total < published.total < windowed.total < conventional.total
    assert conventional.total / windowed.total > windowed.total / published.total  # most of the ratio is the window


def test_parts_by_hand():
    """K and V of a row: 2 * 8 * 256 * 2 bytes in 25 layers, 2 * 2 * 512 * 2 in 5; P = 8."""
    conventional, windowed, published, ours = accounts()
    remote, needed, few = 7 / 8 * 262144, 10.5 * 16384, 14 * 1023 / 8
    assert conventional.window == pytest.approx(9 * 25 * 8192 * remote / GIB)
    assert windowed.full == conventional.full == pytest.approx(9 * 5 * 4096 * remote / GIB)
    assert published.window == pytest.approx(6 * 25 * 8192 * few / GIB)
    assert ours.full == pytest.approx(4 * 5 * 4096 * needed / GIB)


def test_a_window_does_not_grow_with_the_length():
    short, long = accounts(length=65536)[-1], accounts(length=1048576)[-1]
    assert short.window == long.window and long.full == pytest.approx(16 * short.full)
