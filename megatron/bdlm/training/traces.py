"""Traces of a run: `rank-N.json.gz` of `torch.profiler`, summed up by our ranges (`platform/ranges.py`)."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from megatron.bdlm.platform.ranges import RANGES


@dataclass(frozen=True)
class RangeTotal:
    """A range over a whole trace."""

    calls: int
    seconds: float  # nested ranges are counted in the outer one too


class TraceError(ValueError):
    """A file that is no trace; the message names it."""


def read_trace(file: str | Path) -> dict[str, RangeTotal]:
    """Calls and seconds on the host of each of our ranges in a Chrome trace (`.json` or `.json.gz`).

    Raises:
        TraceError: no such file, or not a Chrome trace.
    """
    path = Path(file)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(content)["traceEvents"]
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file. A run writes rank-N.json.gz to torch_profile, beside --tensorboard-dir") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a Chrome trace ({type(error).__name__})") from None
    totals: dict[str, RangeTotal] = {}
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "user_annotation" and name in RANGES:
            so_far = totals.get(name, RangeTotal(0, 0.0))
            totals[name] = RangeTotal(so_far.calls + 1, so_far.seconds + event["dur"] / 1e6)
    return totals


def find_traces(path: str | Path) -> list[Path]:
    """The traces of a run's folder by rank, or the one file.

    Raises:
        TraceError: a folder without any.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("rank-*.json*"), key=lambda file: int(file.name.removeprefix("rank-").split(".")[0]))
    if not files:
        raise TraceError(f"{path}: no rank-N.json.gz in it. A run with --profile --use-pytorch-profiler writes them beside --tensorboard-dir")
    return files


def table(ranks: dict[str, dict[str, RangeTotal]]) -> str:
    """Milliseconds of each range, a column a rank; calls are those of the first rank that has the range."""
    lines = [["range", "calls", *ranks]]
    for name in RANGES:
        found = [totals[name] for totals in ranks.values() if name in totals]
        if found:
            cells = [f"{totals[name].seconds * 1e3:.1f}" if name in totals else "-" for totals in ranks.values()]
            lines.append([name, str(found[0].calls), *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]) for line in lines
    )
