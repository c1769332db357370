"""Block diffusion attention against the dense float64 oracle on 1, 2 and 4 processes, output and every gradient.

The mask comes from the oracle's plain loops, so agreement here covers plan, rectangles, tiles, exchange and glue at
once.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.attention.kernels import KernelUnavailable
from megatron.bdlm.parallel.exchange import ExchangeError
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.distributed import run_distributed
from tests.attention.attention_cases import Case, errors, grid, run_case, run_cases_on_rank, strategies, transports

TOLERANCE = 1e-12


def assert_exact(cases, results):
    """results: per rank, per case."""
    wrong = []
    for number, case in enumerate(cases):
        found = errors([shards[number] for shards in results], case)
        wrong += [f"{case}: {found}"] if max(found.values()) > TOLERANCE else []
    assert not wrong, f"{len(wrong)} of {len(cases)} cases are wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("case", grid(1), ids=str)
def test_one_process(case):
    assert_exact([case], [[run_case(case, 1, 0)]])


@pytest.mark.parametrize("size", [2, 4])
def test_every_strategy_and_transport(size):
    cases = grid(size)
    assert_exact(cases, run_distributed(run_cases_on_rank, size, cases))


@st.composite
def random_cases(draw, size=1):
    """Any sample on `size` ranks: documents, blocks, views, masks, windows, heads, strategy, K, transport."""
    lengths = draw(st.lists(st.integers(0, 17), min_size=1, max_size=4).filter(sum))
    plan = dict(
        seq_length=sum(lengths),
        documents=lengths,
        block_size=draw(st.integers(1, 9)),
        views=draw(st.sampled_from((1, 2))),
        clean_attention=draw(st.sampled_from(("block-causal", "token-causal"))),
        noisy_attention=draw(st.sampled_from(("bidirectional", "causal"))),
        block_origin=draw(st.integers(0, 6)),
    )
    options = {}
    if size > 1:
        plan |= draw(st.sampled_from(strategies(size)))
        options = draw(st.sampled_from(transports(size)))
        assume(is_legal(plan, size))
    nk, g = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 3)))
    return Case(
        plan,
        window=draw(st.none() | st.integers(1, 20)),
        queries=draw(st.sampled_from(("all", "noisy"))),
        heads=(nk * g, nk, 8, draw(st.sampled_from((8, 4)))),
        batch=draw(st.sampled_from((1, 2))),
        seed=draw(st.integers(0, 9)),
        kernel=draw(st.sampled_from(("torch", "math"))),
        **options,
    )


def is_legal(plan, size):
    """Whether the sample has a block for every block-parallel rank; nothing else may be refused here."""
    try:
        SequencePlan.build(**plan, context_parallel_size=size)
    except ValueError as error:
        assert "fewer than the" in str(error), error
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(random_cases())
def test_random_samples_on_one_process(case):
    assert_exact([case], [[run_case(case, 1, 0)]])


@pytest.mark.parametrize("size", [2, 4])
def test_random_samples_on_several_ranks(size):
    """Hypothesis draws the cases, then one set of ranks runs all of them."""
    cases = []

    @settings(max_examples=60, deadline=None, phases=(Phase.generate,), database=None)
    @given(random_cases(size))
    def draw(case):
        cases.append(case)

    draw()
    assert len(cases) >= 50 and len({str(case.plan.get("strategy")) for case in cases}) == 4
    assert_exact(cases, run_distributed(run_cases_on_rank, size, cases))


PERTURBED = dict(seq_length=30, block_size=4, views=2, documents=[7, 23])


def outputs_after_changes(changes):
    """Body of a rank: global row numbers and output, unchanged and after adding 1 to some global rows of q, k, v."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    plan = SequencePlan.build(**PERTURBED, context_parallel_size=size, rank=rank)
    outputs = []
    for rows in ([], *changes):
        inputs = [x.clone() for x in Case(PERTURBED).inputs()[:3]]
        for x in inputs:
            x[rows] += 1.0
        outputs.append(block_diffusion_attention(*(plan.take(x) for x in inputs), plan))
    return plan.rows, outputs


