"""Block-parallel process groups, carved out of the context-parallel ranks.

The engine builds them: `--hierarchical-context-parallel-sizes INNER K` makes, inside each
context-parallel group of P = INNER * K ranks, an inner group of adjacent ranks (a block's rows
are split over it) and an outer, strided group of K ranks, the block-parallel group:

    cp_rank = inner_rank + INNER * block_parallel_rank

Both sizes may be 1. Without context parallelism (P = 1) the block-parallel group is the
context-parallel group of this rank alone. Source: megatron-core parallel_state.
"""

from typing import Optional

import torch
from megatron.core import parallel_state


def hierarchical_sizes(context_parallel_size: int, block_parallel_size: int) -> Optional[list[int]]:
    """Value of the engine's --hierarchical-context-parallel-sizes for P and K; None for P = 1."""
    if context_parallel_size == 1:
        return None
    return [context_parallel_size // block_parallel_size, block_parallel_size]


def get_block_parallel_group() -> torch.distributed.ProcessGroup:
    """The block-parallel group of this rank."""
    context_parallel_group = parallel_state.get_context_parallel_group()
    if context_parallel_group.size() == 1:
        return context_parallel_group
    return parallel_state.get_hierarchical_context_parallel_groups()[1]


def get_block_parallel_world_size() -> int:
    """K, the number of ranks of the block-parallel group."""
    return get_block_parallel_group().size()


def get_block_parallel_rank() -> int:
    """This rank's index inside the block-parallel group."""
    return get_block_parallel_group().rank()
