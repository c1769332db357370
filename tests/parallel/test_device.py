"""The exchange's own communicator, with a stand-in for torch.distributed: no NCCL is needed."""

from datetime import timedelta

import pytest
import torch

from megatron.bdlm.parallel import device, exchange


class Group:
    """An NCCL group of ranks 4..7 with a timeout, or a gloo one."""

    def __init__(self, backend):
        self.backend = backend

    def _get_backend(self, kind):
        assert kind.type == "cuda"
        return type("Backend", (), {"options": type("Options", (), {"_timeout": timedelta(minutes=3)})})


class StandIn:
    """Notes what is asked of torch.distributed."""

    def __init__(self):
        self.calls = []

    def get_backend(self, group):
        return group.backend

    def get_process_group_ranks(self, group):
        return [4, 5, 6, 7]

    def new_group(self, ranks, **options):
        self.calls.append(("new_group", ranks, options))
        return Group("nccl")

    def all_reduce(self, x, group):
        self.calls.append(("all_reduce", x.numel(), group))

    class ProcessGroupNCCL:
        class Options:
            def __init__(self, is_high_priority_stream):
                self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(0)


@pytest.fixture
def stand_in(monkeypatch):
    stand_in, zeros = StandIn(), torch.zeros
    monkeypatch.setattr(device, "dist", stand_in)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    return stand_in


def test_on_nccl_the_exchange_has_a_group_of_its_own_opened_once_by_a_collective(stand_in):
    given = Group("cpu:gloo,cuda:nccl")
    own = device.exchange_group(given)
    assert own is not given and device.exchange_group(given) is own
    (_, ranks, options), (name, size, opened) = stand_in.calls
    assert ranks == [4, 5, 6, 7] and options["use_local_synchronization"] and options["backend"] == "nccl"
    assert options["pg_options"].is_high_priority_stream
    assert options["timeout"] == options["pg_options"]._timeout == timedelta(minutes=3)
    assert (name, size, opened) == ("all_reduce", 1, own)


def test_with_gloo_the_group_itself_serves(stand_in):
    given = Group("gloo")
    assert device.exchange_group(given) is given and stand_in.calls == []


def test_the_real_options_take_a_priority():
    assert torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True).is_high_priority_stream


def test_a_link_uses_that_group_for_every_transfer(monkeypatch):
    own, operations = object(), []
    monkeypatch.setattr(exchange.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(exchange.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(exchange.dist, "get_global_rank", lambda group, peer: peer + 10)
    monkeypatch.setattr(exchange, "exchange_group", lambda group: own)
    monkeypatch.setattr(exchange.dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(exchange.dist, "batch_isend_irecv", lambda batch: operations.extend(batch) or [])
    link = exchange.Link.of("context parallel", 2, 2)
    rows = torch.zeros(3)
    pending = link.transfer({1: rows}, {1: rows}, "forward", 7)
    assert [(peer, group, tag) for _, _, peer, group, tag in operations] == [(11, own, 7)] * 2
    assert pending.tensors == (rows, rows)  # alive until the compute stream waits


def test_a_copy_to_a_gpu_starts_in_pinned_memory_and_does_not_wait(monkeypatch):
    asked = []

    class Tensor:
        is_cuda = False

        def pin_memory(self):
            asked.append("pinned")
            return self

        def to(self, where, non_blocking=False):
            asked.append((where.type, non_blocking))

    device.to_device(Tensor(), torch.device("cuda"))
    device.to_device(Tensor(), torch.device("cpu"))
    assert asked == ["pinned", ("cuda", True), ("cpu", False)]
