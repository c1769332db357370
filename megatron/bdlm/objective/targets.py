"""What each row of a sample predicts, with which weight, and what it counts for.

Everything here speaks of one whole sample in the global row order [xt_1; ..; xt_V; x0] (leading axis V+1, then L
tokens) and does not know which rank holds a row: `select_rows` picks the rows of one rank afterwards.

A noisy row i predicts token i, or token i+1 of the same document with the label shift `next`; a clean row always
predicts token i+1. A row carries the weight and the noise level of the token that it predicts, whichever block the
row itself stands in.

| array      | noisy row of view v                                       | clean row (with --bdlm-clean-loss-weight)  |
|------------|-----------------------------------------------------------|--------------------------------------------|
| scored     | its token is corrupted (uniform corruption: supervised)   | its token is supervised                    |
| weight     | w, or 1 (`unit`); w/V where V views each estimate the sum | 1                                          |
| supervised | v = 1 and its token is supervised                         | its token is supervised                    |
| counted    | `supervised`, or its token is corrupted (`masked`)        | its token is supervised                    |

`block-mean` (DiffusionGemma) weighs a row 1 / (supervised rows of its block) / (such blocks of its document) and counts
documents: one row stands for each.

Shapes: L tokens, V views, B blocks, n selected rows.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.noise import Noised, block_ids, document_starts


@dataclass(frozen=True)
class Targets:
    """Every row of one sample; [V+1, L] each, the last row of the leading axis is the clean stream."""

    target: np.ndarray  # int64 id that the row predicts; 0 where it predicts none
    weight: np.ndarray  # float32 loss weight; 0 where not scored
    nelbo_weight: np.ndarray  # float32 weight of the NELBO that is logged: view 1 alone, 0 elsewhere
    t: np.ndarray  # float32 noise level of the predicted token; 0 on clean rows
    scored: np.ndarray  # bool: the row needs logits
    corrupted: np.ndarray  # bool: the row predicts a corrupted token
    supervised: np.ndarray  # bool: every supervised token once over the views; clean rows: what they score
    counted: np.ndarray  # bool: the denominators


def build_targets(
    tokens: np.ndarray,
    eligible: np.ndarray,
    noised: Noised,
    documents: Optional[Sequence[int]],
    config: BDLMConfig,
    *,
    clean_eligible: Optional[np.ndarray] = None,
    mask_token_id: Optional[int] = None,
) -> Targets:
    """Targets of one sample.

    Args:
        tokens: [L] clean ids.
        eligible: [L] bool, the supervised tokens that `noised` was drawn with.
        noised: the corrupted sample.
        documents: lengths that sum to L; None: one document.
        config: shift, weight, denominator, corruption, loss factors.
        clean_eligible: [L] bool, tokens that clean rows score; default `eligible`.
        mask_token_id: default config.bdlm_mask_token_id.

    Raises:
        ValueError: a supervised token is the mask token, which can never be predicted.
    """
    views, length = noised.corrupted.shape
    clean_eligible = eligible if clean_eligible is None else clean_eligible
    _refuse_mask_targets(tokens, eligible | clean_eligible, config, mask_token_id)
    starts = document_starts(length, documents)
    shift = config.bdlm_label_shift == "next"

    shape = (views + 1, length)
    out = Targets(
        target=np.zeros(shape, np.int64),
        weight=np.zeros(shape, np.float32),
        nelbo_weight=np.zeros(shape, np.float32),
        t=np.zeros(shape, np.float32),
        scored=np.zeros(shape, bool),
        corrupted=np.zeros(shape, bool),
        supervised=np.zeros(shape, bool),
        counted=np.zeros(shape, bool),
    )
    for view in range(views):
        corrupted, weight = _at_row(noised.corrupted[view], starts, shift), _at_row(noised.weight[view], starts, shift)
        supervised = _at_row(eligible, starts, shift)
        out.target[view] = _at_row(tokens, starts, shift)
        out.t[view] = _at_row(noised.t[view], starts, shift)
        out.corrupted[view] = corrupted
        out.scored[view] = supervised if config.bdlm_corruption == "uniform" else corrupted
        if config.bdlm_loss_weight == "nelbo":
            weight = weight * np.float32(noised.range_factor / views)
        np.copyto(out.weight[view], weight, where=out.scored[view])
        if view == 0:
            out.supervised[0] = supervised
            w = _at_row(noised.nelbo_weight[0], starts, shift) * np.float32(noised.range_factor)
            np.copyto(out.nelbo_weight[0], w, where=corrupted)
    _count(out, noised, starts, shift, config)

    if config.bdlm_clean_loss_weight > 0.0:
        clean = _at_row(clean_eligible, starts, shift=True)
        out.target[views] = _at_row(tokens, starts, shift=True)
        out.weight[views] = clean
        for flags in (out.scored, out.supervised, out.counted):
            flags[views] = clean
    return out


def target_blocks(
    eligible: np.ndarray,
    block_starts: np.ndarray,
    documents: Optional[Sequence[int]] = None,
    label_shift: str = "none",
) -> np.ndarray:
    """Blocks whose noisy rows are needed: some row of theirs predicts a supervised token.

    The other blocks (prompts) need no noisy rows at all. A matter of eligibility alone, so that a plan does not
    depend on the draw. With the label shift, the row that predicts a block's first token stands in the block before:
    8 tokens, S = 4, tokens 4..7 supervised: block 1, and with `next` blocks 0 and 1.

    Args:
        eligible: [L] bool supervised tokens.
        block_starts: [B] first token of each block.
        documents: lengths that sum to L; None: one document.
        label_shift: `none` or `next`.

    Returns:
        Ascending int64 indices over the sample's blocks.
    """
    needed = _at_row(eligible, document_starts(len(eligible), documents), label_shift == "next")
    if not needed.size:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.logical_or.reduceat(needed, block_starts))


def _at_row(values: np.ndarray, starts: np.ndarray, shift: bool) -> np.ndarray:
    """[L] by token -> [L] by the row that predicts it; 0 (False) for a row that predicts nothing.

    Shifted, values 5 6 7 8 9 of documents of 3 and 2 tokens give 6 7 0 9 0: the first token of a document has no row.
    """
    if not shift:
        return values
    out = np.zeros_like(values)
    out[:-1] = values[1:]
    out[starts[1:] - 1] = 0
    return out


def _count(out: Targets, noised: Noised, starts: np.ndarray, shift: bool, config: BDLMConfig) -> None:
    """Fill `counted` of the noisy rows; `block-mean` replaces their weights too."""
    if config.bdlm_loss_denominator == "supervised":
        out.counted[:-1] = out.supervised[:-1]
    elif config.bdlm_loss_denominator == "masked":
        out.counted[:-1] = out.corrupted[:-1]
    else:
        supervised = out.supervised[0]
        length = supervised.shape[0]
        # the block and the document of the predicted token; a row that predicts nothing is not supervised
        block = _at_row(block_ids(noised.block_starts, length), starts, shift)
        document = _at_row(block_ids(starts, length), starts, shift)
        rows = np.bincount(block[supervised], minlength=len(noised.block_starts))
        first_block = np.flatnonzero(rows)  # blocks with a supervised row, each in one document
        blocks = np.bincount(block_ids(starts, length)[noised.block_starts[first_block]], minlength=len(starts))
        scored = out.scored[0]
        out.weight[0, scored] = 1.0 / (rows[block[scored]] * blocks[document[scored]])
        _, first_row = np.unique(document[supervised], return_index=True)
        out.counted[0, np.flatnonzero(supervised)[first_row]] = True


def _refuse_mask_targets(
    tokens: np.ndarray, scored: np.ndarray, config: BDLMConfig, mask_token_id: Optional[int]
) -> None:
    mask = config.bdlm_mask_token_id if mask_token_id is None else mask_token_id
    if mask is None or config.bdlm_keep_mask_logit:
        return
    found = np.flatnonzero((tokens == mask) & scored)
    if found.size:
        raise ValueError(
            f"--bdlm-mask-token-id {mask}: supervised token {found[0]} of the sample is the mask token, which has no "
            f"probability. A legal value: an id that the data never holds, such as a new row behind the vocabulary"
        )
