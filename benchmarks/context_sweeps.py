"""One thing changed at a time: context, ranks, views, block size, prompt share, window; attention of one layer at a fixed link rate.

    python benchmarks/context_sweeps.py --json benchmarks/results/context_sweeps.json --plot benchmarks/results/context_sweeps.png

Every point is a run of `context_strategies.py` (a cluster of its own, its ways interleaved); the base point is measured once and
stands in every sweep. The device's speed and the link's rate stay the same, so the ratio of communication to computation moves
with the shape; it stands beside each point.

A mostly sliding-window model is computed from two measured layers: 5 with the window for 1 without.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SWEEPS = {
    "length": (512, 1024, 2048), "nodes": (2, 4, 8), "views": (1, 2), "block-size": (8, 32, 128), "prompt": (0.0, 0.5), "window": (0, 128),
}
BASE = {"length": 1024, "nodes": 4, "views": 1, "block-size": 32, "prompt": 0.0, "window": 0}
BASELINES = ("cp/ring", "bp")
WINDOWED_LAYERS = 5


def measure(args: argparse.Namespace, changed: dict) -> dict:
    """Result of one point: figures by way, ceilings, bytes."""
    values = {name: value for name, value in {**BASE, **changed}.items() if (name, value) != ("window", 0)}
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    common = ["--ways", "cp/ring", "bp", "csbp/direct", "csbp/ring", "--rates", str(args.rate), "--device-rate", str(args.device_rate)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, str(HERE / "context_strategies.py"), *flags, *common, "--repeats", str(args.repeats), "--json", str(answer)],
            check=True, stdout=subprocess.DEVNULL,
        )
        result = json.loads(answer.read_text())
    point = result["points"][0]
    rows = {
        name: {
            **row, "peak_bytes": max(result["ways"][name]["peak_bytes"]), "balance": result["ways"][name]["balance"],
            "busiest_sent": max(result["ways"][name]["sent"]),
        }
        for name, row in point["ways"].items()
    }
    return {**BASE, **changed, "ratio_met": point["ratio_met"], "ways": rows, "load_average": result["settings"]["load_average"]}


def speedup(ways: dict, over: str = "") -> float:
    """Of csbp/direct over a way, or over the best baseline."""
    return min(ways[name]["step"] for name in ([over] if over else BASELINES)) / ways["csbp/direct"]["step"]


def mostly_windowed(points: dict) -> dict:
    """Six layers, five with the window, from the two measured kinds; by way: step, computation, communication, ceiling."""
    windowed, full = points["window=128"]["ways"], points["base"]["ways"]
    parts = ("step", "compute_only", "communication_only", "ceiling")
    return {way: {part: WINDOWED_LAYERS * windowed[way][part] + full[way][part] for part in parts} for way in full}


def plot(points: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    swept = {name: values for name, values in SWEEPS.items() if sum(key_of(name, value) in points for value in values) > 1}
    columns = min(3, len(swept))
    figure, axes = pyplot.subplots(-(-len(swept) // columns), columns, figsize=(4.4 * columns + 1, 3.8 * -(-len(swept) // columns)), squeeze=False)
    for axis, (name, values) in zip(axes.flat, swept.items()):
        mine = [points[key_of(name, value)] for value in values if key_of(name, value) in points]
        labels = [f"{point[name] or 'none'}\n(ratio {point['ratio_met']:.1f})" for point in mine]
        for way, color in (("cp/ring", "tab:gray"), ("bp", "tab:olive"), ("csbp/ring", "tab:blue"), ("csbp/direct", "tab:green")):
            axis.plot(labels, [point["ways"][way]["step"] for point in mine], "o-", color=color, label=way)
            axis.plot(labels, [point["ways"][way]["ceiling"] for point in mine], "_", color=color, markersize=16)
        axis.set(title=name, ylim=(0, None), ylabel="s, forward and backward")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("attention of one layer; dash: ceiling (larger of computation alone and communication alone)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def key_of(name: str, value) -> str:
    return "base" if BASE[name] == value else f"{name}={value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=204.0, help="Mbit/s of a node's link")
    parser.add_argument("--device-rate", type=float, default=15.5e9, help="flop/s of a device for every rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(SWEEPS), choices=SWEEPS, help="sweeps to run")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    args = parser.parse_args()
    wanted = {"base": {}} | {key_of(name, value): {name: value} for name in args.only for value in SWEEPS[name] if value != BASE[name]}
    points: dict = {}
    for key, changed in wanted.items():
        points[key] = point = measure(args, changed)
        steps = ", ".join(f"{way} {row['step']:.3f} (ceiling {row['ceiling']:.3f})" for way, row in point["ways"].items())
        print(f"{key:14} ratio {point['ratio_met']:.2f}: {steps}; x best baseline {speedup(point['ways']):.2f}, x cp/ring {speedup(point['ways'], 'cp/ring'):.2f}", flush=True)
        result = {"settings": {"rate_mbit": args.rate, "device_rate": args.device_rate, "repeats": args.repeats, "cores": os.cpu_count()}, "points": points}
        if "window=128" in points:
            result["mostly_windowed"] = mixed = mostly_windowed(points)
        if args.json:  # after every point: an interrupted sweep keeps what it has
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if "window=128" in points:
        print(f"5 of 6 layers windowed: x best baseline {speedup(mixed):.2f}, x cp/ring {speedup(mixed, 'cp/ring'):.2f}")
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
