"""Cross entropy of a linear output layer without its logits: chunked over rows, parallel over the vocabulary.

    nll_i = logsumexp_v(hidden_i . weight_v) - hidden_i . weight_{target_i}

With a softcap c each logit z is c * tanh(z / c) (DiffusionGemma), so dz carries 1 - (logit / c)^2.

Logits exist for `chunk` rows at a time, in forward and again in backward (recomputed: the incoming gradient of each
row is only known then, and saving them would cost [rows, vocab]). Peak extra memory is one float32 [chunk, vocab/TP]
buffer, plus its half-size copy in the weight's type when that is 16 bits wide (and another with a softcap).

Each rank of the tensor-parallel group holds an equal slice of the vocabulary. Only numbers per row are exchanged, once
for all chunks: the maximum, and the sum of exponentials beside the target's logit. The gradient of `hidden` is summed
over the group.

Shapes: n rows, c rows of a chunk, h hidden size, v rows of the weight on this rank (ids rank*v .. (rank+1)*v - 1).
"""

from dataclasses import dataclass
from typing import Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.bdlm.platform.ranges import spanned


@dataclass(frozen=True)
class _Vocabulary:
    """This rank's slice of the vocabulary and who shares it."""

    first: int  # global id of local row 0
    valid: int  # local rows with a real token: the rest pads the vocabulary
    excluded: Optional[int]  # local row without probability, if it lies here
    group: Optional[dist.ProcessGroup]
    softcap: Optional[float] = None

    @classmethod
    def of(
        cls, rows: int, excluded_token: Optional[int], vocab_size: Optional[int], group: Optional[dist.ProcessGroup],
        softcap: Optional[float] = None,
    ) -> "_Vocabulary":
        shared = group is not None and dist.get_world_size(group) > 1
        first = rows * dist.get_rank(group) if shared else 0
        last = first + rows if vocab_size is None else min(first + rows, vocab_size)
        inside = excluded_token is not None and first <= excluded_token < last
        return cls(first, max(0, last - first), excluded_token - first if inside else None, group if shared else None, softcap)

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[n] global ids -> local column (0 where it lies elsewhere), and bool whether it lies here."""
        here = (targets >= self.first) & (targets < self.first + self.valid)
        return torch.where(here, targets - self.first, 0), here


def softcapped(logits: Tensor, cap: Optional[float]) -> Tensor:
    """cap * tanh(logits / cap), in place; the logits themselves where there is no cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int = 4096,
    excluded_token: Optional[int] = None,
    vocab_size: Optional[int] = None,
    tp_group: Optional[dist.ProcessGroup] = None,
    reduce_hidden_grad: bool = True,
    softcap: Optional[float] = None,
) -> Tensor:
    """Negative log-likelihood of each row's target.

    Args:
        hidden: [n, h]; the same on every rank of `tp_group`.
        weight: [v, h], this rank's slice of the output layer.
        targets: [n] int64 global ids.
        chunk: rows whose logits exist at a time; 0: all of them.
        excluded_token: global id without probability (the mask token); its logit is neither scored nor trained.
        vocab_size: tokens of the vocabulary; weight rows from there on are padding, without probability and gradient.
        tp_group: ranks that hold the other slices of the weight.
        reduce_hidden_grad: sum the gradient of `hidden` over `tp_group`; off when the caller does (sequence parallel).
        softcap: cap of the logits (module docstring); None: none.

    Returns:
        [n] float32 (float64 for float64 inputs). Empty, with a graph, for n = 0. The value for a target that is
        excluded or padding is infinite: the caller never scores one.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}: expected [n, h] and [v, h]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)}: expected [{hidden.shape[0]}], one id a row")
    if chunk < 0:
        raise ValueError(f"--bdlm-cross-entropy-chunk {chunk}: not negative. A legal value: 4096")
    vocabulary = _Vocabulary.of(weight.shape[0], excluded_token, vocab_size, tp_group, softcap)
    return _LinearCrossEntropy.apply(hidden, weight, targets, chunk, vocabulary, reduce_hidden_grad)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @spanned("bdlm/cross entropy")
    def forward(ctx, hidden, weight, targets, chunk, vocabulary, reduce_hidden_grad):
        ctx.chunk, ctx.vocabulary, ctx.reduce_hidden_grad = chunk, vocabulary, reduce_hidden_grad
        column, here = vocabulary.locate(targets)
        lse = hidden.new_full(targets.shape, -torch.inf, dtype=torch.promote_types(hidden.dtype, torch.float32))
        target_logit = lse.clone()
        for rows in _chunks(hidden.shape[0], chunk, vocabulary):
            lse[rows], target_logit[rows] = _forward_rows(hidden[rows], weight, column[rows], vocabulary)
        lse, target_logit = _combine(lse, target_logit.masked_fill_(~here, -torch.inf), here, vocabulary)
        ctx.save_for_backward(hidden, weight, targets, lse)
        return lse - target_logit

    @staticmethod
    @spanned("bdlm/cross entropy backward")
    def backward(ctx, grad_nll):
        hidden, weight, targets, lse = ctx.saved_tensors
        vocabulary: _Vocabulary = ctx.vocabulary
        column, here = vocabulary.locate(targets)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # float32 sums for 16-bit weights: the chunks' contributions would drown in bf16
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if need_weight else None
        for rows in _chunks(hidden.shape[0], ctx.chunk, vocabulary):
            part = _Rows(hidden[rows], column[rows], here[rows], lse[rows], grad_nll[rows])
            _backward_rows(part, weight, vocabulary, grad_hidden[rows] if need_hidden else None, grad_weight)
        if need_hidden and vocabulary.group is not None and ctx.reduce_hidden_grad and hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=vocabulary.group)
        return grad_hidden, grad_weight.to(weight.dtype) if need_weight else None, None, None, None, None


@dataclass(frozen=True)
class _Rows:
    """What backward knows of one chunk of rows."""

    hidden: Tensor  # [c, h]
    column: Tensor  # [c] the target's local column
    here: Tensor  # [c] bool: the target lies in this rank's slice
    lse: Tensor  # [c] over the whole vocabulary
    grad_nll: Tensor  # [c]


def _forward_rows(hidden: Tensor, weight: Tensor, column: Tensor, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
    """One chunk: local log-sum-exp [c] and the logit at `column` [c]. A function, so that its logits die with it."""
    logits = _logits(hidden, weight, vocabulary)
    picked = logits.gather(1, column[:, None]).squeeze(1)
    return _logsumexp_(logits), picked


def _backward_rows(
    rows: _Rows, weight: Tensor, vocabulary: _Vocabulary, grad_hidden: Optional[Tensor], grad_weight: Optional[Tensor]
) -> None:
    """One chunk: d logits = grad_nll * (softmax - onehot); writes `grad_hidden` [c, h], adds to `grad_weight`."""
    grad = _logits(rows.hidden, weight, vocabulary)
    slope = None if vocabulary.softcap is None else 1 - grad.div(vocabulary.softcap).square_()
    grad.sub_(rows.lse[:, None]).exp_()
    grad.scatter_add_(1, rows.column[:, None], -rows.here[:, None].to(grad.dtype))
    grad.mul_(rows.grad_nll[:, None])
    if slope is not None:
        grad.mul_(slope)
    narrow = grad.to(weight.dtype)  # a copy only for 16-bit types
    if grad_hidden is not None:
        torch.mm(narrow, weight[: vocabulary.valid], out=grad_hidden)
    if grad_weight is not None:
        _add_product_(grad_weight[: vocabulary.valid], grad, narrow, rows.hidden)


def _chunks(rows: int, chunk: int, vocabulary: _Vocabulary) -> Iterator[slice]:
    """Row slices of a chunk each; none where this rank's slice of the vocabulary is all padding."""
    step = chunk if chunk > 0 else max(1, rows)
    rows = rows if vocabulary.valid else 0
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _logits(hidden: Tensor, weight: Tensor, vocabulary: _Vocabulary) -> Tensor:
    """[c, v] in float32 (float64), the excluded token at minus infinity.

    A GPU multiplies 16-bit operands into a float32 result; a CPU rounds the products' sum to 16 bits first.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    weight = weight[: vocabulary.valid].t()
    if hidden.is_cuda and hidden.dtype != dtype:
        logits = torch.mm(hidden, weight, out_dtype=dtype)
    else:
        logits = torch.mm(hidden, weight).to(dtype)
    logits = softcapped(logits, vocabulary.softcap)
    if vocabulary.excluded is not None:
        logits[:, vocabulary.excluded] = -torch.inf
    return logits


def _logsumexp_(logits: Tensor) -> Tensor:
    """[c, v] -> [c], in place: `torch.logsumexp` would hold a second [c, v]."""
    top = logits.amax(1)
    # a slice whose only token is excluded has no finite logit; subtracting -inf from -inf would be NaN
    offset = torch.where(torch.isfinite(top), top, 0)
    return logits.sub_(offset[:, None]).exp_().sum(1).log_().add_(offset)


def _combine(lse: Tensor, target_logit: Tensor, here: Tensor, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor]:
    """Local log-sum-exp and target logit of each row -> those over the whole vocabulary."""
    if vocabulary.group is None or lse.numel() == 0:
        return lse, target_logit
    top = lse.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=vocabulary.group)
    # the third row counts the ranks that hold the target: none for an id beyond the vocabulary
    parts = torch.stack([torch.exp(lse - top), torch.where(here, target_logit, 0), here.to(lse.dtype)])
    dist.all_reduce(parts, group=vocabulary.group)
    return parts[0].log_().add_(top), torch.where(parts[2] > 0, parts[1], -torch.inf)


def _add_product_(grad_weight: Tensor, grad: Tensor, narrow: Tensor, hidden: Tensor) -> None:
    """grad_weight [v, h] += grad^T [v, c] hidden [c, h], summed in the type of grad_weight.

    `narrow` is `grad` in the type of `hidden`: a GPU multiplies 16-bit operands into a float32 result, a CPU cannot.
    """
    if narrow.is_cuda and narrow.dtype != grad_weight.dtype:
        grad_weight.add_(torch.mm(narrow.t(), hidden, out_dtype=grad_weight.dtype))
    else:
        grad_weight.addmm_(grad.t(), hidden.to(grad.dtype))
