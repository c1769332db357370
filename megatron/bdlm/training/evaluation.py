"""Likelihood of text under a block diffusion model: the NELBO by Monte Carlo, and multiple choice by it.

    -log p(x) <= sum over blocks E_t sum over corrupted tokens w(t) * -log p(x_i | noisy block, clean earlier blocks)

One draw of the noise gives one estimate of the bound; the noise of draw k and sample i is a pure function of (seed, i,
k), so two models are compared on the same noise. The range of t is that of validation, [0.001, 1]: anything narrower
would be no bound.

Shapes: L tokens of a sample, b samples (or draws of one sample) in a forward, n scored rows.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Optional, Sequence

import numpy as np
import torch

from megatron.bdlm.attention.core_attention import AttentionOptions, BlockDiffusionParams
from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.data.noise import Noised, block_starts_of, corrupt
from megatron.bdlm.objective.loss import T_BUCKETS, ScoredRows, select_rows
from megatron.bdlm.objective.targets import Targets, build_targets, target_blocks
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.training.step import validation_config

STUDENT_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
"""97.5% quantiles of Student's t for 1 to 30 degrees of freedom; beyond, 1.96."""

RowLikelihood = Callable[[torch.Tensor, torch.Tensor, BlockDiffusionParams, ScoredRows], torch.Tensor]
"""ids [b, s], positions [b, s], parameters, rows -> negative log-likelihoods [n] in nats."""


@dataclass(frozen=True)
class Text:
    """A sample to score; `eligible` bool [L] says which tokens."""

    tokens: np.ndarray
    eligible: np.ndarray
    index: int
    """Names its noise."""


