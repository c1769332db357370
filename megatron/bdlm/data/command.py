"""What the data tools share as command lines: exit codes, messages, signals.

Exit codes: 0 done; 1 a check found faults; 2 the input or an option cannot be used; 130 and 143 interrupted.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.partial import remove_partial_output

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a tool's `main` and leave the process with its exit code; a known fault is one line on stderr."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.getLogger("megatron").setLevel(logging.WARNING)  # the engine tells every file it opens
    try:
        code = main()
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)


def _terminate(number: int, frame: Any) -> None:
    """Leave at once and clean."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    remove_partial_output()
    os._exit(128 + number)


@contextmanager
def stop_signals_deferred() -> Iterator[None]:
    """Act on a stop signal that arrives inside only at the end.

    Handlers record it (any thread may receive a signal, and its handler then runs in the main thread), and the
    signals are blocked too, which processes forked inside inherit: they must unblock them once they are ready.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in dict.fromkeys(received):
            os.kill(os.getpid(), number)
