"""Corruption: a pure function of its key, right frequencies (4 sigma), and only eligible tokens.

Frequency tests fix their seeds: they either always pass or always fail, and 4 sigma says what passing means.
"""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.data.noise import VALIDATION_T_RANGE, block_ids, block_starts_of, corrupt
from megatron.bdlm.data.schedules import SCHEDULES, NoiseSchedule

MASK = 1000


def make(**options) -> BDLMConfig:
    config = BDLMConfig(**{"bdlm_mask_token_id": MASK, **{f"bdlm_{k}": v for k, v in options.items()}})
    config.validate()
    return config


def sample(length, prompt=0, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 1000, length)
    eligible = np.ones(length, bool)
    eligible[:prompt] = False
    return tokens, eligible


def within_4_sigma(mean, expected, variance, count):
    assert abs(mean - expected) <= 4.0 * np.sqrt(variance / count), (mean, expected, np.sqrt(variance / count))


# ---- a pure function of the key --------------------------------------------------------------------


def test_same_key_same_noise_and_inputs_untouched():
    """Fault C3: the arrays of a cached sample are not mutated; reading it twice gives identical noise."""
    tokens, eligible = sample(500, prompt=100)
    tokens.setflags(write=False), eligible.setflags(write=False)
    config = make(block_size=8)
    one, two = (corrupt(tokens, eligible, config, 1, 2, 3) for _ in range(2))
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))


def test_every_part_of_the_key_matters():
    tokens, eligible = sample(200)
    config = make(block_size=8)
    base = dict(seed=1, sample_index=2, epoch=3, purpose="train")
    changed = [dict(), dict(seed=2), dict(sample_index=3), dict(epoch=4), dict(purpose="validation")]
    # exchanging two parts of the key is another key as well
    changed += [dict(seed=2, sample_index=1), dict(sample_index=3, epoch=2)]
    drawn = [corrupt(tokens, eligible, config, **{**base, **change}) for change in changed]
    assert len({noised.corrupted.tobytes() for noised in drawn}) == len(changed)
    assert len({noised.t.tobytes() for noised in drawn}) == len(changed)


def test_bits_are_frozen():
    """Fault D1, over machines and versions: the corrupted ids of one key are these, whatever draws them."""
    tokens, eligible = np.arange(1000) * 7919 % 1000, np.arange(1000) >= 3
    digest = hashlib.sha256()
    variants = [dict(), dict(views=2, loss_weight="unit"), dict(force_one_corrupted=True, noise_level_per="document")]
    for options in variants:
        noised = corrupt(tokens, eligible, make(block_size=7, **options), 1234, 17, 5, documents=[400, 0, 600])
        digest.update(noised.xt.astype("<i8").tobytes())
    uniform = make(corruption="uniform", loss_weight="unit")
    digest.update(corrupt(tokens, eligible, uniform, 1234, 17, vocab_size=1000).xt.astype("<i8").tobytes())
    assert digest.hexdigest() == FROZEN


FROZEN = "fb5214ab253c73b39ef96f3822420a40b87b4dc2786a0f5192c70f741e54546f"


def test_batch_order_and_length_of_other_samples_do_not_matter():
    """A sample's noise knows nothing of its neighbours: drawn alone, in any order, it is the same."""
    config = make(block_size=4)
    samples = [sample(n, seed=n) for n in (40, 64, 12)]
    forward = [corrupt(*s, config, 9, i).xt for i, s in enumerate(samples)]
    backward = [corrupt(*samples[i], config, 9, i).xt for i in (2, 1, 0)][::-1]
    for one, two in zip(forward, backward):
        np.testing.assert_array_equal(one, two)


# ---- who is corrupted ------------------------------------------------------------------------------


