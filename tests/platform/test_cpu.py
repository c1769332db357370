"""The CPU platform: CUDA means CPU, Adam keeps apex's state layout, a foreign engine is refused."""

import subprocess
import sys

import pytest
import torch

from megatron.bdlm.platform import cpu
from megatron.bdlm.testing.distributed import run_distributed

ON_CPU = cpu.enable()

pytestmark = pytest.mark.skipif(not ON_CPU, reason="a CUDA device is visible: the CPU platform does nothing")


def test_cuda_devices_mean_the_cpu():
    x = torch.zeros(2, device="cuda")
    assert x.device.type == "cpu" and x.cuda() is x and x.pin_memory() is x
    assert x.to("cuda:0").device.type == "cpu" and torch.empty(1, device=torch.device("cuda", 0)).device.type == "cpu"
    assert x.type() == "torch.cuda.FloatTensor"
    assert not torch.cuda.is_available()


def test_random_state_is_the_cpu_generator():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_events_measure_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert end.query() and start.elapsed_time(end) >= 0.0


def test_peak_memory_grows_with_what_is_touched():
    before = cpu.peak_memory_bytes()
    block = torch.ones(1 << 27)  # 512 MiB, written
    assert cpu.peak_memory_bytes() - before > 256 << 20 or before > 4 << 30
    del block


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_adamw(decay):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    theirs = [p.clone() for p in ours]
    adam = cpu.FusedAdam(ours, lr=1e-2, weight_decay=decay, betas=(0.9, 0.95), eps=1e-8)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=decay, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = a.grad.clone()
        adam.step()
        reference.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    assert adam.param_groups[0]["step"] == 5
    assert set(adam.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}


def _uneven_exchanges():
    import torch.distributed as dist

    cpu.adapt_engine(cpu.enable())
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region

    sizes, rank = [3, 1], dist.get_rank()
    rows = (torch.arange(sizes[rank] * 2.0).view(-1, 2) + 10 * rank).requires_grad_()
    whole = gather_from_sequence_parallel_region(rows, group=dist.group.WORLD, output_split_sizes=sizes)
    part = reduce_scatter_to_sequence_parallel_region(whole * (rank + 1), group=dist.group.WORLD, input_split_sizes=sizes)
    part.sum().backward()
    return whole.detach(), part.detach(), rows.grad


def test_ranks_gather_and_reduce_different_numbers_of_rows():
    """Ranks hold 3 rows and 1; the sum over both is 1x + 2x, and so is the gradient."""
    expected = torch.tensor([[0.0, 1], [2, 3], [4, 5], [10, 11]])
    for rank, (whole, part, gradient) in enumerate(run_distributed(_uneven_exchanges, 2)):
        own = expected[:3] if rank == 0 else expected[3:]
        assert torch.equal(whole, expected) and torch.equal(part, 3 * own)
        assert torch.equal(gradient, torch.full_like(own, 3.0))


def test_another_engine_is_refused(monkeypatch):
    monkeypatch.setattr(cpu.importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(cpu.UnsupportedEngineError, match="megatron-core 0.20.0 is installed, this project needs 0.19.2"):
        cpu.check_engine_version()


def test_nothing_changes_where_cuda_is_available():
    """In a process whose torch says that CUDA is there, `enable` leaves torch alone."""
    code = (
        "import torch; torch.cuda.is_available = lambda: True; before = dict(vars(torch.cuda))\n"
        "from megatron.bdlm.platform import cpu\n"
        "assert cpu.enable() is False and not cpu.is_active() and dict(vars(torch.cuda)) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
