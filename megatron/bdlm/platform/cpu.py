"""The only file that knows that a machine may lack a GPU.

The engine (megatron-core) is written for CUDA. `enable()` makes the unmodified engine run on
the CPU over gloo, and does nothing where a CUDA device is visible. It works by three means:

1. a `TorchFunctionMode` that reads `device="cuda"` as the CPU and makes `.cuda()` and pinned
   memory the identity;
2. stand-ins for the `torch.cuda` functions that the engine calls (device, stream, event, memory,
   random state); `torch.cuda.is_available()` stays False;
3. after the engine is imported, `adapt_engine` replaces the engine functions that would
   otherwise demand CUDA, and supplies an Adam with the state layout that the engine's
   distributed optimizer can save and load.

Order in an entry script: `ON_CPU = cpu.enable()`, then `import megatron...`, then
`cpu.adapt_engine(ON_CPU)`.
"""

import contextlib
import datetime
import importlib.metadata
import os
import resource
import time
import types

import torch
from torch.overrides import TorchFunctionMode

ENGINE_VERSION = "0.19.2"

CPU_DEFAULTS = dict(
    distributed_backend="gloo",
    transformer_impl="local",
    no_persist_layer_norm=True,
    apply_rope_fusion=False,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    bias_swiglu_fusion=False,
    bias_dropout_fusion=False,
    bias_gelu_fusion=False,
    use_cpu_initialization=True,
    async_tensor_model_parallel_allreduce=False,
)
"""Engine flags (by destination) whose CUDA defaults cannot run on a CPU."""

_CPU = torch.device("cpu")
_active: TorchFunctionMode | None = None


class UnsupportedEngineError(RuntimeError):
    """The installed engine is not the version that this project was built against."""


def check_engine_version() -> None:
    """Refuse an engine other than the tested one: its internals are relied upon.

    Raises:
        UnsupportedEngineError: naming both versions.
    """
    found = importlib.metadata.version("megatron-core")
    if found != ENGINE_VERSION:
        raise UnsupportedEngineError(
            f"megatron-core {found} is installed, this project needs {ENGINE_VERSION}: pip install megatron-core=={ENGINE_VERSION}"
        )


def enable() -> bool:
    """Make this process a CPU platform if no CUDA device is visible; call before importing the engine.

    Returns:
        True on the CPU platform, False where CUDA is used (then nothing was changed).
    """
    global _active
    if _active is not None:
        return True
    if torch.cuda.is_available():
        return False
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the engine's jit_fuser is torch.compile
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the engine checks it, also here
    _replace_cuda_functions()
    _active = _CudaMeansCpu()
    _active.__enter__()
    return True


def is_active() -> bool:
    """Whether this process runs on the CPU platform."""
    return _active is not None


