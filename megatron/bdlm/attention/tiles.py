"""Attention as dense tiles: read rows, run a kernel, merge by log-sum-exp; and the same backward.

    s rows of a rank        g query heads per key head      h = samples x key heads
    n rectangles of a tile  r queries, c keys of each       d head size (q and k, or v)

Layout. Query-side tensors are folded: `[s, g, h, d]`, keys and values `[c, h, d]`, log-sum-exp `[s, g, h]`. In this
order a run of tokens is one contiguous stretch of `len * g` rows, so the query heads of a group fold into rows, and
equally spaced runs are a strided view: `[n, h, len * g, d]`, nothing is copied. The CPU kernel writes its results in
the same memory order. With g = 1 the engine's `[s, b, heads, d]` already is the folded tensor.

    Example: runs of 2 tokens starting at 2, 6, 10 with g = 1 and row stride t is
    as_strided((3, h, 2, d), (4t, .., t, 1), offset 2t).

Merging (Dao et al., FlashAttention, 2022): with l = log-sum-exp of what a row has seen so far and (o', l') of new keys,
w = sigmoid(l' - l) is the new keys' share of the row, o <- o + w (o' - o), l <- max(l, l') + log(1 + exp(-|l' - l|)).
A row that has seen nothing has l = -inf, w = 1.

Pure tensor math: no torch.distributed here, and no plan beyond lists of rectangles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from megatron.bdlm.attention.diagonal_tile import DiagonalTile
from megatron.bdlm.attention.kernels.base import AttentionKernel
from megatron.bdlm.parallel.device import to_device
from megatron.bdlm.platform.ranges import spanned

GATHERED_PAIRS = 1 << 14  # below this many (query, key) pairs a lone rectangle joins a gathered batch
PROGRESSION = 4  # so does a progression shorter than this


# ---- where the rows of a tile are --------------------------------------------------------------


@dataclass(frozen=True)
class Spaced:
    """`count` runs of `length` rows, the i-th starting at `start + i * step`. Read and written in place."""

    count: int
    start: int
    step: int  # 0: the same rows for every rectangle (keys only)
    length: int

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """View of x [rows, h, d] as [count, h, length, d]."""
        row, head, last = x.stride()
        size = (self.count, x.shape[1], self.length, x.shape[2])
        return x.as_strided(size, (self.step * row, head, row, last), x.storage_offset() + self.start * row)

    def write(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """Nothing to do: `read` gave a view, and `part` is that view after being changed in place."""

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """x[rows] += part, [count, h, length, d]."""
        if self.step == 0 and self.count > 1:
            self.first.add(x, part.sum(0, keepdim=True, dtype=x.dtype))
        else:
            self.read(x).add_(part)

    @property
    def first(self) -> "Spaced":
        return Spaced(1, self.start, 0, self.length)


@dataclass(frozen=True)
class Scattered:
    """Runs of `length` rows that start anywhere: gathered into one batch. Runs that are written must not overlap."""

    index: torch.Tensor  # int64 [count * length], row numbers
    length: int

    @staticmethod
    def of(starts: Sequence[int], length: int, device: torch.device) -> "Scattered":
        rows = torch.tensor(starts)[:, None] + torch.arange(length)
        return Scattered(to_device(rows.flatten(), device), length)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Copy of the rows of x [rows, h, d] as [count, h, length, d]."""
        return x.index_select(0, self.index).unflatten(0, (-1, self.length)).transpose(1, 2)

    def write(self, x: torch.Tensor, part: torch.Tensor) -> None:
        x[self.index] = part.transpose(1, 2).flatten(0, 1)

    def add(self, x: torch.Tensor, part: torch.Tensor) -> None:
        """x[rows] += part; rows that stand in several runs get the sum."""
        x.index_add_(0, self.index, part.transpose(1, 2).flatten(0, 1).to(x.dtype))


@dataclass(frozen=True)
class Tile:
    """Equal rectangles that one kernel call computes. No query row stands in two of them."""

    queries: Spaced | Scattered  # of folded rows (token * g + member) for a full tile, of tokens for a diagonal one
    keys: Spaced | Scattered
    kind: str  # "full" | "causal" | "anticausal"
    mask: torch.Tensor | None = None  # additive [rows, keys], the same for every rectangle (`leaves`)


