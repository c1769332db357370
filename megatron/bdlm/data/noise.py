"""Stateless corruption: which tokens of a sample are corrupted, at which noise level, with which weight.

`corrupt` is a pure function of (seed, global sample index, epoch, purpose, view): the corrupted ids are bit-identical
on every rank of every layout, for every worker count, and after a resume. No generator has a state that could be lost.

Random bits: philox.py. One draw u in [0, 2^32) decides one token: it is corrupted when u < p * 2^32. p is computed in
float64, so the last bit of a platform's logarithm could matter only to a draw that equals the threshold exactly.

Shapes: L tokens of a sample, V views, B blocks, G groups that share a noise level (blocks, documents or the sequence).
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.philox import NoiseKey, pieces, scratch
from megatron.bdlm.data.schedules import NoiseSchedule, complement_weight
from megatron.bdlm.parallel.blocks import build_blocks

VALIDATION_T_RANGE = (1e-3, 1.0)
"""Noise levels of every validation: on a clipped range exp(NELBO) would bound nothing."""

_LEVEL, _ORDER, _SHIFT, _TOKEN, _REPLACEMENT, _SELF_CONDITIONING = range(6)  # the streams of one sample

_SMALL = 16  # tokens of a group that is reduced column by column


@dataclass(frozen=True)
class Noised:
    """One corrupted sample, one leading view axis."""

    xt: np.ndarray
    """[V, L] noisy streams, integer like the tokens"""

    corrupted: np.ndarray
    """[V, L] bool: tokens that were drawn for corruption (a uniform replacement may equal the original)"""

    t: np.ndarray
    """[V, L] float32 noise level of the token's group; a complementary view shows the level of the first one"""

    weight: np.ndarray
    """[V, L] float32 loss weight of a token, were it corrupted: the NELBO weight, or 1 for --bdlm-loss-weight unit"""

    nelbo_weight: np.ndarray
    """[V, L] float32: w = p'(t)/p(t) in the first view, p'(t)/(1-p(t)) in a complementary one (schedules.py)"""

    range_factor: float
    """Factor that makes the NELBO weight exact on this range of t; 1 for the linear schedule (schedules.py)"""

    block_starts: np.ndarray
    """[B] int64 first token of each block, over the whole sample"""


