"""Where draft blocks start: eligible anchors, their draw, and which of a block's rows are scored.

A drafter's block of B rows starts at an anchor, a token that is known when the block is drafted; row k predicts token
a + k, so row 0 is never scored. Documents are *segments*: runs of one document id (an id may come back later in a
sample, and is another segment then; -1 is padding).

    S sample length     A anchors     B block size

Example, S = 12, loss mask 001110111101, documents 000000001111: eligible are 2, 3, 6, 8. Not 4 (its successor is not
supervised), not 7 (its successor is another document), not 9 and 11. At B = 4 the scored rows are
2 -> {1, 2}, 3 -> {1, 3} (row 2 falls on the hole at 5), 6 -> {1}, 8 -> {1, 3}.

The draw is a pure function of (seed, sample, epoch): every rank that shares a sample draws the same anchors.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

from megatron.bdlm.data.philox import NoiseKey

MODES = ("uniform", "locality")
_PURPOSE = "dflash anchors"


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of one document id: per token, where its run starts and stops, int64 [S]; and whether it is text, bool [S]."""

    starts: np.ndarray
    stops: np.ndarray
    is_text: np.ndarray

    @staticmethod
    def of(documents: np.ndarray) -> "Segments":
        """Segments of document ids [S]."""
        documents = np.asarray(documents)
        size = len(documents)
        begins = np.flatnonzero(np.concatenate((documents[:1] == documents[:1], documents[1:] != documents[:-1])))
        lengths = np.diff(np.append(begins, size))
        return Segments(np.repeat(begins, lengths), np.repeat(begins + lengths, lengths), documents != -1)


def eligible_anchors(loss_mask: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Ascending positions at which a block may start, int64: itself and its successor supervised, in one document.

    Args:
        loss_mask: bool [S], supervised tokens.
        documents: int [S], -1 for padding.
    """
    mask, segments = np.asarray(loss_mask, bool), Segments.of(documents)
    usable = mask & segments.is_text
    position = np.arange(len(mask))
    followed = np.zeros(len(mask), bool)
    followed[:-1] = usable[1:]
    return np.flatnonzero(usable & followed & (position + 1 < segments.stops))


@dataclass(frozen=True)
class AnchorDraw:
    """How anchors are drawn."""

    count: int = 512
    """most anchors of a sample, or of a document"""
    block_size: int = 16
    mode: str = "uniform"
    """uniform: without replacement; locality: a random start in the list of eligible positions, then strides of B"""
    per: str = "sample"
    """what `count` limits: a sample, or each of its documents"""
    seed: int = 1234

    def draw(self, loss_mask: np.ndarray, documents: np.ndarray, sample_index: int, epoch: int = 0) -> np.ndarray:
        """Ascending anchors of one sample, int64; fewer than `count` where there are not so many."""
        eligible = eligible_anchors(loss_mask, documents)
        key = NoiseKey(self.seed, sample_index, epoch, _PURPOSE)
        if self.per == "sample":
            return self._choose(eligible, key, 0)
        starts = Segments.of(documents).starts[eligible]
        runs = np.split(eligible, np.flatnonzero(np.diff(starts)) + 1)
        return np.concatenate([self._choose(run, key, number) for number, run in enumerate(runs)])

    def _choose(self, eligible: np.ndarray, key: NoiseKey, run: int) -> np.ndarray:
        count = min(self.count, len(eligible))
        if count == 0 or count == len(eligible):
            return eligible[:count]
        if self.mode == "uniform":
            order = np.argsort(key.units(run, len(eligible)), kind="stable")
            return np.sort(eligible[order[:count]])
        first = int(key.units(run, 1)[0] * len(eligible))
        stride = coprime_stride(self.block_size, len(eligible))
        return np.sort(eligible[(first + stride * np.arange(count)) % len(eligible)])


def coprime_stride(block_size: int, count: int) -> int:
    """The least stride from `block_size` on that shares no divisor with `count`: a walk that meets every position once."""
    stride = block_size
    while gcd(stride, count) != 1:
        stride += 1
    return stride


def scored_rows(anchors: np.ndarray, loss_mask: np.ndarray, documents: np.ndarray, block_size: int) -> np.ndarray:
    """bool [A, B]: rows k >= 1 whose token a + k lies in the anchor's document and is supervised.

    A hole in the loss mask leaves out its own rows only, not the later ones.
    """
    anchors, mask, segments = np.asarray(anchors, np.int64), np.asarray(loss_mask, bool), Segments.of(documents)
    tokens = anchors[:, None] + np.arange(block_size)
    inside = tokens < (segments.stops[anchors][:, None] if len(anchors) else 0)
    scored = inside & mask[np.minimum(tokens, max(len(mask) - 1, 0))] if len(anchors) else inside
    scored[:, :1] = False
    return scored


def context_starts(anchors: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """First context token of each anchor, int64 [A]: the start of its document. Context stops before the anchor."""
    return Segments.of(documents).starts[np.asarray(anchors, np.int64)] if len(anchors) else np.zeros(0, np.int64)


def deal(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Owner of each anchor, int64 [A]: the longest with the shortest, pairs dealt in turn.

    Args:
        costs: context length of each anchor.
        ranks: block-parallel ranks. With fewer than two anchors a rank, single anchors are dealt.

    Counts of two ranks differ by two at most.
    """
    order = np.argsort(np.asarray(costs), kind="stable")
    owners, count = np.zeros(len(order), np.int64), len(order)
    if count < 2 * ranks:
        owners[order] = np.arange(count) % ranks
        return owners
    pair = np.minimum(np.arange(count), np.arange(count)[::-1])  # rank in the order from either end
    owners[order] = pair % ranks
    return owners
