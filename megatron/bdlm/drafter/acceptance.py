"""How many tokens a verification accepts: the meter of a drafter, without a server.

    S tokens     B block size

With greedy decoding the target's answer is known beforehand, so that drafting can be replayed on it: at an anchor a the
drafter proposes B - 1 tokens, those before the first difference from the answer are accepted, the target adds one, and
the walk goes on at a + accepted + 1. The accepted length of a verification is what it produced, 1 to B. The same numbers
come out of a real client with greedy decoding.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron.bdlm.drafter.batch import DraftSample, FeatureSource
from megatron.bdlm.drafter.client import DraftSession
from megatron.bdlm.drafter.model import Drafter


@dataclass(frozen=True)
class Acceptance:
    """Accepted lengths of verifications, and how often row k was accepted where it was drafted."""

    lengths: tuple[int, ...]
    accepted: tuple[int, ...]  # per row k = 1..B-1: verifications that accepted it
    drafted: tuple[int, ...]  # per row: verifications in which the answer was long enough to tell

    @property
    def mean(self) -> float:
        """Mean accepted length; 1 means that nothing drafted was right."""
        return sum(self.lengths) / max(len(self.lengths), 1)

    @property
    def by_position(self) -> list[float]:
        """Share of verifications that accepted row k, k = 1..B-1."""
        return [right / max(tried, 1) for right, tried in zip(self.accepted, self.drafted)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        def added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip(a, b))

        return Acceptance(self.lengths + other.lengths, added(self.accepted, other.accepted), added(self.drafted, other.drafted))


def no_acceptance(block_size: int) -> Acceptance:
    """The sum of nothing."""
    return Acceptance((), (0,) * (block_size - 1), (0,) * (block_size - 1))


def walk(drafter: Drafter, sample: DraftSample, source: FeatureSource, embedding: torch.Tensor, head: torch.Tensor) -> Acceptance:
    """Replay drafting on the supervised run of a sample: the target's greedy answer behind a prompt of a token or more."""
    supervised = np.flatnonzero(sample.loss_mask)
    anchor, stop, done, size = int(supervised[0]), int(supervised[-1]) + 1, 0, drafter.shape.block_size
    session = DraftSession(drafter, embedding, head)
    lengths, accepted, drafted = [], np.zeros(size - 1, int), np.zeros(size - 1, int)
    while anchor + 1 < stop:
        features = source.features(sample, np.arange(done, anchor))
        tokens = session.draft(features.to(next(drafter.parameters()).dtype), int(sample.tokens[anchor])).cpu().numpy()
        answer = sample.tokens[anchor + 1 : min(anchor + size, stop)]
        matches = int(np.cumprod(tokens[: len(answer)] == answer).sum())
        drafted[: len(answer)] += 1
        accepted[:matches] += 1
        produced = min(matches + 1, stop - anchor - 1)
        lengths.append(produced)
        done, anchor = anchor, anchor + produced
    return Acceptance(tuple(lengths), tuple(accepted.tolist()), tuple(drafted.tolist()))