def test_prompt_five_answer_four():
    """Fault B7: in 1000 draws the corrupted positions lie within the answer, and each answer position is hit."""
    tokens, eligible = sample(9, prompt=5)
    config = make(block_size=4)
    hits = sum(corrupt(tokens, eligible, config, 0, index).corrupted[0].astype(int) for index in range(1000))
    assert (hits[:5] == 0).all() and (hits[5:] > 0).all()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 70), block=st.integers(1, 20), data=st.data(),
    per=st.sampled_from(["block", "document", "sequence"]), draw=st.sampled_from(["uniform", "stratified"]),
    force=st.booleans(),
)  # fmt: skip
def test_invariants(length, block, data, per, draw, force):
    """Fault C5 among others: any lengths, zero-length documents, any eligibility."""
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    documents = np.diff([0, *cuts, length]).tolist()
    tokens = np.arange(length)
    eligible = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    config = make(block_size=block, noise_level_per=per, noise_draw=draw, force_one_corrupted=force)
    noised = corrupt(tokens, eligible, config, 3, 5, documents=documents)
    corrupted = noised.corrupted[0]
    assert not (corrupted & ~eligible).any()
    np.testing.assert_array_equal(noised.xt[0], np.where(corrupted, MASK, tokens))
    assert ((noised.t >= np.float32(1e-3)) & (noised.t <= 1)).all()
    np.testing.assert_allclose(noised.weight, 1 / NoiseSchedule("linear").probability(noised.t), rtol=1e-5)
    document_of = block_ids(np.cumsum([0, *documents])[:-1], length) if length else np.zeros(0)
    block_of = block_ids(noised.block_starts, length)
    for b in range(len(noised.block_starts)):
        inside = block_of == b
        assert inside.sum() <= block and len(set(document_of[inside])) == 1 and len(set(noised.t[0, inside])) == 1
        if force and eligible[inside].any():
            assert corrupted[inside].any()
    if per == "sequence" and length:
        assert len(set(noised.t[0])) == 1


def test_token_zero_and_end_of_text_are_ordinary_tokens():
    """Faults C1, C2: eligibility is a boolean array; id 0, or a pad id equal to the eos id, changes nothing."""
    eligible = np.ones(6, bool)
    eligible[4:] = False  # padding after the document, with the id of eos
    config = make(t_min=1.0, t_max=1.0, block_size=3)
    noised = corrupt(np.array([0, 7, 0, 2, 2, 2]), eligible, config)
    assert noised.corrupted[0].tolist() == [True, True, True, True, False, False]
    assert noised.xt[0].tolist() == [MASK, MASK, MASK, MASK, 2, 2]


def test_narrow_ids_hold_a_mask_behind_the_vocabulary():
    """A .bin of uint16 ids and mask id 70000: the noisy stream is wide enough."""
    noised = corrupt(np.array([65535, 1], dtype=np.uint16), np.ones(2, bool), make(mask_token_id=70000, t_min=1.0))
    assert noised.xt[0].tolist() == [70000, 70000]


def test_int32_ids_stay_int32():
    assert corrupt(np.arange(4, dtype=np.int32), np.ones(4, bool), make()).xt.dtype == np.int32


# ---- blocks ----------------------------------------------------------------------------------------


def test_block_starts():
    assert block_starts_of(10, 4).tolist() == [0, 4, 8]
    assert block_starts_of(10, 4, documents=(7, 3)).tolist() == [0, 4, 7]
    assert block_starts_of(10, 4, documents=(0, 7, 0, 3)).tolist() == [0, 4, 7]
    assert block_starts_of(10, 4, restarts=(5,)).tolist() == [0, 4, 5, 9]
    assert block_starts_of(10, 4, documents=(6, 4), restarts=(2, 6)).tolist() == [0, 2, 6]
    assert block_starts_of(0, 4).tolist() == [] and block_starts_of(0, 4, documents=()).tolist() == []


def test_given_block_starts_share_one_level():
    noised = corrupt(*sample(10), make(block_size=4), block_starts=[0, 5, 6])
    t = noised.t[0]
    assert len(set(t[:5])) == len(set(t[6:])) == 1 and len(set(t)) == 3
    assert noised.block_starts.tolist() == [0, 5, 6]