@dataclass(frozen=True)
class Score:
    """Sums over the scored tokens of one sample under one draw; arrays are by noise level, `T_BUCKETS` long."""

    nelbo: np.ndarray  # weighted negative log-likelihood in nats
    cross_entropy: np.ndarray  # unweighted
    masked: np.ndarray  # corrupted tokens
    supervised: np.ndarray  # scored tokens, corrupted or not

    def __add__(self, other: "Score") -> "Score":
        return Score(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


class Likelihood:
    """Scores samples under draws of the noise.

    Args:
        row_likelihood: the model.
        config: the model's options; its objective becomes that of validation.
        seed: of the noise.
        vocab_size: tokens of the tokenizer.
        device: where the model is.

    Raises:
        BDLMConfigError: a corruption that has no bound.
    """

    def __init__(
        self, row_likelihood: RowLikelihood, config: BDLMConfig, seed: int, vocab_size: int, device: torch.device
    ):
        if config.bdlm_corruption != "absorbing":
            raise BDLMConfigError(
                f"--bdlm-corruption {config.bdlm_corruption}: its loss bounds no likelihood. "
                "A legal value: absorbing (in training)"
            )
        self._row_likelihood, self._seed, self._vocab_size, self._device = row_likelihood, seed, vocab_size, device
        self._config = dataclasses.replace(validation_config(config), bdlm_block_size_schedule=None)

    @torch.no_grad()
    def score(self, samples: Sequence[Text], draws: Sequence[int]) -> list[Score]:
        """Scores of samples of one length and with the same target blocks, each under the draw beside it."""
        config = self._config
        plan = self._plan(samples[0])
        noised = [self._noised(sample, draw) for sample, draw in zip(samples, draws)]
        targets = [build_targets(s.tokens, s.eligible, noise, None, config) for s, noise in zip(samples, noised)]
        rows = select_rows(targets, plan.rows, plan.scored_clean)
        streams = torch.stack(
            [torch.from_numpy(np.concatenate([n.xt[0], s.tokens])) for s, n in zip(samples, noised)], dim=1
        )
        input_ids = plan.take(streams, 0).t().contiguous().to(self._device)
        final = plan.noisy_rows or None
        params = BlockDiffusionParams.from_plan(plan, None, AttentionOptions(), self._device, final)
        positions = params.position_ids.expand(len(samples), -1)
        nll = self._row_likelihood(input_ids, positions, params, rows.to(self._device)).double().cpu()
        return [_score(nll, rows, rows.index % len(samples) == place, target) for place, target in enumerate(targets)]

    def _noised(self, sample: Text, draw: int) -> Noised:
        return corrupt(
            sample.tokens,
            sample.eligible,
            self._config,
            self._seed,
            sample.index,
            draw,
            vocab_size=self._vocab_size,
            purpose="validation",
        )

    def _plan(self, sample: Text) -> SequencePlan:
        config, length = self._config, len(sample.tokens)
        starts = block_starts_of(length, config.bdlm_block_size)
        chosen = target_blocks(sample.eligible, starts, None, config.bdlm_label_shift).tolist()
        return SequencePlan.build(
            seq_length=length,
            block_size=config.bdlm_block_size,
            context_parallel_size=1,
            block_parallel_size=1,
            rank=0,
            clean_attention=config.bdlm_clean_attention,
            noisy_attention=config.bdlm_noisy_attention,
            target_blocks=None if len(chosen) == len(starts) else chosen,
        )


def _score(nll: torch.Tensor, rows: ScoredRows, own: torch.Tensor, target: Targets) -> Score:
    """Sums of one sample's rows, `own` bool [n], by noise level."""

    def by_level(t: np.ndarray, values: Optional[np.ndarray] = None) -> np.ndarray:
        bucket = np.minimum((t * np.float32(T_BUCKETS)).astype(np.int64), T_BUCKETS - 1)
        return np.bincount(bucket, values, minlength=T_BUCKETS).astype(np.float64)

    t, values = rows.t[own].numpy(), nll[own].numpy()
    levels = target.t[0][target.supervised[0]]
    return Score(
        by_level(t, values * rows.nelbo_weight[own].numpy()), by_level(t, values), by_level(t), by_level(levels)
    )


# ---- a held-out text -----------------------------------------------------------------------


def cut(stream: Sequence[int], length: int) -> list[Text]:
    """Samples of `length` tokens out of one stream; the last one may be shorter, of two tokens at least."""
    tokens = np.asarray(stream, dtype=np.int64)
    pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [Text(piece, np.ones(len(piece), dtype=bool), index) for index, piece in enumerate(pieces) if len(piece) > 1]


def evaluate_text(
    likelihood: Likelihood,
    samples: Sequence[Text],
    draws: int,
    batch: int,
    size_bytes: Optional[int] = None,
    progress: Optional[Callable[[int], None]] = None,
) -> dict[str, Any]:
    """NELBO per token, its 95% interval over the draws, the perplexity bound, and both by noise level.

    Args:
        batch: samples in one forward.
        size_bytes: of the text, for bits per byte.
        progress: called with the number of samples scored.
    """
    totals = []
    for draw in range(draws):
        scores: list[Score] = []
        for group in _groups(samples, batch):
            scores += likelihood.score(group, [draw] * len(group))
            if progress is not None:
                progress(len(group))
        totals.append(_total(scores))
    tokens = int(totals[0].supervised.sum())
    estimates = [float(total.nelbo.sum()) / tokens for total in totals]
    mean, half = interval(estimates)
    result: dict[str, Any] = {
        "tokens": tokens,
        "draws": draws,
        "nelbo": mean,
        "nelbo_95": half,
        "nelbo_of_draws": estimates,
        "ppl_bound": math.exp(mean),
        "ppl_bound_95": None if half is None else [math.exp(mean - half), math.exp(mean + half)],
    }
    if size_bytes:
        result["bits_per_byte_bound"] = mean * tokens / size_bytes / math.log(2)
    whole = _total(totals)
    result["masked_cross_entropy"] = _ratio(whole.cross_entropy.sum(), whole.masked.sum())
    result["by_noise_level"] = [
        {
            "t": [b / T_BUCKETS, (b + 1) / T_BUCKETS],
            "nelbo": _ratio(whole.nelbo[b], whole.supervised[b]),
            "masked_cross_entropy": _ratio(whole.cross_entropy[b], whole.masked[b]),
            "masked_tokens": int(whole.masked[b]),
        }
        for b in range(T_BUCKETS)
    ]
    return result


def interval(estimates: Sequence[float]) -> tuple[float, Optional[float]]:
    """Mean of independent estimates and half the width of its 95% interval (Student's t); None for one estimate."""
    mean, count = sum(estimates) / len(estimates), len(estimates)
    if count == 1:
        return mean, None
    variance = sum((value - mean) ** 2 for value in estimates) / (count - 1)
    quantile = STUDENT_T[count - 2] if count - 2 < len(STUDENT_T) else 1.96
    return mean, quantile * math.sqrt(variance / count)


def _groups(samples: Sequence[Text], batch: int) -> Iterable[list[Text]]:
    """Up to `batch` neighbours of the same length at a time."""
    group: list[Text] = []
    for sample in samples:
        if group and (len(group) == batch or len(sample.tokens) != len(group[0].tokens)):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _total(scores: Sequence[Score]) -> Score:
    total = scores[0]
    for score in scores[1:]:
        total += score
    return total


def _ratio(total: float, count: float) -> Optional[float]:
    return float(total) / float(count) if count else None


# ---- multiple choice -----------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A context, continuations of it, and which is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


def evaluate_choices(
    likelihood: Likelihood,
    questions: Sequence[Question],
    tokenize: Callable[[str], Sequence[int]],
    draws: int,
    batch: int,
    progress: Optional[Callable[[int], None]] = None,
) -> dict[str, Any]:
    """Zero-shot multiple choice: the choice with the smallest NELBO given the context wins.

    Every choice of a question is scored under the same draws. `accuracy` compares the sums, `accuracy_per_byte` the
    sums divided by the length of the choice in bytes, which does not prefer short ones.
    """
    details = []
    for number, question in enumerate(questions):
        bounds = [
            _choice_bound(likelihood, _choice(question, c, tokenize, number), draws, batch) for c in question.choices
        ]
        per_byte = [bound / max(len(choice.encode()), 1) for bound, choice in zip(bounds, question.choices)]
        details.append(
            {
                "answer": question.answer,
                "nelbo_of_choices": bounds,
                "chosen": int(np.argmin(bounds)),
                "chosen_per_byte": int(np.argmin(per_byte)),
            }
        )
        if progress is not None:
            progress(1)
    result: dict[str, Any] = {"questions": len(questions), "draws": draws}
    for name, key in (("accuracy", "chosen"), ("accuracy_per_byte", "chosen_per_byte")):
        share = sum(d[key] == d["answer"] for d in details) / len(details)
        result[name] = share
        result[f"{name}_standard_error"] = math.sqrt(share * (1 - share) / len(details))
    return {**result, "details": details}


def _choice(question: Question, choice: str, tokenize: Callable[[str], Sequence[int]], number: int) -> Text:
    """The question with one choice; only the tokens of the choice are scored."""
    context, whole = len(tokenize(question.context)), np.asarray(tokenize(question.context + choice), dtype=np.int64)
    if len(whole) <= context:
        raise ValueError(
            f"question {number}: choice {choice!r} adds no token to its context; every choice must be a text"
        )
    return Text(whole, np.arange(len(whole)) >= context, number)


def _choice_bound(likelihood: Likelihood, sample: Text, draws: int, batch: int) -> float:
    """Mean over draws of the NELBO in nats."""
    scores: list[Score] = []
    for start in range(0, draws, batch):
        these = range(start, min(start + batch, draws))
        scores += likelihood.score([sample] * len(these), list(these))
    return float(sum(score.nelbo.sum() for score in scores)) / draws
