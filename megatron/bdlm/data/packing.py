"""Put whole items (documents, conversations) into samples of L tokens, and give their last block its tail.

A piece is one item: its tokens, which of them are supervised, and where blocks count anew inside it. Three steps,
each a pure function:

    fit      pieces longer than L are refused, dropped or cut on the left, never trimmed in silence
    fill     the last block: short ("ragged"), filled with supervised end tokens ("eos-fill"), or with invisible
             padding ("pad")
    pack     whole pieces into samples of at most L tokens, sequentially or first-fit decreasing inside a window

The packing is a function of the lengths and their order alone, so the place in it is all that a resume needs.

    S = 4, a piece of 6 tokens a0..a5, blocks count anew at its token 1: blocks are a0 | a1 a2 a3 a4 | a5
    ragged   a0 | a1 a2 a3 a4 | a5             the last block is real and has one token
    eos-fill a0 | a1 a2 a3 a4 | a5 E  E  E     supervised, part of the piece
    pad      a0 | a1 a2 a3 a4 | a5 (.  .  .)   padding: not part of the piece, seen by nobody
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Optional

import numpy as np

from megatron.bdlm.data.documents import DataError

TooLong = Literal["error", "drop", "truncate-left"]
Tail = Literal["ragged", "eos-fill", "pad"]
Method = Literal["first-fit", "sequential", "none"]


@dataclass(frozen=True)
class Piece:
    """One item, n tokens."""

    tokens: np.ndarray
    """int64 [n]"""

    eligible: np.ndarray
    """bool [n], supervised tokens"""

    restarts: tuple[int, ...] = ()
    """Tokens at which blocks count anew, besides token 0; ascending"""

    padding: int = 0
    """Invisible padding tokens that follow the piece"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens it takes in a sample."""
        return len(self.tokens) + self.padding


def fit(piece: Piece, limit: int, policy: TooLong, place: str) -> Optional[Piece]:
    """The piece in at most `limit` tokens; None if the policy drops it.

    `truncate-left` keeps the last `limit` tokens: the end of an answer matters more than the start of a prompt.

    Raises:
        DataError: it is longer and the policy is `error`; `place` (file and line) is named.
    """
    if len(piece) <= limit:
        return piece
    if policy == "error":
        raise DataError(
            f"{place}: {len(piece)} tokens do not fit --seq-length {limit}; a legal value: {len(piece)}, or drop or "
            "truncate-left as the policy for too long samples"
        )
    if policy == "drop":
        return None
    cut = len(piece) - limit
    restarts = tuple(start - cut for start in piece.restarts if start > cut)
    return Piece(piece.tokens[cut:], piece.eligible[cut:], restarts)


def fill(piece: Piece, limit: int, block_size: int, tail: Tail, end_token: Optional[int]) -> Piece:
    """Give the piece's last block its tail, at most up to `limit` tokens.

    `eos-fill` continues an answer: behind a token without supervision (a prompt, what a chat template appends) it adds nothing.

    Raises:
        DataError: `eos-fill` without an end token.
    """
    if tail == "ragged" or not len(piece):
        return piece
    last = piece.restarts[-1] if piece.restarts else 0
    missing = min(-(len(piece) - last) % block_size, limit - len(piece))
    if tail == "pad":
        return replace(piece, padding=missing)
    if end_token is None:
        raise DataError(
            "--bdlm-tail-policy eos-fill: the tokenizer has no end-of-document token. A legal value: ragged"
        )
    if not piece.eligible[-1]:
        return piece
    tokens = np.concatenate([piece.tokens, np.full(missing, end_token, dtype=piece.tokens.dtype)])
    return Piece(tokens, np.concatenate([piece.eligible, np.ones(missing, dtype=bool)]), piece.restarts)


@dataclass(frozen=True)
class Packing:
    """Which items share a sample."""

    samples: tuple[tuple[int, ...], ...]
    """Item numbers of each sample, ascending inside it"""

    empty: tuple[int, ...]
    """Items without a token; they are in no sample"""


