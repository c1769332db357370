"""Mock documents with structure that a model can learn: a random walk on a ring of tokens.

For quick starts and topology tests without files (`--mock-data`). Document d is a pure function of
(SEED, d): a start token, then steps on a ring of `tokens` ids, +1 with probability 0.8, else +2, +3,
+4 or +5 alike; an end-of-document token at the end. The vocabulary is respected, the mask and
padding ids never occur. Per token, unigram frequencies give about ln(64) = 4.16 nats, the
previous token gives `ENTROPY_RATE` = 0.778 nats, so a loss has room to fall.
"""

import math
from typing import Optional

import numpy as np

from megatron.bdlm.data.documents import DataError

SEED = 20220
DOCUMENTS = 10_000
SHORTEST, LONGEST = 33, 512
RING = 64
STEP_PROBABILITIES = np.array([0.8, 0.05, 0.05, 0.05, 0.05])  # of steps 1..5
ENTROPY_RATE = float(-(STEP_PROBABILITIES * np.log(STEP_PROBABILITIES)).sum())
assert math.isclose(ENTROPY_RATE, 0.778, abs_tol=1e-3)


class MockDocuments:
    """The engine's low-level dataset: `sequence_lengths`, `get`, `len`.

    Args:
        vocabulary_size: ids are below it.
        eod: last token of every document; None leaves it out.
        excluded: ids that must not occur (mask, padding).

    Raises:
        DataError: fewer than 8 ordinary tokens remain.
    """

    def __init__(self, vocabulary_size: int, eod: Optional[int], excluded: frozenset[int] = frozenset()) -> None:
        outside = excluded | {eod}
        ring = [token for token in range(min(vocabulary_size, RING + len(outside))) if token not in outside][:RING]
        if len(ring) < 8:
            raise DataError(
                f"--mock-data: a vocabulary of {vocabulary_size} leaves {len(ring)} ordinary tokens; at least 8 are "
                "needed"
            )
        self.ring = np.array(ring, dtype=np.int64)
        self.eod = eod
        lengths = np.random.Generator(np.random.Philox(key=[SEED, 0])).integers(SHORTEST, LONGEST + 1, DOCUMENTS)
        self.sequence_lengths = lengths.astype(np.int32)

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> np.ndarray:
        """All tokens of document `index`, int64 [length]."""
        length = int(self.sequence_lengths[index])
        generator = np.random.Generator(np.random.Philox(key=[SEED, 1 + int(index)]))
        steps = generator.choice(len(STEP_PROBABILITIES), size=length, p=STEP_PROBABILITIES) + 1
        steps[0] = generator.integers(len(self.ring))
        tokens = self.ring[np.cumsum(steps) % len(self.ring)]
        if self.eod is not None:
            tokens[-1] = self.eod
        return tokens

    def get(self, idx: int, offset: int = 0, length: Optional[int] = None) -> np.ndarray:
        """Tokens `offset .. offset + length` of document `idx`, to its end if `length` is None."""
        tokens = self[idx]
        return tokens[offset:] if length is None else tokens[offset : offset + length]
