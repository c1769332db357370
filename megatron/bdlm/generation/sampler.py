"""Block by block sampling, left to right, with a cache of clean keys and values (docs/sampling.md).

Inside a block: start from all mask, run the noisy rows against the cache, commit some tokens, repeat until the block
is full; then run its rows once as clean ones to extend the cache. That clean run and the first noisy run of the next
block are one forward, because noisy rows may see clean rows of the same forward.

    prompt of 6 tokens, S = 4:  block 0 (tokens 0-3) goes to the cache; block 1 starts as [4, 5, mask, mask]

Label shift `next`: the token of a row comes from the row before it. For a block's first token that row is the last
clean one, whose logits the clean run gives.

Shapes: b sequences, s rows of a forward, S block size.
"""

import time
from dataclasses import dataclass
from typing import Callable, Optional, Protocol, Sequence

import numpy as np
import torch

from megatron.bdlm.generation.cache import KeyValueCache
from megatron.bdlm.generation.policy import SamplingOptions, propose, select_commits
from megatron.bdlm.generation.rows import CLEAN, NOISY, PADDING, BlockRules, SamplingParams, SamplingRows


class Model(Protocol):
    """What the sampler needs of a model: full-vocabulary logits of the rows of a forward."""

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """int64 [b, s], int64 [b, s] -> [b, s, vocabulary]; every core attention calls `params.attend`."""


