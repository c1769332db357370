"""Stateless corruption: which tokens of a sample are corrupted, at which noise level, with which weight.

`corrupt` is a pure function of (seed, global sample index, epoch, purpose, view): the corrupted ids are bit-identical
on every rank of every layout, for every worker count, and after a resume. No generator has a state that could be lost.

Random bits come from Philox4x64, a counter-based generator. Key and counter of a stream (all unsigned 64-bit words):

    key     = (seed, first 8 bytes of SHA-256 of the purpose)
    counter = (0, stream + 256 * view, epoch, sample index)

The first counter word counts the blocks of output, so that streams never overlap. Streams are drawn as 32-bit words
(little-endian halves of the generator's raw output); a permutation is drawn by `RandomState`, whose
stream NumPy keeps frozen.

One draw u in [0, 2^32) decides one token: it is corrupted when u < p * 2^32. p is computed in float64, so the last
bit of a platform's log or cosine could matter only to a draw that equals the threshold exactly.

Shapes: L tokens of a sample, V views, B blocks, G groups that share a noise level (blocks, documents or the sequence).
"""

import hashlib
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.schedules import NoiseSchedule
from megatron.bdlm.parallel.blocks import build_blocks

VALIDATION_T_RANGE = (1e-3, 1.0)
"""Noise levels of every validation: on a clipped range exp(NELBO) would bound nothing."""

_LEVEL, _ORDER, _SHIFT, _TOKEN, _REPLACEMENT = range(5)  # the streams of one sample

_PIECE = 1 << 15  # words drawn at a time; even
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it modulo 2^64 are a low-discrepancy sequence


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
    sample_index: int = 17,
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
    key = _NoiseKey(seed, sample_index, epoch, purpose)
    t_min, t_max = t_range if t_range is not None else (config.bdlm_t_min, config.bdlm_t_max)
    blocks = Groups.of_blocks(length, config.bdlm_block_size, documents, block_starts)
    groups = _level_groups(config.bdlm_noise_level_per, length, blocks, documents)
    schedule = NoiseSchedule(config.bdlm_noise_schedule, config.bdlm_noise_eps)

    own_place = config.bdlm_noise_level_per == "block"
    t_G = _unit_levels(groups, eligible, config.bdlm_noise_draw, key, own_place)
    t_G *= t_max - t_min
    t_G += t_min
    views = config.bdlm_views
    corrupted = np.empty((views, length), dtype=bool)
    key.below(_TOKEN, groups.expand(_thresholds(schedule.probability(t_G))), out=corrupted[0])
    corrupted[0] &= eligible
    if config.bdlm_force_one_corrupted:
        _force_one(corrupted[0], key.words(_TOKEN, length), eligible, blocks)
    if views == 2:
        np.greater(eligible, corrupted[0], out=corrupted[1])  # eligible and not corrupted in the first view
    t_L = groups.expand(t_G.astype(np.float32))
    weights = [groups.expand(schedule.weight(t_G).astype(np.float32))]
    if views == 2:
        weights.append(groups.expand(schedule.complement_weight(t_G).astype(np.float32)))
    nelbo_weight = weights[0][None] if views == 1 else np.stack(weights)
    unit = config.bdlm_loss_weight == "unit"
    return Noised(
        xt=_replace(tokens, corrupted, config, key, mask_token_id, vocab_size),
        corrupted=corrupted,
        t=t_L[None] if views == 1 else np.stack([t_L, t_L]),
        weight=np.ones_like(nelbo_weight) if unit else nelbo_weight,
        nelbo_weight=nelbo_weight,
        range_factor=schedule.range_factor(t_min, t_max),
        block_starts=blocks.starts,
    )


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

    def expand(self, values: np.ndarray) -> np.ndarray:
        """[G] -> [L]: each token gets the value of its group."""
        if self.size == 1:
            return values
        if self.size is not None:
            return np.repeat(values, self.size)[: self.length]
        return np.repeat(values, np.diff(self.starts, append=self.length))

    def any(self, flags: np.ndarray) -> np.ndarray:
        """[L] bool -> [G] bool: some token of the group is set."""
        if not self.length:
            return np.zeros(0, dtype=bool)
        return np.logical_or.reduceat(flags, self.starts)


