"""Losses of draft rows: position weights, and sums with their weights, so that the global batch has one denominator.

    A anchors     B block size     k row of a block: predicts token a + k, row 0 is known     gamma: decay of the weights

`ce`     weight w_k = exp(-(k - 1) / gamma) of -log p_k (DFlash, arXiv 2602.06036)
`kl`     the same weights of KL(teacher || draft), the teacher's logits taken at a + k - 1
`dpace`  the weight follows what the drafter can reach (D-PACE, arXiv 2605.18810): with p_k the probability of the label,
         s_k = (1 - alpha) p_k + alpha at scored rows and 1 elsewhere, P_k = prod_{j<=k} s_j, the weight is the sum of
         P_j over the scored rows j >= k. Weights carry no gradient.

Example, alpha 0.5, p = (., .9, .5, .2): s = .95, .75, .6, P = .95, .7125, .4275, weights 2.09, 1.14, .4275.

Every loss is a pair (sum of weight * loss, sum of weights). The training step adds both up over micro-batches and ranks
and divides once.
"""

import torch
from torch import Tensor

KINDS = ("ce", "kl", "dpace")
DPACE_VARIANTS = ("suffix", "prefix", "continuation")
LK_KINDS = ("none", "tv", "lambda")


def default_gamma(block_size: int) -> float:
    """gamma of the published recipes: 7 at B = 16, 5 at 10, 4 at 8; half the block size between and beyond them."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(block_size / 2, 1.0))


def position_weights(block_size: int, gamma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """w [B]: 0, 1, exp(-1 / gamma), exp(-2 / gamma), .."""
    k = torch.arange(block_size, dtype=dtype)
    weights = torch.exp(-(k - 1) / gamma)
    weights[0] = 0
    return weights


def dpace_weights(p: Tensor, scored: Tensor, alpha: float, variant: str = "suffix") -> Tensor:
    """Weights [A, B] of D-PACE; 0 where a row is not scored.

    Args:
        p: [A, B] probability of the label, anything at rows that are not scored.
        scored: bool [A, B].
        alpha: 1 ignores p.
        variant: "suffix" (the sum of P_j from k on), "prefix" (P_k alone), "continuation" (suffix / P_k).
    """
    reach = torch.where(scored, (1 - alpha) * p.detach() + alpha, torch.ones_like(p)).cumprod(1)
    if variant == "prefix":
        weights = reach
    else:
        weights = (reach * scored).flip(1).cumsum(1).flip(1)
        if variant == "continuation":
            weights = weights / reach
    return weights * scored


def lk_loss(nll: Tensor, kind: str, kl_scale: float = 1.0, kl_decay: float = 1.0) -> Tensor:
    """A row's loss from the label's negative log-likelihood, any shape.

    "none": nll. "tv": 1 - p. "lambda": c nll + (1 - c)(1 - p) with c = kl_scale * exp(-kl_decay * mean p), which goes
    from one to the other as the drafter learns; c carries no gradient.
    """
    if kind == "none":
        return nll
    p = torch.exp(-nll)
    if kind == "tv":
        return 1 - p
    c = kl_scale * torch.exp(-kl_decay * p.detach().mean()) if p.numel() else p.sum()
    return c * nll + (1 - c) * (1 - p)


def weighted_sum(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of weight * loss, sum of weights) of rows [n]; finite, with a graph, for n = 0."""
    return (losses * weights.to(losses.dtype)).sum(), weights.detach().sum()
