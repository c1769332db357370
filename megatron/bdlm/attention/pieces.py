"""A program's pieces as tiles, made once, and the layout that tiles read keys in."""

from weakref import WeakKeyDictionary

import torch

from megatron.bdlm.attention.diagonal_tile import DiagonalTile
from megatron.bdlm.attention.leaves import with_leaves
from megatron.bdlm.attention.tiles import Tile, tiles_of
from megatron.bdlm.parallel.program import Piece

# Piece -> {what tiles depend on besides: tiles}; made once, not in every layer
_tiles_of_piece: WeakKeyDictionary = WeakKeyDictionary()


def piece_tiles(piece: Piece, q_folded: torch.Tensor, call) -> tuple[Tile | DiagonalTile, ...]:
    """The piece's rectangles as tiles, for this group and head size, device and kind of kernel of an `AttentionCall`."""
    known = _tiles_of_piece.setdefault(piece, {})
    g, size, device = q_folded.shape[1], q_folded.shape[3], q_folded.device
    key = (g, device, call.kernel.takes_mask, size if call.diagonal else None)
    if key not in known:
        special, batches = DiagonalTile.split(piece.batches, g, size, device) if call.diagonal else ((), piece.batches)
        tiles = tiles_of(batches, g, device)
        known[key] = (*special, *(with_leaves(tiles, g, device) if call.kernel.takes_mask else tiles))
    return known[key]


def heads_joined(x: torch.Tensor) -> torch.Tensor:
    """[s, b, nk, d] -> [s, h, d] with a contiguous last dimension; a view where the strides allow it."""
    x = x.flatten(1, 2)
    return x if x.stride(2) == 1 and x.stride(1) > 0 else x.contiguous()
