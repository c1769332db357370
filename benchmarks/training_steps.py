"""Whole training steps under slow links: engine, optimizer, gradient reduction and data included.

    python benchmarks/training_steps.py --nodes 4 --ratios 0 1.5 3 --device-rate 15e9 --json steps.json --plot steps.png

One run of `pretrain_bdlm.py`'s own functions on an emulated cluster (`cluster.py`). The ways to share a sample take turns,
iteration by iteration, on the same model: only strategy and transport change, so every figure of a round comes from the same
minute. A *ratio* r sets the link rate at which everything that `cp/ring` sends in a step (keys, values, their gradients, and the
reduction of the weights' gradients) takes r times its computation, from the bytes that its busiest link counted without a limit.

Beside every step stand its ceilings: `compute`, the same step with every piece of remote keys and values already there and
without a limit; `communicate`, the busiest link's bytes at the link's rate (5% of a packet are headers); and their maximum. Figures are medians over rounds.

--device-rate: attention takes the time of a device of its own for every rank (see context_strategies.py); everything else, the
optimizer included, is computed by the cores, which ranks share.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import cluster, rate_for_ratio, set_rate  # noqa: E402

WAYS = {
    "cp/ring": ("cp", "ring"), "cp/allgather": ("cp", "allgather"), "bp": ("bp", "direct"),
    "csbp/direct": ("csbp", "direct"), "csbp/ring": ("csbp", "ring"),
}
"""Strategy and transport of every way."""

BASELINES = ("cp/ring", "cp/allgather", "bp")

MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --kv-channels 64 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4 --eval-iters 0 --eval-interval 100000 --log-interval 100000 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 --no-mmap-bin-files --bdlm-block-size 32"
).split()


def link_bytes() -> int:
    """Bytes that this node's link has carried in its busier direction; 0 without a link of its own."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = list(map(int, counts.split()))
            return max(fields[0], fields[8])
    return 0


class Turns:
    """Wraps the engine's training step: each iteration runs one way, timed from a common barrier on the slowest rank."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.points, self.bytes = args, [], {}
        self.plan = self._plan()

    def iterations(self) -> int:
        """Iterations of the whole schedule."""
        rounds = self.args.repeats * len(self.args.ways)
        return len(self.args.ways) + rounds + rounds * len(self.args.ratios)

    def _plan(self):
        """Yield (strategy, transport) of each iteration and take its seconds."""
        ways = self.args.ways
        for name in ways:  # plans are built, memory is allocated
            start = link_bytes()
            yield WAYS[name]
            self.bytes[name] = int(self._slowest(link_bytes() - start))
        compute = {name: [] for name in ways}
        for repeat in range(self.args.repeats):
            for name in list(ways)[:: 1 if repeat % 2 else -1]:
                compute[name].append((yield WAYS[name][0], "resident"))
        computation = statistics.median(compute["cp/ring"])
        for ratio in self.args.ratios:
            rate = rate_for_ratio(ratio, computation, self.bytes["cp/ring"]) if ratio and self.bytes["cp/ring"] else None
            self._limit(rate)
            steps = {name: [] for name in ways}
            for repeat in range(self.args.repeats):
                for name in list(ways)[:: 1 if repeat % 2 else -1]:
                    steps[name].append((yield WAYS[name]))
            self.points.append({"ratio": ratio, "rate_mbit": rate, "seconds": steps})
            self._write(compute)
        self._limit(None)
        yield None

    def _limit(self, rate: float | None) -> None:
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == 0:
            set_rate(rate)
        dist.barrier()

    def _slowest(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def _write(self, compute: dict) -> None:
        if int(os.environ["RANK"]) == 0:
            result = {"bytes": self.bytes, "compute": compute, "points": self.points}
            Path(self.args.worker).write_text(json.dumps(result))

    def install(self) -> None:
        """Take turns from now on, outside of everything else that wraps the engine's step."""
        import torch.distributed as dist
        from megatron.core.utils import unwrap_model
        from megatron.training import training as engine

        stock, current = engine.train_step, [None]

        def train_step(forward, data, model, *rest, **named):
            if current[0] is None:
                current[0] = next(self.plan)
            strategy, transport = current[0]
            for stage in unwrap_model(model):
                slots = 1 if strategy == "cp" else dist.get_world_size()
                stage.bdlm = dataclasses.replace(
                    stage.bdlm, bdlm_strategy=strategy, bdlm_transport=transport, block_parallel_size=slots
                )
            dist.barrier()
            start = time.perf_counter()
            result = stock(forward, data, model, *rest, **named)
            current[0] = self.plan.send(self._slowest(time.perf_counter() - start))
            return result

        engine.train_step = train_step


