"""What each way to share a sample's attention costs when links are slow: time, exposed communication, bytes, memory, balance.

    python benchmarks/context_strategies.py --nodes 4 --ratios 0 0.75 1.5 3 --json benchmarks/results/context_4x1.json \
        --plot benchmarks/results/context_4x1.png
    python benchmarks/context_strategies.py --nodes 2 --ranks-per-node 4 --ratios 0 3 --key-heads 8 ...

Ranks run on an emulated cluster (`cluster.py`). A *ratio* r sets the link rate at which `cp/ring` between these nodes communicates
r times as long as it computes: its busiest link's bytes over r times its computation, measured at the start of the run, corrected
once by the time that its communication then took (0: no limit). The ratio that was met in the end stands in the result, from the
communication and computation of the same rounds.

Every round runs every way once, in alternating order, from a common barrier; the time of a step (forward and backward of one
layer) is that of its slowest rank; figures are medians over rounds, ratios are medians of ratios within a round. Beside every step stand its
ceilings: its computation alone, its communication alone, and their maximum, which perfect overlap would reach. `exposed` is
the step less its computation.

Started by torchrun, on machines of its own, it emulates nothing and takes their links as they are (`multi_gpu.sh`):

    torchrun --nproc-per-node 8 benchmarks/context_strategies.py --device cuda --length 262144 --query-heads 32 --key-heads 8 --head-size 128

--device-rate FLOPS gives every rank a device of its own: attention tiles take as long as such a device needs, without doing the
arithmetic (context_ways.DeviceKernel). Without it everything is computed by the cores, which ranks share.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import cluster, rate_for_ratio, set_rate  # noqa: E402
from benchmarks.context_ways import BASELINES, PLACE, WAYS, Shape, Way, bytes_of_step, make_way, use_device  # noqa: E402

PARTS = ("step", "compute", "communicate")
LOAD = os.getloadavg()[0]
"""Of this machine before anything is measured."""


# ---- on a rank ---------------------------------------------------------------------------------------


def slowest(seconds: float) -> float:
    """The largest over all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def timed(way: Way, part: str) -> float:
    """Seconds of the slowest rank from a common barrier, the device's work included."""
    wait = torch.cuda.synchronize if PLACE["device"] == "cuda" else lambda: None
    wait()
    dist.barrier()
    start = time.perf_counter()
    getattr(way, part)()
    wait()
    return slowest(time.perf_counter() - start)


def describe(way: Way, ranks_per_node: int) -> dict:
    """Figures that do not depend on the links: of all ranks."""
    mine = {"flops": way.flops, **bytes_of_step(way, ranks_per_node), "peak_bytes": way.peak_bytes()}
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    found = {name: [rank[name] for rank in of_ranks] for name in mine}
    return {**found, "balance": max(found["flops"]) * len(of_ranks) / sum(found["flops"])}


def busiest_link(described: dict, ranks_per_node: int) -> int:
    """Bytes of the node that sends most to other nodes."""
    crossing = described["between_nodes"]
    return max(sum(crossing[first : first + ranks_per_node]) for first in range(0, len(crossing), ranks_per_node))


