"""Noise schedules: the corruption probability p(t) of a noise level t, and its NELBO weight.

    -log p(x) <= sum_b E_t sum_{i corrupted in b} w(t_b) * -log p_theta(x_i | xt_b, x0_{<b}),   w = p'(t) / p(t)

| schedule  | p(t)                       | w(t)                                                      |
|-----------|----------------------------|-----------------------------------------------------------|
| linear    | (1-eps) t + eps            | 1 / p                                                     |
| quadratic | t^2                        | 2 / t                                                     |
| sqrt      | sqrt t                     | 1 / (2t)                                                  |
| log       | ln(1+t) / ln 2             | 1 / ((1+t) ln(1+t))                                       |
| cosine    | 1 - (1-eps) cos(pi t / 2)  | (1-eps) (pi/2) sin(pi t / 2) / p                          |

With t uniform on [t_min, t_max] a token contributes E[w p] = E[w(t) p(t)] units of cross entropy. That mean is one for
the linear schedule on every range. The others miss it by what the range cuts off: `range_factor` is its inverse, so
that `range_factor * w` gives exactly ln n per token for constant logits over n candidates, on every range. (On the p
axis it is the average of (1/p) E[sum of the corrupted tokens' losses] over [p(t_min), p(t_max)].)

Shapes: everything is elementwise on numpy arrays (float64).
"""

import math
from dataclasses import dataclass

import numpy as np

SCHEDULES = ("linear", "quadratic", "sqrt", "log", "cosine")


@dataclass(frozen=True)
class NoiseSchedule:
    """One schedule p(t) by name, with the floor `eps` of the linear and the cosine one."""

    name: str
    eps: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"--bdlm-noise-schedule {self.name}: known schedules: {known}. A legal value: linear")

    def curve(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        """(p(t), w(t) p(t)) at once: they share their costly part. A scalar 1 for the linear schedule."""
        t = np.asarray(t, dtype=np.float64)
        if self.name == "linear":
            # (1-eps) t + eps written as 1 - (1-eps)(1-t): exactly 1 at t = 1; in place: as long as a sample at S = 1
            p = 1.0 - t
            p *= self.eps - 1.0
            p += 1.0
            return p, 1.0
        if self.name == "quadratic":
            return t * t, 2.0 * t
        if self.name == "sqrt":
            root = np.sqrt(t)
            return root, 0.5 / root
        if self.name == "log":
            return np.log1p(t) / math.log(2.0), 1.0 / ((1.0 + t) * math.log(2.0))
        sine, cosine = _sine_and_cosine(1.0 - t)  # of the complement: exactly 0 and 1 at t = 1
        sine *= self.eps - 1.0
        sine += 1.0
        cosine *= (1.0 - self.eps) * 0.5 * math.pi
        return sine, cosine

    def probability(self, t: np.ndarray) -> np.ndarray:
        """p(t), the probability that an eligible token is corrupted."""
        return self.curve(t)[0]

    def rate(self, t: np.ndarray) -> np.ndarray:
        """w(t) p(t): p'(t), and 1 for the linear schedule, whose published weight is 1/p rather than (1-eps)/p."""
        p, rate = self.curve(t)
        return np.broadcast_to(np.float64(rate), p.shape)

    def weight(self, t: np.ndarray) -> np.ndarray:
        """w(t), the NELBO weight of a corrupted token."""
        p, rate = self.curve(t)
        return rate / p

    def complement_weight(self, t: np.ndarray) -> np.ndarray:
        """The NELBO weight in the second, complementary view, whose corruption probability is 1 - p(t).

        Its level t2 solves p(t2) = 1 - p(t); for uniform t the density of t2 is p'(t2)/p'(t), so the unbiased weight is
        (p'(t2) / p(t2)) / (p'(t2) / p'(t)) = p'(t) / (1 - p(t)). Where p(t) = 1 the view corrupts nothing: weight 0.
        """
        p, rate = self.curve(t)
        return complement_weight(p, rate)

    def range_factor(self, t_min: float, t_max: float) -> float:
        """1 / E[w(t) p(t)] for t uniform on [t_min, t_max]; 1 for the linear schedule."""
        if self.name == "linear":
            return 1.0
        if t_max == t_min:
            return float(1.0 / self.rate(t_min))
        low, high = self.probability(np.array([t_min, t_max]))
        return float((t_max - t_min) / (high - low))


def complement_weight(p: np.ndarray, rate: np.ndarray | float) -> np.ndarray:
    """rate / (1 - p), and 0 where p = 1 (`NoiseSchedule.complement_weight`)."""
    left = 1.0 - p
    return np.divide(rate, left, out=np.zeros_like(left), where=left > 0.0)


# Taylor coefficients of sin(h) / h in h^2: on [0, pi/4] the first one left out is below 1e-19
_SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))


def _sine_and_cosine(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sin and cos of pi u / 2 for u in [0, 1], from products, sums and a root alone, which round alike on every machine.

    With h = sin(pi u / 4): sin = 2 h sqrt(1 - h^2), cos = 1 - 2 h^2. Some four times as fast as a library's sine.
    """
    angle = u * (0.25 * math.pi)
    square = np.asarray(angle * angle)
    h = np.full_like(square, _SINE[-1])
    for coefficient in _SINE[-2::-1]:
        h *= square
        h += coefficient
    h *= angle
    np.multiply(h, h, out=square)
    sine = np.sqrt(1.0 - square)
    sine *= h
    sine *= 2.0
    square *= -2.0
    square += 1.0
    return sine, square