# ---- noise levels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [0, 24])
def test_stratified_blocks_take_every_stratum_once(prompt):
    """32 blocks of 4: one level in each of the 32 strata; with a prompt of 6 blocks, one in each of 26."""
    noised = corrupt(*sample(128, prompt), make(block_size=4, t_min=0.2, t_max=0.6))
    t = np.sort(noised.t[0, prompt::4].astype(np.float64))
    count = (128 - prompt) // 4
    np.testing.assert_array_equal(np.floor((t - 0.2) / 0.4 * count), np.arange(count))


def test_stratified_level_is_independent_of_block_position():
    """Mean level at each of 8 block positions over 20000 samples: 1/2 within 4 sigma (variance 1/12).

    Blocks share out 8 strata without replacement: any two are correlated by -(63/64)/7 = -.14, whatever their distance.
    """
    tokens, eligible = sample(8)
    config = make(block_size=1)
    t = np.stack([corrupt(tokens, eligible, config, 4, i).t[0] for i in range(20000)]).astype(np.float64)
    for position in range(8):
        within_4_sigma(t[:, position].mean(), 0.5005, 1 / 12, 20000)
    expected = -(1 - 1 / 64) / 12 / 7 * 0.999**2  # covariance of two draws without replacement from 8 stratum centres
    products = (t[:, :-1] - 0.5005) * (t[:, 1:] - 0.5005)
    for lag in range(7):
        within_4_sigma(products[:, lag].mean(), expected, 1 / 144, 20000)


@pytest.mark.parametrize("draw", ["uniform", "stratified"])
@pytest.mark.parametrize("per", ["block", "document", "sequence"])
def test_levels_are_uniform_on_their_range(per, draw):
    """Deciles of the level over 4000 samples of 3 groups, range [.3, .8], 4 sigma of independent draws."""
    tokens, eligible = sample(12)
    config = make(block_size=4, noise_level_per=per, noise_draw=draw, t_min=0.3, t_max=0.8)
    t = np.stack([corrupt(tokens, eligible, config, 5, i, documents=[4, 4, 4]).t[0, ::4] for i in range(4000)])
    for group in range(3):
        share = np.histogram(t[:, group], bins=10, range=(0.3, 0.8))[0] / 4000
        assert (np.abs(share - 0.1) <= 4 * np.sqrt(0.09 / 4000)).all()


def test_levels_per_sequence_are_a_low_discrepancy_sequence():
    """Any 100 consecutive samples: every tenth of [0, 1) gets 10 levels, give or take 2 (drawn apart: 3 a sigma)."""
    tokens, eligible = sample(4)
    config = make(noise_level_per="sequence", t_min=1e-9)
    t = np.array([corrupt(tokens, eligible, config, 6, 10**12 + i).t[0, 0] for i in range(300)])
    for start in range(0, 300, 100):
        counts = np.histogram(t[start : start + 100], bins=10, range=(0, 1))[0]
        assert (np.abs(counts - 10) <= 2).all()


def test_documents_of_a_sample_take_every_stratum_once():
    noised = corrupt(*sample(40), make(noise_level_per="document", t_min=1e-9), documents=[10, 10, 10, 10])
    assert sorted(np.floor(noised.t[0, ::10] * 4)) == [0, 1, 2, 3]


def test_t_range_overrides_the_config():
    """Validation of a model trained on a clipped range: fixed noise over [1e-3, 1]."""
    config = make(block_size=1, t_min=0.45, t_max=0.95)
    noised = corrupt(*sample(4000), config, t_range=VALIDATION_T_RANGE, purpose="validation")
    assert noised.t.min() < 0.01 and noised.t.max() > 0.99