def measure_point(ways: dict[str, Way], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by way and part."""
    found: dict = {name: {part: [] for part in PARTS} for name in ways}
    for repeat in range(repeats):
        for name in list(ways) if repeat % 2 else list(ways)[::-1]:
            for part in PARTS:
                if repeat and part == "communicate" and name != "cp/ring":
                    continue  # without computation it hardly varies
                found[name][part].append(timed(ways[name], part))
    return found


def limit(rate: float | None) -> bool:
    """Rank 0 sets the rate of every link; whether there are links to limit."""
    dist.barrier()
    done = torch.tensor(float(dist.get_rank() == 0 and set_rate(rate)))
    dist.all_reduce(done)
    return bool(done)


def measure_on_rank(args: argparse.Namespace) -> None:
    """Body of a rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        PLACE.update(device="cuda", dtype=torch.bfloat16)
    # figures are compared on the host; tensors of the device travel by NCCL
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    if args.device_rate:
        use_device(args.device_rate)
    shape = shape_of(args)
    ways = {name: make_way(name, shape, args.ranks_per_node) for name in args.ways}
    described = {name: describe(way, args.ranks_per_node) for name, way in ways.items()}
    for way in ways.values():
        way.compute()  # warms up plans of this part
    computation = statistics.median(timed(ways["cp/ring"], "compute") for _ in range(3))
    points = []
    for ratio, rate in [(None, rate or None) for rate in args.rates or ()] or [(ratio, None) for ratio in args.ratios]:
        if ratio:
            rate = rate_for_ratio(ratio, computation, busiest_link(described["cp/ring"], args.ranks_per_node))
        limited = limit(rate)
        if limited and ratio:
            # steps wait for each other and packets have headers: correct the rate by what the ring took
            met = timed(ways["cp/ring"], "communicate") / computation
            rate *= met / ratio
            limit(rate)
        point = {"ratio": ratio, "rate_mbit": rate if limited else None, "seconds": measure_point(ways, args.repeats)}
        points.append(point)
        if dist.get_rank() == 0:
            # written after every point: an interrupted sweep keeps what it has
            Path(args.worker).write_text(json.dumps({"ways": described, "points": points}))
    limit(None)
    dist.destroy_process_group()


# ---- figures -----------------------------------------------------------------------------------------


def summary(point: dict) -> dict:
    """Medians, ceilings and ratios of one point."""
    seconds = point["seconds"]
    rows = {}
    for name, parts in seconds.items():
        step, compute, communicate = (statistics.median(parts[part]) for part in PARTS)
        rows[name] = {
            "step": step, "compute_only": compute, "communication_only": communicate, "ceiling": max(compute, communicate),
            "exposed": max(0.0, step - compute), "spread": [min(parts["step"]), max(parts["step"])],
        }
    ring = seconds["cp/ring"]
    met = statistics.median(move / work for move, work in zip(ring["communicate"], ring["compute"]))
    return {
        "ratio": point["ratio"], "ratio_met": met, "rate_mbit": point["rate_mbit"], "ways": rows,
        "speedups": {name: speedups(seconds, name) for name in seconds if name.startswith("csbp")},
    }


def speedups(seconds: dict, ours: str) -> dict[str, float]:
    """Of `ours` over every other way: medians of ratios within a round."""
    found = {
        other: statistics.median(b / a for a, b in zip(seconds[ours]["step"], seconds[other]["step"]))
        for other in seconds if other != ours
    }
    baselines = [found[name] for name in BASELINES if name in found]
    return {**found, "best baseline": min(baselines)} if baselines else found


def print_result(result: dict) -> None:
    ways = result["ways"]
    print(f"{'way':18} {'GFLOP/rank':>10} {'balance':>8} {'MB sent/rank':>12} {'between nodes':>13} {'peak MB':>8}")
    for name, row in ways.items():
        ranks = len(row["flops"])
        print(
            f"{name:18} {max(row['flops']) / 1e9:10.2f} {row['balance']:8.3f} {sum(row['sent']) / ranks / 1e6:12.2f} "
            f"{sum(row['between_nodes']) / 1e6:13.2f} {max(row['peak_bytes']) / 1e6:8.1f}"
        )
    for point in result["points"]:
        rate = "no limit" if point["rate_mbit"] is None else f"{point['rate_mbit']:.1f} Mbit/s"
        print(f"\nratio {'-' if point['ratio'] is None else point['ratio']} ({rate}; met: {point['ratio_met']:.2f})")
        print(f"{'way':18} {'step s':>8} {'compute':>8} {'communic.':>9} {'maximum':>8} {'exposed':>8} {'x csbp/direct':>13}")
        ours = point["speedups"].get("csbp/direct", {})
        for name, row in point["ways"].items():
            print(
                f"{name:18} {row['step']:8.3f} {row['compute_only']:8.3f} {row['communication_only']:9.3f} "
                f"{row['ceiling']:8.3f} {row['exposed']:8.3f} {ours.get(name, 1.0):13.2f}"
            )


def plot_result(result: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(result["points"]), figsize=(4.2 * len(result["points"]) + 1, 4.2), squeeze=False)
    for axis, point in zip(axes[0], result["points"]):
        names = list(point["ways"])
        rows = [point["ways"][name] for name in names]
        places = range(len(names))
        colors = ["tab:green" if name.startswith("csbp") else "tab:gray" for name in names]
        axis.barh(places, [row["step"] for row in rows], color=colors)
        axis.plot([row["compute_only"] for row in rows], places, "k|", markersize=14, label="computation only")
        axis.plot([row["communication_only"] for row in rows], places, "r|", markersize=14, label="communication only")
        axis.set_yticks(places, names)
        axis.invert_yaxis()
        axis.set_xlabel("seconds, forward and backward of one layer")
        rate = "no limit" if point["rate_mbit"] is None else f"{point['rate_mbit']:.0f} Mbit/s a node"
        axis.set_title(f"{rate}\ncp/ring: communication / computation {point['ratio_met']:.2f}", fontsize=9)
    axes[0][0].legend(fontsize=8)
    settings = result["settings"]
    figure.suptitle(
        f"{settings['nodes']} emulated nodes x {settings['ranks_per_node']} ranks, L={settings['length']}, "
        f"S={settings['block_size']}, {settings['query_heads']}/{settings['key_heads']} heads of {settings['head_size']}; "
        + ("a device per rank" if settings["device_rate"] else f"{os.cpu_count()} cores for all ranks"), fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ---- command line ------------------------------------------------------------------------------------


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="cp/ring must be among them")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.75, 1.5, 3.0])
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s of a node's link instead of ratios (0: no limit)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: bfloat16 over NCCL, started by torchrun")
    parser.add_argument("--device-rate", type=float, help="flop/s of a device for every rank (default: compute on the cores)")
    for field in dataclasses.fields(Shape):
        kind = int if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # file for rank 0's result
    args = parser.parse_args()
    if "cp/ring" not in args.ways:
        parser.error(f"--ways {' '.join(args.ways)}: cp/ring defines the ratios. A legal value: cp/ring csbp/direct")
    if args.device == "cuda" and not (torch.cuda.is_available() and "LOCAL_RANK" in os.environ):
        parser.error("--device cuda: needs GPUs and torchrun (benchmarks/multi_gpu.sh). A legal value here: --device cpu")
    return args


