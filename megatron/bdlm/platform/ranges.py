"""Named ranges of a step, as a profiler shows them: `bdlm/tiles`, `bdlm/exchange`, ..

    with span("bdlm/plan"):             # a stretch of code
    @spanned("bdlm/tiles")              # a function
    for x in span_each("bdlm/exchange", arrivals):     # the time in which the iterator works, not the loop body

Every name is in `RANGES`. They appear in the traces of `torch.profiler` (the engine's `--profile
--use-pytorch-profiler`) and, under the engine's `--profile` with nsys, as NVTX ranges. Where no profiler
runs, a range costs the question whether one does (`benchmarks/ranges.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

RANGES = {
    "bdlm/step": "one iteration: every micro-batch, the gradients' reduction, the optimizer",
    "bdlm/batch": "from clean samples to this rank's rows, of one micro-batch",
    "bdlm/data": "waiting for the data loader, in `bdlm/batch`",
    "bdlm/noise": "corruption of one sample, in `bdlm/batch`",
    "bdlm/plan": "the sequence plan of a micro-batch (kept for equal layouts), in `bdlm/batch`",
    "bdlm/targets": "what every row predicts, in `bdlm/batch`",
    "bdlm/attention": "attention of one layer in forward",
    "bdlm/attention backward": "attention of one layer in backward",
    "bdlm/exchange": "posting, waiting for and unpacking what travels between context-parallel ranks, in attention",
    "bdlm/exchange wait": "in `bdlm/exchange`: the host waits (with NCCL it only queues a dependency)",
    "bdlm/tiles": "rectangles of attention in forward: kernel and merge",
    "bdlm/tiles backward": "rectangles of attention in backward",
    "bdlm/cross entropy": "output layer and log-likelihoods of the scored rows",
    "bdlm/cross entropy backward": "the same in backward",
    "bdlm/loss": "sums, counts and metrics out of log-likelihoods",
    "bdlm/reduction": "the engine finishes gradients over data- and context-parallel ranks and divides them",
    "bdlm/optimizer": "the optimizer's step",
}
"""Name -> what lies inside."""

_NOTHING = contextlib.nullcontext()
_profiler_runs = torch.autograd._profiler_enabled

T = TypeVar("T")


def span(name: str) -> contextlib.AbstractContextManager:
    """A range around a stretch of code; nothing where no profiler runs."""
    return torch.profiler.record_function(name) if _profiler_runs() else _NOTHING


def spanned(name: str) -> Callable[[Callable], Callable]:
    """A range around each call of a function."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            if not _profiler_runs():
                return function(*args, **kwargs)
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return call

    return decorate


def span_each(name: str, items: Iterable[T]) -> Iterator[T]:
    """The items of an iterator; a range around the making of each, and around what the iterator does after the last."""
    iterator = iter(items)
    end = object()
    while True:
        with span(name):
            item = next(iterator, end)
        if item is end:
            return
        yield item
