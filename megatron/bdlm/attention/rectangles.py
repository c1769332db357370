"""The mask as dense rectangles: what the tile math and the autograd function read.

The values are made by the plan (`parallel.program`, `parallel.staircase`); this is their name in the
attention package.
"""

from megatron.bdlm.parallel.program import AttentionProgram, Piece, RectangleBatch

__all__ = ["AttentionProgram", "Piece", "RectangleBatch"]
