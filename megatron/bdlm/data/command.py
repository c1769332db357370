"""What the data tools share as command lines: exit codes, messages, signals.

Exit codes: 0 done; 1 a check found faults; 2 the input or an option cannot be used; 130 and 143 interrupted.
"""

import signal
import sys
from collections.abc import Callable

from megatron.bdlm.data.documents import DataError


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a tool's `main` and leave the process with its exit code; a known fault is one line on stderr."""
    # SystemExit runs the cleanup of half-written files, which the default action of SIGTERM would not.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = main()
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)
