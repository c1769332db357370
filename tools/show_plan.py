#!/usr/bin/env python3
r"""Show how a sample is shared out among context-parallel ranks: who holds what, who needs what, what each computes.

    python tools/show_plan.py --seq-length 512 --bdlm-block-size 32 --context-parallel-size 4 --output plan.png
    python tools/show_plan.py --seq-length 8192 --bdlm-block-size 32 --context-parallel-size 8 \
        --block-parallel-size 2 --bdlm-strategy hybrid
    python tools/show_plan.py --seq-length 300 --bdlm-block-size 8 --context-parallel-size 4 \
        --documents 100,37,163 --window 64

Needs no GPU and no process group: a plan is a value made on the CPU.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.parallel.picture import PictureError, describe, draw  # noqa: E402
from megatron.bdlm.parallel.plan import PlanError, SequencePlan  # noqa: E402


ENDINGS = (".png", ".pdf", ".svg")
"""Of --output."""


def numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: numbers with commas between them. A legal value: 64,64")
    return [int(part) for part in parts]


def ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1. A legal value: 4")
    return int(text)


def picture_file(text: str) -> Path:
    if Path(text).suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"{text}: its ending must be one of {', '.join(ENDINGS)}. A legal value: plan.png")
    return Path(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, required=True, help="clean length L of the sample")
    parser.add_argument("--bdlm-block-size", "--block-size", dest="block_size", type=int, required=True, help="S")
    parser.add_argument("--context-parallel-size", type=ranks, default=1, help="P (default: %(default)s)")
    parser.add_argument("--block-parallel-size", type=int, help="K (default: what the strategy implies)")
    parser.add_argument("--bdlm-strategy", "--strategy", dest="strategy", default="csbp",
                        choices=["csbp", "cp", "bp", "hybrid"], help="default: %(default)s")
    parser.add_argument("--bdlm-views", "--views", dest="views", type=int, default=1, help="V (default: %(default)s)")
    parser.add_argument("--documents", type=numbers, metavar="N,N,..", help="document lengths that sum to L")
    parser.add_argument("--block-origin", type=int, default=0, help="tokens of a document before blocks start to count")
    parser.add_argument("--target-blocks", type=numbers, metavar="N,N,..", help="blocks with noisy rows (default: all)")
    parser.add_argument("--bdlm-clean-attention", "--clean-attention", dest="clean_attention", default="block-causal",
                        choices=["block-causal", "token-causal"], help="default: %(default)s")
    parser.add_argument("--bdlm-noisy-attention", "--noisy-attention", dest="noisy_attention", default="bidirectional",
                        choices=["bidirectional", "causal"], help="default: %(default)s")
    parser.add_argument("--window", type=int, help="sliding window W of the layer (default: none)")
    parser.add_argument("--output", type=picture_file, metavar="PNG", help="draw the plan into this file too")
    return parser.parse_args(arguments)


def main() -> int:
    options = vars(parse())
    window, output = options.pop("window"), options.pop("output")
    try:
        plans = [SequencePlan.build(rank=rank, **options) for rank in range(options["context_parallel_size"])]
        print(describe(plans, window))
        if output is not None:
            draw(plans, output, window)
            print(f"wrote {output}")
    except (PlanError, PictureError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
