"""The last layer computes noisy rows only, where no loss reads clean rows.

Keys and values of clean rows are still needed there; their attention output, output projection
and MLP are not. The core attention then returns the first n rows of the local order (the noisy
ones); what remains is to add them to the same n rows of the residual. That happens in the
residual addition of the layer spec, so the engine's layer itself is unchanged.

Under sequence parallel a rank holds rows [r*s/T, (r+1)*s/T) of the s local rows, but needs
[r*n/T, (r+1)*n/T): the residual is gathered, cut, and split again.
"""

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region


def noisy_rows_bias_dropout_add(training: bool, fused: bool):
    """`get_bias_dropout_add` whose residual may have more rows than what is added to it."""
    add = get_bias_dropout_add(training, fused)

    def apply(x_with_bias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        rows = x_with_bias[0].size(0)
        if rows != residual.size(0):
            residual = residual[:rows]
        return add(x_with_bias, residual, dropout)

    return apply


def noisy_rows_bias_dropout_add_sequence_parallel(training: bool, fused: bool):
    """The same where rows are split over the tensor-parallel group (see the module docstring)."""
    add = get_bias_dropout_add(training, fused)

    def apply(x_with_bias, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        rows = x_with_bias[0].size(0)
        if rows != residual.size(0):
            group = parallel_state.get_tensor_model_parallel_group()
            whole = gather_from_sequence_parallel_region(residual, tensor_parallel_output_grad=False, group=group)
            residual = scatter_to_sequence_parallel_region(whole[: rows * group.size()], group=group)
        return add(x_with_bias, residual, dropout)

    return apply
