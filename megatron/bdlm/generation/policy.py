"""Which token a row proposes, and which proposals are committed in a step.

Pure functions of logits and options. The mask token and padded rows of the vocabulary are never proposed. The
confidence of a proposal is the model's own probability of it (temperature and top-p change what is proposed, not
how sure the model is of it).
"""

import math
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from megatron.bdlm.generation.rows import BlockRules


@dataclass(frozen=True)
class SamplingOptions:
    """What the user chooses; each field is the flag of tools/generate.py with the same name."""

    max_new_tokens: int = 128
    steps: Optional[int] = None
    """Denoising steps a block: each commits an equal share of what is left."""
    tokens_per_step: Optional[int] = None
    """Tokens committed a step, the most confident first; default 1 where --steps is not given."""
    threshold: Optional[float] = None
    """Commit besides every token whose confidence is at least this."""
    temperature: float = 0.0
    """0 proposes the most probable token."""
    top_p: float = 1.0
    """Propose from the smallest set of tokens whose probability reaches this."""
    seed: int = 1234
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        def require(holds: bool, flag: str, value: object, rule: str, legal: str) -> None:
            if not holds:
                raise ValueError(f"{flag} {value}: {rule}. A legal value: {legal}")

        require(self.max_new_tokens >= 1, "--max-new-tokens", self.max_new_tokens, "at least 1", "128")
        require(self.steps is None or self.steps >= 1, "--steps", self.steps, "at least 1", "8")
        require(self.tokens_per_step is None or self.tokens_per_step >= 1, "--tokens-per-step", self.tokens_per_step, "at least 1", "1")
        require(
            self.steps is None or self.tokens_per_step is None, "--tokens-per-step", self.tokens_per_step,
            f"--steps {self.steps} already says how many tokens a step commits; give one of the two", "none",
        )
        require(self.threshold is None or 0.0 < self.threshold <= 1.0, "--threshold", self.threshold, "0 < threshold <= 1", "0.9")
        require(
            math.isfinite(self.temperature) and self.temperature >= 0.0, "--temperature", self.temperature,
            "finite and not negative", "0.7",
        )
        require(0.0 < self.top_p <= 1.0, "--top-p", self.top_p, "0 < top-p <= 1", "0.95")


def propose(
    logits: torch.Tensor, rules: BlockRules, options: SamplingOptions, uniforms: Optional[np.ndarray] = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for every row.

    Args:
        logits: [r, vocabulary, padded or not].
        uniforms: float64 [r] in [0, 1), one a row; used where the temperature is not 0.

    Returns:
        int64 [r] tokens and their confidence [r] in [0, 1].
    """
    logits = logits[:, : rules.vocab_size]
    if logits.dtype != torch.float64:
        logits = logits.float()
    real = logits.clone()
    real[:, rules.mask_token_id] = -torch.inf
    probability = (logits if rules.keep_mask_logit else real).softmax(-1)
    if options.temperature == 0.0:
        tokens = real.argmax(-1)
    else:
        tokens = _draw((real / options.temperature).softmax(-1), options.top_p, uniforms)
    return tokens, probability.gather(-1, tokens[:, None])[:, 0]


def _draw(probability: torch.Tensor, top_p: float, uniforms: np.ndarray) -> torch.Tensor:
    """Inverse transform sampling from the most probable tokens: [r, vocabulary] -> int64 [r]."""
    ordered, token = probability.double().sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1)
    # a token stays when those before it do not reach top_p yet; the first always does
    kept = ((cumulative - ordered < top_p) & (ordered > 0)).sum(-1, keepdim=True)
    total = cumulative.gather(-1, kept - 1)
    target = torch.from_numpy(uniforms).to(cumulative)[:, None] * total
    rank = torch.searchsorted(cumulative, target, right=True).minimum(kept - 1)
    return token.gather(-1, rank)[:, 0]


def select_commits(confidence: np.ndarray, candidates: np.ndarray, options: SamplingOptions, step: int) -> np.ndarray:
    """Which proposals of a block are committed in this step: at least one while there are candidates.

    Args:
        confidence: [S].
        candidates: bool [S], positions that may be committed.
        step: denoising steps already made in this block.

    Returns:
        bool [S]; of equal confidences the earlier position goes first.
    """
    remaining = int(candidates.sum())
    if options.steps is not None:
        count = math.ceil(remaining / max(options.steps - step, 1))
    else:
        count = min(options.tokens_per_step or 1, remaining)
    order = np.argsort(np.where(candidates, -confidence.astype(np.float64), np.inf), kind="stable")
    chosen = np.zeros_like(candidates)
    chosen[order[:count]] = True
    if options.threshold is not None:
        chosen |= candidates & (confidence >= options.threshold)
    return chosen