def peak_memory_bytes() -> int:
    """Peak memory: allocated by CUDA on this device, or the resident set of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` becomes the CPU in every torch call; `.cuda()` is the identity."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the engine's optimizer sorts parameters by the string torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """A stream on which everything has already happened."""

    device, cuda_stream = _CPU, 0

    def __init__(self, *args, **kwargs):
        pass

    @staticmethod
    def priority_range():
        return (0, 0)

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def query(self):
        return True


class _Event:
    """An event that is complete as soon as it is recorded; `elapsed_time` is wall time in ms."""

    def __init__(self, *args, **kwargs):
        self._time = 0.0

    def record(self, stream=None):
        self._time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return (end._time - self._time) * 1e3


def _replace_cuda_functions() -> None:
    """Give `torch.cuda` the functions that the engine calls.

    A new function object per name: torch._dynamo asserts that no object stands under two names.
    """
    cuda = torch.cuda

    def constant(value, *names):
        for name in names:
            setattr(cuda, name, lambda *args, **kwargs: value)

    constant(_CPU, "current_device")
    constant(1, "device_count")  # the engine skips model parallelism when it is 0
    constant(None, "set_device", "synchronize", "empty_cache", "check_error", "set_stream", "reset_peak_memory_stats")
    constant((0, 0), "get_device_capability")
    constant("cpu", "get_device_name")
    constant(
        types.SimpleNamespace(major=0, minor=0, name="cpu", total_memory=1, multi_processor_count=1),
        "get_device_properties",
    )
    constant(_Stream(), "current_stream", "default_stream")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    constant(0, "device_memory_used")
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.memory_stats = lambda *args: {}
    cuda.stream = lambda stream: contextlib.nullcontext()
    # the engine's model-parallel random-state tracker drives the CPU generator instead
    cuda.default_generators = {_CPU: torch.default_generator}
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)


def adapt_engine(on_cpu: bool) -> None:
    """Adapt the imported engine; the first replacement is needed on a GPU too.

    Args:
        on_cpu: what `enable` returned.
    """
    check_engine_version()
    import megatron.core.datasets.utils as dataset_utils

    # The wheel ships the compiled index helper but not its Makefile: compile_helpers() would exit.
    dataset_utils.compile_helpers = lambda: None
    if not on_cpu:
        return
    import megatron.core.optimizer as engine_optimizer
    import megatron.core.optimizer.distrib_optimizer as engine_distributed_optimizer
    import megatron.core.tensor_parallel.mappings as engine_mappings
    import megatron.core.transformer.moe.token_dispatcher as engine_dispatcher
    import megatron.training.training as engine_training

    initialize = engine_training.initialize_megatron
    engine_training.initialize_megatron = lambda **kwargs: initialize(**{**kwargs, "allow_no_cuda": True})
    # Its warm-up draws from the generator that initialises weights, by amounts that depend on the layout.
    engine_training.set_jit_fusion_options = lambda **kwargs: None
    # All-to-all wants its split sizes as numbers; the engine turns them into an array only on their way from a GPU.
    engine_dispatcher.maybe_move_tensor_to_cpu = _numbers_of
    # Tensor-parallel ranks of an expert hold different numbers of rows, which gloo can neither gather nor reduce and scatter.
    for name, exchange in (("_gather_along_first_dim", _gather), ("_reduce_scatter_along_first_dim", _reduce_scatter)):
        setattr(engine_mappings, name, _uneven(getattr(engine_mappings, name), exchange))
    engine_optimizer.Adam, engine_optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    engine_distributed_optimizer.HAVE_APEX_OR_TE = engine_distributed_optimizer.USING_APEX_OPTIMIZER = True


def _numbers_of(tensor, as_numpy: bool = False, record_stream: bool = False):
    """The engine's `maybe_move_tensor_to_cpu` for a tensor that is there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven(stock, exchange):
    """`exchange` where rank sizes are given and there is more than one rank, else the engine's function."""
    def along_first_dim(input_, group, sizes=None, use_global_buffer=False):
        if sizes is None or group.size() == 1:
            return stock(input_, group, sizes, use_global_buffer)
        return exchange(input_, group, [int(size) for size in sizes])

    return along_first_dim


def _gather(rows: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    """[n, ..] of each rank, n = `sizes`[rank] -> all of them, [sum of sizes, ..]."""
    everyone = torch.cat([rows] * len(sizes))
    out = rows.new_empty(sum(sizes), *rows.shape[1:])
    torch.distributed.all_to_all_single(out, everyone, sizes, [len(rows)] * len(sizes), group=group)
    return out


def _reduce_scatter(rows: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    """[sum of sizes, ..] -> this rank's [n, ..] of the sum over ranks, n = `sizes`[rank]."""
    own = sizes[group.rank()]
    parts = rows.new_empty(len(sizes) * own, *rows.shape[1:])
    torch.distributed.all_to_all_single(parts, rows.contiguous(), [own] * len(sizes), sizes, group=group)
    return parts.view(len(sizes), own, *rows.shape[1:]).sum(0)


def limit_waits(seconds: float) -> None:
    """Give every wait for a transfer this timeout; nothing where CUDA is used.

    The engine changes the timeout of process groups after the first step. Gloo's collectives follow, but its point-to-point
    transfers keep the one that their sockets were connected with, unless a wait names its own.
    """
    if not is_active():
        return
    work = torch.distributed.Work
    stock_wait = getattr(work.wait, "stock", work.wait)

    def wait(self, timeout=datetime.timedelta(seconds=seconds)):
        return stock_wait(self, timeout)

    wait.stock = stock_wait
    work.wait = wait


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps one step count per parameter group, the state layout of apex.

    The engine's distributed optimizer can neither save nor load `torch.optim.AdamW`, which keeps
    a step per parameter. The update itself is torch's.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, capturable=False, **_):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        update = torch.optim._functional.adamw if self.adam_w_mode else torch.optim._functional.adam
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
