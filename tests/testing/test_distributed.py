"""The spawn helper itself: results in rank order, failures with their traceback, nothing left behind."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.testing.distributed import RankFailure, run_distributed


def sum_of_ranks(scale):
    total = torch.tensor([float(dist.get_rank()) * scale])
    dist.all_reduce(total)
    return dist.get_rank(), total, os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()


def rank_one_raises():
    if dist.get_rank() == 1:
        raise ValueError("wrong on purpose")
    dist.barrier()


def rank_one_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def never_answers():
    if dist.get_rank() == 1:
        multiprocessing.Event().wait()


def test_results_come_in_rank_order():
    results = run_distributed(sum_of_ranks, 2, 10.0, ranks_per_node=1)
    assert [(rank, total.item(), local, threads) for rank, total, local, threads in results] == [
        (0, 10.0, "1", 1),
        (1, 10.0, "1", 1),
    ]


@pytest.mark.parametrize(
    ("fn", "timeout", "message"),
    [
        (rank_one_raises, 60.0, "wrong on purpose"),
        (rank_one_dies, 60.0, "exit code 7"),
        (never_answers, 8.0, "no answer from rank 0, 1"),
    ],
)
def test_a_failure_is_raised_and_ends_the_other_ranks(fn, timeout, message):
    with pytest.raises(RankFailure, match=message):
        run_distributed(fn, 2, timeout=timeout)
    assert not multiprocessing.active_children()