# ---- frequencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_corruption_frequency_is_p(name):
    """Within each tenth of t, the share of corrupted tokens is the mean of p, 4 sigma of the binomial."""
    tokens, eligible = sample(200_000)
    noised = corrupt(tokens, eligible, make(block_size=1, noise_schedule=name), 7, 0)
    p = NoiseSchedule(name).probability(noised.t[0])
    for low in np.arange(10) / 10:
        inside = (noised.t[0] >= low) & (noised.t[0] < low + 0.1)
        q, corrupted = p[inside], noised.corrupted[0, inside]
        within_4_sigma(corrupted.mean(), q.mean(), np.mean(q * (1 - q)), len(q))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("t_min, t_max", [(1e-3, 1.0), (0.3, 0.8)])
def test_expected_nelbo_weight_is_one(name, t_min, t_max):
    """Constant logits: the NELBO per token is ln n times this mean (one level a token: independent draws)."""
    tokens, eligible = sample(400_000)
    noised = corrupt(tokens, eligible, make(block_size=1, noise_schedule=name, t_min=t_min, t_max=t_max), 8, 0)
    value = noised.range_factor * (noised.weight * noised.corrupted)[0].astype(np.float64)
    within_4_sigma(value.mean(), 1.0, value.var(), value.size)


@pytest.mark.parametrize("t_min, t_max, expected", [(1e-3, 1.0, 5.22), (0.3, 0.8, 0.96), (0.45, 0.95, 0.49)])
def test_variance_of_the_nelbo_weight(t_min, t_max, expected):
    """E[1/p - 1] a token for the linear schedule, as docs/objectives.md says: ln(p_max/p_min)/(p_max - p_min) - 1."""
    weight = corrupt(*sample(400_000), make(block_size=1, t_min=t_min, t_max=t_max), 8, 0).weight.astype(np.float64)
    assert (weight - 1).mean() == pytest.approx(expected, abs=0.01)  # variance of w * corrupted given t: (1-p)/p


def test_expected_nelbo_weight_of_the_complementary_view_is_one():
    tokens, eligible = sample(400_000)
    noised = corrupt(tokens, eligible, make(block_size=1, views=2, t_min=0.01, t_max=0.99), 8, 0)
    value = (noised.weight * noised.corrupted)[1].astype(np.float64)
    within_4_sigma(value.mean(), 1.0, value.var(), value.size)


def test_tokens_of_a_block_are_corrupted_independently():
    """t fixed at 1/2 (p = .5005): the product of neighbours has mean p^2, 4 sigma."""
    noised = corrupt(*sample(200_000), make(t_min=0.5, t_max=0.5), 9, 0)
    x = noised.corrupted[0].astype(np.float64)
    within_4_sigma((x[1:] * x[:-1])[::2].mean(), 0.5005**2, 0.5005**2 * (1 - 0.5005**2), 99_999)


# ---- variants --------------------------------------------------------------------------------------


def test_complementary_views():
    """View 2 corrupts exactly the eligible tokens that view 1 left clean: once over the pair, each."""
    tokens, eligible = sample(300, prompt=40)
    noised = corrupt(tokens, eligible, make(block_size=8, views=2, loss_weight="unit"))
    np.testing.assert_array_equal(noised.corrupted[0] ^ noised.corrupted[1], eligible)
    for view in range(2):
        np.testing.assert_array_equal(noised.xt[view], np.where(noised.corrupted[view], MASK, tokens))
    assert (noised.weight == 1).all()
    single = corrupt(tokens, eligible, make(block_size=8))
    np.testing.assert_array_equal(single.xt[0], noised.xt[0])  # view 1 is what one view alone would be


def test_unit_weight_keeps_the_nelbo_weight_beside_it():
    noised = corrupt(*sample(64), make(block_size=8, loss_weight="unit"))
    assert (noised.weight == 1).all()
    np.testing.assert_allclose(noised.nelbo_weight, 1 / NoiseSchedule("linear").probability(noised.t), rtol=1e-5)


