"""Block-parallel groups out of the context-parallel ranks: cp_rank = inner_rank + INNER * bp_rank."""

import pytest

from megatron.bdlm.testing.distributed import run_distributed


def _groups(tensor, context, block):
    from megatron.bdlm.platform import cpu

    cpu.enable()
    import torch
    from megatron.core import parallel_state

    from megatron.bdlm.parallel import state

    parallel_state.initialize_model_parallel(
        tensor, context_parallel_size=context,
        hierarchical_context_parallel_sizes=state.hierarchical_sizes(context, block),
    )
    context_group = parallel_state.get_context_parallel_group()
    block_ranks = torch.distributed.get_process_group_ranks(state.get_block_parallel_group())
    result = (
        torch.distributed.get_process_group_ranks(context_group), context_group.rank(),
        block_ranks, state.get_block_parallel_rank(), state.get_block_parallel_world_size(),
    )
    parallel_state.destroy_model_parallel()
    return result


def _all_groups():
    return [_groups(*sizes) for sizes in ((1, 4, 1), (1, 4, 2), (1, 4, 4), (2, 2, 2), (2, 1, 1))]


def test_block_parallel_groups():
    results = run_distributed(_all_groups, 4)
    for rank, cases in enumerate(results):
        for (context_ranks, context_rank, block_ranks, block_rank, block_size), (context, block) in zip(
            cases, ((4, 1), (4, 2), (4, 4), (2, 2), (1, 1)), strict=True
        ):
            inner = context // block
            assert len(context_ranks) == context and block_size == block == len(block_ranks)
            assert block_ranks == [context_ranks[context_rank % inner + inner * slot] for slot in range(block)]
            assert context_rank == context_rank % inner + inner * block_rank
            assert rank == context_ranks[context_rank]


@pytest.mark.parametrize("sizes, expected", [((1, 1), None), ((4, 2), [2, 2]), ((4, 4), [1, 4]), ((4, 1), [4, 1])])
def test_hierarchical_sizes(sizes, expected):
    from megatron.bdlm.parallel.state import hierarchical_sizes

    assert hierarchical_sizes(*sizes) == expected
