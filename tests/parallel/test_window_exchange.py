"""What window layers receive and compute: exactly the rows of the formula, counted in bytes on 2 and 4 ranks (tests 9, 10).

    W - 1 rows before each own half chunk: ranks 0 and P-1 have one such border that is not their own, the others two
    and, where blocks count from a response inside a half chunk, the W - 1 rows before each own block
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.parallel.exchange import traffic
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.distributed import run_distributed
from megatron.bdlm.testing.oracle import dense_block_diffusion_attention, visible

LENGTH, SIZE = 128, 8
HEADS, KEY_HEADS, HEAD = 4, 2, 8
ROW = KEY_HEADS * 2 * HEAD * 4  # bytes of K and V of a row in float32; its gradient takes as many


def plan_of(ranks, rank, response=0, **layout):
    """A sample whose response starts at `response` and has the noisy rows; clean rows see tokens up to themselves."""
    shape = dict(seq_length=LENGTH, block_size=SIZE, clean_attention="token-causal", block_restarts=[response] if response else None)
    starts = SequencePlan.build(**shape).block_starts
    targets = np.flatnonzero(starts >= response)
    return SequencePlan.build(**shape, target_blocks=targets, context_parallel_size=ranks, rank=rank, **layout)


def received_bytes(windows):
    """Per window: what this rank received forward and backward; the plan's count of needed rows beside it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = plan_of(ranks, rank)
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for window in windows:
        q, k, v = (
            torch.randn(plan.s_local, 1, heads, HEAD, generator=generator).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        traffic()
        block_diffusion_attention(q, k, v, plan, None, "direct", window=window).sum().backward()
        counted = traffic()
        found[window] = counted["forward"]["received"], counted["backward"]["received"]
    return found


def attention_errors(inputs, expected):
    """Per layout and window: largest error of this rank's output and gradients against those of all rows, float64."""
    found = {}
    for layout in LAYOUTS:
        for window, wanted in expected.items():
            plan = plan_of(dist.get_world_size(), dist.get_rank(), RESPONSE, **layout)
            local = [plan.take(x).requires_grad_() for x in inputs[:3]]
            out = block_diffusion_attention(*local, plan, None, "direct", window=window)
            out.backward(plan.take(inputs[3]))
            used = plan.rows >= 0
            parts = [out.detach(), *(x.grad for x in local)]
            found[str(layout), window] = max(float((part - plan.take(whole))[used].abs().max()) for part, whole in zip(parts, wanted))
    return found


def on_rank(windows, inputs, expected):
    return received_bytes(windows), attention_errors(inputs, expected) if expected else {}


RESPONSE = 37  # inside a half chunk of 16 tokens
LAYOUTS = (dict(strategy="csbp"), dict(strategy="hybrid", block_parallel_size=2), dict(strategy="cp"))


def whole_attention():
    """Inputs of all rows, and output and gradients by window: below, at and above a half chunk, longer than the sample."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2 * LENGTH, 1, heads, HEAD) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    targets = np.flatnonzero(plan_of(1, 0, RESPONSE).block_starts >= RESPONSE)
    expected = {}
    for window in (5, 16, 40, 300):
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        out = dense_block_diffusion_attention(
            q, k, v, seq_length=LENGTH, block_size=SIZE, clean_attention="token-causal", window=window,
            block_restarts=[RESPONSE], target_blocks=targets,
        )
        out.backward(inputs[3])
        expected[window] = [out.detach(), q.grad, k.grad, v.grad]
    return inputs, expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_window_layers_and_what_they_compute(ranks):
    half_chunk = LENGTH // (2 * ranks)
    windows = [2, 9, half_chunk + 1]  # up to W - 1 = c each border is one neighbour's
    given = whole_attention() if ranks == 4 else ([], {})
    for rank, (found, errors) in enumerate(run_distributed(on_rank, ranks, windows, *given)):
        borders = 1 if rank in (0, ranks - 1) else 2
        for window in windows:
            rows = borders * (window - 1)
            # backward: K and V again, and gradients of the rows that went out, as many as came in
            assert found[window] == (rows * ROW, 2 * rows * ROW), (rank, window)
        assert len(errors) == (12 if ranks == 4 else 0) and all(error < 1e-9 for error in errors.values()), errors


def _lacking(plan, mask):
    """Rows that this rank's rows see and that it does not hold, by brute force over the mask."""
    held = plan.rows[plan.rows >= 0]
    return set(mask[held].any(0).nonzero().flatten().tolist()) - set(held.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("response", [0, 37, 101])
@pytest.mark.parametrize("window", [1, 16, 40, 300])
def test_needed_rows_are_those_of_the_mask(layout, response, window):
    """Windows below, at and above a half chunk, longer than the sample; responses that start anywhere."""
    starts = plan_of(4, 0, response).block_starts
    mask = visible(
        seq_length=LENGTH, block_size=SIZE, clean_attention="token-causal", window=window,
        block_restarts=[response] if response else None, target_blocks=np.flatnonzero(starts >= response),
    )
    for rank in range(4):
        plan = plan_of(4, rank, response, **layout)
        others = [plan_of(4, source, response, **layout) for source in range(4)]
        asked = {int(row) for source in range(4) for row in others[source].rows[plan.needed_rows(rank, source, window)]}
        assert asked == _lacking(plan, mask)


def test_windows_do_not_depend_on_the_length():
    """(2P - 2)(W - 1) rows over all ranks, for every length."""
    for length in (256, 1024):
        rows = 0
        for rank in range(4):
            plan = SequencePlan.build(length, SIZE, 4, 4, rank, clean_attention="token-causal")
            rows += sum(len(plan.needed_rows(rank, source, 17)) for source in range(4))
        assert rows == (2 * 4 - 2) * 16
