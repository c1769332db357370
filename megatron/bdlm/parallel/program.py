"""What one rank computes in one layer: dense rectangles of attention, per source of keys.

A program is a frozen value made on the CPU; the exchange and the tile math read it and decide nothing.

Indices are local rows (`SequencePlan.rows` says which global rows they are): queries at this rank,
`Piece.rows` at the source, `key_starts` in the rows of the piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megatron.bdlm.parallel import relations
from megatron.bdlm.parallel.batches import LabelledRectangles, RectangleBatch, cut_keys, into_batches, merge_adjacent
from megatron.bdlm.parallel.layout import Layout
from megatron.bdlm.parallel.staircase import Staircase, decompose

__all__ = ["AttentionProgram", "Piece", "RectangleBatch", "build_program", "needed_rows"]


@dataclass(frozen=True, eq=False)
class Piece:
    """The keys and values of one source that this rank needs, and what sees them."""

    source: int  # rank in the context-parallel group
    rows: np.ndarray  # int64, ascending local rows AT THE SOURCE
    batches: tuple[RectangleBatch, ...]

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        return sum(batch.area for batch in self.batches)

    def part(self, low: int, high: int) -> "Piece":
        """What this piece has of the source's local rows `[low, high)`."""
        first, last = np.searchsorted(self.rows, (low, high)).tolist()
        batches = tuple(cut for batch in self.batches for cut in cut_keys(batch, first, last))
        return Piece(self.source, self.rows[first:last], batches)


@dataclass(frozen=True, eq=False)
class AttentionProgram:
    """All attention of one rank in one layer."""

    queries: int  # local query rows computed: all but padding, or the noisy ones
    local: Piece  # source: this rank; rows: all local rows but padding
    remote: tuple[Piece, ...]  # sources of which something is needed, rank-1, rank-2, .. modulo P
    sends: dict[int, np.ndarray]  # peer -> local rows it needs (the mirror of its Piece.rows), rank+1, rank+2, ..
    shared: tuple[np.ndarray, ...]  # per rank: its local rows that ring and allgather move
    own: Optional[Piece] = None  # local rectangles that follow once replicas have merged (`replicas`): never shared

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        return self.local.area + sum(piece.area for piece in self.remote)

    @property
    def rectangles(self) -> int:
        """Rectangles over all pieces."""
        return sum(batch.count for piece in (self.local, *self.remote) for batch in piece.batches)


@dataclass(frozen=True)
class LayerView:
    """What a layer asks for: a window on clean keys, and whether clean rows are computed."""

    window: Optional[int] = None
    queries: str = "all"  # or "noisy"


def build_program(layout: Layout, rank: int, layer: LayerView) -> AttentionProgram:
    """The program of `rank`, queries and keys in local rows."""
    spec, share = layout.spec, layout.shares[rank]
    size = spec.context_parallel_size
    # under bp every rank has every clean row, so nothing is asked of anybody
    ring = range(0) if spec.strategy == "bp" else range(1, size)
    remote, sends = [], {}
    for distance in ring:
        source = (rank - distance) % size
        rows = needed_rows(layout, rank, source, layer)
        if len(rows):
            remote.append(Piece(source, rows, into_batches(_rectangles(layout, rank, source, layer).keys_among(rows))))
        peer = (rank + distance) % size
        asked = needed_rows(layout, peer, rank, layer)
        if len(asked):
            sends[peer] = asked
    return AttentionProgram(
        queries=share.rows(spec.views) if layer.queries == "all" else spec.views * share.noisy.count,
        local=Piece(rank, np.arange(share.rows(spec.views)), into_batches(_rectangles(layout, rank, rank, layer))),
        remote=tuple(remote),
        sends=sends,
        shared=tuple(_shared(layout, each) for each in range(size)),
    )


def needed_rows(layout: Layout, querier: int, source: int, layer: LayerView) -> np.ndarray:
    """Ascending local rows of `source` that any row of `querier` sees, int64."""
    seen = np.zeros(layout.shares[source].rows(layout.spec.views) + 1, np.int64)
    for part in _relations(layout, querier, source, layer):
        for _, _, key in part.streams:
            part.stairs.count_keys(seen, key)
    return np.flatnonzero(np.cumsum(seen[:-1]) > 0)


OWN, EARLIER = 0, 1


@dataclass(frozen=True, eq=False)
class _Relation:
    """One staircase and the streams it holds for."""

    stairs: Staircase
    label: int  # OWN or EARLIER
    streams: tuple[tuple[int, int, int], ...]  # (stream, first local query row, first local key row)


def _relations(layout: Layout, querier: int, source: int, layer: LayerView) -> Iterator[_Relation]:
    """The mask between the rows of `querier` and the rows of `source`."""
    blocks, spec = layout.blocks, layout.spec
    rows, keys = layout.shares[querier], layout.shares[source]
    views = range(spec.views)
    noisy_rows, noisy_keys = rows.noisy.count, keys.noisy.count
    clean_row, clean_key = spec.views * noisy_rows, spec.views * noisy_keys
    if querier == source or spec.splits_blocks:
        yield _Relation(
            relations.noisy_own(blocks, rows.noisy, keys.noisy, spec.noisy_causal), OWN,
            tuple((view, view * noisy_rows, view * noisy_keys) for view in views),
        )
    yield _Relation(
        relations.noisy_earlier(blocks, rows.noisy, keys.clean, layer.window), EARLIER,
        tuple((view, view * noisy_rows, clean_key) for view in views),
    )
    if layer.queries == "noisy":
        return
    clean_stream = ((spec.views, clean_row, clean_key),)
    if spec.clean_causal:
        stairs = relations.clean_token_causal(blocks, rows.clean, keys.clean, layer.window)
        yield _Relation(stairs, EARLIER, clean_stream)
        return
    if querier == source or spec.splits_blocks:
        yield _Relation(relations.clean_own(blocks, rows.clean, keys.clean, layer.window), OWN, clean_stream)
    yield _Relation(relations.clean_earlier(blocks, rows.clean, keys.clean, layer.window), EARLIER, clean_stream)


def _rectangles(layout: Layout, querier: int, source: int, layer: LayerView) -> LabelledRectangles:
    """The relations as rectangles, in local rows of both."""
    entries = []
    for relation in _relations(layout, querier, source, layer):
        parts = decompose(relation.stairs, layout.spec.block_size)
        entries += [(parts.shifted(query, key), stream, relation.label) for stream, query, key in relation.streams]
    return merge_adjacent(LabelledRectangles.join(entries))


def _shared(layout: Layout, rank: int) -> np.ndarray:
    """Local rows of a rank that ring and allgather move: clean ones, and noisy ones where blocks are split."""
    spec, share = layout.spec, layout.shares[rank]
    if spec.strategy == "bp" or spec.context_parallel_size == 1:
        return np.zeros(0, np.int64)
    noisy = spec.views * share.noisy.count
    return np.arange(0 if spec.splits_blocks else noisy, noisy + share.clean.count)
