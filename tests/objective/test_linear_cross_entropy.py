"""Chunked, vocabulary-parallel linear cross entropy against one dense log-softmax in float64, with both gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy
from megatron.bdlm.testing.distributed import run_distributed

ROWS, HIDDEN, PADDED, VOCABULARY = 23, 8, 48, 45


def problem(rows=ROWS, dtype=torch.float64, forbidden=()):
    """hidden, weight, targets (never one of `forbidden`), and one gradient a row."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    allowed = torch.tensor([v for v in range(VOCABULARY) if v not in forbidden])
    targets = allowed[torch.randint(len(allowed), (rows,), generator=generator)]
    return hidden, weight, targets, torch.rand(rows, generator=generator, dtype=torch.float64) * 50


def plain(hidden, weight, targets, excluded, vocab_size):
    """All logits at once."""
    logits = hidden @ weight.t()
    keep = torch.ones(weight.shape[0], dtype=torch.bool)
    if vocab_size is not None:
        keep[vocab_size:] = False
    if excluded is not None:
        keep[excluded] = False
    log_p = torch.log_softmax(logits.masked_fill(~keep, -torch.inf), dim=1)
    return -log_p.gather(1, targets[:, None]).squeeze(1)


def both_gradients(function, hidden, weight, grad):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    nll = function(hidden, weight)
    (nll * grad.to(nll.dtype)).sum().backward()
    return nll.detach(), hidden.grad, weight.grad


CASES = [(7, None, None), (0, 3, None), (1, 44, VOCABULARY), (23, 20, VOCABULARY), (4096, None, VOCABULARY)]


@pytest.mark.parametrize("chunk, excluded, vocab_size", CASES)
def test_equals_dense(chunk, excluded, vocab_size):
    hidden, weight, targets, grad = problem(forbidden=(excluded,))
    expected = both_gradients(lambda h, w: plain(h, w, targets, excluded, vocab_size), hidden, weight, grad)
    options = dict(chunk=chunk, excluded_token=excluded, vocab_size=vocab_size)
    actual = both_gradients(lambda h, w: linear_cross_entropy(h, w, targets, **options), hidden, weight, grad)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_excluded_and_padding_rows_get_no_gradient():
    """Faults E1, the mask's own row, and that its logit, however large, changes nothing."""
    hidden, weight, targets, grad = problem(forbidden=(5,))
    weight[5] *= 1000
    weight[VOCABULARY:] *= 1000
    options = dict(chunk=4, excluded_token=5, vocab_size=VOCABULARY)
    function = lambda h, w: linear_cross_entropy(h, w, targets, **options)  # noqa: E731
    nll, grad_hidden, grad_weight = both_gradients(function, hidden, weight, grad)
    assert (grad_weight[5] == 0).all() and (grad_weight[VOCABULARY:] == 0).all()
    weight[5], weight[VOCABULARY:] = 0, 0
    assert torch.equal(both_gradients(function, hidden, weight, grad)[0], nll)


def _vocabulary_parallel():
    """On each of 4 ranks: every case with the vocabulary over 2 of them, then over all 4."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {2: _slices_of(pairs[dist.get_rank() // 2]), 4: _slices_of(dist.group.WORLD)}


def _slices_of(group):
    """This rank's slice of every case, gradients of hidden with and without the reduction."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = PADDED // ranks
    out = []
    for chunk, excluded, vocab_size in CASES:
        hidden, weight, targets, grad = problem(forbidden=(excluded,))
        for reduce in (True, False):
            options = dict(chunk=chunk, excluded_token=excluded, vocab_size=vocab_size)
            options |= dict(tp_group=group, reduce_hidden_grad=reduce)
            out.append(
                both_gradients(
                    lambda h, w: linear_cross_entropy(h, w, targets, **options),
                    hidden, weight[rank * rows : (rank + 1) * rows], grad,
                )
            )  # fmt: skip
    # the last rank's slice is all padding
    hidden, weight, targets, grad = problem(forbidden=range(rows, VOCABULARY))
    function = lambda h, w: linear_cross_entropy(h, w, targets, vocab_size=rows, tp_group=group)  # noqa: E731
    out.append(both_gradients(function, hidden, weight[rank * rows : (rank + 1) * rows], grad))
    # no row at all: no exchange, and a graph
    function = lambda h, w: linear_cross_entropy(h, w, targets[:0], tp_group=group)  # noqa: E731
    out.append(both_gradients(function, hidden[:0], weight[rank * rows : (rank + 1) * rows], grad[:0]))
    return out


