"""Attention traffic of a model whose layers mostly have a window: a published account of it, and what each part is.

    exchange   K and V of the rows that a rank lacks, once through all layers, mean over the ranks
    window     W - 1 rows before each half chunk: (2P - 2)(W - 1) / P rows a rank, whatever the length

The published figures for DiffusionGemma 26B-A4B at 256K tokens on 8 ranks are 433.1 GiB a GPU for conventional context
parallelism and 28.3 GiB for CSBP. They follow to the last digit from the split below, which is this project's reading: the
sources give the totals, not the count of exchanges. Encoder and decoder are two passes there; forward, recomputation and
backward move rows each. The conventional baseline knows no window: most of the ratio is the window, as the row of
context parallelism with a windowed exchange shows.
"""

from dataclasses import dataclass

from megatron.bdlm.planner.models import KNOWN, Model
from megatron.bdlm.planner.traffic import needs

GIB = 2**30


@dataclass(frozen=True)
class Account:
    """One way of moving K and V, GiB a rank and step."""

    name: str
    full: float  # layers without a window
    window: float  # layers with one
    reason: str

    @property
    def total(self) -> float:
        return self.full + self.window


def accounts(model: Model = KNOWN["26b-a4b"], length: int = 262144, ranks: int = 8, item: int = 2) -> list[Account]:
    """Accounts of a model with two kinds of layers; `item` bytes a value, gradients too.

    Example: 26b-a4b, 262144 tokens, 8 ranks: 433.1, 41.4, 28.3, 14.5 GiB.
    """
    width = {True: 0, False: 0}  # bytes of a row over all layers with, without a window
    for kind in model.kinds:
        width[kind.window is not None] += kind.count * kind.key_heads * 2 * kind.head_size * item
    window = next(kind.window for kind in model.kinds if kind.window is not None)
    remote = length * (ranks - 1) / ranks
    needed = needs(length, ranks, ranks, "direct").mean
    few = needs(length, ranks, ranks, "direct", window=window).mean

    def gib(rows: float, has_window: bool, times: int) -> float:
        return rows * width[has_window] * times / GIB

    return [
        Account(
            "conventional CP, as published", gib(remote, False, 9), gib(remote, True, 9),
            "every remote row in every layer; 9 exchanges: clean rows in the encoder pass, clean and noisy ones in the decoder "
            "pass; forward, recomputation, backward each",
        ),
        Account(
            "conventional CP, windowed exchange", gib(remote, False, 9), gib(few, True, 6),
            "the same, but window layers move W - 1 rows a half chunk; noisy rows see only their own block there",
        ),
        Account(
            "CSBP, as published", gib(remote, False, 6), gib(few, True, 6),
            "clean rows only, in the encoder and again in the decoder pass; forward, recomputation, backward each",
        ),
        Account(
            "CSBP here", gib(needed, False, 4), gib(few, True, 4),
            "noisy and clean rows run in one pass and share one exchange of the rows that are needed; forward, recomputation, K and "
            "V again in backward, and their gradients (--bp-grad-dtype bf16); a self-conditioned sample adds one exchange",
        ),
    ]