class _NoiseKey:
    """The key of one sample's noise, and the streams it opens (module docstring)."""

    def __init__(self, seed: int, sample_index: int, epoch: int, purpose: str):
        if sample_index < 0 or epoch < 0:
            raise ValueError(f"sample_index {sample_index}, epoch {epoch}: both must be 0 or more")
        digest = hashlib.sha256(purpose.encode()).digest()[:8]
        self._key = np.array([seed % _WORD, int.from_bytes(digest, "little")], dtype=np.uint64)
        self._sample, self._epoch = sample_index, epoch

    def _philox(self, stream: int, sample: int, view: int = 0) -> np.random.Philox:
        counter = np.array([0, stream + 256 * view, self._epoch, sample], dtype=np.uint64)
        return np.random.Philox(key=self._key, counter=counter)

    def words(self, stream: int, count: int) -> np.ndarray:
        """[count] uint32"""
        return _words(self._philox(stream, self._sample), count)

    def below(self, stream: int, largest: np.ndarray, out: np.ndarray) -> None:
        """out[i] = word i of the stream <= largest[i], [count] each; a piece at a time, so that the words stay in cache."""
        philox = self._philox(stream, self._sample)
        for start in range(0, len(out), _PIECE):
            piece = slice(start, min(start + _PIECE, len(out)))
            np.less_equal(_words(philox, piece.stop - start), largest[piece], out=out[piece])

    def ids(self, stream: int, count: int, bound: int, dtype: np.dtype) -> np.ndarray:
        """[count] integers, uniform on [0, bound) up to bound / 2^32: the high halves of 32 x 32 bit products."""
        philox, out = self._philox(stream, self._sample), np.empty(count, dtype)
        for start in range(0, count, _PIECE):
            drawn = _words(philox, min(_PIECE, count - start)).astype(np.uint64)
            drawn *= np.uint64(bound)
            drawn >>= np.uint64(32)
            out[start : start + _PIECE] = drawn
        return out

    def permutation(self, count: int) -> np.ndarray:
        """A permutation of 0..count-1."""
        return np.random.RandomState(self._philox(_ORDER, self._sample)).permutation(count)

    def shift(self) -> float:
        """In [0, 1): the sample's place in a low-discrepancy (golden ratio) sequence over sample indices."""
        offset = int(self._philox(_SHIFT, 0).random_raw())
        return ((offset + self._sample * _GOLDEN) % _WORD >> 11) / 2.0**53


def _words(philox: np.random.Philox, count: int) -> np.ndarray:
    """The next [count] uint32; an odd count wastes half of the generator's last word."""
    raw = philox.random_raw((count + 1) // 2)
    return np.asarray(raw, dtype="<u8").view("<u4")[:count].astype(np.uint32, copy=False)


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


def _unit_levels(groups: Groups, eligible: np.ndarray, draw: str, key: _NoiseKey, own_place: bool) -> np.ndarray:
    """[G] float64 in [0, 1): the noise levels before they are scaled to their range.

    Stratified: the n groups that hold an eligible token get one level in each of the n strata [k/n, (k+1)/n), in a
    random order. Inside its stratum the level of a block is independent (`own_place`); documents share one place in
    their strata, which walks through a low-discrepancy sequence over samples (for one level a sample: that sequence
    itself).
    """
    count = len(groups.starts)
    levels = key.words(_LEVEL, count) * 2.0**-32
    if draw == "uniform" or count == 0:
        return levels
    if not own_place:
        levels[:] = key.shift()
    if eligible.all():
        levels += key.permutation(count)
        levels /= count
        return levels
    active = np.flatnonzero(groups.any(eligible))
    levels[active] = (key.permutation(len(active)) + levels[active]) / max(1, len(active))
    return levels


def _thresholds(p: np.ndarray) -> np.ndarray:
    """p -> the largest 32-bit draw u with u < p * 2^32, which is below 2^32 for p = 1 too; overwrites p."""
    p *= 2.0**32
    np.ceil(p, out=p)
    np.clip(p, 1.0, 2.0**32, out=p)
    p -= 1.0
    return p.astype(np.uint32)


def _force_one(corrupted: np.ndarray, draws: np.ndarray, eligible: np.ndarray, blocks: Groups) -> None:
    """In place: corrupt the eligible token with the smallest draw in each block that has none corrupted.

    Given that no draw fell below the threshold, the smallest is uniform over the block's eligible tokens.
    """
    if not eligible.any():
        return
    lacking = blocks.expand(~blocks.any(corrupted)) & eligible
    candidates = np.where(lacking, draws, np.uint32(2**32 - 1))
    smallest = blocks.expand(np.minimum.reduceat(candidates, blocks.starts))
    corrupted |= lacking & (candidates == smallest)


def _replace(
    tokens: np.ndarray,
    corrupted: np.ndarray,
    config: BDLMConfig,
    key: _NoiseKey,
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
