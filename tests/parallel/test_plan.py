"""The plan's rows, needs and rectangles; its refusals; its speed."""

import pickle
import time

import numpy as np
import pytest
import torch

from megatron.bdlm.parallel.plan import PlanError, SequencePlan
from tests.parallel.plans import plans_of


def shapes(piece) -> list[tuple[int, int, int, int]]:
    return [(batch.queries, batch.keys, batch.count, batch.copies) for batch in piece.batches]


# ---- rows -------------------------------------------------------------------------------------


def test_local_rows_are_views_then_clean_then_padding():
    """10 tokens, S = 4: blocks of 4, 4, 2 on two ranks; the rank with blocks 0 and 2 has 6 tokens, the other 4."""
    plans = plans_of(seq_length=10, block_size=4, context_parallel_size=2, views=2)
    short = min(plans, key=lambda plan: plan.used_rows)
    assert [plan.s_local for plan in plans] == [18, 18] and short.used_rows == 12 and short.noisy_rows == 8
    tokens = list(range(4, 8))
    assert short.rows.tolist() == tokens + [10 + t for t in tokens] + [20 + t for t in tokens] + [-1] * 6
    assert short.position_ids.tolist() == tokens * 3 + [0] * 6
    assert short.is_clean.tolist() == [False] * 8 + [True] * 4 + [False] * 6
    assert short.view.tolist() == [0] * 4 + [1] * 4 + [-1] * 10
    assert short.block_ids.tolist() == [1] * 12 + [-1] * 6
    assert short.scored_clean.tolist() == short.is_clean.tolist()
    assert short.rows.dtype == short.position_ids.dtype == torch.int64


def test_row_multiple_rounds_up():
    assert SequencePlan.build(10, 4, context_parallel_size=2, row_multiple=8).s_local == 16


@pytest.mark.parametrize("strategy, slots", [("csbp", 4), ("cp", 1), ("bp", 4), ("hybrid", 2)])
def test_every_row_stands_on_one_rank(strategy, slots):
    plans = plans_of(
        seq_length=50, block_size=4, context_parallel_size=4, block_parallel_size=slots, strategy=strategy, views=2,
        documents=[13, 0, 37], target_blocks=[0, 3, 5, 6, 11],
    )
    targets = [t for b in (0, 3, 5, 6, 11) for t in range(plans[0].block_starts[b], plans[0].block_stops[b])]
    rows = np.concatenate([plan.rows.numpy() for plan in plans])
    noisy = [view * 50 + t for view in (0, 1) for t in targets]
    clean = list(range(100, 150)) * (4 if strategy == "bp" else 1)
    assert sorted(rows[rows >= 0].tolist()) == sorted(noisy + clean)
    scored = np.concatenate([plan.rows[plan.scored_clean].numpy() for plan in plans])
    assert sorted(scored.tolist()) == list(range(100, 150)), "each clean row is scored once"
    for plan in plans:
        kept = plan.rows >= 0
        token = plan.rows[kept] % 50
        assert torch.equal(plan.position_ids[kept], torch.where(token < 13, token, token - 13))
        assert len({plan.s_local for plan in plans}) == 1


def test_one_rank_has_the_same_plan_under_every_strategy():
    plans = [SequencePlan.build(30, 4, strategy=strategy) for strategy in ("csbp", "cp", "bp", "hybrid")]
    for plan in plans[1:]:
        assert torch.equal(plan.rows, plans[0].rows)
        assert shapes(plan.program().local) == shapes(plans[0].program().local)
        assert not plan.program().remote and not plan.program().sends


def test_take():
    plan = SequencePlan.build(10, 4, context_parallel_size=2, rank=1)
    rows = torch.arange(40.0).reshape(20, 2)
    taken = plan.take(rows, fill=-5.0)
    assert taken.shape == (plan.s_local, 2)
    assert torch.equal(taken[: plan.used_rows], rows[plan.rows[: plan.used_rows]])
    padded = SequencePlan.build(10, 4, context_parallel_size=2, row_multiple=16)
    assert padded.take(rows[:, 0].bool(), fill=True)[-1].item() is True