@pytest.mark.parametrize("size", [1, 4])
def test_a_change_reaches_only_the_rows_that_may_see_it(size):
    """Fault A2: two documents."""
    length, views = PERTURBED["seq_length"], PERTURBED["views"]
    blocks = SequencePlan.build(**PERTURBED).block_ids.view(views + 1, length)[0]  # of every token
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(PERTURBED["documents"]))
    tokens = torch.arange(length)
    changes = [(stream, block) for stream in range(views + 1) for block in range(int(blocks.max()) + 1)]
    changed_rows = [(stream * length + tokens[blocks == block]).tolist() for stream, block in changes]
    if size == 1:
        results = [outputs_after_changes(changed_rows)]
    else:
        results = run_distributed(outputs_after_changes, size, changed_rows)
    for number, (stream, block) in enumerate(changes):
        same_document = documents == documents[blocks == block][0]
        own, later = blocks == block, (blocks > block) & same_document
        if stream < views:  # xt: its own block of its own view
            may_change = [own if view == stream else own & False for view in range(views)] + [own & False]
        else:  # x0: noisy rows of later blocks, clean rows of this and later blocks
            may_change = [later] * views + [own | later]
        may_change = torch.cat(may_change)
        for rows, outputs in results:
            moved = (outputs[0] != outputs[number + 1]).flatten(1).any(1)[rows >= 0]
            assert torch.equal(moved, may_change[rows[rows >= 0]])


def test_inputs_of_two_lengths_alternate():
    """Fault A5."""
    cases = [Case(dict(seq_length=length, block_size=4)) for length in (64, 96, 64, 96)]
    for case in cases:
        assert_exact([case], [[run_case(case, 1, 0)]])


def test_padding_sees_only_itself():
    plan = SequencePlan.build(30, 4, row_multiple=16)
    q, k, v = (torch.randn(plan.s_local, 1, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = block_diffusion_attention(q, k, v, plan)
    padding = plan.rows < 0
    assert padding.sum() == 4
    torch.testing.assert_close(out[padding], v[padding].repeat_interleave(2, 2))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dq[padding] == 0).all() and (dk[padding] == 0).all()
    torch.testing.assert_close(dv[padding], torch.full_like(dv[padding], 2.0))

    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[padding] = 1e4
    assert torch.equal(block_diffusion_attention(*changed, plan)[~padding], out[~padding])


def test_calling_twice_and_double_use_of_an_output():
    plan = SequencePlan.build(24, 4)
    q, k, v = (torch.randn(48, 1, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = block_diffusion_attention(q, k, v, plan)
    once = torch.autograd.grad(out.sum() + (2 * out).sum(), (q, k, v), retain_graph=True)
    again = torch.autograd.grad(3 * block_diffusion_attention(q, k, v, plan).sum(), (q, k, v))
    recomputed = torch.utils.checkpoint.checkpoint(block_diffusion_attention, q, k, v, plan, use_reentrant=False)
    through_checkpoint = torch.autograd.grad(3 * recomputed.sum(), (q, k, v))
    for first, second, third in zip(once, again, through_checkpoint):
        torch.testing.assert_close(first, second)
        torch.testing.assert_close(first, third)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(transport="pigeon"), ExchangeError, "--bdlm-transport pigeon.*direct"),
        (dict(kernel="pigeon"), KernelUnavailable, "--bdlm-attention-kernel pigeon.*auto"),
        (dict(kernel="flash_attn"), KernelUnavailable, "--bdlm-attention-kernel flash_attn: cannot serve cpu"),
        (dict(rows=9), ValueError, "q .9, 1, 2, 8.: must be .*48 local rows"),
        (dict(key_heads=3), ValueError, "k has 3 heads"),
        (dict(key_size=4), ValueError, "must have the head size of q, 8"),
        (dict(key_dtype=torch.float64), ValueError, "must be like q, torch.float32"),
        (dict(key_batch=2), ValueError, "as many samples as q, 1"),
    ],
)
def test_refusals(changes, error, message):
    options = dict(
        rows=48, key_heads=2, key_size=8, key_batch=1, key_dtype=torch.float32, transport="direct", kernel="auto"
    )
    options.update(changes)
    plan = SequencePlan.build(24, 4)
    q = torch.zeros(options["rows"], 1, 2, 8)
    k = torch.zeros(
        options["rows"], options["key_batch"], options["key_heads"], options["key_size"], dtype=options["key_dtype"]
    )
    with pytest.raises(error, match=message):
        block_diffusion_attention(
            q, k, torch.zeros_like(q), plan, transport=options["transport"], kernel=options["kernel"]
        )


def test_a_plan_over_several_ranks_needs_their_group():
    plan = SequencePlan.build(24, 4, context_parallel_size=2)
    x = torch.zeros(plan.s_local, 1, 2, 8)
    with pytest.raises(
        ExchangeError, match="--context-parallel-size 2: the process group given to attention has 1 ranks"
    ):
        block_diffusion_attention(x, x, x, plan)