def measure_under_torchrun(args: argparse.Namespace) -> None:
    """This process is a rank already, and the links are what they are; rank 0 reports."""
    args.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    args.nodes = int(os.environ["WORLD_SIZE"]) // args.ranks_per_node
    args.rates = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        args.worker = os.path.join(folder, "result.json")
        measure_on_rank(args)
        if os.environ["RANK"] == "0":
            note = f"as it is: {torch.cuda.get_device_name()}, NCCL" if args.device == "cuda" else "as it is: gloo"
            report(args, json.loads(Path(args.worker).read_text()), note)


def main() -> None:
    args = parse()
    if args.worker:
        measure_on_rank(args)
        return
    if "LOCAL_RANK" in os.environ:
        measure_under_torchrun(args)
        return
    with tempfile.TemporaryDirectory() as folder, cluster(args.nodes, args.ranks_per_node) as machines:
        answer = os.path.join(folder, "result.json")
        # without an emulated network there is no rate to set
        ratios = [] if machines.emulated else ["--rates", "0"]
        machines.torchrun(__file__, [*sys.argv[1:], "--worker", answer, *ratios], args.timeout)
        raw = json.loads(Path(answer).read_text())
    report(args, raw, machines.note)


def report(args: argparse.Namespace, raw: dict, network: str) -> None:
    """Print the figures of `raw`, what rank 0 wrote, and save them where asked."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "worker", "timeout")}
    dtype = str(PLACE["dtype"]).removeprefix("torch.")
    result = {
        "settings": {**settings, "network": network, "cores": os.cpu_count(), "load_average": LOAD, "dtype": dtype},
        "ways": raw["ways"], "points": [{**summary(point), "rounds": point["seconds"]} for point in raw["points"]],
    }
    print_result(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot_result(result, args.plot)


if __name__ == "__main__":
    main()
