#!/usr/bin/env python3
"""Build a corpus of JSON lines from text that every machine has: the sources of Python's standard library."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.corpus import build_corpus, standard_library  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="Example: python tools/build_corpus.py --output corpus.jsonl --size-limit-mb 4"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write; fields: text, path")
    parser.add_argument(
        "--size-limit-mb", type=float, default=None, help="at most this many megabytes of text; default: all"
    )
    parser.add_argument(
        "--file-limit-kb",
        type=float,
        default=200,
        help="leave out larger files, which are tables (default: %(default)s)",
    )
    parser.add_argument(
        "--source", type=Path, default=None, help=f"folder of the sources; default: {standard_library()}"
    )
    parser.add_argument("--suffix", default=".py", help="files to take from the folder (default: %(default)s)")
    parser.add_argument("--with-tests", action="store_true", help="take folders named test or tests too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    limit = None if arguments.size_limit_mb is None else int(arguments.size_limit_mb * 1e6)
    summary = build_corpus(
        arguments.output,
        arguments.source,
        arguments.suffix,
        limit,
        int(arguments.file_limit_kb * 1e3),
        arguments.with_tests,
    )
    skipped = f", {summary.skipped} unreadable files skipped" if summary.skipped else ""
    print(f"{arguments.output}: {summary.documents} documents, {summary.text_bytes / 1e6:.2f} MB of text{skipped}")


if __name__ == "__main__":
    run_tool(main)
