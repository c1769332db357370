"""Sets of tokens as sorted half-open intervals.

A rank's share of a stream is a few long runs of tokens, so every question the plan asks (how many
tokens before t do I hold, which of my rows is token t) is answered on the runs, never token by
token. The rows of a share stand in ascending token order, hence *row = number of held tokens
before it*: `rank_of`. It is monotone, which is what keeps the mask a staircase after sharding.

    Intervals([0, 12], [4, 16]) holds tokens 0..3 and 12..15; rank_of(13) = 5, rank_of(8) = 4.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Intervals:
    """Sorted, disjoint, non-adjacent, non-empty runs `[starts[i], stops[i])`, int64."""

    starts: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(starts, stops) -> "Intervals":
        """Normal form of disjoint runs in any order: sorted, empty ones dropped, adjacent ones joined."""
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        keep = stops > starts
        starts, stops = starts[keep], stops[keep]
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        if np.any(starts[1:] < stops[:-1]):
            raise ValueError("runs of one share overlap")
        joined = np.flatnonzero(starts[1:] > stops[:-1])
        first = np.concatenate(([0], joined + 1)) if len(starts) else joined
        last = np.concatenate((joined, [len(starts) - 1])) if len(starts) else joined
        return Intervals(starts[first], stops[last])

    @property
    def count(self) -> int:
        """Tokens held."""
        return int((self.stops - self.starts).sum())

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The runs as a list of (start, stop)."""
        return list(zip(self.starts.tolist(), self.stops.tolist()))

    def rank_of(self, tokens) -> np.ndarray:
        """Number of held tokens strictly before each of `tokens` (any shape)."""
        tokens = np.asarray(tokens, np.int64)
        before = np.concatenate(([0], np.cumsum(self.stops - self.starts)))
        run = np.searchsorted(self.starts, tokens, side="right")
        # tokens beyond the end of the last run started before them still count that whole run
        inside = np.minimum(tokens, self.stops[run - 1]) - self.starts[run - 1] if len(self.starts) else 0
        return np.where(run > 0, before[run - 1] + inside, 0)

    def holds(self, tokens) -> np.ndarray:
        """Whether each of `tokens` is held."""
        tokens = np.asarray(tokens, np.int64)
        if not len(self.starts):
            return np.zeros(tokens.shape, bool)
        run = np.searchsorted(self.starts, tokens, side="right")
        return (run > 0) & (tokens < self.stops[run - 1])

    def tokens_at(self, rows) -> np.ndarray:
        """The token of each of `rows`, 0 <= row < count: the inverse of `rank_of`."""
        rows = np.asarray(rows, np.int64)
        before = np.cumsum(self.stops - self.starts)
        run = np.searchsorted(before, rows, side="right")
        return self.stops[run] - (before[run] - rows)

    def tokens(self) -> np.ndarray:
        """Every held token, ascending."""
        return spans(self.starts, self.stops - self.starts)

    def cut(self, *boundaries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The runs cut at every given token: (starts, stops), ascending, non-empty. Each of `boundaries` ascends."""
        inside = [self._inside(np.asarray(b, np.int64)) for b in boundaries]
        marks = np.sort(np.concatenate(inside + [self.starts]))
        marks = marks[np.diff(marks, prepend=-1) > 0]
        run = np.searchsorted(self.starts, marks, side="right") - 1
        following = np.concatenate((marks[1:], marks[-1:] + 1)) if len(marks) else marks
        same_run = np.concatenate((run[1:] == run[:-1], [False])) if len(marks) else np.zeros(0, bool)
        return marks, np.where(same_run, following, self.stops[run])

    def _inside(self, ascending: np.ndarray) -> np.ndarray:
        """Those of some ascending tokens that are held. Most boundaries lie in other ranks' shares and are never looked at."""
        first, last = np.searchsorted(ascending, self.starts), np.searchsorted(ascending, self.stops)
        return ascending[spans(first, last - first)]

    def intersect(self, other: "Intervals") -> "Intervals":
        """Tokens held by both."""
        starts, stops = self.cut(other.starts, other.stops)
        both = other.holds(starts)
        return Intervals.of(starts[both], stops[both])


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of many runs, concatenated: `spans([3, 9], [2, 3]) = [3, 4, 9, 10, 11]`."""
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