# ---- rectangles to tiles ------------------------------------------------------------------------


def tiles_of(batches: Sequence, g: int, device: torch.device) -> tuple[Tile, ...]:
    """Cut batches of equal rectangles (`RectangleBatch`) into tiles, for g query heads per key head.

    Regular halving gives arithmetic progressions of starts: each is a tile of views. What is left, irregular starts of
    packed documents for example, is computed where it stands when it is large, and gathered into one batch when small.
    """
    tiles = []
    for batch in batches:
        if batch.queries == 0 or batch.keys == 0 or len(batch.query_starts) == 0:
            continue
        rows = g if batch.kind == "full" else 1  # query rows per token
        order = np.lexsort((batch.key_starts, batch.query_starts))
        starts = np.stack((batch.query_starts[order] * rows, batch.key_starts[order]), 1)
        queries = batch.queries * rows
        small = []
        for first, count in _progressions(starts, queries, batch.keys):
            if count < PROGRESSION and count * queries * batch.keys < GATHERED_PAIRS and len(starts) > count:
                small.extend(starts[first : first + count].tolist())
                continue
            query_start, key_start = starts[first].tolist()
            query_step, key_step = (starts[first + 1] - starts[first]).tolist() if count > 1 else (0, 0)
            tiles.append(
                Tile(
                    Spaced(count, query_start, query_step, queries),
                    Spaced(count, key_start, key_step, batch.keys),
                    batch.kind,
                )
            )
        for layer in _disjoint_layers(small, queries):
            query_starts, key_starts = zip(*layer)
            tiles.append(
                Tile(
                    Scattered.of(query_starts, queries, device),
                    Scattered.of(key_starts, batch.keys, device),
                    batch.kind,
                )
            )
    return tuple(tiles)


def _progressions(starts: np.ndarray, queries: int, keys: int) -> Iterator[tuple[int, int]]:
    """Split rows (query start, key start), sorted by query start, into maximal progressions; yield (first, count).

    Query runs must not overlap; key runs must not either, unless all are the same (step 0).
    """
    steps = np.diff(starts, axis=0)
    usable = (steps[:, 0] >= queries) & ((steps[:, 1] >= keys) | (steps[:, 1] == 0))
    same_as_next = np.all(steps[1:] == steps[:-1], axis=1)
    first, total = 0, len(starts)
    while first < total:
        last = first
        if first + 1 < total and usable[first]:
            last = first + 1
            while last + 1 < total and same_as_next[last - 1]:
                last += 1
        yield first, last - first + 1
        first = last + 1


def _disjoint_layers(starts: list[list[int]], length: int) -> list[list[list[int]]]:
    """Distribute (query start, key start) pairs, sorted, over lists in which no two query runs overlap."""
    layers: list[list[list[int]]] = []
    for pair in starts:
        for layer in layers:
            if layer[-1][0] + length <= pair[0]:
                layer.append(pair)
                break
        else:
            layers.append([pair])
    return layers


# ---- folding ------------------------------------------------------------------------------------


