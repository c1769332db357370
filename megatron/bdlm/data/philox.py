"""Random bits as a pure function of a key: Philox4x64, a counter-based generator, one stream for each use.

Key and counter of a stream (all unsigned 64-bit words):

    key     = (seed, first 8 bytes of SHA-256 of the purpose)
    counter = (0, stream + 256 * view, epoch, sample index)

The first counter word counts the blocks of output, so that streams never overlap. Streams are drawn as 32-bit words
(little-endian halves of the generator's raw output); a permutation is drawn by `RandomState`, whose
stream NumPy keeps frozen.

Work goes piece by piece, so that the words of a piece stay in cache. What is marked as scratch is overwritten by the next
call of the same thread.
"""

import hashlib
import threading
from typing import Iterator, Optional

import numpy as np

PIECE = 1 << 13  # words drawn at a time; even; 64 KiB of float64: cached, and below what an allocator maps anew
_WORD = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiples of it modulo 2^64 are a low-discrepancy sequence


class NoiseKey:
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

    def below(self, stream: int, largest: np.ndarray, out: np.ndarray, keep: bool = False) -> Optional[np.ndarray]:
        """out[i] = word i of the stream <= largest[i], [count] each; a piece at a time, so that the words stay in cache.

        Returns:
            [count] uint32, the words, where they are to be kept; scratch.
        """
        philox = self._philox(stream, self._sample)
        kept = scratch("kept", len(out), np.uint32) if keep else None
        for piece in pieces(len(out)):
            words = _words(philox, piece.stop - piece.start)
            np.less_equal(words, largest[piece], out=out[piece])
            if kept is not None:
                kept[piece] = words
        return kept

    def units(self, stream: int, count: int) -> np.ndarray:
        """[count] float64 in [0, 1), multiples of 2^-32; scratch."""
        philox, out = self._philox(stream, self._sample), scratch("units", count, np.float64)
        for piece in pieces(count):
            np.multiply(_words(philox, piece.stop - piece.start), 2.0**-32, out=out[piece])
        return out

    def ids(self, stream: int, count: int, bound: int, dtype: np.dtype) -> np.ndarray:
        """[count] integers, uniform on [0, bound) up to bound / 2^32: the high halves of 32 x 32 bit products."""
        philox, out = self._philox(stream, self._sample), np.empty(count, dtype)
        for piece in pieces(count):
            drawn = _words(philox, piece.stop - piece.start).astype(np.uint64)
            drawn *= np.uint64(bound)
            drawn >>= np.uint64(32)
            out[piece] = drawn
        return out

    def permutation(self, stream: int, count: int) -> np.ndarray:
        """A permutation of 0..count-1; scratch."""
        order = scratch("order", count, np.int64)
        for piece in pieces(count):
            order[piece] = np.arange(piece.start, piece.stop)
        np.random.RandomState(self._philox(stream, self._sample)).shuffle(order)
        return order

    def shift(self, stream: int) -> float:
        """In [0, 1): the sample's place in a low-discrepancy (golden ratio) sequence over sample indices."""
        offset = int(self._philox(stream, 0).random_raw())
        return ((offset + self._sample * _GOLDEN) % _WORD >> 11) / 2.0**53


_memory = threading.local()


def scratch(name: str, count: int, dtype: type) -> np.ndarray:
    """[count] uninitialised, the same memory at every call of a thread: fresh pages cost more than what is computed in them."""
    held = getattr(_memory, name, None)
    if held is None or len(held) < count:
        held = np.empty(count, dtype)
        setattr(_memory, name, held)
    return held[:count]


def pieces(count: int) -> Iterator[slice]:
    """0..count in pieces of at most PIECE."""
    return (slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE))


def _words(philox: np.random.Philox, count: int) -> np.ndarray:
    """The next [count] uint32; an odd count wastes half of the generator's last word."""
    raw = philox.random_raw((count + 1) // 2)
    return np.asarray(raw, dtype="<u8").view("<u4")[:count].astype(np.uint32, copy=False)
