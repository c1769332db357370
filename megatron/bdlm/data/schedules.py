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

    def probability(self, t: np.ndarray) -> np.ndarray:
        """p(t), the probability that an eligible token is corrupted."""
        t = np.asarray(t, dtype=np.float64)
        if self.name == "linear":
            # (1-eps) t + eps written as 1 - (1-eps)(1-t): exactly 1 at t = 1; in place: as long as a sample at S = 1
            p = 1.0 - t
            p *= self.eps - 1.0
            p += 1.0
            return p
        if self.name == "quadratic":
            return t * t
        if self.name == "sqrt":
            return np.sqrt(t)
        if self.name == "log":
            return np.log1p(t) / math.log(2.0)
        # the cosine written as a sine of the complement, which is exactly 0 at t = 1
        return 1.0 - (1.0 - self.eps) * np.sin(0.5 * math.pi * (1.0 - t))

    def rate(self, t: np.ndarray) -> np.ndarray:
        """w(t) p(t): p'(t), and 1 for the linear schedule, whose published weight is 1/p rather than (1-eps)/p."""
        t = np.asarray(t, dtype=np.float64)
        if self.name == "linear":
            return np.ones_like(t)
        if self.name == "quadratic":
            return 2.0 * t
        if self.name == "sqrt":
            return 0.5 / np.sqrt(t)
        if self.name == "log":
            return 1.0 / ((1.0 + t) * math.log(2.0))
        return (1.0 - self.eps) * 0.5 * math.pi * np.sin(0.5 * math.pi * t)

    def weight(self, t: np.ndarray) -> np.ndarray:
        """w(t), the NELBO weight of a corrupted token."""
        p = self.probability(t)
        if self.name == "linear":
            return np.reciprocal(p, out=p)
        return np.divide(self.rate(t), p, out=p)

    def complement_weight(self, t: np.ndarray) -> np.ndarray:
        """The NELBO weight in the second, complementary view, whose corruption probability is 1 - p(t).

        Its level t2 solves p(t2) = 1 - p(t); for uniform t the density of t2 is p'(t2)/p'(t), so the unbiased weight is
        (p'(t2) / p(t2)) / (p'(t2) / p'(t)) = p'(t) / (1 - p(t)). Where p(t) = 1 the view corrupts nothing: weight 0.
        """
        left = 1.0 - self.probability(t)
        return np.divide(self.rate(t), left, out=np.zeros_like(left), where=left > 0.0)

    def range_factor(self, t_min: float, t_max: float) -> float:
        """1 / E[w(t) p(t)] for t uniform on [t_min, t_max]; 1 for the linear schedule."""
        if self.name == "linear":
            return 1.0
        if t_max == t_min:
            return float(1.0 / self.rate(t_min))
        low, high = self.probability(np.array([t_min, t_max]))
        return float((t_max - t_min) / (high - low))
