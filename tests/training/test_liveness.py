"""Which rank is silent, and where a rank waits."""

import sys

import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.bdlm.training.liveness import KEY, Liveness, collective_of, frames_of  # noqa: E402


def three_ranks(writing, timeout=0.4):
    """Rank 0's view of a store into which only the ranks in `writing` go on writing."""
    store = torch.distributed.HashStore()
    ranks = [Liveness(store, rank, 3, timeout) for rank in range(3)]
    for rank in ranks:
        store.set(KEY.format(rank.rank), f"1 {rank.rank + 4} step")
        if rank.rank in writing:
            rank.enter(rank.rank + 4)
            rank.start()
    return ranks


def test_the_silent_rank_is_named():
    ranks = three_ranks(writing={0, 2})
    try:
        line = ranks[0].report([sys._getframe()])
    finally:
        [rank.stop() for rank in (ranks[0], ranks[2])]
    assert line.startswith("rank 0: last finished step 4, waiting in test_the_silent_rank_is_named (")
    assert line.endswith("; no sign of life from rank 1 (last finished step 5)")


def test_a_slow_rank_is_not_silent():
    ranks = three_ranks(writing={0, 1, 2})
    try:
        assert "every rank still shows signs of life" in ranks[0].report([sys._getframe()])
    finally:
        [rank.stop() for rank in ranks]


def test_a_lost_store_is_said():
    class Gone:
        def multi_get(self, keys):
            raise RuntimeError("connection reset")

    assert "the job's store does not answer" in Liveness(Gone(), 0, 2, 1.0).report([sys._getframe()])


def test_a_collective_is_found_in_a_traceback():
    there: dict = {}
    code = "def all_reduce():\n    raise RuntimeError('Timed out waiting 4000ms')"
    exec(compile(code, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), there)
    try:
        there["all_reduce"]()
    except RuntimeError as error:
        place = collective_of(frames_of(error.__traceback__))
    assert place.startswith("all_reduce, called by test_a_collective_is_found_in_a_traceback (")