def test_identity():
    plan, same = (SequencePlan.build(32, 4, context_parallel_size=2, documents=[20, 12]) for _ in range(2))
    assert plan == same and hash(plan) == hash(same) and plan.fingerprint() == same.fingerprint()
    assert plan != SequencePlan.build(32, 4, context_parallel_size=2, documents=[20, 12], rank=1)
    assert plan != SequencePlan.build(32, 4, context_parallel_size=2)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert repr(SequencePlan.build(30, 4, context_parallel_size=4, rank=1)).startswith(
        "SequencePlan(csbp, L=30, S=4, B=8, P=4, K=4, V=1, rank=1: 8 noisy + 8 clean + 0 padding rows)"
    )
    with pytest.raises(AttributeError):
        plan.rank = 3


# ---- needs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_needed_rows_are_one_half_chunk_of_lower_ranks_and_both_of_higher(ranks, views):
    """Semantics section 3: 1.5 (P-1) half chunks on average, clean rows only, whatever the number of views."""
    c = 8
    plans = plans_of(seq_length=2 * ranks * c, block_size=4, context_parallel_size=ranks, views=views)
    total = 0
    for plan in plans:
        program = plan.program()
        assert [piece.source for piece in program.remote] == [(plan.rank - d) % ranks for d in range(1, ranks)]
        assert list(program.sends) == [(plan.rank + d) % ranks for d in range(1, ranks)]
        for piece in program.remote:
            clean = plans[piece.source].rows.numpy()[piece.rows] - views * 2 * ranks * c
            first_half = list(range(piece.source * c, (piece.source + 1) * c))
            mirror = 2 * ranks - 1 - piece.source
            both = first_half + list(range(mirror * c, (mirror + 1) * c))
            assert clean.tolist() == (first_half if piece.source < plan.rank else both)
            total += len(piece.rows)
    assert total == 1.5 * (ranks - 1) * c * ranks


def test_bp_needs_nothing():
    for plan in plans_of(seq_length=64, block_size=4, context_parallel_size=4, strategy="bp"):
        program = plan.program()
        assert not program.remote and not program.sends and not any(len(rows) for rows in program.shared)
        assert len(plan.needed_rows(0, 1)) == 0


