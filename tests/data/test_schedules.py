"""Noise schedules against their formulas, worked out by hand at one point and by quadrature over a range."""

import math

import numpy as np
import pytest

from megatron.bdlm.data.schedules import SCHEDULES, NoiseSchedule

T = np.linspace(1e-3, 1.0, 4001)


@pytest.mark.parametrize(
    "name, p, w",
    [
        # t = 1/4, eps = 1/1000: .999/4 + .001 = .25075, and 1/.25075
        ("linear", 0.25075, 1 / 0.25075),
        # 1/16, and 2/(1/4)
        ("quadratic", 0.0625, 8.0),
        # 1/2, and 1/(2/4)
        ("sqrt", 0.5, 2.0),
        # ln 1.25 / ln 2 = .2231436/.6931472, and 1/(1.25 * .2231436)
        ("log", 0.3219281, 3.5851369),
        # 1 - .999 cos(pi/8) = 1 - .999 * .9238795, and .999 * pi/2 * sin(pi/8) / p = .6005170 / .0770444
        ("cosine", 0.0770444, 7.7944280),
    ],
)
def test_probability_and_weight_at_a_quarter(name, p, w):
    schedule = NoiseSchedule(name, 1e-3)
    assert schedule.probability(np.array([0.25]))[0] == pytest.approx(p, rel=1e-6)
    assert schedule.weight(np.array([0.25]))[0] == pytest.approx(w, rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_probability_rises_to_exactly_one(name):
    p = NoiseSchedule(name).probability(T)
    assert (np.diff(p) > 0).all() and p[0] > 0 and p[-1] == 1.0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "linear"])
def test_weight_is_the_logarithmic_derivative(name):
    schedule, t, step = NoiseSchedule(name), T[1:-1], 1e-6
    derivative = (np.log(schedule.probability(t + step)) - np.log(schedule.probability(t - step))) / (2 * step)
    np.testing.assert_allclose(schedule.weight(t), derivative, rtol=2e-3, atol=1e-6)


def test_linear_weight_is_one_over_p():
    """The published weight of the linear schedule, not p'/p = (1-eps)/p, which loses the share eps of the bound."""
    schedule = NoiseSchedule("linear", 0.1)
    np.testing.assert_array_equal(schedule.weight(T), 1.0 / schedule.probability(T))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("t_min, t_max", [(1e-3, 1.0), (0.3, 0.8), (0.45, 0.95), (0.5, 0.5), (1.0, 1.0)])
def test_range_factor_makes_the_expected_weight_one(name, t_min, t_max):
    """factor * E[w p] = 1 for t uniform on any range, and in the complementary view factor * E[w2 (1-p)] = 1."""
    schedule = NoiseSchedule(name)
    t = t_min + (t_max - t_min) * (np.arange(200_000) + 0.5) / 200_000
    factor = schedule.range_factor(t_min, t_max)
    assert factor * np.mean(schedule.weight(t) * schedule.probability(t)) == pytest.approx(1.0, rel=1e-4)
    if t_min < 1.0:
        second = schedule.complement_weight(t) * (1.0 - schedule.probability(t))
        assert factor * np.mean(second) == pytest.approx(1.0, rel=1e-4)


def test_complement_weight_is_zero_where_nothing_is_left():
    assert NoiseSchedule("linear").complement_weight(np.array([1.0]))[0] == 0.0


def test_closed_forms_of_the_range_factor():
    """t^2: E[2t] = t_min + t_max = 1.1 on [.3, .8]; sqrt: (.5)/(sqrt .8 - sqrt .3); linear: 1."""
    assert NoiseSchedule("quadratic").range_factor(0.3, 0.8) == pytest.approx(1 / 1.1)
    assert NoiseSchedule("sqrt").range_factor(0.3, 0.8) == pytest.approx(0.5 / (math.sqrt(0.8) - math.sqrt(0.3)))
    assert NoiseSchedule("linear").range_factor(0.3, 0.8) == 1.0


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="--bdlm-noise-schedule cubic: known schedules: linear"):
        NoiseSchedule("cubic")