@dataclass(frozen=True)
class SampledSequence:
    """One continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """New tokens; the end-of-text token, where one was sampled, is the last."""
    finish: str
    """'eos' or 'length'."""
    commits: tuple[int, ...]
    """Tokens committed in each denoising step."""

    def shown(self, end_tokens: Sequence[int]) -> list[int]:
        """The prompt as it was given, then the new tokens without end-of-text."""
        return [*self.prompt, *(token for token in self.tokens if token not in end_tokens)]


@dataclass
class SamplingStatistics:
    """Counts of one call of `sample`."""

    forwards: int = 0
    """Calls of the model."""
    denoising_steps: int = 0
    """Forwards that held noisy rows, summed over sequences."""
    clean_rows: int = 0
    noisy_rows: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of a sequence for each forward that denoised it."""
        return self.new_tokens / max(self.denoising_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class SamplingResult:
    sequences: list[SampledSequence]
    statistics: SamplingStatistics


@torch.no_grad()
def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    rules: BlockRules,
    options: SamplingOptions,
    *,
    use_cache: bool = True,
    prefill_rows: int = 512,
    device: torch.device | str = "cpu",
    progress: Optional[Callable[[int], None]] = None,
) -> SamplingResult:
    """Continue a batch of prompts of any lengths.

    Args:
        prompts: token ids of each prompt.
        use_cache: False runs all clean rows in every forward (to check the cache, slow).
        prefill_rows: prompt tokens that one forward takes in (rounded to whole blocks, at least one).
        progress: called after each forward with the number of tokens committed in it.

    Raises:
        ValueError: a prompt that cannot be continued, named by its index.
    """
    started = time.perf_counter()
    statistics = SamplingStatistics()
    active = [_Sequence(index, prompt, rules, options) for index, prompt in enumerate(prompts)]
    finished: dict[int, SampledSequence] = {}
    cache = KeyValueCache(len(active), device)
    chunk = max(prefill_rows // rules.block_size, 1) * rules.block_size if use_cache else None
    while active:
        rows = _rows([s.next_rows(chunk) for s in active], device)
        logits = model(rows.input_ids, rows.position_ids, SamplingParams.of(rows, rules, cache))
        if use_cache:
            cache.advance(rows.clean_counts)
        committed = sum(s.take(logits[i]) for i, s in enumerate(active))
        _count(statistics, rows, committed)
        if progress is not None:
            progress(committed)
        remaining = [i for i, s in enumerate(active) if s.finish is None]
        finished.update({s.index: s.result() for s in active if s.finish is not None})
        if len(remaining) < len(active):
            active = [active[i] for i in remaining]
            cache.keep(remaining)
            if not use_cache:
                cache = KeyValueCache(len(active), device)
    statistics.seconds = time.perf_counter() - started
    statistics.new_tokens = sum(len(s.tokens) for s in finished.values())
    return SamplingResult([finished[i] for i in range(len(prompts))], statistics)


def _count(statistics: SamplingStatistics, rows: SamplingRows, committed: int) -> None:
    noisy = rows.kind == NOISY
    statistics.forwards += 1
    statistics.denoising_steps += int(noisy.any(1).sum())
    statistics.noisy_rows += int(noisy.sum())
    statistics.clean_rows += int(rows.clean_counts.sum())


@dataclass
class _NextRows:
    """Rows of one sequence for one forward: `clean` tokens from position `start`, then the noisy block, if any."""

    start: int
    clean: np.ndarray
    noisy: np.ndarray


def _rows(parts: list[_NextRows], device: torch.device | str) -> SamplingRows:
    """One rectangular batch, padded behind the shorter sequences."""
    width = max(len(p.clean) + len(p.noisy) for p in parts)
    ids = np.zeros((len(parts), width), np.int64)
    positions = np.zeros_like(ids)
    kind = np.full(ids.shape, PADDING, np.int8)
    for i, part in enumerate(parts):
        clean, count = len(part.clean), len(part.clean) + len(part.noisy)
        ids[i, :count] = np.concatenate([part.clean, part.noisy])
        positions[i, :count] = part.start + np.arange(count)
        kind[i, :clean], kind[i, clean:count] = CLEAN, NOISY
    tensor = [torch.from_numpy(x).to(device) for x in (ids, positions, kind)]
    return SamplingRows(*tensor, clean_counts=torch.tensor([len(p.clean) for p in parts], device=device))


class _Sequence:
    """State of one continuation: finished blocks, the block being filled, and how much of it is in the cache."""

    def __init__(self, index: int, prompt: Sequence[int], rules: BlockRules, options: SamplingOptions):
        self.index, self.prompt, self.rules, self.options = index, tuple(int(t) for t in prompt), rules, options
        outside = [t for t in self.prompt if not 0 <= t < rules.vocab_size]
        if outside:
            raise ValueError(f"prompt {index}: token id {outside[0]} is outside the vocabulary of {rules.vocab_size}")
        if not self.prompt and rules.label_shift == "next":
            raise ValueError(
                f"prompt {index} is empty: with --bdlm-label-shift next no row predicts token 0. "
                "A legal prompt: one token, for example the beginning-of-text token"
            )
        self.limit = len(self.prompt) + options.max_new_tokens
        whole = len(self.prompt) // rules.block_size * rules.block_size
        self.finished = list(self.prompt[:whole])  # tokens of full blocks
        self.cached = 0  # how many of them earlier forwards have seen as clean rows
        self.commits: list[int] = []
        self.finish: Optional[str] = None
        self.random = np.random.Generator(np.random.Philox(key=[options.seed, index]))
        self.previous_logits: Optional[torch.Tensor] = None  # of the last clean row, for label shift next
        self._open_block(self.prompt[whole:])

    def _open_block(self, fixed: Sequence[int] = ()) -> None:
        """A block of masks whose first tokens may be fixed (the rest of a prompt)."""
        self.start = len(self.finished)
        self.block = np.full(self.rules.block_size, self.rules.mask_token_id, np.int64)
        self.committed = np.zeros(self.rules.block_size, bool)
        self.block[: len(fixed)] = fixed
        self.committed[: len(fixed)] = True
        self.step = 0

    def next_rows(self, chunk: Optional[int]) -> _NextRows:
        """Rows for the next forward: at most `chunk` clean ones; without a chunk all of them, every time."""
        if chunk is None:
            self.cached = 0
        start = self.cached
        stop = self.start if chunk is None else min(self.start, start + chunk)
        self.cached = stop
        ready = stop == self.start
        self._shape = (stop - start, ready)
        return _NextRows(start, np.asarray(self.finished[start:stop], np.int64), self.block if ready else self.block[:0])

    def take(self, logits: torch.Tensor) -> int:
        """Commit tokens out of this forward's logits [s, vocabulary]; returns how many."""
        clean, ready = self._shape
        if not ready:
            return 0
        if clean:
            self.previous_logits = logits[clean - 1]
        rows = logits[clean : clean + self.rules.block_size]
        if self.rules.label_shift == "next":
            # row -1 of a document does not exist; its block starts with a fixed token, so any row fills the place
            first = rows[0] if self.previous_logits is None else self.previous_logits
            rows = torch.cat([first[None], rows[:-1]])
        tokens, confidence = propose(rows, self.rules, self.options, self.random.random(len(rows)))
        chosen = select_commits(confidence.cpu().numpy(), self._candidates(), self.options, self.step)
        self.block[chosen] = tokens.cpu().numpy()[chosen]
        self.committed |= chosen
        self.step += 1
        self.commits.append(int(chosen.sum()))
        self._close_if_full()
        return self.commits[-1]

    def _end_of_text(self) -> Optional[int]:
        """Place in the block of the first sampled end-of-text token."""
        sampled = self.committed & (self.start + np.arange(len(self.block)) >= len(self.prompt))
        places = np.flatnonzero(sampled & np.isin(self.block, self.options.eos_token_ids))
        return int(places[0]) if len(places) else None

    def _needed(self) -> np.ndarray:
        """Places of the block whose token the result needs: those before an end of text and within the limit."""
        places = np.arange(len(self.block))
        end = self._end_of_text()
        return (self.start + places < self.limit) & (places <= (len(places) if end is None else end))

    def _candidates(self) -> np.ndarray:
        return self._needed() & ~self.committed

    def _close_if_full(self) -> None:
        if self._candidates().any():
            return
        self.finished.extend(self.block[self._needed()].tolist())
        if self._end_of_text() is not None:
            self.finish = "eos"
        elif len(self.finished) >= self.limit:
            self.finish = "length"
        else:
            self._open_block()

    def result(self) -> SampledSequence:
        new = tuple(int(t) for t in self.finished[len(self.prompt) :])
        return SampledSequence(self.prompt, new, self.finish, tuple(self.commits))