def fold(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[s, b, n, d] -> [s, g, b * key_heads, d]: a view for g = 1, else a copy. Query head = key head * g + member."""
    s, b, n, d = x.shape
    g = n // key_heads
    x = x.reshape(s, b, key_heads, g, d).permute(0, 3, 1, 2, 4).reshape(s, g, b * key_heads, d)
    regular = x.stride(3) == 1 and x.stride(2) > 0 and (s == 1 or x.stride(0) > 0)
    return x if regular and (g == 1 or x.stride(0) == g * x.stride(1)) else x.contiguous()


def unfold(x: torch.Tensor, batch: int) -> torch.Tensor:
    """[s, g, b * key_heads, d] -> [s, b, key_heads * g, d], the inverse of `fold`."""
    s, g, h, d = x.shape
    return x.reshape(s, g, batch, h // batch, d).permute(0, 2, 3, 1, 4).reshape(s, batch, h // batch * g, d)


# ---- forward ------------------------------------------------------------------------------------


@dataclass
class Partial:
    """What the rows have seen so far: normalised output and log-sum-exp, float32 (float64 for float64 inputs)."""

    out: torch.Tensor  # [s, g, h, dv]
    lse: torch.Tensor  # [s, g, h]

    @staticmethod
    def empty(q: torch.Tensor, value_head_size: int) -> "Partial":
        """Nothing seen yet, for folded q [s, g, h, d]."""
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros(*q.shape[:3], value_head_size, dtype=dtype, device=q.device)
        return Partial(out, torch.full(q.shape[:3], float("-inf"), dtype=dtype, device=q.device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Partial results and gradients are summed in float32, in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@spanned("bdlm/tiles")
def attend(
    seen: Partial,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[Tile | DiagonalTile],
    kernel: AttentionKernel,
    scale: float,
) -> None:
    """Let the rows of q [s, g, h, d] see k [c, h, d], v [c, h, dv] through `tiles`; `seen` is updated in place."""
    lse = seen.lse.unsqueeze(-1)  # [s, g, h, 1]
    for tile in tiles:
        if isinstance(tile, DiagonalTile):
            tile.attend(seen, q, k, v, scale)
            continue
        causal, queries = tile.kind != "full", tile.queries
        for q_rows, out_rows, lse_rows in _lanes(tile, q, seen.out, lse):
            part = kernel.forward(
                *_flip(tile, queries.read(q_rows), tile.keys.read(k), tile.keys.read(v)), scale, causal, tile.mask
            )
            part_out, part_lse = _flip(tile, *part)
            out_view, lse_view = queries.read(out_rows), queries.read(lse_rows)
            _merge(out_view, lse_view, part_out, part_lse.unsqueeze(-1))
            queries.write(out_rows, out_view)
            queries.write(lse_rows, lse_view)


def _merge(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge a kernel's result into out [n, h, r, dv] and lse [n, h, r, 1] in place, one pass over out."""
    gain = part_lse - lse
    out.lerp_(part_out.to(out.dtype), torch.sigmoid(gain))
    torch.sub(torch.maximum(lse, part_lse), logsigmoid(gain.abs_()), out=lse)


# ---- backward -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedRows:
    """Query-side inputs of backward, folded: all in the inputs' type, lse in the accumulation type."""

    dout: torch.Tensor  # [s, g, h, dv]
    q: torch.Tensor  # [s, g, h, d]
    out: torch.Tensor  # [s, g, h, dv], the final output
    lse: torch.Tensor  # [s, g, h], the final log-sum-exp


@spanned("bdlm/tiles backward")
def attend_backward(
    rows: FinishedRows,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[Tile | DiagonalTile],
    kernel: AttentionKernel,
    scale: float,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add the gradients of what `attend` computed to `gradients` = (dq [s, g, h, d], dk [c, h, d], dv [c, h, dv])."""
    dq, dk, dv = gradients
    lse = rows.lse.unsqueeze(-1)
    for tile in tiles:
        if isinstance(tile, DiagonalTile):
            tile.attend_backward(rows, k, v, scale, gradients)
            continue
        causal, queries = tile.kind != "full", tile.queries
        for dout, q, out, lse_rows, dq_rows in _lanes(tile, rows.dout, rows.q, rows.out, lse, dq):
            dout, q, out, lse_view = _flip(tile, *(queries.read(x) for x in (dout, q, out, lse_rows)))
            keys, values = _flip(tile, tile.keys.read(k), tile.keys.read(v))
            parts = kernel.backward(dout, q, keys, values, out, lse_view.squeeze(-1), scale, causal, tile.mask)
            part_dq, part_dk, part_dv = _flip(tile, *parts)
            queries.add(dq_rows, part_dq)
            tile.keys.add(dk, part_dk)
            tile.keys.add(dv, part_dv)


# ---- how query heads meet a kernel ----------------------------------------------------------------


def _lanes(tile: Tile, *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Query-side tensors [s, g, h, d] as [rows, h, d], the rows that `tile.queries` counts.

    Full rectangles take all g heads of a group at once, as rows. A diagonal has to keep one row per token, so
    there each member of the group is a lane of its own.
    """
    if tile.kind == "full":
        yield [x.flatten(0, 1) for x in tensors]
    else:
        for member in range(tensors[0].shape[1]):
            yield [x[:, member] for x in tensors]


def _flip(tile: Tile, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Anticausal squares are causal ones with rows and keys in reverse order (dimension 2)."""
    return tuple(x.flip(2) for x in tensors) if tile.kind == "anticausal" else tensors
