"""Rectangles of equal shape in batches, so that one kernel call computes many.

The rectangles of a piece come from several staircases (views and the clean stream; own block and earlier
keys). Here adjacent ones are joined, equal shapes are put together, and what a kernel adapter relies on is
made sure of: see `RectangleBatch`.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron.bdlm.parallel.staircase import FULL, Rectangles

KINDS = ("full", "causal", "anticausal")


@dataclass(frozen=True, eq=False)
class RectangleBatch:
    """n rectangles of one shape, `queries x keys`.

    Within a batch no two rectangles share a query row. With `copies` c > 1 (several streams that see
    the same clean keys) the batch is c runs of n/c rectangles with the same key starts, so that the c
    queries of a key range can be folded into one; within one run no two rectangles share a key.
    """

    queries: int
    keys: int
    query_starts: np.ndarray  # int64 [n], first local query row of each
    key_starts: np.ndarray  # int64 [n], first key of each, in the rows of the piece
    kind: str  # "full" | "causal" (square, row i sees keys 0..i) | "anticausal" (square, row i sees keys i..)
    copies: int = 1

    @property
    def count(self) -> int:
        """n."""
        return len(self.query_starts)

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        one = self.queries * self.keys if self.kind == "full" else self.queries * (self.queries + 1) // 2
        return one * self.count


@dataclass(frozen=True, eq=False)
class LabelledRectangles:
    """Rectangles of one piece, with the stream their queries are in and the relation they stem from."""

    parts: Rectangles
    stream: np.ndarray  # int64: noisy view, or V for clean
    relation: np.ndarray  # int64: own block 0, earlier keys 1

    @staticmethod
    def join(entries: list[tuple[Rectangles, int, int]]) -> "LabelledRectangles":
        """From (rectangles, stream, relation) triples."""
        parts = Rectangles.join([part for part, _, _ in entries])
        streams = [np.full(part.count, stream, np.int64) for part, stream, _ in entries]
        relations = [np.full(part.count, relation, np.int64) for part, _, relation in entries]
        nothing = [np.zeros(0, np.int64)]
        return LabelledRectangles(parts, np.concatenate(streams or nothing), np.concatenate(relations or nothing))

    def keys_among(self, rows: np.ndarray) -> "LabelledRectangles":
        """Keys counted in `rows` (ascending, holding every key) instead of in all rows of the source."""
        parts = replace(self.parts, key=np.searchsorted(rows, self.parts.key))
        return LabelledRectangles(parts, self.stream, self.relation)

    def take(self, index) -> "LabelledRectangles":
        return LabelledRectangles(self.parts.take(index), self.stream[index], self.relation[index])


def merge_adjacent(labelled: LabelledRectangles) -> LabelledRectangles:
    """Join full rectangles of one kind of step whose queries follow each other and see the same keys.

    For example the last noisy rows and all clean rows of a rank against a whole earlier half chunk.
    (Across relations it would join every second own-block square with the next block's view of it, and
    the regular starts of both would be lost.)
    """
    parts = labelled.parts
    if not parts.count:
        return labelled
    labels = np.stack((parts.keys, parts.key, parts.level, parts.phase, parts.kind, labelled.relation))
    order = np.lexsort((parts.query, *labels))
    labelled, labels = labelled.take(order), labels[:, order]
    parts = labelled.parts
    continues = np.zeros(parts.count, bool)
    continues[1:] = (
        (labels[:, 1:] == labels[:, :-1]).all(axis=0)
        & (parts.kind[1:] == FULL)
        & (parts.query[1:] == parts.query[:-1] + parts.queries[:-1])
    )
    first = np.flatnonzero(~continues)
    merged = labelled.take(first)
    joined = replace(merged.parts, queries=np.add.reduceat(parts.queries, first))
    return LabelledRectangles(joined, merged.stream, merged.relation)


def into_batches(labelled: LabelledRectangles) -> tuple[RectangleBatch, ...]:
    """Group rectangles into batches that keep the promises of `RectangleBatch`."""
    parts = labelled.parts
    if not parts.count:
        return ()
    labels = np.stack((parts.keys, parts.queries, parts.kind, -parts.level, parts.phase, labelled.relation))
    order = np.lexsort((parts.query, labelled.stream, *labels))
    labelled, labels = labelled.take(order), labels[:, order]
    begins = np.flatnonzero(np.concatenate(([True], (labels[:, 1:] != labels[:, :-1]).any(axis=0))))
    batches: list[RectangleBatch] = []
    for first, last in zip(begins.tolist(), begins[1:].tolist() + [parts.count]):
        batches += _batches_of_one_shape(labelled.take(slice(first, last)))
    return tuple(batches)


def cut_keys(batch: RectangleBatch, first: int, last: int) -> list[RectangleBatch]:
    """What a batch sees of the keys `[first, last)`, those keys counted from 0.

    A triangle that the cut goes through leaves a smaller triangle on the side of its diagonal's end and, on the
    other, a triangle with a rectangle beside it. For example causal 4 x 4 on keys 0..3 cut at 1: keys [0, 1) give a
    causal 1 x 1 and a full 3 x 1, keys [1, 4) a causal 3 x 3 for the last three queries.
    """
    keys = batch.key_starts.reshape(batch.copies, -1)[0]
    low = np.clip(first - keys, 0, batch.keys)  # of each rectangle, its keys [low, high) are inside
    high = np.clip(last - keys, 0, batch.keys)
    cut = []
    for lower, upper in np.unique(np.stack((low, high))[:, high > low], axis=1).T.tolist():
        chosen = (low == lower) & (high == upper)
        queries = batch.query_starts.reshape(batch.copies, -1)[:, chosen].reshape(-1)
        starts = np.tile(keys[chosen] + lower - first, batch.copies)
        for kind, query, height in _cut_shape(batch, lower, upper):
            cut.append(RectangleBatch(height, upper - lower, queries + query, starts, kind, batch.copies))
    return cut


def _cut_shape(batch: RectangleBatch, lower: int, upper: int) -> list[tuple[str, int, int]]:
    """(kind, first query, queries) of what is left of one rectangle on its keys `[lower, upper)`."""
    if batch.kind == "full":
        return [("full", 0, batch.queries)]
    before, after = ("full", 0, lower), ("full", upper, batch.queries - upper)
    beside = after if batch.kind == "causal" else before  # queries that see all of these keys
    return [(batch.kind, lower, upper - lower)] + [beside] * (beside[2] > 0)


def _batches_of_one_shape(group: LabelledRectangles) -> list[RectangleBatch]:
    """Streams that see the same keys become copies; then runs whose keys are apart share a batch.

    Query rows are apart already: parts of one relation, phase and level never share one.
    """
    parts = group.parts
    streams = np.flatnonzero(np.diff(group.stream, prepend=-1))
    same_keys: dict[bytes, list[slice]] = {}
    for first, last in zip(streams.tolist(), streams[1:].tolist() + [parts.count]):
        same_keys.setdefault(parts.key[first:last].tobytes(), []).append(slice(first, last))
    by_copies: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for runs in same_keys.values():
        queries = np.stack([parts.query[run] for run in runs])
        by_copies.setdefault(len(runs), []).append((queries, parts.key[runs[0]]))
    batches = []
    for copies, entries in by_copies.items():
        queries = np.concatenate([query for query, _ in entries], axis=1)
        keys = np.concatenate([key for _, key in entries])
        shape = int(parts.queries[0]), int(parts.keys[0])
        for chosen in _spread(keys, shape[1]):
            query_starts, key_starts = queries[:, chosen].reshape(-1), np.tile(keys[chosen], copies)
            batches.append(RectangleBatch(*shape, query_starts, key_starts, KINDS[int(parts.kind[0])], copies))
    return batches


def _spread(starts: np.ndarray, width: int) -> list[np.ndarray]:
    """Split ranges `[start, start + width)` into the fewest interleaved sets without overlap; order is kept."""
    order = np.argsort(starts, kind="stable")
    ascending = starts[order]
    sets = 1
    while sets < len(starts) and (ascending[sets:] - ascending[:-sets] < width).any():
        sets += 1
    if sets == 1:
        return [np.arange(len(starts))]
    return [np.sort(order[offset::sets]) for offset in range(sets)]
