"""A step on a GPU never makes the host wait: shown without a GPU.

The tensors are fake: they have a device, shapes and strides but no values (`torch._subclasses.FakeTensorMode`). So the
GPU's way through the code runs to its end only if nothing asks for a value (`.item()`, a boolean index, `nonzero`);
a mode beside it refuses copies that the host would wait for. (Torch's autograd engine wants a real device, so forward and
backward are called one after the other.)
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.bdlm.attention import functional
from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.objective import linear_cross_entropy
from megatron.bdlm.objective.loss import GlobalCounts, ScoredRows, block_diffusion_loss
from megatron.bdlm.parallel.exchange import Link, Pending
from megatron.bdlm.parallel.plan import SequencePlan


@contextmanager
def without_cpu_platform():
    """The CPU platform, where another test has enabled it, would turn "cuda" into "cpu" (platform/cpu.py)."""
    with ExitStack() as stack:
        while _len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield


class HostWaits(TorchDispatchMode):
    """Fails at a copy between CPU and GPU that is not asynchronous; counts the operators it saw."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.seen += 1
        given = [x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if copies and not kwargs.get("non_blocking"):
            places = {*given, to} - {None}
            assert len(places) == 1, f"{func} between {given} and {to}: the host waits for it"
        return func(*args, **kwargs)


def take_both_passes(function, monkeypatch) -> None:
    """From now on the autograd function's `apply` returns (output, gradients) of the tensors among its arguments."""

    def apply(*arguments):
        context = SimpleNamespace(needs_input_grad=(True,) * len(arguments))
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        with torch.no_grad():
            out = function.forward(context, *arguments)
            return out, function.backward(context, torch.empty_like(out))

    monkeypatch.setattr(function, "apply", apply)


def note_launches(monkeypatch) -> list[str]:
    """Triton launches nothing from now on and is noted: its tables and tensors must be on the GPU."""
    launches = []
    triton_diagonal = pytest.importorskip("megatron.bdlm.attention.kernels.triton_diagonal")

    def note(name):
        def launch(tables, *arguments):
            assert tables.intervals.is_cuda
            launches.append(name)

        return launch

    for name in ("forward", "backward"):
        monkeypatch.setattr(triton_diagonal, name, note(name))
    return launches


class SilentLink(Link):
    """Notes its transfers and moves nothing."""

    def transfer(self, sends, receives, direction, tag):
        assert all(x.is_contiguous() and x.is_cuda for x in (*sends.values(), *receives.values()))
        return Pending()


@pytest.fixture
def gpu(monkeypatch):
    """Fake CUDA tensors, pinned memory that is ordinary memory, a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with without_cpu_platform(), FakeTensorMode(allow_non_fake_inputs=True), HostWaits() as waits:
        yield waits
    assert waits.seen > 20


CASES = {
    "regular": dict(seq_length=256, block_size=32),
    "S = 1, two views": dict(seq_length=64, block_size=1, views=2),
    "packed documents": dict(seq_length=100, block_size=8, documents=[20, 61, 19]),
    "token-causal": dict(seq_length=256, block_size=32, clean_attention="token-causal"),
}


@pytest.mark.parametrize("transport", ["direct", "ring", "hierarchical"])
@pytest.mark.parametrize("name", CASES)
def test_attention_forward_and_backward(gpu, name, transport, monkeypatch):
    take_both_passes(functional.BlockDiffusionAttention, monkeypatch)
    launches = note_launches(monkeypatch)
    size = 1 if transport == "direct" and name == "regular" else 4
    for rank in {0, size - 1}:
        link = SilentLink(None, rank, size, 2 if size == 4 else 1)
        monkeypatch.setattr(functional.Link, "of", lambda *_: link)
        plan = SequencePlan.build(**CASES[name], context_parallel_size=size, rank=rank)
        q, k, v = (
            torch.empty(plan.s_local, 1, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)
        )
        out, gradients = block_diffusion_attention(q, k, v, plan, transport=transport, kernel="torch")
        assert launches.count("forward") == launches.count("backward") > 0
        assert out.is_cuda and [x.shape for x in gradients[:3]] == [x.shape for x in (q, k, v)]


def test_cross_entropy_with_16_bit_inputs_sums_in_float32(gpu, monkeypatch):
    take_both_passes(linear_cross_entropy._LinearCrossEntropy, monkeypatch)
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, **options: products.append(options) or mm(*given, **options))
    hidden, weight = (torch.empty(*size, dtype=torch.bfloat16, device="cuda") for size in ((40, 16), (96, 16)))
    targets = torch.empty(40, dtype=torch.int64, device="cuda")
    nll, gradients = linear_cross_entropy.linear_cross_entropy(
        hidden, weight, targets, chunk=16, excluded_token=5, vocab_size=90
    )
    assert nll.dtype == torch.float32 and [x.dtype for x in gradients[:2]] == [torch.bfloat16] * 2
    assert products.count({"out_dtype": torch.float32}) == 9  # 3 chunks: logits twice, the weight's gradient


@pytest.mark.parametrize("clean_weight", [0.0, 0.5])
def test_rows_go_to_the_gpu_and_become_a_loss_with_its_metrics(gpu, clean_weight):
    flags, numbers = torch.zeros(12, dtype=torch.bool), torch.zeros(12)
    rows = ScoredRows(
        index=torch.arange(12), target=torch.arange(12), weight=numbers, nelbo_weight=numbers, t=numbers, clean=flags,
        corrupted=flags, bucket_supervised=torch.zeros(10), counts=GlobalCounts(12, 0), supervised=12, masked=6,
    ).to("cuda")
    config = BDLMConfig(bdlm_clean_loss_weight=clean_weight)
    loss, count, metrics = block_diffusion_loss(torch.empty(12, device="cuda"), rows, config, GlobalCounts(12, 3), diagnostics=True)
    assert all(x.is_cuda for x in (loss, count, *metrics.values())) and len(metrics) > 10


def test_what_waits_is_caught(gpu):
    x = torch.empty(30, device="cuda")
    for _ in range(20):
        x = x + 1
    with pytest.raises(DataDependentOutputException):
        x.sum().item()
    with pytest.raises(AssertionError, match="the host waits for it"):
        x.cpu()
    with pytest.raises(AssertionError, match="the host waits for it"):
        torch.zeros(3).to("cuda")
    with pytest.raises(AssertionError, match="the host waits for it"):
        torch.tensor(3.0, device="cuda")
