"""The block diffusion mask and attention as plain loops in float64: what everything else is held to.

Written to be read against the definition (who sees whom), not to be fast, and without any idea of
the code under test: no intervals, no rectangles, no log-sum-exp merging, no sharding. It imports
nothing of this package.

Rows are global: `[xt_1; ..; xt_V; x0]`, so noisy row of view v (from 0) and token i is row
`v*L + i` and clean row i is `V*L + i`; R = (V+1)*L rows.

shapes: b batch, n query heads, g key heads (g divides n: grouped-query attention), d and dv head sizes
"""

import math
from dataclasses import dataclass
from typing import Optional, Sequence, Union

import torch

LARGEST_ROWS = 4096
"""Largest R = (V+1)*L accepted: the mask alone is R x R, built entry by entry."""


@dataclass(frozen=True)
class Token:
    """Where one token of the sample stands."""

    document: int
    block: int  # over the whole sample
    position: int  # inside the document
    block_position: int  # position of the block's first token inside the document


def tokens_of_sample(
    seq_length: int,
    block_size: int,
    documents: Optional[Sequence[int]] = None,
    block_origin: Union[int, Sequence[int]] = 0,
    block_restarts: Optional[Sequence[int]] = None,
) -> list[Token]:
    """Walk over the sample and note document, block and position of every token.

    A block starts at the first token of a document, at the document's block origin, at a restart,
    and when the current block has `block_size` tokens.
    """
    lengths = [seq_length] if documents is None else list(documents)
    if sum(lengths) != seq_length:
        raise ValueError(f"documents sum to {sum(lengths)}, not to seq_length {seq_length}")
    restarts = set() if block_restarts is None else {int(token) for token in block_restarts}
    walked: list[Token] = []
    block = -1
    for document, length in enumerate(lengths):
        origin = block_origin if isinstance(block_origin, int) else int(block_origin[document])
        in_block = 0
        block_position = 0
        for position in range(length):
            here = len(walked)
            if position == 0 or position == origin or here in restarts or in_block == block_size:
                block += 1
                in_block = 0
                block_position = position
            walked.append(Token(document, block, position, block_position))
            in_block += 1
    return walked


def sees(
    query: Token,
    query_view: Optional[int],
    key: Token,
    key_view: Optional[int],
    clean_attention: str,
    noisy_attention: str,
    window: Optional[int],
) -> bool:
    """Whether a query row sees a key row (view None: a clean row); both are rows that exist."""
    if query.document != key.document:
        return False
    if query_view is None:
        if key_view is not None:
            return False
        if clean_attention == "block-causal":
            allowed = key.block <= query.block
        elif clean_attention == "token-causal":
            allowed = key.position <= query.position
        else:
            raise ValueError(f"clean_attention {clean_attention!r}: block-causal or token-causal")
        return allowed and (window is None or query.position - key.position < window)
    if key_view is not None:
        if key_view != query_view or key.block != query.block:
            return False
        if noisy_attention == "bidirectional":
            return True
        if noisy_attention == "causal":
            return key.position <= query.position
        raise ValueError(f"noisy_attention {noisy_attention!r}: bidirectional or causal")
    if key.block >= query.block:
        return False
    return window is None or key.position >= query.block_position - (window - 1)


def visible(
    *,
    seq_length: int,
    block_size: int,
    views: int = 1,
    documents: Optional[Sequence[int]] = None,
    clean_attention: str = "block-causal",
    noisy_attention: str = "bidirectional",
    block_origin: Union[int, Sequence[int]] = 0,
    block_restarts: Optional[Sequence[int]] = None,
    target_blocks: Optional[Sequence[int]] = None,
    window: Optional[int] = None,
) -> torch.Tensor:
    """The mask, bool `[R, R]`: entry (q, k) says whether row q sees row k.

    Noisy rows of blocks that are not targets do not exist: their rows and columns are False.

    Raises:
        ValueError: R beyond `LARGEST_ROWS`, or an unknown option value.
    """
    rows = (views + 1) * seq_length
    if rows > LARGEST_ROWS:
        raise ValueError(
            f"the dense oracle holds {rows} x {rows} entries for seq_length {seq_length} and {views} view(s); "
            f"it refuses above {LARGEST_ROWS} rows. A legal seq_length: {LARGEST_ROWS // (views + 1)}"
        )
    sample = tokens_of_sample(seq_length, block_size, documents, block_origin, block_restarts)
    targets = None if target_blocks is None else {int(block) for block in target_blocks}

    def row(index: int) -> Optional[tuple[Token, Optional[int]]]:
        view, token = divmod(index, seq_length)
        if view == views:
            return sample[token], None
        if targets is not None and sample[token].block not in targets:
            return None
        return sample[token], view

    every_row = [row(index) for index in range(rows)]
    mask = []
    for query in every_row:
        line = []
        for key in every_row:
            exist = query is not None and key is not None
            line.append(exist and sees(*query, *key, clean_attention, noisy_attention, window))
        mask.append(line)
    return torch.tensor(mask, dtype=torch.bool)


def dense_block_diffusion_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_length: int,
    block_size: int,
    views: int = 1,
    documents: Optional[Sequence[int]] = None,
    clean_attention: str = "block-causal",
    noisy_attention: str = "bidirectional",
    block_origin: Union[int, Sequence[int]] = 0,
    block_restarts: Optional[Sequence[int]] = None,
    target_blocks: Optional[Sequence[int]] = None,
    window: Optional[int] = None,
    softmax_scale: Optional[float] = None,
) -> torch.Tensor:
    """Attention of the whole sample over all its rows, differentiable, computed in float64.

    Args:
        q: `[R, b, n, d]`; k: `[R, b, g, d]`; v: `[R, b, g, dv]`; the other arguments as in `visible`.
        softmax_scale: factor of the scores; None: 1/sqrt(d).

    Returns:
        `[R, b, n, dv]` float64; rows that see nothing (noisy rows of blocks that are no targets) are zero.
    """
    mask = visible(
        seq_length=seq_length, block_size=block_size, views=views, documents=documents,
        clean_attention=clean_attention, noisy_attention=noisy_attention, block_origin=block_origin,
        block_restarts=block_restarts, target_blocks=target_blocks, window=window,
    )
    rows, _, heads, head_size = q.shape
    if rows != mask.shape[0]:
        raise ValueError(f"q has {rows} rows; {views} view(s) and the clean stream have {mask.shape[0]}")
    key_heads = k.shape[2]
    scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale
    exists = mask.any(dim=1)
    by_head = []
    for head in range(heads):
        key_head = head // (heads // key_heads)
        queries, keys, values = (t.double() for t in (q[:, :, head], k[:, :, key_head], v[:, :, key_head]))
        scores = torch.einsum("qbd,kbd->bqk", queries, keys) * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        # a row without keys would be 0/0: give it all keys, then drop its output
        scores = scores.masked_fill(~exists[:, None], 0.0)
        out = torch.einsum("bqk,kbd->qbd", torch.softmax(scores, dim=-1), values)
        by_head.append(out.masked_fill(~exists[:, None, None], 0.0))
    return torch.stack(by_head, dim=2)
