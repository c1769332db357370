"""What DFlash2 adds: a grouped dynamic convolution inside each block, and a candidate selector.

    r rows     B block size     D hidden     T taps     g channels of a group     V vocabulary     K candidates     R rank

Convolution. Around a sublayer f with input x (already normed): delta = projection(x) gives two sets of taps by row and
group of channels; y = conv(f(conv(x; base_0 + delta_0)); base_1 + delta_1), and y is what is added to the residual.

    conv(x)[k, c] = sum_t kernel[k, t, c // g] * x[k - t, c],   zero before the block: nothing crosses into the next block

At the start base is one at tap 0 and the projection is zero: a drafter with it is the same function as one without.

Selector. Among the K largest logits u of a row, candidate c after predecessor p scores u[c] + <A[p] * (W h), B[c]>, with
codebooks A, B and the row's hidden state h. Drafting walks from the anchor and takes the best candidate row by row. B is
zero at the start, so that the walk is the argmax.
"""

import torch
from torch import Tensor, nn


class BlockConvolution(nn.Module):
    """Taps of one sublayer: base [2, T, D] plus a projection of the sublayer's input."""

    def __init__(self, hidden: int, taps: int, group: int, block_size: int):
        super().__init__()
        self.taps, self.group, self.block_size = taps, group, block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * hidden // group, bias=False)
        self.reset()

    def reset(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.base_kernel.zero_()[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def deltas(self, x: Tensor) -> Tensor:
        """x [r, D] -> [r, 2, T, D / g]."""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """Convolve x [r, D] with the taps of `side` (0 before, 1 after the sublayer)."""
        kernel = self.base_kernel[side] + delta[:, side].repeat_interleave(self.group, dim=-1)  # [r, T, D]
        blocks = x.unflatten(0, (-1, self.block_size))
        out = kernel[:, 0] * x
        for tap in range(1, self.taps):
            shifted = nn.functional.pad(blocks, (0, 0, tap, 0))[:, : self.block_size].flatten(0, 1)
            out = out + kernel[:, tap] * shifted
        return out


class CandidateSelector(nn.Module):
    """Rescores a row's best candidates by what stands before it."""

    def __init__(self, vocab: int, hidden: int, rank: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.reset()

    def reset(self) -> None:
        """No effect at the start."""
        with torch.no_grad():
            self.predecessor_codebook.normal_(std=0.02)
            self.successor_codebook.zero_()

    def scores(self, logits: Tensor, hidden: Tensor, predecessors: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and ids [.., K] of the best candidates, for logits [.., V], hidden [.., D] and predecessors [..]."""
        best, ids = logits.topk(self.top_k, dim=-1)
        key = self.predecessor_codebook[predecessors] * self.hidden_projection(hidden)  # [.., R]
        return best + (self.successor_codebook[ids] @ key.unsqueeze(-1)).squeeze(-1).to(best.dtype), ids

    def walk(self, logits: Tensor, hidden: Tensor, anchor: Tensor) -> Tensor:
        """Greedy tokens [a, k] of rows with logits [a, k, V] and hidden [a, k, D], from anchors [a]."""
        chosen, before = [], anchor
        for row in range(logits.shape[1]):
            scores, ids = self.scores(logits[:, row], hidden[:, row], before)
            before = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
            chosen.append(before)
        return torch.stack(chosen, dim=1)
