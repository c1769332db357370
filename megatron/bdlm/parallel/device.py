"""What a GPU needs and a CPU does not: copies that the host does not wait for, and a communicator of the exchange's own.

**Communicator.** On NCCL every process group has one stream on which its transfers run one after the other. The
exchange has a group of its own, so that a transfer never queues behind another part of the model, and its stream has
high priority: attention fills the GPU with blocks, and a transfer would otherwise wait for a free one. A transfer is
posted from the compute stream and so starts when what was enqueued there before is done; it then runs beside
whatever is enqueued later. `Pending` holds the tensors of a transfer until the compute stream waits for it, and they are
allocated and reused on that stream: no `record_stream` is needed, which would keep the buffers of every step alive
where the host runs ahead, memory of size L instead of L/P.

**First call.** Where a batch of sends and receives is the first use of an NCCL group, *all* its ranks must take part
(documentation of `torch.distributed.batch_isend_irecv`), but an exchange has ranks with nothing to send. So the group
is opened by a collective.

With gloo the context-parallel group serves: messages are told apart by their tags.
"""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# group -> the exchange's group over the same ranks
_own_groups: WeakKeyDictionary = WeakKeyDictionary()


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on `device`, from memory that the GPU reads by itself: an ordinary copy would hold up the host."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def exchange_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group on which the exchange of `group` (None: all ranks) runs: one of its own on NCCL, else `group`.

    Every rank of `group` calls it before its first transfer, in the same order over groups.
    """
    if "nccl" not in dist.get_backend(group):
        return group
    given = dist.group.WORLD if group is None else group
    if given not in _own_groups:
        _own_groups[given] = _open(given)
    return _own_groups[given]


def set_timeout(timeout: timedelta) -> None:
    """How long transfers on the exchange's own groups may take from now on; the engine changes its groups after the first step."""
    for own in _own_groups.values():
        dist.distributed_c10d._set_pg_timeout(timeout, own)


def _open(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second NCCL group over the ranks of `group`; only they take part."""
    ranks, timeout = dist.get_process_group_ranks(group), _timeout(group)
    assert ranks == sorted(ranks), "a new group counts its ranks in ascending order, the plan in the group's"
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    own = dist.new_group(
        ranks,
        timeout=timeout,
        backend="nccl",
        pg_options=options,
        use_local_synchronization=True,
        group_desc="BDLM_EXCHANGE",
    )
    dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=own)
    return own


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the ranks of `group` wait for each other (the engine's --distributed-timeout-minutes)."""
    return group._get_backend(torch.device("cuda")).options._timeout
