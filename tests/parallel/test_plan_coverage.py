"""Every allowed (query, key) pair is computed exactly once over all ranks and pieces, every other never."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron.bdlm.parallel.plan import PlanError
from tests.parallel.plans import allowed_pairs, counted_pairs, pairs_of, plans_of, samples, windows

many = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
few = settings(many, max_examples=100)


def buildable(sample: dict):
    try:
        return plans_of(**sample)
    except PlanError:
        assume(False)


@many
@given(samples(), windows, st.sampled_from(["all", "all", "noisy"]))
def test_random_samples(sample, window, queries):
    """Fault A7."""
    plans = buildable(sample)
    counted, wanted = counted_pairs(plans, window, queries), allowed_pairs(window, queries, **sample)
    assert np.array_equal(counted, wanted), np.argwhere(counted != wanted)[:5]


@few
@given(samples(), windows)
def test_what_one_rank_needs_the_other_sends(sample, window):
    plans = buildable(sample)
    programs = [plan.program(window) for plan in plans]
    received = {(p.rank, piece.source): piece.rows.tolist() for p, g in zip(plans, programs) for piece in g.remote}
    sent = {(peer, p.rank): rows.tolist() for p, g in zip(plans, programs) for peer, rows in g.sends.items()}
    assert received == sent
    for (rank, source), rows in received.items():
        assert plans[0].needed_rows(rank, source, window).tolist() == rows == sorted(rows)
        assert set(rows) <= set(programs[0].shared[source].tolist())


@few
@given(samples(), windows)
def test_batches_keep_their_promises(sample, window):
    for plan in buildable(sample):
        program = plan.program(window)
        for piece in (program.local, *program.remote):
            assert piece.source != plan.rank or piece is program.local
            read = [pairs_of(batch)[1] for batch in piece.batches]
            if piece.source != plan.rank:  # every row that travels is used
                assert set(np.concatenate(read).tolist()) == set(range(len(piece.rows)))
            for batch in piece.batches:
                assert batch.kind == "full" or batch.queries == batch.keys > 1
                rows = (batch.query_starts[:, None] + np.arange(batch.queries)).ravel()
                assert len(set(rows.tolist())) == len(rows) and rows.max() < program.queries
                per_copy = batch.key_starts.reshape(batch.copies, -1)
                assert (per_copy == per_copy[0]).all()
                keys = (per_copy[0][:, None] + np.arange(batch.keys)).ravel()
                assert len(set(keys.tolist())) == len(keys)


@few
@given(samples())
def test_cost_is_the_area_of_the_program(sample):
    for plan in buildable(sample):
        assert plan.cost() == plan.program().area


@pytest.mark.parametrize("clean_attention", ["block-causal", "token-causal"])
@pytest.mark.parametrize("strategy, slots", [("csbp", 4), ("cp", 1), ("bp", 4), ("hybrid", 2)])
def test_length_30_on_four_ranks_with_blocks_of_4(strategy, slots, clean_attention):
    """Fault A9: nothing divides, blocks stay where they are."""
    sample = dict(seq_length=30, block_size=4, context_parallel_size=4, block_parallel_size=slots, strategy=strategy,
                  clean_attention=clean_attention)
    plans = plans_of(**sample)
    assert plans[0].block_starts.tolist() == [0, 4, 8, 12, 16, 20, 24, 28] and plans[0].block_stops[-1] == 30
    assert np.array_equal(counted_pairs(plans), allowed_pairs(**sample))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("clean_attention", ["block-causal", "token-causal"])
def test_length_96_with_blocks_of_4(clean_attention, size):
    """Fault A1: element by element the plain loops' mask, blocks far below any kernel's tile."""
    sample = dict(
        seq_length=96, block_size=4, context_parallel_size=size, block_parallel_size=size, clean_attention=clean_attention
    )
    assert np.array_equal(counted_pairs(plans_of(**sample)), allowed_pairs(**sample))


@pytest.mark.parametrize("length", [16, 31, 32])
@pytest.mark.parametrize("strategy, slots", [("hybrid", 1), ("cp", 1)])
def test_fewer_blocks_than_ranks(strategy, slots, length):
    sample = dict(
        seq_length=length, block_size=16, context_parallel_size=4, strategy=strategy, block_parallel_size=slots
    )
    plans = plans_of(**sample)
    assert np.array_equal(counted_pairs(plans), allowed_pairs(**sample))
    assert max(plan.holdings().noisy.count for plan in plans) - min(plan.holdings().noisy.count for plan in plans) <= 1


def test_documents_packed_are_documents_alone():
    """Fault C5: lengths 0, 1, S-1, S, S+1 and odd ones; nothing crosses, positions and blocks restart."""
    documents = [0, 1, 3, 0, 4, 5, 7]
    whole = dict(seq_length=20, block_size=4, context_parallel_size=2, block_parallel_size=2, documents=documents)
    packed = counted_pairs(plans_of(**whole))
    first = 0
    seen = np.zeros_like(packed)
    for length in documents:
        if length:
            alone = counted_pairs(plans_of(seq_length=length, block_size=4, context_parallel_size=1))
            rows = np.concatenate((np.arange(first, first + length), np.arange(20 + first, 20 + first + length)))
            seen[np.ix_(rows, rows)] = alone
        first += length
    assert np.array_equal(packed, seen)


def test_the_next_prompt_is_out_of_sight_of_an_answer():
    """Fault A8: turns of 5 and 7 tokens, S = 4; without the restart block 1 would reach into the second turn."""
    sample = dict(seq_length=12, block_size=4, context_parallel_size=2, block_parallel_size=2)
    second_turn = np.concatenate((np.arange(5, 12), np.arange(17, 24)))
    first_turn = np.setdiff1d(np.arange(24), second_turn)
    assert counted_pairs(plans_of(**sample))[np.ix_(first_turn, second_turn)].any()
    restarted = counted_pairs(plans_of(**sample, block_restarts=[5]))
    assert not restarted[np.ix_(first_turn, second_turn)].any()
    assert restarted[np.ix_(second_turn, first_turn)].any()


def test_plans_of_different_lengths_do_not_mix():
    """Fault A5: one process, lengths alternate."""
    for length in (24, 32, 24, 32):
        sample = dict(seq_length=length, block_size=4, context_parallel_size=2, block_parallel_size=2)
        assert np.array_equal(counted_pairs(plans_of(**sample)), allowed_pairs(**sample))