def corrupt(
    tokens: np.ndarray,
    eligible: np.ndarray,
    config: BDLMConfig,
    seed: int = 1234,
    sample_index: int = 0,
    epoch: int = 0,
    *,
    block_starts: Optional[Sequence[int]] = None,
    documents: Optional[Sequence[int]] = None,
    mask_token_id: Optional[int] = None,
    vocab_size: Optional[int] = None,
    t_range: Optional[tuple[float, float]] = None,
    purpose: str = "train",
) -> Noised:
    """Corrupt one sample.

    Args:
        tokens: [L] clean ids.
        eligible: [L] bool, tokens with supervision; the others are never corrupted. Never inferred from ids.
        config: corruption, schedule, granularity, draw, range, views and weight.
        seed, sample_index, epoch, purpose: the key of the noise; `sample_index` is global, before any sharding.
        block_starts: [B] first token of every block; default: blocks of config.bdlm_block_size inside each document.
        documents: lengths that sum to L (zero allowed); default: one document.
        mask_token_id: default config.bdlm_mask_token_id; only absorbing corruption needs it.
        vocab_size: only uniform corruption needs it: replacements are uniform on [0, vocab_size).
        t_range: (t_min, t_max); default: that of the config.

    Raises:
        ValueError: shapes, lengths or ids that contradict each other.
        TypeError: `eligible` is not boolean, or `tokens` not integer.
    """
    tokens, eligible = _checked(tokens, eligible)
    length = tokens.shape[0]
    key = NoiseKey(seed, sample_index, epoch, purpose)
    t_min, t_max = t_range if t_range is not None else (config.bdlm_t_min, config.bdlm_t_max)
    blocks = Groups.of_blocks(length, config.bdlm_block_size, documents, block_starts)
    groups = _level_groups(config.bdlm_noise_level_per, length, blocks, documents)
    schedule = NoiseSchedule(config.bdlm_noise_schedule, config.bdlm_noise_eps)

    own_place = config.bdlm_noise_level_per == "block"
    if t_min == t_max:
        t_G = np.full(len(groups.starts), t_min)
    else:
        t_G = _unit_levels(groups, eligible, config.bdlm_noise_draw, key, own_place)
        t_G *= t_max - t_min
        t_G += t_min
    views = config.bdlm_views
    thresholds, t_L, nelbo_weight = _tables(schedule, t_G, groups, views)
    corrupted = np.empty((views, length), dtype=bool)
    force = config.bdlm_force_one_corrupted
    largest = thresholds if groups.size == 1 else groups.expand(thresholds, scratch("largest", length, np.uint32))
    draws = key.below(_TOKEN, largest, out=corrupted[0], keep=force)
    corrupted[0] &= eligible
    if draws is not None:
        _force_one(corrupted[0], draws, eligible, blocks)
    if views == 2:
        np.greater(eligible, corrupted[0], out=corrupted[1])  # eligible and not corrupted in the first view
    unit = config.bdlm_loss_weight == "unit"
    return Noised(
        xt=_replace(tokens, corrupted, config, key, mask_token_id, vocab_size),
        corrupted=corrupted,
        t=np.broadcast_to(t_L, (views, length)),
        weight=np.broadcast_to(np.float32(1.0), nelbo_weight.shape) if unit else nelbo_weight,
        nelbo_weight=nelbo_weight,
        range_factor=schedule.range_factor(t_min, t_max),
        block_starts=blocks.starts,
    )


def is_self_conditioned(share: float, seed: int, sample_index: int, epoch: int, purpose: str = "train") -> bool:
    """Whether a sample is one of the `share` that also see what a first pass predicted; a function of its identity, as the noise."""
    return bool(NoiseKey(seed, sample_index, epoch, purpose).units(_SELF_CONDITIONING, 1)[0] < share)


def block_starts_of(
    length: int, block_size: int, documents: Optional[Sequence[int]] = None, restarts: Sequence[int] = ()
) -> np.ndarray:
    """First token of every block, counted anew from every document start and every restart (turns, a response).

    block_starts_of(10, 4) -> 0 4 8;  documents (7, 3) -> 0 4 7;  restarts (5,) -> 0 4 5 9

    Returns:
        [B] int64, ascending.
    """
    if length == 0 or (documents is None and not len(restarts)):
        return np.arange(0, length, block_size, dtype=np.int64)
    return build_blocks(length, block_size, documents, block_restarts=restarts).starts


def document_starts(length: int, documents: Optional[Sequence[int]]) -> np.ndarray:
    """[D] int64 first token of each document that holds one."""
    if documents is None:
        return np.zeros(1 if length else 0, dtype=np.int64)
    lengths = np.asarray(documents, dtype=np.int64)
    if lengths.sum() != length or (lengths < 0).any():
        raise ValueError(f"documents: lengths, not negative, must sum to {length}, they sum to {lengths.sum()}")
    lengths = lengths[lengths > 0]
    return np.cumsum(lengths) - lengths


