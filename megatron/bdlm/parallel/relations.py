"""Who sees whom, as staircases between one rank's rows and one rank's keys.

The three relations of the block diffusion mask, on the shares (`Intervals` of tokens) of a querying
rank and of a source. F(t), the number of source rows before token t (`rank_of`), turns "keys from
token x up to token y" into "rows F(x) up to F(y) of the source"; it is monotone, so the mask stays a
staircase whatever the shares are. Rows and keys count within their stream.

    relation          rows      keys       sees tokens                          groups
    own               noisy b   noisy b    block b, or up to itself (causal)    blocks
    earlier           noisy b   clean      [start - (W-1), start of b)          documents
    earlier + own     clean b   clean      [i - (W-1), end of b)                documents, blocks
    token-causal      clean i   clean      [i - (W-1), i]                       documents

(W: window, infinite without one; never before the document.) A block's own clean keys are kept apart
from earlier ones: earlier keys then have the same staircase for noisy and for clean rows and
share batches.
"""

from typing import Optional

import numpy as np

from megatron.bdlm.parallel.blocks import BlockTable
from megatron.bdlm.parallel.intervals import Intervals
from megatron.bdlm.parallel.staircase import Staircase


def noisy_own(table: BlockTable, rows: Intervals, keys: Intervals, causal: bool) -> Staircase:
    """Noisy rows against the noisy rows of their own block (of one view); `causal`: up to themselves."""
    starts, stops = rows.cut(table.starts, *((keys.starts, keys.stops) if causal else ()))
    block = table.of_tokens(starts)
    low = keys.rank_of(table.starts[block])
    if not causal:
        return _standing(rows, starts, stops, low, keys.rank_of(table.stops[block]), block)
    moves = keys.holds(starts)
    high = keys.rank_of(starts)
    return Staircase(rows.rank_of(starts), stops - starts, low, high, np.zeros_like(moves), moves, block)


def noisy_earlier(table: BlockTable, rows: Intervals, keys: Intervals, window: Optional[int]) -> Staircase:
    """Noisy rows against the clean rows of strictly earlier blocks."""
    starts, stops = rows.cut(table.starts)
    block = table.of_tokens(starts)
    first = table.document_starts[block]
    if window is not None:
        first = np.maximum(first, table.starts[block] - (window - 1))
    low, high = keys.rank_of(first), keys.rank_of(table.starts[block])
    return _standing(rows, starts, stops, low, high, table.documents[block])


def clean_earlier(table: BlockTable, rows: Intervals, keys: Intervals, window: Optional[int]) -> Staircase:
    """Clean rows against the clean rows of strictly earlier blocks."""
    if window is None:
        return noisy_earlier(table, rows, keys, None)
    reach = window - 1
    short = [table.starts + reach] if reach < table.block_size else []
    starts, stops = rows.cut(
        table.starts, np.unique(table.document_starts) + reach, keys.starts + reach, keys.stops + reach, *short
    )
    block = table.of_tokens(starts)
    block_start, oldest = table.starts[block], starts - reach
    low = keys.rank_of(np.clip(oldest, table.document_starts[block], block_start))
    moves = (oldest >= table.document_starts[block]) & (oldest < block_start) & keys.holds(oldest)
    high = keys.rank_of(block_start)
    return Staircase(
        rows.rank_of(starts), stops - starts, low, high, moves, np.zeros_like(moves), table.documents[block]
    )


def clean_own(table: BlockTable, rows: Intervals, keys: Intervals, window: Optional[int]) -> Staircase:
    """Clean rows against the clean rows of their own block, block-causal."""
    reach = table.block_size if window is None else window - 1
    short = [table.starts + reach, keys.starts + reach, keys.stops + reach] if reach < table.block_size else []
    starts, stops = rows.cut(table.starts, *short)
    block = table.of_tokens(starts)
    oldest = starts - reach
    low = keys.rank_of(np.maximum(oldest, table.starts[block]))
    moves = (oldest >= table.starts[block]) & keys.holds(oldest)
    high = keys.rank_of(table.stops[block])
    return Staircase(rows.rank_of(starts), stops - starts, low, high, moves, np.zeros_like(moves), block)


def clean_token_causal(table: BlockTable, rows: Intervals, keys: Intervals, window: Optional[int]) -> Staircase:
    """Clean rows against clean rows up to themselves; blocks do not matter."""
    document_starts = np.unique(table.document_starts)
    marks = [document_starts, keys.starts, keys.stops]
    if window is not None:
        marks += [mark + window - 1 for mark in marks]
    starts, stops = rows.cut(*marks)
    block = table.of_tokens(starts)
    first = table.document_starts[block]
    oldest = first - 1 if window is None else starts - (window - 1)
    low_moves = (oldest >= first) & keys.holds(oldest)
    low = keys.rank_of(np.maximum(oldest, first))
    return Staircase(
        rows.rank_of(starts), stops - starts, low, keys.rank_of(starts), low_moves, keys.holds(starts),
        table.documents[block],
    )


def _standing(rows: Intervals, starts, stops, low, high, group) -> Staircase:
    """A staircase whose ends stand still over each segment."""
    still = np.zeros(len(starts), bool)
    return Staircase(rows.rank_of(starts), stops - starts, low, high, still, still, group)
