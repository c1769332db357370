#!/usr/bin/env python3
"""Where the time of a step goes, rank by rank: the `bdlm/` ranges of traces that `--profile --use-pytorch-profiler` wrote.

    python tools/trace_summary.py runs/a/torch_profile               # every rank of the run
    python tools/trace_summary.py runs/a/torch_profile/rank-3.json.gz

Milliseconds on the host, and calls. Ranges lie inside each other (`bdlm/tiles` in `bdlm/attention` in `bdlm/step`), so columns do not
add up. The traces themselves open in chrome://tracing or https://ui.perfetto.dev.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.training.traces import TraceError, find_traces, read_trace, table  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a rank-N.json.gz, or the folder torch_profile of a run")
    args = parser.parse_args()
    try:
        files = find_traces(args.trace)
        print(table({file.name.split(".")[0]: read_trace(file) for file in files}))
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
