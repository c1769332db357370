"""Which rank stopped answering, at which step, in which collective.

A rank that hangs takes all others with it: they wait in a collective until its timeout
(`--distributed-timeout-seconds-after-init`, gloo and NCCL alike) and then fail without knowing whom they waited for. So every
rank has a thread that writes a sign of life into the job's key-value store:

    bdlm/alive/3  =  "17 41 step"      17th sign, step 41 is done, inside a training step

A rank in trouble reads all signs twice, some seconds apart. Those that did not change are silent: stopped, dead, or cut off.
Nothing compares clocks. A thread of a rank that is only slow goes on writing, so a slow rank is not called silent.
"""

import datetime
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any, Callable, Iterable, Optional

import torch
from megatron.training import get_args
from megatron.training import training as engine_training

from megatron.bdlm.parallel import device
from megatron.bdlm.platform import cpu

KEY = "bdlm/alive/{}"
COLLECTIVE_FILE = "torch/distributed/distributed_c10d.py"
WARN_AT = 0.5
"""Share of the timeout after which a step without end is reported; NCCL's own watchdog kills the process at 1."""


class Liveness:
    """Signs of life of this rank, and a report about those of the others."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float):
        """
        Args:
            store: a key-value store that all ranks share; used from a thread of its own.
            timeout: seconds after which a collective fails.
        """
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.interval = min(5.0, timeout / 8)
        self.done = 0  # steps
        self._store, self._beat = store, 0
        self._entered: Optional[float] = None
        self._told = False
        self._end = threading.Event()
        self._main = threading.main_thread().ident

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="bdlm-liveness", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the interpreter ends around it."""
        self._end.set()
        self._thread.join(4 * self.interval)

    def enter(self, done: int) -> None:
        """A training step begins, after `done` steps."""
        self.done, self._told, self._entered = done, False, time.monotonic()

    def leave(self, done: int) -> None:
        """It has ended."""
        self.done, self._entered = done, None

    def silent(self) -> Optional[list[str]]:
        """Ranks without a new sign of life over two intervals, with the last step each had done; None if the store is gone."""
        keys = [KEY.format(rank) for rank in range(self.world_size)]
        try:
            before = self._store.multi_get(keys)
            time.sleep(2.5 * self.interval)
            after = self._store.multi_get(keys)
        except Exception:
            return None
        return [
            f"rank {rank} (last finished step {new.split()[1].decode()})"
            for rank, (old, new) in enumerate(zip(before, after))
            if old == new and rank != self.rank
        ]

    def report(self, frames: Iterable[FrameType]) -> str:
        """One line: this rank, where it stands in the given stack, the last finished step, and who is silent."""
        silent = self.silent()
        if silent is None:
            others = "the job's store does not answer, so which rank is missing is not known"
        elif silent:
            others = f"no sign of life from {', '.join(silent)}"
        else:
            others = "every rank still shows signs of life"
        return f"rank {self.rank}: last finished step {self.done}, waiting in {collective_of(frames)}; {others}"

    def _run(self) -> None:
        while not self._end.is_set():
            self._beat += 1
            state = "step" if self._entered is not None else "between"
            try:
                self._store.set(KEY.format(self.rank), f"{self._beat} {self.done} {state}")
            except Exception:  # the store went with its host; the report says so
                return
            entered = self._entered
            if entered is not None and not self._told and time.monotonic() - entered > WARN_AT * self.timeout:
                self._told = True
                main = sys._current_frames().get(self._main)
                frames = [frame for frame, _ in traceback.walk_stack(main)][::-1]
                threading.Thread(target=self._warn, args=(frames, time.monotonic() - entered), daemon=True).start()
            self._end.wait(self.interval)

    def _warn(self, frames: list[FrameType], seconds: float) -> None:
        print(f"> warning: a step takes {seconds:.0f} s, collectives fail at {self.timeout:g} s; {self.report(frames)}", file=sys.stderr, flush=True)


def frames_of(trace: Optional[TracebackType]) -> list[FrameType]:
    """The frames of a traceback, outermost first."""
    return [frame for frame, _ in traceback.walk_tb(trace)]


def collective_of(frames: Iterable[FrameType]) -> str:
    """`all_reduce, called by FUNCTION (file:line)`: the collective in a stack, outermost frame first, and our or the engine's caller.

    A wait for a transfer begun earlier has no collective in its stack; then it is the two innermost functions that are named.
    """
    frames = list(frames)
    inside = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith(COLLECTIVE_FILE)]
    outside = [frame for frame in frames if "/torch/" not in frame.f_code.co_filename and frame.f_code.co_filename != cpu.__file__]
    return ", called by ".join(inside[:1] + [_place(frame) for frame in outside[:-3 + len(inside[:1]) : -1]]) or "no Python code"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno})"


def begin(timeout: float) -> Optional[Liveness]:
    """Signs of life of this rank, begun; None where there is no other rank."""
    world_size = torch.distributed.get_world_size()
    if world_size == 1:
        return None
    store = torch.distributed.distributed_c10d._get_default_store().clone()  # own connection: a wait holds the lock of the other
    liveness = Liveness(store, torch.distributed.get_rank(), world_size, timeout)
    store.set_timeout(datetime.timedelta(seconds=4 * liveness.interval))
    liveness.start()
    return liveness


class Watch:
    """Signs of life around the engine's training steps, and the last finished step."""

    def __init__(self) -> None:
        self.done = 0
        self.started, self.first = False, 0
        self.liveness: Optional[Liveness] = None

    def install(self) -> None:
        """Wrap the engine's training step; the first step of a process, which may be slow, is not timed."""
        stock_train_step: Callable = engine_training.train_step

        def train_step(*args: Any, iteration: int, **kwargs: Any) -> Any:
            self.done = iteration
            if not self.started:
                self.started, self.liveness = True, begin(_timeout(get_args()))
                self.first = iteration
            elif iteration == self.first + 1:  # the engine has just changed the process groups
                cpu.limit_waits(_timeout(get_args()))
                device.set_timeout(datetime.timedelta(seconds=_timeout(get_args())))
            if self.liveness and iteration > self.first:
                self.liveness.enter(iteration)
            result = stock_train_step(*args, iteration=iteration, **kwargs)
            self.done = iteration + 1
            if self.liveness:
                self.liveness.leave(self.done)
            return result

        engine_training.train_step = train_step

    def stop(self) -> None:
        if self.liveness is not None:
            self.liveness.stop()

    def report(self, trace: Optional[TracebackType]) -> str:
        """Where this rank stood when an exception left it with `trace`, and which ranks are silent."""
        frames = frames_of(trace)
        if self.liveness is None:
            return f"last finished step {self.done}, waiting in {collective_of(frames)}"
        return self.liveness.report(frames)


def _timeout(args: Any) -> float:
    """Seconds after which a collective fails."""
    return args.distributed_timeout_seconds_after_init or 60.0 * args.distributed_timeout_minutes
