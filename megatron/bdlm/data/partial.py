"""Output under a temporary name until it is complete: nothing half-written is ever left under a final name, or at all.

An exception removes the temporary files on its way out. A signal handler cannot rely on that (an exception raised
inside a callback, such as one around `fork`, is swallowed by the interpreter), so the open ones are also registered
and `remove_partial_output` takes them away at once.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_open: set[Path] = set()


@contextmanager
def partial_output(final: Path) -> Iterator[Path]:
    """A temporary name beside `final`, for a file or a folder; removed at the end unless it was renamed."""
    partial = final.with_name(f"{final.name}.partial-{os.getpid()}")
    final.parent.mkdir(parents=True, exist_ok=True)
    _open.add(partial)
    try:
        yield partial
    finally:
        _remove(partial)
        _open.discard(partial)


def remove_partial_output() -> None:
    """Remove all temporary files and folders of this process that are open now."""
    for partial in list(_open):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