def block_ids(starts: np.ndarray, length: int) -> np.ndarray:
    """[L] int64: which interval (block, document) each token lies in."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=length))


@dataclass(frozen=True)
class Groups:
    """Consecutive token intervals of one sample: blocks, documents, or the sequence."""

    starts: np.ndarray  # [G] int64
    length: int
    size: Optional[int]  # all groups but the last have this many tokens; None: they differ

    @classmethod
    def of_blocks(
        cls, length: int, block_size: int, documents: Optional[Sequence[int]], block_starts: Optional[Sequence[int]]
    ) -> "Groups":
        """The given blocks, or blocks of `block_size` inside each document."""
        starts = document_starts(length, documents)
        if block_starts is None:
            regular = block_size if len(starts) <= 1 else None
            return cls(block_starts_of(length, block_size, documents), length, regular)
        given = np.asarray(block_starts, dtype=np.int64)
        ascending = given.size > 0 and given[0] == 0 and bool((np.diff(given) > 0).all()) and given[-1] < length
        if length and not ascending:
            raise ValueError(f"block_starts: must ascend from 0 to below {length}, got {given[:8].tolist()}..")
        if not np.isin(starts, given).all():
            raise ValueError("block_starts: a block spans two documents; every document start must be a block start")
        return cls(given, length, None)

    def expand(self, values: np.ndarray, out: Optional[np.ndarray] = None) -> np.ndarray:
        """[G] -> [L]: each token gets the value of its group; into `out` where given."""
        if out is None and self.size == 1:
            return values
        if out is None:
            out = np.empty(self.length, dtype=values.dtype)
        if self.size is not None:
            whole = self.length // self.size
            out[: whole * self.size].reshape(whole, self.size)[:] = values[:whole, None]
            out[whole * self.size :] = values[whole:]
        else:
            out[:] = np.repeat(values, np.diff(self.starts, append=self.length))
        return out

    def any(self, flags: np.ndarray) -> np.ndarray:
        """[L] bool -> [G] bool: some token of the group is set."""
        if not self.length:
            return np.zeros(0, dtype=bool)
        if self.size is None or not self.size <= min(_SMALL, self.length):
            return np.logical_or.reduceat(flags, self.starts)
        whole = self.length // self.size * self.size
        columns = flags[:whole].reshape(-1, self.size).T  # column by column: reduceat costs more than a short group itself
        out = np.empty(len(self.starts), dtype=bool)
        out[-1] = flags[whole:].any()  # the short last group; overwritten where there is none
        inside = out[: columns.shape[1]]
        inside[:] = columns[0]
        for column in columns[1:]:
            inside |= column
        return out

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """The group of each of some tokens, int64."""
        return tokens // self.size if self.size is not None else np.searchsorted(self.starts, tokens, side="right") - 1


def _checked(tokens: np.ndarray, eligible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, eligible = np.asarray(tokens), np.asarray(eligible)
    if tokens.ndim != 1 or eligible.shape != tokens.shape:
        raise ValueError(f"tokens {tokens.shape}, eligible {eligible.shape}: both must have one axis, equally long")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens: integer ids, got {tokens.dtype}")
    if eligible.dtype != np.bool_:
        raise TypeError(f"eligible: a boolean array carried from the dataset, got {eligible.dtype}")
    # narrow unsigned ids (uint16 in .bin files) could not hold a mask id behind the vocabulary
    return (tokens if tokens.dtype in (np.int32, np.int64) else tokens.astype(np.int64)), eligible


def _level_groups(per: str, length: int, blocks: Groups, documents: Optional[Sequence[int]]) -> Groups:
    if per == "block":
        return blocks
    if per == "document":
        return Groups(document_starts(length, documents), length, None)
    return Groups(document_starts(length, None), length, None)


def _unit_levels(groups: Groups, eligible: np.ndarray, draw: str, key: NoiseKey, own_place: bool) -> np.ndarray:
    """[G] float64 in [0, 1): the noise levels before they are scaled to their range.

    Stratified: the n groups that hold an eligible token get one level in each of the n strata [k/n, (k+1)/n), in a
    random order. Inside its stratum the level of a block is independent (`own_place`); documents share one place in
    their strata, which walks through a low-discrepancy sequence over samples (for one level a sample: that sequence
    itself).
    """
    count = len(groups.starts)
    levels = key.units(_LEVEL, count)
    if draw == "uniform" or count == 0:
        return levels
    if not own_place:
        levels[:] = key.shift(_SHIFT)
    if eligible.all():
        levels += key.permutation(_ORDER, count)
        levels /= count
        return levels
    active = np.flatnonzero(groups.any(eligible))
    levels[active] = (key.permutation(_ORDER, len(active)) + levels[active]) / max(1, len(active))
    return levels


def _tables(schedule: NoiseSchedule, t_G: np.ndarray, groups: Groups, views: int) -> tuple[np.ndarray, ...]:
    """thresholds [G] uint32 (scratch), t [L] float32, NELBO weights [V, L] float32; a piece of the groups at a time, in cache."""
    count = len(t_G)
    thresholds = scratch("thresholds", count, np.uint32)
    t_32, weight_G = np.empty(count, dtype=np.float32), np.empty((views, count), dtype=np.float32)
    for piece in pieces(count):
        t_32[piece] = t_G[piece]
        p, rate = schedule.curve(t_G[piece])
        np.divide(rate, p, out=weight_G[0, piece], casting="same_kind")
        if views == 2:
            weight_G[1, piece] = complement_weight(p, rate)
        thresholds[piece] = _thresholds(p)
    if groups.size == 1:
        return thresholds, t_32, weight_G
    weights = np.empty((views, groups.length), dtype=np.float32)
    for weight, out in zip(weight_G, weights):
        groups.expand(weight, out)
    return thresholds, groups.expand(t_32), weights


def _thresholds(p: np.ndarray) -> np.ndarray:
    """p -> the largest 32-bit draw u with u < p * 2^32, which is below 2^32 for p = 1 too; overwrites p."""
    p *= 2.0**32
    np.ceil(p, out=p)
    np.clip(p, 1.0, 2.0**32, out=p)
    p -= 1.0
    return p


def _force_one(corrupted: np.ndarray, draws: np.ndarray, eligible: np.ndarray, blocks: Groups) -> None:
    """In place: corrupt the eligible token with the smallest draw in each block that has none corrupted.

    Given that no draw fell below the threshold, the smallest is uniform over the block's eligible tokens.
    """
    if blocks.size == 1:
        corrupted[:] = eligible
        return
    lacking = ~blocks.any(corrupted)
    candidates = np.flatnonzero(blocks.expand(lacking) & eligible)
    if not len(candidates):
        return
    draws = draws[candidates]
    starts = np.flatnonzero(np.diff(blocks.of(candidates), prepend=-1))
    smallest = np.repeat(np.minimum.reduceat(draws, starts), np.diff(starts, append=len(candidates)))
    corrupted[candidates[draws == smallest]] = True


def _replace(
    tokens: np.ndarray,
    corrupted: np.ndarray,
    config: BDLMConfig,
    key: NoiseKey,
    mask_token_id: Optional[int],
    vocab_size: Optional[int],
) -> np.ndarray:
    """[V, L] noisy streams."""
    if config.bdlm_corruption == "absorbing":
        mask = config.bdlm_mask_token_id if mask_token_id is None else mask_token_id
        if mask is None:
            raise ValueError(
                "--bdlm-mask-token-id None: absorbing corruption needs the id of the mask token. "
                "A legal value: the size of the vocabulary, for a new row behind it"
            )
        return _blend(tokens, mask, corrupted)
    if vocab_size is None or not 0 < vocab_size <= 2**32:
        raise ValueError(f"vocab_size {vocab_size}: uniform corruption draws from its ids. A legal value: 32000")
    return _blend(tokens, key.ids(_REPLACEMENT, tokens.shape[0], vocab_size, tokens.dtype), corrupted)


def _blend(tokens: np.ndarray, replacement: np.ndarray | int, corrupted: np.ndarray) -> np.ndarray:
    """[V, L]: the replacement where corrupted, else the token (4 times as fast as branching on random bits)."""
    out = np.empty(corrupted.shape, dtype=tokens.dtype)
    np.subtract(replacement, tokens, out=out)
    out *= corrupted.view(np.int8)
    out += tokens
    return out