@pytest.fixture(scope="module")
def slices():
    return run_distributed(_vocabulary_parallel, 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_parallel_equals_dense(ranks, slices):
    results = [result[ranks] for result in slices[:ranks]]
    rows = PADDED // ranks
    expected = []
    for _, excluded, vocab_size in CASES:
        hidden, weight, targets, grad = problem(forbidden=(excluded,))
        dense = both_gradients(lambda h, w: plain(h, w, targets, excluded, vocab_size), hidden, weight, grad)
        expected += [dense, dense]
    hidden, weight, targets, grad = problem(forbidden=range(rows, VOCABULARY))
    expected.append(both_gradients(lambda h, w: plain(h, w, targets, None, rows), hidden, weight, grad))
    expected.append((torch.zeros(0).double(), torch.zeros(0, HIDDEN).double(), torch.zeros(PADDED, HIDDEN).double()))
    for case, (nll, grad_hidden, grad_weight) in enumerate(expected):
        parts = [result[case] for result in results]
        unreduced = case % 2 == 1 and case < 2 * len(CASES)
        for part in parts:
            torch.testing.assert_close(part[0], nll, rtol=1e-12, atol=1e-12)
            if not unreduced:
                torch.testing.assert_close(part[1], grad_hidden, rtol=1e-12, atol=1e-12)
        if unreduced:
            torch.testing.assert_close(sum(part[1] for part in parts), grad_hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad_weight, rtol=1e-12, atol=1e-12)


def test_no_rows_keep_a_graph():
    """Fault B3: a rank without a scored row still gives every parameter a zero gradient."""
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.randn(PADDED, HIDDEN, requires_grad=True)
    nll = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert nll.shape == (0,) and nll.dtype == torch.float32
    nll.sum().backward()
    assert (weight.grad == 0).all() and hidden.grad.shape == (0, HIDDEN)


def test_accumulates_over_micro_batches_and_uses_through_hooks():
    """The engine adds `param.grad` to its own float32 buffer in a hook, and ties the weight to the embedding."""
    hidden, weight, targets, grad = problem()
    weight.requires_grad_()
    main_grad = torch.zeros_like(weight)

    def into_main_grad(parameter):
        main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(into_main_grad)
    for rows in (slice(0, 10), slice(10, ROWS)):
        embedded = hidden[rows] + weight[targets[rows]]  # tied
        (linear_cross_entropy(embedded, weight, targets[rows], chunk=4) * grad[rows]).sum().backward()
    expected = weight.detach().clone().requires_grad_()
    (plain(hidden + expected[targets], expected, targets, None, None) * grad).sum().backward()
    torch.testing.assert_close(main_grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_frozen_weight_gets_no_gradient():
    hidden, weight, targets, _ = problem()
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, targets).sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_large_logits_stay_finite():
    hidden, weight, targets, grad = problem(dtype=torch.float32)
    nll, grad_hidden, _ = both_gradients(lambda h, w: linear_cross_entropy(h, w, targets), hidden * 1000, weight, grad)
    assert torch.isfinite(nll).all() and torch.isfinite(grad_hidden).all()


def test_bfloat16_sums_the_weight_gradient_in_float32():
    """512 chunks of 1 row: the error against float64 is the rounding of the result (2^-9), as for one chunk of 512."""
    hidden, weight, targets, _ = problem(rows=512, dtype=torch.bfloat16)
    grad = torch.ones(512)
    reference = both_gradients(
        lambda h, w: plain(h, w, targets, None, None), hidden.double(), weight.double(), grad.double()
    )[2]
    errors = []
    for chunk in (1, 512):
        function = lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)  # noqa: E731
        nll, _, grad_weight = both_gradients(function, hidden, weight, grad)
        assert nll.dtype == torch.float32 and grad_weight.dtype == torch.bfloat16
        errors.append(((grad_weight.double() - reference).norm() / reference.norm()).item())
    assert errors[0] <= 1.1 * errors[1] and errors[1] < 0.01


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1.2), (torch.bfloat16, 1.7)])
def test_peak_memory_is_one_chunk_of_logits(dtype, limit):
    """Peak above inputs and results, in float32 [chunk, vocab] buffers; [rows, vocab] would be 16 of them."""
    rows, vocabulary, hidden_size, chunk = 1024, 8192, 16, 64
    hidden = torch.randn(rows, hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        nll = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
        nll.sum().backward()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    # the gradient of the weight in float32, its result, and the gradient of hidden belong to the result
    results = weight.numel() * 4 + (weight.numel() + hidden.numel()) * dtype.itemsize
    assert peak > chunk * vocabulary * 4  # the measurement sees the logits at all
    assert peak - results <= limit * chunk * vocabulary * 4


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"hidden \(2, 3\), weight \(4, 5\): expected \[n, h\] and \[v, h\]"):
        linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets \(3,\): expected \[2\]"):
        linear_cross_entropy(torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="--bdlm-cross-entropy-chunk -1"):
        linear_cross_entropy(torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(2, dtype=torch.int64), chunk=-1)
