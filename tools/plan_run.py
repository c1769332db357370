"""Which layout of TP, PP, CP, BP, EP and DP to run a model with: predicted memory, bytes, FLOPs, time and tokens a second.

    python tools/plan_run.py --model 14b --gpus 16 --gpu h200 --seq-length 262144 --global-batch-size 16
    python tools/plan_run.py --model /models/Qwen3-8B --gpus 4096 --seq-length 1048576 --global-batch-size 512 --json plan.json --plot plan.png
    python tools/plan_run.py --gpus 8 --seq-length 65536 --global-batch-size 8 -- --num-layers 36 --hidden-size 4096 ...
    python tools/plan_run.py --published

Every legal layout is predicted; the best few are printed with ready flags. Predictions are a model of the machine (docs/performance.md says
what it leaves out); constants of hardware and their sources: megatron/bdlm/planner/hardware.py.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from megatron.bdlm.planner import window_traffic
from megatron.bdlm.planner.hardware import GPUS, Efficiency
from megatron.bdlm.planner.models import KNOWN, Model, PlannerError, from_config, from_flags
from megatron.bdlm.planner.published import compare
from megatron.bdlm.planner.search import Ranked, exact_balance, flags, search
from megatron.bdlm.planner.work import Machine, Prediction, Workload

GIB = 2**30


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a Hugging Face folder or config.json, or one of {', '.join(KNOWN)}; else Megatron flags behind --")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS))
    parser.add_argument("--gpus", type=int, default=8, help="number of them")
    parser.add_argument("--gpus-per-node", type=int, help="default: the GPU's usual node")
    parser.add_argument("--node-gbytes", type=float, help="GB/s between GPUs of a node, one direction")
    parser.add_argument("--network-gbytes", type=float, help="GB/s to other nodes, one direction, per GPU")
    parser.add_argument("--seq-length", type=int, default=262144, help="clean tokens of a sample")
    parser.add_argument("--bdlm-block-size", type=int, default=32)
    parser.add_argument("--bdlm-views", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples of a step")
    parser.add_argument("--bp-grad-bytes", type=int, default=4, choices=(2, 4), help="bytes of a dK/dV value on the wire")
    for field in dataclasses.fields(Efficiency):
        parser.add_argument(f"--efficiency-{field.name.replace('_', '-')}", type=float, default=field.default)
    parser.add_argument("--best", type=int, default=5, help="layouts to print flags of")
    parser.add_argument("--json", help="file to write all predictions to")
    parser.add_argument("--plot", help="PNG file")
    parser.add_argument("--published", action="store_true", help="compare with published figures and end")
    parser.add_argument("flags", nargs="*", help="Megatron flags of the model, behind --")
    return parser.parse_args(arguments)


def check_counts(args: argparse.Namespace) -> None:
    """Raises PlannerError: a size that is below 1."""
    legal = {"gpus": 8, "seq_length": 262144, "bdlm_block_size": 32, "bdlm_views": 1, "global_batch_size": 16, "gpus_per_node": 8, "best": 5}
    for name, example in legal.items():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PlannerError(f"--{name.replace('_', '-')} {value}: at least 1. A legal value: {example}")


def machine_of(args: argparse.Namespace) -> Machine:
    gpu = GPUS[args.gpu]
    given = {
        "gpus_per_node": args.gpus_per_node,
        "node_bandwidth": args.node_gbytes and args.node_gbytes * 1e9,
        "network_bandwidth": args.network_gbytes and args.network_gbytes * 1e9,
    }
    gpu = dataclasses.replace(gpu, **{name: value for name, value in given.items() if value})
    efficiency = Efficiency(**{field.name: getattr(args, f"efficiency_{field.name}") for field in dataclasses.fields(Efficiency)})
    return Machine(gpu, args.gpus, efficiency)


def model_of(args: argparse.Namespace) -> Model:
    """Raises PlannerError: no model given, or one that cannot be read."""
    if args.flags:
        return from_flags(args.flags)
    if not args.model:
        raise PlannerError(f"--model: missing, and no Megatron flags behind --. A legal value: {next(iter(KNOWN))}")
    return KNOWN[args.model] if args.model in KNOWN else from_config(Path(args.model))


def best_of(ranked: Ranked, count: int) -> list[Prediction]:
    """The best fitting predictions, one of each TP, PP, CP, EP, DP and strategy: hybrids differ little among each other."""
    kept: dict[tuple, Prediction] = {}
    for prediction in ranked.predictions:
        layout = prediction.layout
        if prediction.fits:
            kept.setdefault((layout.tp, layout.pp, layout.cp, layout.ep, layout.dp, layout.strategy), prediction)
    return list(kept.values())[:count]


def table(predictions: list[Prediction]) -> str:
    lines = [
        f"{'TP':>3} {'PP':>3} {'CP':>4} {'BP':>4} {'EP':>3} {'DP':>4} {'strategy':8} {'transport':12} {'recompute':9} {'GB/GPU':>7} "
        f"{'attention GB':>12} {'between nodes':>13} {'PFLOP':>8} {'step s':>8} {'exposed s':>9} {'tokens/s':>9}"
    ]
    for prediction in predictions:
        layout, moved = prediction.layout, prediction.bytes
        lines.append(
            f"{layout.tp:3} {layout.pp:3} {layout.cp:4} {layout.bp:4} {layout.ep:3} {layout.dp:4} {layout.strategy:8} "
            f"{layout.transport:12} {'full' if layout.recompute else 'none':9} {prediction.memory_total / 1e9:7.1f} "
            f"{moved['attention'] / 1e9:12.1f} {moved['attention between nodes'] / 1e9:13.1f} "
            f"{sum(prediction.flops.values()) / 1e15:8.1f} {prediction.step_seconds:8.2f} "
            f"{prediction.seconds['attention exposed']:9.2f} {prediction.tokens_per_second:9.0f}"
        )
    return "\n".join(lines)


def memory_lines(prediction: Prediction) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f}" for name, value in prediction.memory.items())


def plot(predictions: list[Prediction], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        f"TP{p.layout.tp} PP{p.layout.pp} CP{p.layout.cp} BP{p.layout.bp} EP{p.layout.ep} DP{p.layout.dp}\n{p.layout.strategy}"
        for p in predictions
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 0.6 * len(predictions) + 2.5))
    series = (
        (axes[0], [{k: v for k, v in p.seconds.items() if k not in ("step", "attention exposed")} for p in predictions], "seconds of a step"),
        (axes[1], [{k: v / 1e9 for k, v in p.memory.items()} for p in predictions], "GB of the heaviest rank"),
    )
    for axis, rows, label in series:
        left = [0.0] * len(rows)
        for part in rows[0]:
            widths = [row[part] for row in rows]
            axis.barh(range(len(rows)), widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths)]
        axis.set_yticks(range(len(rows)), names if axis is axes[0] else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def print_published() -> None:
    print("Predicted beside published (16 H200; assumptions: megatron/bdlm/planner/published.py)")
    print(f"{'model':11} {'context':>8} {'published':>18} {'CP 8 on a node':>15} {'CP 16 on two':>13}  explained by")
    for row in compare():
        published = row.published
        if published.traffic:
            text = "{:.0f} -> {:.0f} GiB".format(*published.traffic)
            predicted = ["{:.0f} -> {:.0f} GiB".format(*row.predicted), "-"]
        else:
            text, predicted = f"{published.speedup:.2f}x", [f"{value:.2f}x" for value in row.predicted]
        print(f"{published.model:11} {published.length:8} {text:>18} {predicted[0]:>15} {predicted[1]:>13}  {row.explained}")
    print("\nAttention traffic of 26b-a4b at 262144 tokens on 8 ranks, GiB a rank and step (25 of 30 layers have a window)")
    for account in window_traffic.accounts():
        parts = f"full layers {account.full:.1f}, window layers {account.window:.1f}"
        print(f"{account.total:7.1f}  {account.name} ({parts})\n         {account.reason}")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.published:
        print_published()
        return 0
    try:
        check_counts(args)
        model, machine = model_of(args), machine_of(args)
        workload = Workload(args.seq_length, args.bdlm_block_size, args.global_batch_size, args.bdlm_views, args.bp_grad_bytes)
        ranked = search(model, machine, workload)
    except PlannerError as error:
        print(error, file=sys.stderr)
        return 2
    title = f"{model.name} ({model.parameters / 1e9:.1f}B) on {machine.count} {machine.gpu.name}, L={workload.length}, S={workload.block_size}"
    print(f"{title}: {len(ranked.predictions)} legal layouts, {ranked.fitting} fit in {machine.gpu.memory / 1e9:.0f} GB")
    best = best_of(ranked, args.best)
    if not best:
        print(f"none fits; the smallest needs {ranked.predictions[0].memory_total / 1e9:.0f} GB:")
        best = [ranked.predictions[0]]
    print(table(best))
    for number, prediction in enumerate(best, 1):
        balance = exact_balance(workload, prediction.layout)
        print(f"\n{number}. {flags(workload, prediction.layout)}")
        print(f"   GB by part: {memory_lines(prediction)}" + (f"; balance {balance:.4f}" if balance else ""))
    if args.json:
        everything = [{**dataclasses.asdict(p), "flags": flags(workload, p.layout)} for p in (best if args.gpus > 512 else ranked.predictions)]
        settings = {"model": dataclasses.asdict(model), "machine": dataclasses.asdict(machine), "workload": dataclasses.asdict(workload)}
        Path(args.json).write_text(json.dumps({**settings, "predictions": everything}, indent=1) + "\n")
    if args.plot:
        plot(best, args.plot, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
