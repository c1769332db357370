"""The blocks of one sample: where they start and stop, whose document they are in, what they cost.

Blocks restart at every document, at a document's block origin (the start of a response; the
prompt before it has blocks of its own, the last of them possibly short) and at every given
restart (turns of a conversation). A short block is a real block. Zero-length documents hold none.

    seq_length 12, S = 4, documents (5, 7): blocks [0,4) [4,5) | [5,9) [9,12)
    seq_length 12, S = 4, block_origin 2:   blocks [0,2) [2,6) [6,10) [10,12)
"""

from dataclasses import dataclass
from typing import Optional, Sequence, Union

import numpy as np

from megatron.bdlm.parallel.intervals import spans


class PlanError(ValueError):
    """A sequence layout that cannot be; the message names flag, value, rule and a legal value."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Blocks of a sample in ascending token order; arrays of length B unless noted."""

    starts: np.ndarray  # int64, first token
    stops: np.ndarray  # int64, one past the last token
    documents: np.ndarray  # int64, index into the given document lengths
    document_starts: np.ndarray  # int64, first token of the block's document
    is_target: np.ndarray  # bool, whether the block has noisy rows
    block_size: int  # S: no block is longer

    @property
    def count(self) -> int:
        """B, the number of blocks."""
        return len(self.starts)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each block."""
        return self.stops - self.starts

    def of_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Index of the block that holds each token."""
        return np.searchsorted(self.starts, tokens, side="right") - 1

    def area(self, starts: np.ndarray, stops: np.ndarray, causal: bool) -> np.ndarray:
        """Visible (query, key) pairs of the rows `[starts, stops)` of one stream, each range inside one block.

        A row sees the earlier tokens of its document and its own block (`causal`: that up to itself);
        this is the count for a noisy row of one view and for a clean row alike.
        Worked example, S = 4: block 2 of a document has 4 rows that see 8 earlier and 4 own keys: 48.
        """
        block = self.of_tokens(starts)
        rows, first = stops - starts, self.starts[block]
        own = rows * (starts - first) + rows * (rows + 1) // 2 if causal else rows * self.sizes[block]
        return rows * (first - self.document_starts[block]) + own


def build_blocks(
    seq_length: int,
    block_size: int,
    documents: Optional[Sequence[int]] = None,
    block_origin: Union[int, Sequence[int]] = 0,
    block_restarts: Optional[Sequence[int]] = None,
    target_blocks: Optional[Sequence[int]] = None,
) -> BlockTable:
    """The block table of a sample.

    Args:
        documents: document lengths that sum to `seq_length`; zero lengths are skipped; None: one document.
        block_origin: tokens of a document before its blocks start to count, one number or one per document.
        block_restarts: further tokens (of the sample) at which a block starts.
        target_blocks: indices of the blocks that have noisy rows; None: all.

    Raises:
        PlanError: lengths, origins, restarts or targets out of range.
    """
    lengths = _document_lengths(seq_length, block_size, documents)
    firsts = np.cumsum(lengths) - lengths
    origins = _origins(lengths, block_origin)
    restarts = np.unique(np.asarray([] if block_restarts is None else block_restarts, np.int64))
    if len(restarts) and not (0 <= restarts[0] and restarts[-1] < seq_length):
        raise PlanError(
            f"block_restarts {restarts.tolist()}: tokens of the sample, 0 <= restart < --seq-length {seq_length}"
        )
    real = lengths > 0
    anchors = np.unique(np.concatenate((firsts[real], (firsts + origins)[real & (origins < lengths)], restarts)))
    anchor_lengths = np.diff(np.concatenate((anchors, [seq_length])))
    # an anchor's stretch of n tokens holds ceil(n / S) blocks, the last one possibly short
    per_anchor = -(-anchor_lengths // block_size)
    index = spans(np.zeros_like(per_anchor), per_anchor)
    starts = np.repeat(anchors, per_anchor) + index * block_size
    stops = np.minimum(starts + block_size, np.repeat(anchors + anchor_lengths, per_anchor))
    real_documents = np.flatnonzero(real)
    which = real_documents[np.searchsorted(firsts[real], starts, side="right") - 1]
    return BlockTable(starts, stops, which, firsts[which], _targets(len(starts), target_blocks), block_size)


def _document_lengths(seq_length: int, block_size: int, documents: Optional[Sequence[int]]) -> np.ndarray:
    if seq_length < 1:
        raise PlanError(f"--seq-length {seq_length}: a sample holds at least one token. A legal value: 4096")
    if block_size < 1:
        raise PlanError(f"--bdlm-block-size {block_size}: a block holds at least one token. A legal value: 32")
    lengths = np.asarray([seq_length] if documents is None else documents, np.int64)
    if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != seq_length:
        negative = [int(length) for length in lengths.flat if length < 0]
        wrong = f"with a length of {negative[0]}" if negative else f"that sum to {int(lengths.sum())}"
        raise PlanError(
            f"documents: {lengths.size} lengths {wrong}; none may be negative, and their sum must be --seq-length {seq_length}. "
            f"A legal value: {seq_length}"
        )
    return lengths


def _origins(lengths: np.ndarray, block_origin: Union[int, Sequence[int]]) -> np.ndarray:
    origins = np.asarray(block_origin, np.int64)
    if origins.ndim > 1 or (origins.ndim == 1 and len(origins) != len(lengths)) or (origins < 0).any():
        raise PlanError(
            f"block_origin {block_origin}: one number, or one per document ({len(lengths)} documents), not negative. "
            "A legal value: 0"
        )
    return np.broadcast_to(origins, lengths.shape)


def _targets(count: int, target_blocks: Optional[Sequence[int]]) -> np.ndarray:
    if target_blocks is None:
        return np.ones(count, bool)
    indices = np.asarray(target_blocks, np.int64).reshape(-1)
    if len(indices) and not (0 <= indices.min() and indices.max() < count):
        raise PlanError(
            f"target_blocks {int(indices.min())} to {int(indices.max())}: the sample has blocks 0 to {count - 1}"
        )
    if len(np.unique(indices)) != len(indices):
        raise PlanError("target_blocks: a block is named twice; name each target once")
    is_target = np.zeros(count, bool)
    is_target[indices] = True
    return is_target