def test_forced_token_is_uniform_over_the_eligible_ones():
    """p = .001: of 5 tokens with 4 eligible the forced one is each in a quarter of the samples, 4 sigma."""
    tokens, eligible = sample(5, prompt=1)
    config = make(block_size=5, force_one_corrupted=True, t_min=1e-9, t_max=1e-9)
    forced = np.stack([corrupt(tokens, eligible, config, 2, i).corrupted[0] for i in range(8000)])
    assert forced.any(1).all() and not forced[:, 0].any()
    one = forced[forced.sum(1) == 1]
    for position in range(1, 5):
        within_4_sigma(one[:, position].mean(), 0.25, 0.25 * 0.75, len(one))


def test_uniform_corruption_draws_from_the_whole_vocabulary():
    """t = 1: every eligible token becomes one of 8 ids, each in 1/8 of the draws (its own id as well), 4 sigma."""
    tokens, eligible = np.full(80_000, 3), np.ones(80_000, bool)
    eligible[:1000] = False
    config = make(corruption="uniform", loss_weight="unit", t_min=1.0)
    noised = corrupt(tokens, eligible, config, vocab_size=8)
    assert (noised.xt[0, :1000] == 3).all() and noised.corrupted[0, 1000:].all()
    for token in range(8):
        within_4_sigma((noised.xt[0, 1000:] == token).mean(), 1 / 8, 7 / 64, 79_000)


# ---- refusals --------------------------------------------------------------------------------------


def test_integer_eligibility_is_refused():
    with pytest.raises(TypeError, match="eligible: a boolean array"):
        corrupt(np.arange(3), np.ones(3, int), make())


def test_floating_tokens_are_refused():
    with pytest.raises(TypeError, match="tokens: integer ids"):
        corrupt(np.arange(3.0), np.ones(3, bool), make())


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match=r"tokens \(3,\), eligible \(4,\)"):
        corrupt(np.arange(3), np.ones(4, bool), make())


def test_documents_that_do_not_sum_are_refused():
    """Fault C4: a packed sample one token too long is refused rather than shifted."""
    with pytest.raises(ValueError, match="must sum to 10, they sum to 11"):
        corrupt(*sample(10), make(), documents=[6, 5])


def test_block_over_two_documents_is_refused():
    with pytest.raises(ValueError, match="a block spans two documents"):
        corrupt(*sample(10), make(), documents=[6, 4], block_starts=[0, 4, 8])


def test_unordered_block_starts_are_refused():
    with pytest.raises(ValueError, match="block_starts: must ascend from 0"):
        corrupt(*sample(10), make(), block_starts=[0, 8, 4])


def test_restart_outside_the_sample_is_refused():
    with pytest.raises(ValueError, match="0 <= restart < --seq-length 10"):
        block_starts_of(10, 4, restarts=[10])


def test_negative_sample_index_is_refused():
    with pytest.raises(ValueError, match="sample_index -1"):
        corrupt(*sample(4), make(), sample_index=-1)


def test_missing_mask_token_is_refused():
    with pytest.raises(ValueError, match="--bdlm-mask-token-id None"):
        corrupt(*sample(4), make(mask_token_id=None))


def test_missing_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size None: uniform corruption draws from its ids"):
        corrupt(*sample(4), make(corruption="uniform", loss_weight="unit"))


@pytest.mark.parametrize(
    "options, flag",
    [
        (dict(views=2, force_one_corrupted=True), "--bdlm-force-one-corrupted True"),
        (dict(views=2, corruption="uniform", loss_weight="unit"), "--bdlm-views 2"),
        (dict(corruption="uniform"), "--bdlm-loss-weight nelbo"),
        (dict(corruption="uniform", loss_weight="unit", loss_denominator="masked"), "--bdlm-loss-denominator masked"),
        (dict(loss_denominator="block-mean"), "--bdlm-loss-denominator block-mean"),
        (dict(clean_loss_weight=0.5), "--bdlm-clean-loss-weight 0.5"),
        (dict(t_min=0.0), "--bdlm-t-min/--bdlm-t-max 0.0/1.0"),
        (dict(noise_eps=1.0), "--bdlm-noise-eps 1.0"),
    ],
)
def test_combinations_without_meaning_are_refused(options, flag):
    with pytest.raises(BDLMConfigError, match=flag):
        make(**options)
