#!/usr/bin/env python3
"""Draw the plans that the documentation shows, each as `tools/show_plan.py` would.

    python tools/docs_pictures.py                    # all, into docs/images
    python tools/docs_pictures.py --only csbp --folder /tmp
    python tools/docs_pictures.py --list             # the command of each
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
TOOL = "tools/show_plan.py"

FOUR_RANKS = "--seq-length 512 --bdlm-block-size 32 --context-parallel-size 4"
PICTURES = {
    "mask": "--seq-length 64 --bdlm-block-size 8",
    "token-causal": "--seq-length 64 --bdlm-block-size 8 --bdlm-clean-attention token-causal",
    "window": "--seq-length 64 --bdlm-block-size 8 --window 16",
    "documents": "--seq-length 64 --bdlm-block-size 8 --documents 20,31,13",
    "prompt": "--seq-length 64 --bdlm-block-size 8 --target-blocks 4,5,6,7",
    "csbp": FOUR_RANKS,
    "cp": f"{FOUR_RANKS} --bdlm-strategy cp",
    "hybrid": f"{FOUR_RANKS} --bdlm-strategy hybrid --block-parallel-size 2",
    "bp": f"{FOUR_RANKS} --bdlm-strategy bp",
}
"""File name in docs/images -> flags of show_plan.py."""


def command(name: str, folder: Path) -> list[str]:
    return [sys.executable, str(ROOT / TOOL), *PICTURES[name].split(), "--output", str(folder / f"{name}.png")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PICTURES, nargs="+", help="these alone (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to draw (default: docs/images)")
    parser.add_argument("--list", action="store_true", help="print the command of each and draw nothing")
    args = parser.parse_args()
    for name in args.only or PICTURES:
        if args.list:
            print(f"python {TOOL} {PICTURES[name]} --output {name}.png")
        elif code := subprocess.run(command(name, args.folder), stdout=subprocess.DEVNULL).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