def pack(rooms: Sequence[int], limit: int, method: Method = "first-fit", window: int = 1024) -> Packing:
    """Put items that take `rooms` tokens into samples of at most `limit`.

    `sequential` closes a sample when the next item does not fit; `first-fit` sorts each window of `window` consecutive
    items by falling size and puts each into the first sample that has room; `none` gives every item its own sample.

    Raises:
        DataError: an item takes more than `limit` tokens.
    """
    rooms = np.asarray(rooms, dtype=np.int64)
    if rooms.size and rooms.max() > limit:
        item = int(rooms.argmax())
        raise DataError(
            f"item {item}: {rooms[item]} tokens do not fit --seq-length {limit}; a legal value: {rooms[item]}"
        )
    items = np.flatnonzero(rooms)
    if method == "none":
        samples = [[int(item)] for item in items]
    elif method == "sequential":
        samples = _sequential(rooms, items, limit)
    else:
        samples = []
        for begin in range(0, items.size, window):
            samples += _first_fit_decreasing(rooms, items[begin : begin + window], limit)
    return Packing(tuple(map(tuple, samples)), tuple(np.flatnonzero(rooms == 0).tolist()))


def _sequential(rooms: np.ndarray, items: np.ndarray, limit: int) -> list[list[int]]:
    samples: list[list[int]] = []
    left = 0
    for item in items.tolist():
        if rooms[item] > left:
            samples.append([])
            left = limit
        samples[-1].append(item)
        left -= int(rooms[item])
    return samples


def _first_fit_decreasing(rooms: np.ndarray, items: np.ndarray, limit: int) -> list[list[int]]:
    left = np.zeros(items.size, dtype=np.int64)  # of each sample; no sample yet where its list is empty
    left[:] = limit
    samples: list[list[int]] = [[] for _ in range(items.size)]
    for item in items[np.argsort(-rooms[items], kind="stable")].tolist():
        first = int(np.argmax(left >= rooms[item]))
        samples[first].append(item)
        left[first] -= rooms[item]
    return [sorted(sample) for sample in samples if sample]


def assemble(pieces: Sequence[Piece], limit: int, padding_token: int = 0) -> dict[str, np.ndarray]:
    """One sample of exactly `limit` tokens: the pieces one after another, then padding.

    Returns:
        tokens    int64 [L]
        eligible  bool  [L]
        documents int32 [L]  number of the piece, -1 padding
        restarts  bool  [L]  blocks count anew here: first token of every piece and run of padding, and the pieces' own

    Raises:
        DataError: the pieces take more than `limit` tokens.
    """
    taken = sum(piece.room for piece in pieces)
    if taken > limit:
        raise DataError(f"{len(pieces)} pieces take {taken} tokens, a sample holds --seq-length {limit}")
    tokens = np.full(limit, padding_token, dtype=np.int64)
    eligible = np.zeros(limit, dtype=bool)
    documents = np.full(limit, -1, dtype=np.int32)
    restarts = np.zeros(limit, dtype=bool)
    begin = 0
    for number, piece in enumerate(piece for piece in pieces if len(piece)):
        end = begin + len(piece)
        tokens[begin:end], eligible[begin:end], documents[begin:end] = piece.tokens, piece.eligible, number
        restarts[[begin, *(begin + start for start in piece.restarts)]] = True
        if end < limit:
            restarts[end] = True
        begin += piece.room
    if begin == 0:
        restarts[:1] = True
    return {"tokens": tokens, "eligible": eligible, "documents": documents, "restarts": restarts}


def epoch_order(
    samples: int, seed: int, epoch: int, lengths: Optional[np.ndarray] = None, bucket: int = 0
) -> np.ndarray:
    """Order of the samples in one pass, a pure function of its arguments: int64 [samples].

    With `bucket` > 0 and `lengths`, samples of like length stand together: the shuffled order is cut into stretches of
    64 buckets, each sorted by length and cut into buckets, and the buckets of a stretch are shuffled. A bucket is the
    number of samples that run side by side, so that a step does not wait for one long sample among short ones.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed % (1 << 64), epoch]))
    order = generator.permutation(samples)
    if not bucket or lengths is None:
        return order
    parts = []
    for begin in range(0, samples, 64 * bucket):
        stretch = order[begin : begin + 64 * bucket]
        stretch = stretch[np.argsort(np.asarray(lengths)[stretch], kind="stable")]
        buckets = [stretch[i : i + bucket] for i in range(0, stretch.size, bucket)]
        parts += [buckets[i] for i in generator.permutation(len(buckets))]
    return np.concatenate(parts) if parts else order
