"""Tiles against dense attention: any set of rectangles, forward, every gradient, layouts and merging."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron.bdlm.attention import tiles as T
from megatron.bdlm.attention.kernels.math import MathKernel
from megatron.bdlm.attention.kernels.torch_cpu import TorchCpuKernel

CPU = torch.device("cpu")


@dataclass
class Batch:
    queries: int
    keys: int
    query_starts: np.ndarray
    key_starts: np.ndarray
    kind: str = "full"


def batch(queries, keys, pairs, kind="full"):
    starts = np.array(pairs, dtype=np.int64)
    return Batch(queries, keys, starts[:, 0], starts[:, 1], kind)


# name -> rectangles over 24 query rows and 24 keys; together with a first full rectangle where rows would stay empty
CASES = {
    "one rectangle": [batch(24, 24, [(0, 0)])],
    "progression": [batch(24, 3, [(0, 0)]), batch(2, 2, [(2, 3), (6, 7), (10, 11), (14, 15), (18, 19)])],
    "same keys, step 0": [batch(4, 8, [(0, 0), (8, 0), (16, 0), (4, 0), (12, 0), (20, 0)])],
    "two streams": [batch(3, 3, [(0, 0), (6, 6), (12, 0), (18, 6), (3, 3), (9, 9), (15, 3), (21, 9)])],
    "irregular": [batch(24, 1, [(0, 5)]), batch(2, 3, [(0, 0), (3, 9), (5, 2), (11, 20), (14, 9), (22, 21)])],
    "same queries twice": [batch(4, 4, [(0, 0), (0, 8), (4, 8), (8, 0), (9, 16), (12, 12), (16, 16), (20, 20)])],
    "causal": [batch(6, 6, [(0, 0), (6, 6), (12, 12), (18, 18)], "causal"), batch(12, 6, [(12, 0)])],
    "anticausal": [batch(6, 6, [(0, 6), (6, 12), (12, 18), (18, 0)], "anticausal")],
    "irregular causal": [batch(24, 2, [(0, 0)]), batch(3, 3, [(0, 4), (4, 9), (9, 20), (20, 4), (14, 8)], "causal")],
}


def dense(q, k, v, batches, scale):
    """Softmax over the union of the rectangles; q [s, b, n, d], k, v [c, b, nk, d]. Plain loops for the mask."""
    s, c, g = q.shape[0], k.shape[0], q.shape[2] // k.shape[2]
    seen = torch.zeros(s, c, dtype=torch.int64)
    for rectangles in batches:
        for query, key in zip(rectangles.query_starts, rectangles.key_starts):
            for i in range(rectangles.queries):
                for j in range(rectangles.keys):
                    if rectangles.kind == "full" or (j <= i if rectangles.kind == "causal" else j >= i):
                        seen[query + i, key + j] += 1
    assert seen.max() == 1 and seen.sum(1).min() > 0, "a case must cover a pair at most once and every row"
    k, v = k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)
    scores = torch.einsum("sbnd,cbnd->bnsc", q, k) * scale
    p = scores.masked_fill(seen == 0, float("-inf")).softmax(-1)
    return torch.einsum("bnsc,cbnd->sbnd", p, v)


def through_tiles(q, k, v, batches, scale, dout, kernel):
    """Output and gradients by tiles, in the shapes of `dense`."""
    nk, b, g = k.shape[2], q.shape[1], q.shape[2] // k.shape[2]
    compiled = T.tiles_of(batches, g, CPU)
    fq, fk, fv = T.fold(q, nk), k.flatten(1, 2), v.flatten(1, 2)
    seen = T.Partial.empty(fq, v.shape[3])
    T.attend(seen, fq, fk, fv, compiled, kernel, scale)
    rows = T.FinishedRows(T.fold(dout, nk), fq, seen.out, seen.lse)
    gradients = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (fq, fk, fv))
    T.attend_backward(rows, fk, fv, compiled, kernel, scale, gradients)
    dq, dk, dv = gradients
    return T.unfold(seen.out, b), T.unfold(dq, b), dk.view(k.shape), dv.view(v.shape)


@pytest.mark.parametrize("kernel", [MathKernel(), TorchCpuKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("heads", [(2, 2, 8, 8), (4, 2, 8, 8), (6, 2, 8, 5), (3, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tiles_equal_dense_attention(case, heads, kernel):
    n, nk, d, dv = heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(24, 2, h, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for h, size in ((n, d), (nk, d), (nk, dv), (n, dv))
    )
    expected = dense(q, k, v, CASES[case], 0.3)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        out, *gradients = through_tiles(q, k, v, CASES[case], 0.3, dout, kernel)
    for ours, reference in zip((out, *gradients), (expected, *expected_gradients)):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-13 * max(1.0, reference.abs().max().item()))


def test_regular_starts_become_views_and_irregular_ones_one_gathered_batch():
    halving = batch(4, 4, [(4, 0), (12, 8), (20, 16), (28, 24), (36, 0), (44, 8), (52, 16), (60, 24)])
    tiles = T.tiles_of([halving], 2, CPU)
    assert tiles == (
        T.Tile(T.Spaced(4, 8, 16, 8), T.Spaced(4, 0, 8, 4), "full"),
        T.Tile(T.Spaced(4, 72, 16, 8), T.Spaced(4, 0, 8, 4), "full"),
    )
    (gathered,) = T.tiles_of([batch(2, 2, [(0, 1), (3, 7), (9, 4), (13, 30)])], 1, CPU)
    assert gathered.queries.index.tolist() == [0, 1, 3, 4, 9, 10, 13, 14]
    assert gathered.keys.index.tolist() == [1, 2, 7, 8, 4, 5, 30, 31]


def test_empty_rectangles_never_reach_a_kernel():
    empty = np.zeros(0, dtype=np.int64)
    assert (
        T.tiles_of(
            [Batch(0, 3, np.zeros(1), np.zeros(1)), Batch(3, 0, np.zeros(1), np.zeros(1)), Batch(2, 2, empty, empty)],
            1,
            CPU,
        )
        == ()
    )


def test_rows_without_a_rectangle_stay_finite():
    q, k = torch.randn(4, 1, 1, 8), torch.randn(2, 1, 8)
    seen = T.Partial.empty(q, 8)
    T.attend(seen, q, k, k, T.tiles_of([batch(2, 2, [(1, 0)])], 1, CPU), TorchCpuKernel(), 1.0)
    assert torch.isfinite(seen.out).all() and (seen.out[[0, 3]] == 0).all()


@pytest.mark.parametrize("distance", [0.0, 30.0, -30.0, 1000.0, -1000.0])
def test_merge_is_exact_for_any_distance_of_the_two_parts(distance):
    out, part = torch.randn(1, 1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 1, 4, dtype=torch.float64)
    lse = torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64)
    part_lse = lse + distance
    total = torch.logaddexp(lse, part_lse)
    expected = out * (lse - total).exp() + part * (part_lse - total).exp()
    T._merge(out, lse, part, part_lse)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(lse, total, rtol=1e-15, atol=0)


def test_fold_is_a_view_without_groups_and_round_trips_with_them():
    x = torch.randn(5, 2, 6, 4)
    assert T.fold(x, 6).data_ptr() == x.data_ptr()
    torch.testing.assert_close(T.unfold(T.fold(x, 2), 2), x)
    strided = torch.randn(5, 2, 6, 12)[..., 4:8]
    torch.testing.assert_close(T.unfold(T.fold(strided, 3), 2), strided)
    broadcast = torch.ones(()).expand(5, 2, 6, 4)  # what `out.sum().backward()` hands back
    assert T.fold(broadcast, 6).stride(3) == 1
