"""Six attention layers, five with a window: conventional context parallelism without and with a windowed exchange, and CSBP.

    python benchmarks/window_layers.py --ranks 4 --length 4096 --window 128

All ways compute the same attention (windows limit every one of them); they differ in what travels:

    cp/ring       every row of both streams in every layer, which is what the published baseline moves
    cp/direct     the needed rows only: W - 1 before a half chunk in window layers; blocks may be split over ranks
    csbp/direct   the needed rows, with whole blocks on a rank: noisy rows never travel

Printed per way: bytes that a rank receives in a step (forward and backward, mean over ranks), seconds of the step, and of
its computation alone (the ceiling). Ratios are taken within rounds; ranks are processes of this machine over gloo.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.context_ways import Shape, bytes_of_step, make_way  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402

NAMES = ("cp/ring", "cp/direct", "csbp/direct")
WINDOW_LAYERS = 5  # for each layer without


def on_rank(shape: Shape, rounds: int) -> dict:
    """Per way: bytes of a step, and seconds by part and round, of six layers."""
    ways = {name: (make_way(name, shape, dist.get_world_size()), make_way(name, replace(shape, window=None), dist.get_world_size())) for name in NAMES}
    found = {name: {"received": 0, "step": [], "compute": []} for name in NAMES}
    for name, (windowed, full) in ways.items():
        for way, layers in ((windowed, WINDOW_LAYERS), (full, 1)):
            found[name]["received"] += layers * bytes_of_step(way, dist.get_world_size())["received"]
    for _ in range(rounds):
        for name, pair in ways.items():
            for part in ("step", "compute"):
                seconds = 0.0
                for way, layers in zip(pair, (WINDOW_LAYERS, 1)):
                    dist.barrier()
                    started = time.perf_counter()
                    getattr(way, part)()
                    dist.barrier()
                    seconds += layers * (time.perf_counter() - started)
                found[name][part].append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = Shape(args.length, args.block_size, query_heads=8, key_heads=4, head_size=32, window=args.window)
    ranks = run_distributed(on_rank, args.ranks, shape, args.rounds)
    summary = {
        name: {
            "received_mean": sum(rank[name]["received"] for rank in ranks) / args.ranks,
            "step": statistics.median(ranks[0][name]["step"]),
            "compute": statistics.median(ranks[0][name]["compute"]),
        }
        for name in NAMES
    }
    ratios = {
        name: statistics.median(a / b for a, b in zip(ranks[0][name]["step"], ranks[0]["csbp/direct"]["step"])) for name in NAMES
    }
    print(f"{args.ranks} ranks, L={args.length}, S={args.block_size}, window {args.window} in {WINDOW_LAYERS} of {WINDOW_LAYERS + 1} layers; {platform.processor() or platform.machine()}")
    print(f"{'':12} {'MB received':>12} {'step s':>8} {'ceiling s':>10} {'over csbp':>10}")
    for name, row in summary.items():
        print(f"{name:12} {row['received_mean'] / 1e6:12.2f} {row['step']:8.3f} {row['compute']:10.3f} {ratios[name]:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "ways": summary, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
