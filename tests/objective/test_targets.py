"""Which row predicts what: shift, documents, clean rows, eligibility, needed blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.data.noise import block_starts_of, corrupt
from megatron.bdlm.objective.loss import sample_counts
from megatron.bdlm.objective.targets import build_targets, target_blocks
from tests.objective.hand import MASK, flags, make, noised_by_hand, targets_by_hand, tokens_of


def test_no_shift_row_predicts_its_own_token():
    """Fault B7: corrupted tokens 6 and 8 of an answer at 5..8; rows 6 and 8 score them, and rows 5..8 count."""
    targets = targets_by_hand(make(block_size=4), 9, [[6, 8]], [0.5] * 9, eligible=range(5, 9))
    assert np.flatnonzero(targets.scored[0]).tolist() == [6, 8]
    assert targets.target[0, [6, 8]].tolist() == [16, 18]
    assert np.flatnonzero(targets.counted[0]).tolist() == [5, 6, 7, 8]
    assert not targets.scored[1].any() and not targets.counted[1].any()
    assert (targets.weight[~targets.scored] == 0).all()


def test_shift_stays_inside_documents():
    """Documents 0..2 and 3..5, all corrupted: rows 0, 1, 3, 4 predict 1, 2, 4, 5; tokens 0 and 3 have no row."""
    config = make(block_size=2, label_shift="next")
    targets = targets_by_hand(config, 6, [range(6)], [1.0] * 6, documents=[3, 3])
    assert np.flatnonzero(targets.scored[0]).tolist() == [0, 1, 3, 4]
    assert targets.target[0, [0, 1, 3, 4]].tolist() == [11, 12, 14, 15]
    np.testing.assert_array_equal(targets.counted, targets.scored)


def test_shifted_row_takes_weight_and_level_of_its_target():
    """S = 2, t = .25 and .5: row 1 stands in block 0 and predicts token 2 of block 1: weight 1/.5005."""
    config = make(block_size=2, label_shift="next")
    targets = targets_by_hand(config, 4, [[2]], [0.25, 0.25, 0.5, 0.5])
    assert np.flatnonzero(targets.scored[0]).tolist() == [1]
    assert targets.t[0, 1] == 0.5
    assert targets.weight[0, 1] == pytest.approx(1 / 0.5005)


def test_clean_rows_score_supervised_next_tokens_of_their_document():
    """Documents 0..3 and 4..6, tokens 2, 3, 4, 6 supervised: clean rows 1, 2 and 5; token 4 opens a document."""
    config = make(block_size=4, clean_attention="token-causal", clean_loss_weight=0.5)
    targets = targets_by_hand(config, 7, [[2]], [0.5] * 7, documents=[4, 3], eligible=[2, 3, 4, 6])
    assert np.flatnonzero(targets.scored[1]).tolist() == [1, 2, 5]
    assert targets.target[1, [1, 2, 5]].tolist() == [12, 13, 16]
    assert targets.weight[1, [1, 2, 5]].tolist() == [1, 1, 1]
    assert sample_counts(targets).clean == 3 and sample_counts(targets).noisy == 4


def test_clean_rows_may_score_other_tokens():
    config = make(block_size=4, clean_attention="token-causal", clean_loss_weight=1.0)
    noised = noised_by_hand(config, 4, [[3]], [0.5] * 4)
    targets = build_targets(tokens_of(4), flags(4, [3]), noised, None, config, clean_eligible=np.ones(4, bool))
    assert np.flatnonzero(targets.scored[1]).tolist() == [0, 1, 2]


def test_token_zero_keeps_its_loss():
    """Faults C1, C2: ids 0 (often padding) and 2 (an eos used as pad id) are scored wherever they are eligible."""
    tokens, eligible = np.array([0, 5, 0, 2, 2, 2]), flags(6, range(4))  # two padding tokens behind a real eos
    config = make(block_size=3, t_min=1.0)
    targets = build_targets(tokens, eligible, corrupt(tokens, eligible, config), None, config)
    assert targets.scored[0].tolist() == [True] * 4 + [False] * 2
    assert targets.target[0, :4].tolist() == [0, 5, 0, 2]


def test_inputs_are_not_mutated():
    """Fault C3: a cached sample is read twice, with write protection on every array."""
    tokens, eligible = tokens_of(12), flags(12, range(4, 12))
    config = make("fast-dllm-v2", block_size=4)
    for array in (tokens, eligible):
        array.setflags(write=False)
    one, two = (build_targets(tokens, eligible, corrupt(tokens, eligible, config), None, config) for _ in range(2))
    np.testing.assert_array_equal(one.weight, two.weight)
    np.testing.assert_array_equal(one.target, two.target)


def test_supervised_mask_token_is_refused():
    tokens = np.array([10, MASK, 12])
    config = make(block_size=4)
    with pytest.raises(ValueError, match=f"--bdlm-mask-token-id {MASK}: supervised token 1 of the sample is the mask"):
        build_targets(tokens, np.ones(3, bool), noised_by_hand(config, 3, [[0]], [0.5] * 3), None, config)


def test_mask_token_in_a_prompt_is_allowed():
    tokens, eligible = np.array([10, MASK, 12]), flags(3, [2])
    config = make(block_size=4)
    targets = build_targets(tokens, eligible, noised_by_hand(config, 3, [[2]], [0.5] * 3), None, config)
    assert targets.scored[0].tolist() == [False, False, True] and targets.target[0, 2] == 12


@pytest.mark.parametrize("eligible, shift, expected", [
    ([4, 5, 6, 7], "none", [1]),  # the answer is block 1
    ([4, 5, 6, 7], "next", [0, 1]),  # row 3 of block 0 predicts token 4
    ([5], "next", [1]),
    ([8], "next", []),  # the first token of document 1 has no row
    ([8], "none", [2]),
    ([], "none", []),
])  # fmt: skip
def test_target_blocks(eligible, shift, expected):
    """Documents of 8 and 4 tokens, S = 4."""
    starts = block_starts_of(12, 4, [8, 4])
    assert target_blocks(flags(12, eligible), starts, [8, 4], shift).tolist() == expected


def test_target_blocks_of_an_empty_sample():
    assert target_blocks(np.zeros(0, bool), np.zeros(0, np.int64)).tolist() == []


@settings(max_examples=80, deadline=None)
@given(
    recipe=st.sampled_from(["bd3lm", "sdar", "fast-dllm-v2", "llada2-sft", "nemotron-joint", "i-dlm"]),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), block=st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_against_plain_loops(recipe, lengths, block, data):
    """Every row of every recipe against loops over (view, row); documents of 0, 1, .. tokens, any eligibility."""
    length = sum(lengths)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    config = make(recipe, block_size=block)
    noised = corrupt(tokens_of(length), eligible, config, documents=lengths)
    targets = build_targets(tokens_of(length), eligible, noised, lengths, config)
    document = [d for d, size in enumerate(lengths) for _ in range(size)]
    views, shift = config.bdlm_views, config.bdlm_label_shift == "next"
    needed = set()
    for view in range(views + 1):
        clean = view == views
        for row in range(length):
            token = row + (1 if shift or clean else 0)
            inside = token < length and document[token] == document[row]
            supervised = inside and bool(eligible[token]) and (not clean or config.bdlm_clean_loss_weight > 0)
            corrupted = inside and not clean and bool(noised.corrupted[view, token])
            scored = supervised if clean else corrupted
            once = supervised and (clean or view == 0)
            masked_count = config.bdlm_loss_denominator == "masked" and not clean
            assert targets.scored[view, row] == scored and targets.corrupted[view, row] == corrupted
            assert targets.supervised[view, row] == once
            assert targets.counted[view, row] == (corrupted if masked_count else once)
            if scored:
                assert targets.target[view, row] == 10 + token
                assert targets.weight[view, row] == (1.0 if clean else noised.weight[view, token])
            else:
                assert targets.weight[view, row] == 0
            if not clean and supervised:
                needed.add(int(np.searchsorted(noised.block_starts, row, side="right")) - 1)
    assert set(target_blocks(eligible, noised.block_starts, lengths, config.bdlm_label_shift).tolist()) == needed
