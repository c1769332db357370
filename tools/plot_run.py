#!/usr/bin/env python3
"""Draw one or several runs: loss, NELBO, masked cross entropy, throughput, NELBO by noise level; several are compared in numbers too.

    python tools/plot_run.py runs/quickstart/tensorboard --output runs/quickstart/run.png
    python tools/plot_run.py csbp=runs/a/tensorboard ring=runs/b/tensorboard --output compare.png
    python tools/plot_run.py a=runs/a/log.jsonl b=runs/b/log.jsonl --output compare.png      # files of --bdlm-json-log
    python tools/plot_run.py runs/quickstart/tensorboard --last "nelbo validation"
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.training.plots import PlotError, compare, draw, last_value, read_run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]PATH", help="folder with event files (--tensorboard-dir of the run) at any depth, or file of --bdlm-json-log")
    parser.add_argument("--output", type=Path, default=Path("run.png"), help="PNG file to write (default: %(default)s)")
    parser.add_argument("--unigram-entropy", type=float, help="nats per token; a horizontal line on the NELBO panel")
    parser.add_argument("--title", help="title of the figure (default: the names of the runs)")
    parser.add_argument("--last", metavar="TAG", help="draw nothing: print the last value of this metric of each run")
    args = parser.parse_args()
    try:
        runs = []
        for text in args.runs:
            name, separator, folder = text.partition("=")
            runs.append(read_run(folder, name) if separator and not Path(text).exists() else read_run(text))
        if args.last:
            for run in runs:
                print(last_value(run, args.last))
            return 0
        report = draw(runs, args.output, args.unigram_entropy, args.title)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in report:
        print(line)
    if len(runs) > 1:
        print(compare(runs))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
