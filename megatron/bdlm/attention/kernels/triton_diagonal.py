"""Triton kernels for the small rectangles near the diagonal: each pass one launch, no mask tensor.

What is visible is a `Diagonal` (diagonal.py): two key intervals a row. Forward goes over query tiles with the online
softmax of FlashAttention (Dao et al., 2022) and merges its result into what the rows have seen before. Backward takes the
final log-sum-exp, as every kernel here does: query tiles give dq, key tiles give dk and dv from the query tiles that
see them. A program is the only writer of its rows, so results are the same from run to run.

    R folded rows (token * g + member)    h = samples x key heads    d, dv head sizes, padded to powers of two in registers

Runs on a GPU, and on a CPU under TRITON_INTERPRET=1 (tests). Compiled ahead of time by tools/compile_kernels.py.
"""

from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # the CPU build of torch brings no Triton
    raise ImportError(f"the Triton kernel needs the package triton ({error}); a legal value: --bdlm-diagonal-kernel dense") from error


@dataclass(frozen=True)
class TileSizes:
    """Shape of a program's work for a head size."""

    rows: int  # folded query rows of a query tile
    keys: int  # of a key tile
    warps: int


def tile_sizes(head_size: int, g: int = 1) -> TileSizes:
    """Sizes that need no spilled registers on compute capability 8.0, 9.0 and 10.0 (tools/compile_kernels.py prints them).

    A query tile holds all g rows of a token.
    """
    rows, keys, warps = (64, 64, 8) if head_size <= 64 else (64, 32, 8) if head_size <= 128 else (32, 32, 8)
    return TileSizes(max(rows, triton.next_power_of_2(g)), keys, warps)


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def _places(start, row, row_stride, head, head_stride, BLOCK: tl.constexpr):
    """Where rows start + row of a head are: a 64-bit scalar, and small offsets, which take half the registers."""
    return tl.cast(start, tl.int64) * row_stride + head * head_stride, row[:, None] * row_stride + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _rows(X, start, row, row_stride, head, head_stride, live, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """X[start + row, head, :], [rows, BLOCK]; zero where the row or the column does not exist."""
    base, offset = _places(start, row, row_stride, head, head_stride, BLOCK)
    return tl.load(X + base + offset, mask=live[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :], other=0.0)


@triton.jit
def _store(X, values, start, row, row_stride, head, head_stride, live, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """X[start + row, head, :] = values."""
    base, offset = _places(start, row, row_stride, head, head_stride, BLOCK)
    tl.store(X + base + offset, values, mask=live[:, None] & (tl.arange(0, BLOCK) < SIZE)[None, :])


@triton.jit
def _add(X, part, start, row, row_stride, head, head_stride, live, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """X[start + row, head, :] += part."""
    before = _rows(X, start, row, row_stride, head, head_stride, live, SIZE, BLOCK)
    _store(X, before + part, start, row, row_stride, head, head_stride, live, SIZE, BLOCK)


@triton.jit
def _visible(INTERVALS, token, live, key, part: tl.constexpr):
    """[rows, keys]: whether the key is in the row's interval `part`."""
    low = tl.load(INTERVALS + token * 4 + 2 * part, mask=live, other=0)
    high = tl.load(INTERVALS + token * 4 + 2 * part + 1, mask=live, other=0)
    return (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])


@triton.jit
def _forward_kernel(
    Q, K, V, OUT, LSE, INTERVALS, TILES, scale, key_count,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row, lse_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, count = tl.load(TILES + tile * 6), tl.load(TILES + tile * 6 + 1)
    row, column = tl.arange(0, ROWS), tl.arange(0, KEYS)
    live, token, folded = row < count * G, first + row // G, first * G
    q = _rows(Q, folded, row, q_row, head, q_head, live, D, BLOCK_D)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for part in tl.static_range(2):
        low, high = tl.load(TILES + tile * 6 + 2 + 2 * part), tl.load(TILES + tile * 6 + 3 + 2 * part)
        for start in range(low, high, KEYS):
            here = start + column < key_count
            k = _rows(K, start, column, k_row, head, k_head, here, D, BLOCK_D)
            v = _rows(V, start, column, v_row, head, v_head, here, DV, BLOCK_DV)
            score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            score = tl.where(_visible(INTERVALS, token, live, start + column, part), score, float("-inf"))
            new = tl.maximum(largest, tl.max(score, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing: exp(-inf - 0) = 0
            p = tl.exp(score - shift[:, None])
            old = tl.exp(largest - shift)
            total = total * old + tl.sum(p, 1)
            out = out * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            largest = new
    # merge with what the rows have seen before: shares of the row's whole sum of exponentials
    at = LSE + tl.cast(folded + row, tl.int64) * lse_row + head * lse_head
    before = tl.load(at, mask=live, other=float("-inf"))
    peak = tl.maximum(before, largest)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    share_before, share = tl.exp(before - peak), tl.exp(largest - peak)
    both = share_before + share * total
    safe = tl.where(both == 0.0, 1.0, both)
    out_before = _rows(OUT, folded, row, out_row, head, out_head, live, DV, BLOCK_DV)
    merged = out_before * (share_before / safe)[:, None] + out * (share / safe)[:, None]
    _store(OUT, merged, folded, row, out_row, head, out_head, live, DV, BLOCK_DV)
    tl.store(at, tl.where(both == 0.0, float("-inf"), peak + tl.log(safe)), mask=live)


@triton.jit
def _gradients(q, k, v, dout, lse, delta, seen, scale, PRECISION: tl.constexpr):
    """p and ds, [rows, keys]: probabilities under the final log-sum-exp, gradient of q.k."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    p = tl.where(seen, tl.exp(score - lse[:, None]), 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def _dq_kernel(
    Q, K, V, DOUT, LSE, DELTA, DQ, INTERVALS, TILES, scale, key_count,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_row, lse_head, dq_row, dq_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, count = tl.load(TILES + tile * 6), tl.load(TILES + tile * 6 + 1)
    row, column = tl.arange(0, ROWS), tl.arange(0, KEYS)
    live, token, folded = row < count * G, first + row // G, first * G
    q = _rows(Q, folded, row, q_row, head, q_head, live, D, BLOCK_D)
    dout = _rows(DOUT, folded, row, dout_row, head, dout_head, live, DV, BLOCK_DV)
    at = tl.cast(folded + row, tl.int64) * lse_row + head * lse_head
    lse, delta = tl.load(LSE + at, mask=live, other=0.0), tl.load(DELTA + at, mask=live, other=0.0)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in tl.static_range(2):
        low, high = tl.load(TILES + tile * 6 + 2 + 2 * part), tl.load(TILES + tile * 6 + 3 + 2 * part)
        for start in range(low, high, KEYS):
            here = start + column < key_count
            k = _rows(K, start, column, k_row, head, k_head, here, D, BLOCK_D)
            v = _rows(V, start, column, v_row, head, v_head, here, DV, BLOCK_DV)
            seen = _visible(INTERVALS, token, live, start + column, part)
            p, ds = _gradients(q, k, v, dout, lse, delta, seen, scale, PRECISION)
            dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    _add(DQ, dq, folded, row, dq_row, head, dq_head, live, D, BLOCK_D)


@triton.jit
def _dkv_kernel(
    Q, K, V, DOUT, LSE, DELTA, DK, DV_OUT, INTERVALS, TILES, KEY_TILES, SEEN_BY, scale, key_count,
    q_row, q_head, k_row, k_head, v_row, v_head, dout_row, dout_head, lse_row, lse_head, dk_row, dk_head, dv_row, dv_head,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(KEY_TILES + number * 3)
    begin, end = tl.load(KEY_TILES + number * 3 + 1), tl.load(KEY_TILES + number * 3 + 2)
    column = tl.arange(0, KEYS)
    here = start + column < key_count
    k = _rows(K, start, column, k_row, head, k_head, here, D, BLOCK_D)
    v = _rows(V, start, column, v_row, head, v_head, here, DV, BLOCK_DV)
    dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_DV], tl.float32)
    row = tl.arange(0, ROWS)
    for entry in range(begin, end):
        tile = tl.load(SEEN_BY + entry)
        first, count = tl.load(TILES + tile * 6), tl.load(TILES + tile * 6 + 1)
        live, token, folded = row < count * G, first + row // G, first * G
        q = _rows(Q, folded, row, q_row, head, q_head, live, D, BLOCK_D)
        dout = _rows(DOUT, folded, row, dout_row, head, dout_head, live, DV, BLOCK_DV)
        at = tl.cast(folded + row, tl.int64) * lse_row + head * lse_head
        lse, delta = tl.load(LSE + at, mask=live, other=0.0), tl.load(DELTA + at, mask=live, other=0.0)
        seen = _visible(INTERVALS, token, live, start + column, 0) | _visible(INTERVALS, token, live, start + column, 1)
        p, ds = _gradients(q, k, v, dout, lse, delta, seen, scale, PRECISION)
        dv += tl.dot(tl.trans(p.to(dout.dtype)), dout, input_precision=PRECISION)
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
    _add(DK, dk, start, column, dk_row, head, dk_head, here, D, BLOCK_D)
    _add(DV_OUT, dv, start, column, dv_row, head, dv_head, here, DV, BLOCK_DV)


KERNELS = {"forward": _forward_kernel, "dq": _dq_kernel, "dk, dv": _dkv_kernel}


# ---- launches -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """A `Diagonal` on the device, for `sizes` and g query heads per key head."""

    intervals: torch.Tensor
    tiles: torch.Tensor
    key_tiles: torch.Tensor
    seen_by: torch.Tensor
    sizes: TileSizes
    g: int


def forward(tables: DeviceTables, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Let rows q [s, g, h, d] see k [c, h, d], v [c, h, dv]; merged into out [s, g, h, dv] and lse [s, g, h], float32."""
    if not len(tables.tiles):
        return
    rows = [x.flatten(0, 1) for x in (q, out, lse)]
    _forward_kernel[(len(tables.tiles), k.shape[1])](
        rows[0], k, v, rows[1], rows[2], tables.intervals, tables.tiles, scale, k.shape[0],
        *_strides(rows[0], k, v, rows[1], rows[2]), **_constants(tables, q, v),
    )  # fmt: skip


def backward(
    tables: DeviceTables,
    inputs: tuple[torch.Tensor, ...],
    scale: float,
    lse: torch.Tensor,
    delta: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add to `gradients` (dq [s, g, h, d], dk [c, h, d], dv [c, h, dv], float32) what the rectangles contribute.

    Args:
        inputs: q [s, g, h, d], k [c, h, d], v [c, h, dv], dout [s, g, h, dv].
        lse, delta: [s, g, h] float32, contiguous: final log-sum-exp; sum of dout * out.
    """
    if not len(tables.tiles):
        return
    q, k, v, dout = inputs
    dq, dk, dv = gradients
    q_rows, dout_rows, dq_rows, lse_rows, delta_rows = (x.flatten(0, 1) for x in (q, dout, dq, lse, delta))
    common = (q_rows, k, v, dout_rows, lse_rows, delta_rows)
    strides = _strides(q_rows, k, v, dout_rows, lse_rows)
    constants = _constants(tables, q, v)
    _dq_kernel[(len(tables.tiles), k.shape[1])](
        *common, dq_rows, tables.intervals, tables.tiles, scale, k.shape[0], *strides, *_strides(dq_rows), **constants
    )
    _dkv_kernel[(len(tables.key_tiles), k.shape[1])](
        *common, dk, dv, tables.intervals, tables.tiles, tables.key_tiles, tables.seen_by, scale, k.shape[0],
        *strides, *_strides(dk, dv), **constants,
    )  # fmt: skip


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Row and head stride of each; the last dimension, where there is one, is contiguous."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _constants(tables: DeviceTables, q: torch.Tensor, v: torch.Tensor) -> dict:
    return {**constants(tables.g, q.shape[-1], v.shape[-1], q.dtype, tables.sizes), "num_warps": tables.sizes.warps}


def constants(g: int, head_size: int, value_head_size: int, dtype: torch.dtype, sizes: TileSizes) -> dict:
    """The kernels' compile-time arguments."""
    return {
        "G": g, "D": head_size, "DV": value_head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)), "BLOCK_DV": max(16, triton.next_power_of_2(value_head_size)),
        "ROWS": sizes.rows, "KEYS": sizes.keys, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