def measure_on_rank(args: argparse.Namespace) -> None:
    """Body of a rank: a training run whose iterations take turns; rank 0 writes the result."""
    from megatron.bdlm.platform import cpu

    on_cpu = cpu.enable()
    import pretrain_bdlm as entry
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from benchmarks.context_ways import use_device  # also registers the transport whose pieces are already there
    from megatron.bdlm.training import run

    cpu.adapt_engine(on_cpu)
    turns = Turns(args)
    size = int(os.environ["WORLD_SIZE"])
    length = ["--seq-length", str(args.length), "--max-position-embeddings", str(args.length)]
    sys.argv = [
        "pretrain_bdlm.py", *MODEL, *length, "--context-parallel-size", str(size), "--train-iters", str(turns.iterations())
    ]
    if args.device_rate:
        use_device(args.device_rate)
    container = run.prepare()
    turns.install()
    pretrain(container, entry.train_valid_test_datasets_provider, ModelType.encoder_or_decoder, entry.forward_step)
    run.finish()


# ---- figures -----------------------------------------------------------------------------------------


def summary(raw: dict) -> list[dict]:
    """Medians, ceilings and speedups of every point."""
    compute = {name: statistics.median(seconds) for name, seconds in raw["compute"].items()}
    found = []
    for point in raw["points"]:
        rows = {}
        for name, seconds in point["seconds"].items():
            step = statistics.median(seconds)
            moved = raw["bytes"][name] * 8 / 0.95 / (point["rate_mbit"] * 1e6) if point["rate_mbit"] else 0.0
            rows[name] = {
                "step": step, "compute_only": compute[name], "communication_only": moved, "ceiling": max(compute[name], moved),
                "exposed": max(0.0, step - compute[name]), "spread": [min(seconds), max(seconds)],
            }
        ours = point["seconds"]["csbp/direct"]
        speedups = {
            name: statistics.median(b / a for a, b in zip(ours, seconds)) for name, seconds in point["seconds"].items()
        }
        best = min(speedups[name] for name in BASELINES if name in speedups)
        found.append({**{k: point[k] for k in ("ratio", "rate_mbit")}, "ways": rows, "speedups": {**speedups, "best baseline": best}})
    return found


def print_result(result: dict) -> None:
    for point in result["points"]:
        rate = "no limit" if point["rate_mbit"] is None else f"{point['rate_mbit']:.1f} Mbit/s"
        print(f"\ncp/ring: communication / computation {point['ratio']} ({rate})")
        print(f"{'way':14} {'step s':>8} {'compute':>8} {'communic.':>9} {'exposed':>8} {'MB, busiest link':>17} {'x csbp/direct':>13}")
        for name, row in point["ways"].items():
            print(
                f"{name:14} {row['step']:8.2f} {row['compute_only']:8.2f} {row['communication_only']:9.2f} {row['exposed']:8.2f} "
                f"{result['bytes'][name] / 1e6:17.1f} {point['speedups'][name]:13.2f}"
            )
        print(f"csbp/direct over the best baseline: {point['speedups']['best baseline']:.2f}")


def plot_result(result: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(result["points"]), figsize=(4 * len(result["points"]) + 1, 3.4), squeeze=False)
    for axis, point in zip(axes[0], result["points"]):
        rows, places = point["ways"], range(len(point["ways"]))
        axis.barh(places, [row["step"] for row in rows.values()], color=["tab:green" if n.startswith("csbp") else "tab:gray" for n in rows])
        axis.plot([row["compute_only"] for row in rows.values()], places, "k|", markersize=14, label="computation only")
        axis.plot([row["communication_only"] for row in rows.values()], places, "r|", markersize=14, label="communication only")
        axis.set_yticks(places, list(rows))
        axis.invert_yaxis()
        axis.set_xlabel("seconds of a training step")
        rate = "no limit" if point["rate_mbit"] is None else f"{point['rate_mbit']:.0f} Mbit/s a node"
        axis.set_title(f"{rate}; cp/ring: ratio {point['ratio']}", fontsize=9)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4, help="one rank each")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="cp/ring and csbp/direct must be among them")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 1.5, 3.0], help="0: no limit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device-rate", type=float, help="flop/s of a device for every rank's attention (default: the cores)")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # file for rank 0's result
    args = parser.parse_args()
    if not {"cp/ring", "csbp/direct"} <= set(args.ways):
        parser.error(f"--ways {' '.join(args.ways)}: ratios and speedups need both. A legal value: cp/ring csbp/direct")
    if args.worker:
        measure_on_rank(args)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, cluster(args.nodes) as machines:
        answer = os.path.join(folder, "result.json")
        machines.torchrun(__file__, [*sys.argv[1:], "--worker", answer], args.timeout)
        raw = json.loads(Path(answer).read_text())
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "worker", "timeout")}
    settings |= {"network": machines.note, "cores": os.cpu_count(), "load_average": load, "dtype": "float32", "model": " ".join(MODEL)}
    result = {"settings": settings, "bytes": raw["bytes"], "points": summary(raw), "rounds": raw}
    print_result(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot_result(result, args.plot)


if __name__ == "__main__":
    main()