def test_hybrid_moves_noisy_rows_inside_a_slot_only():
    plans = plans_of(seq_length=128, block_size=8, context_parallel_size=4, block_parallel_size=2, strategy="hybrid")
    for plan in plans:
        for piece in plan.program().remote:
            noisy = (piece.rows < plans[piece.source].noisy_rows).any()
            assert noisy == (piece.source // 2 == plan.rank // 2)


def test_a_window_limits_what_travels():
    plans = plans_of(seq_length=512, block_size=4, context_parallel_size=4)
    for plan in plans:
        wide, narrow = plan.program(), plan.program(window=16)
        assert sum(len(p.rows) for p in narrow.remote) <= 2 * 15 < sum(len(p.rows) for p in wide.remote)
        assert plan.program(window=512) is wide, "a window over the whole sample limits nothing"


def test_noisy_queries_only():
    plan = SequencePlan.build(64, 4, context_parallel_size=2, views=2)
    program = plan.program(queries="noisy")
    assert program.queries == plan.noisy_rows == 64 and plan.program().queries == 96
    assert program.area == 2 * (plan.program().area - program.area), "two views and one clean stream cost the same"
    assert plan.program(queries="noisy") is program


# ---- rectangles -------------------------------------------------------------------------------


def test_halving_of_one_half_chunk_pair():
    """L = 8192, S = 32, one rank: own squares, then a level per power of two, noisy and clean rows as two copies."""
    program = SequencePlan.build(8192, 32).program()
    levels = [(h, h, 2 * 8192 // (2 * h), 2) for h in (4096, 2048, 1024, 512, 256, 128, 64, 32)]
    assert shapes(program.local) == [(32, 32, 512, 1)] + levels
    for batch in program.local.batches[1:]:
        per_copy = batch.query_starts.reshape(2, -1)
        assert (np.diff(per_copy, axis=1) == 2 * batch.queries).all()
        assert (np.diff(batch.key_starts.reshape(2, -1), axis=1) == 2 * batch.queries).all()


def test_remote_half_chunks_are_single_rectangles():
    """L = 8192, P = 4, rank 2: every row sees half chunk s of a lower rank s, the second half sees all of rank 3."""
    plan = SequencePlan.build(8192, 32, context_parallel_size=4, rank=2)
    remote = {piece.source: shapes(piece) for piece in plan.program().remote}
    assert remote == {1: [(4096, 1024, 1, 1)], 0: [(4096, 1024, 1, 1)], 3: [(1024, 2048, 2, 2)]}


def test_token_causal_clean_rows_are_one_triangle():
    program = SequencePlan.build(8192, 32, context_parallel_size=4, clean_attention="token-causal").program()
    assert [(batch.queries, batch.count) for batch in program.local.batches if batch.kind == "causal"] == [(2048, 1)]


def test_noisy_causal_blocks_are_triangles():
    program = SequencePlan.build(64, 4, noisy_attention="causal", target_blocks=range(8)).program(queries="noisy")
    assert [(b.queries, b.count) for b in program.local.batches if b.kind == "causal"] == [(4, 8)]


def test_views_multiply_rectangles_not_batches():
    one, three = (SequencePlan.build(1024, 32, views=views).program().local for views in (1, 3))
    assert len(one.batches) == len(three.batches)
    assert [batch.copies for batch in three.batches] == [1] + [4] * 5


def test_window_batches_are_few():
    plan = SequencePlan.build(8192, 32, context_parallel_size=4, rank=1)
    program = plan.program(window=1024)
    assert len(program.local.batches) <= 16 and all(len(piece.batches) <= 16 for piece in program.remote)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(seq_length=12, block_size=4, context_parallel_size=4),
         "--bdlm-strategy csbp with --block-parallel-size 4: --seq-length 12 and --bdlm-block-size 4 make 3 .*"
         "A legal value: --bdlm-strategy hybrid --block-parallel-size 2"),
        (dict(seq_length=12, block_size=4, context_parallel_size=4, strategy="bp"), "bp with --block-parallel-size 4: "),
        (dict(seq_length=12, block_size=12, context_parallel_size=4, block_parallel_size=2, strategy="hybrid"),
         "hybrid with --block-parallel-size 2: .* A legal value: --bdlm-strategy hybrid --block-parallel-size 1"),
        (dict(seq_length=64, block_size=4, context_parallel_size=4, block_parallel_size=3, strategy="hybrid"),
         "--block-parallel-size 3: it must divide --context-parallel-size 4. A legal value: 4"),
        (dict(seq_length=64, block_size=4, context_parallel_size=4, block_parallel_size=2),
         "--bdlm-strategy csbp with --block-parallel-size 2: .* needs --block-parallel-size 4"),
        (dict(seq_length=64, block_size=4, context_parallel_size=4, block_parallel_size=4, strategy="cp"),
         "--bdlm-strategy cp with --block-parallel-size 4: .* needs --block-parallel-size 1"),
        (dict(seq_length=64, block_size=4, context_parallel_size=0), "--context-parallel-size 0: .* A legal value: 1"),
        (dict(seq_length=64, block_size=4, views=0), "--bdlm-views 0: .* A legal value: 1"),
        (dict(seq_length=64, block_size=4, strategy="ring"), "--bdlm-strategy ring: .* A legal value: csbp"),
        (dict(seq_length=64, block_size=4, clean_attention="full"), "--bdlm-clean-attention full: .* block-causal"),
        (dict(seq_length=64, block_size=4, noisy_attention="full"), "--bdlm-noisy-attention full: .* bidirectional"),
        (dict(seq_length=64, block_size=4, context_parallel_size=2, rank=2),
         "rank 2: 0 <= rank < --context-parallel-size 2"),
        (dict(seq_length=64, block_size=4, row_multiple=0), "row_multiple 0"),
    ],
)
def test_refused_layouts(arguments, message):
    with pytest.raises(PlanError, match=message):
        SequencePlan.build(**arguments)


def test_refused_layers():
    plan = SequencePlan.build(64, 4)
    with pytest.raises(PlanError, match="--window-size 0: .* A legal value: 64"):
        plan.program(window=0)
    with pytest.raises(PlanError, match="queries clean: .* A legal value: all"):
        plan.program(queries="clean")


# ---- speed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, size, ranks, documents",
    [(1 << 20, 32, 16, 1), (1 << 18, 4, 8, 1), (1 << 20, 32, 16, 64), (1 << 18, 4, 8, 64)],
)
def test_planning_long_samples_takes_seconds_at_most(length, size, ranks, documents):
    """Well under a second on a quiet core; the bound leaves room for a busy machine."""
    cuts = np.sort(np.random.default_rng(0).choice(length, documents - 1, replace=False))
    lengths = np.diff(np.concatenate(([0], cuts, [length]))).tolist()
    began = time.perf_counter()
    plan = SequencePlan.build(length, size, context_parallel_size=ranks, rank=3, documents=lengths)
    program = plan.program()
    assert time.perf_counter() - began < 8.0
    assert plan.balance() <= 1.02 and program.area == plan.cost()
