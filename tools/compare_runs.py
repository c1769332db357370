"""Is a candidate as good as the baseline, and what does it cost? Interleaved pairs of runs, limits stated before.

    python tools/compare_runs.py --pairs 5 --processes 2 --target 5.2 --max-quality-increase 0.01 --max-time-ratio 1.05 \
        --report runs/compare --baseline="--block-parallel-size 1" --candidate="--block-parallel-size 2" \
        -- --context-parallel-size 2 --num-layers 4 ... --train-iters 100 --eval-interval 50 --eval-iters 4

What stands behind -- is common to both sides. Pair i runs both sides with --seed SEED + i, in alternating order. Before the first
figure is looked at, the resolved options of the two sides are compared: they may differ in the flags that the sides name (and in seed and
folders), in nothing else. A limit is met when the upper end of the 95% interval of the paired differences meets it, so an
answer that the pairs cannot give counts as not met. One failed run retains the baseline.

    quality   relative difference of the last value of --quality-metric (smaller is better)
    time      ratio of the median seconds of a step, the first two left out
    memory    ratio of the peak resident bytes of the largest process
    target    steps and seconds until --target-metric first reaches --target, with their ratio

The report is DIR/report.md, with report.json and report.png. Exit code 0: keep the candidate; 3: retain the baseline.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

from megatron.bdlm.testing.training_run import REPOSITORY, command, environment

SIDES = ("baseline", "candidate")
# options that differ between any two runs: where they write, and the seed of the pair (equal within it)
OWN = {"tensorboard_dir", "save", "seed", "rank", "local_rank"}
DERIVED = {"hierarchical_context_parallel_sizes"}  # follows from --block-parallel-size, which is compared itself
# 97.5% points of Student's t for 1, 2, .. degrees of freedom (any statistics table)
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Outcome:
    """One run; `failure` holds the end of its output when it failed."""

    side: str
    pair: int
    failure: str = ""
    quality: float = math.nan
    step_seconds: float = math.nan
    peak_bytes: float = math.nan
    steps_to_target: Optional[int] = None
    seconds_to_target: Optional[float] = None
    curve: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Interval:
    """Mean of paired figures and its 95% interval."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Interval":
        mean = statistics.fmean(values)
        if len(values) < 2:
            return Interval(mean, -math.inf, math.inf)
        t = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
        half = t * statistics.stdev(values) / math.sqrt(len(values))
        return Interval(mean, mean - half, mean + half)

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


# ---- running ---------------------------------------------------------------------------------------


def run_side(args: argparse.Namespace, side: str, pair: int, folder: Path) -> tuple[Outcome, dict]:
    """One run; its outcome and its resolved options."""
    events, save = folder / "tensorboard", folder / "checkpoints"
    flags = [*args.flags, *shlex.split(getattr(args, side)), "--seed", str(args.seed + pair)]
    flags += ["--tensorboard-dir", str(events), "--save", str(save), "--tensorboard-log-interval", "1", "--log-interval", "1"]
    if "--save-interval" not in flags:
        flags += ["--save-interval", "1000000000"]  # --save, which the resolved options stand beside, needs one
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.log", "w") as output:
        process = subprocess.Popen(
            command(args.script, flags, args.processes), stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=REPOSITORY
        )
        _, status, usage = os.wait4(process.pid, 0)  # its usage holds the largest process below it
        process.returncode = os.waitstatus_to_exitcode(status)
    options = save / "bdlm_options.json"
    resolved = json.loads(options.read_text()) if options.is_file() else {}
    if process.returncode:
        return Outcome(side, pair, (folder / "output.log").read_text()[-2000:]), resolved
    return outcome(args, side, pair, events, usage.ru_maxrss * 1024), resolved


def outcome(args: argparse.Namespace, side: str, pair: int, events: Path, peak_bytes: int) -> Outcome:
    """Read what a finished run logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(events), size_guidance={"scalars": 0})
    log.Reload()
    known = log.Tags()["scalars"]
    missing = [metric for metric in {args.quality_metric, args.target_metric, "lm loss"} if metric not in known]
    if missing:
        return Outcome(side, pair, f"the run logged no {', '.join(missing)}; it logged {', '.join(known)}")
    steps = log.Scalars("lm loss")
    gaps = [later.wall_time - earlier.wall_time for earlier, later in zip(steps[1:], steps[2:])]
    reached = next((e for e in log.Scalars(args.target_metric) if args.target is not None and e.value <= args.target), None)
    return Outcome(
        side, pair, "", log.Scalars(args.quality_metric)[-1].value, statistics.median(gaps) if gaps else math.nan, peak_bytes,
        reached.step if reached else None, reached.wall_time - steps[0].wall_time if reached else None,
        {event.step: event.value for event in log.Scalars(args.target_metric)},
    )


def unwanted_differences(args: argparse.Namespace, options: dict[str, dict]) -> list[str]:
    """Options that differ though no side names them."""
    named = set()
    for side in SIDES:
        named |= {part.split("=")[0].removeprefix("--").replace("-", "_") for part in shlex.split(getattr(args, side)) if part.startswith("--")}
    named |= OWN | DERIVED | set(args.may_differ)
    first, second = (options[side] for side in SIDES)
    return [
        f"{name}: {first.get(name)!r} against {second.get(name)!r}"
        for name in sorted(first.keys() | second.keys()) if name not in named and first.get(name) != second.get(name)
    ]


# ---- judging -----------------------------------------------------------------------------------------


def judge(args: argparse.Namespace, outcomes: list[Outcome]) -> dict:
    """Intervals of the paired figures, what met its limit, and the verdict with its reasons."""
    failures = [f"{o.side}, pair {o.pair}: {o.failure.strip().splitlines()[-1]}" for o in outcomes if o.failure]
    pairs = [
        tuple(next(o for o in outcomes if o.pair == pair and o.side == side) for side in SIDES) for pair in range(args.pairs)
    ]
    good = [(base, new) for base, new in pairs if not base.failure and not new.failure]
    reasons = [f"{len(failures)} run(s) failed"] if failures else []
    figures: dict[str, Interval] = {}
    if good:
        figures = {
            "quality": Interval.of([(new.quality - base.quality) / abs(base.quality) for base, new in good]),
            "time": Interval.of([new.step_seconds / base.step_seconds for base, new in good]),
            "memory": Interval.of([new.peak_bytes / base.peak_bytes for base, new in good]),
        }
        limits = {"quality": args.max_quality_increase, "time": args.max_time_ratio, "memory": args.max_memory_ratio}
        for name, limit in limits.items():
            if limit is not None and not figures[name].high <= limit:
                reasons.append(f"{name}: the interval {figures[name]} does not stay below its limit {limit}")
        reached = [(b.seconds_to_target, n.seconds_to_target) for b, n in good if b.seconds_to_target and n.seconds_to_target]
        if reached:
            figures["seconds to target"] = Interval.of([new / base for base, new in reached])
    neutral = {"quality": 0.0, "time": 1.0, "memory": 1.0, "seconds to target": 1.0}
    different = [name for name, i in figures.items() if not i.low <= neutral[name] <= i.high]
    return {
        "figures": figures, "failures": failures, "different": different,
        "verdict": "retain-baseline" if reasons or not good else "keep", "reasons": reasons or ["every limit is met"],
    }


def report(args: argparse.Namespace, outcomes: list[Outcome], judged: dict) -> str:
    """The Markdown report."""
    lines = [
        f"# {judged['verdict']}", "", *[f"* {reason}" for reason in judged["reasons"]], "",
        f"Baseline `{args.baseline}`, candidate `{args.candidate}`, {args.pairs} interleaved pairs, `{args.script}` on {args.processes} processes.",
        f"Limits, stated before the first run: quality increase {args.max_quality_increase}, time ratio {args.max_time_ratio}, "
        f"memory ratio {args.max_memory_ratio}.", "", "| figure | mean and 95% interval | neutral |", "|---|---|---|",
    ]
    for name, interval in judged["figures"].items():
        what = f"{args.quality_metric}, relative difference" if name == "quality" else f"{name}, candidate over baseline"
        lines.append(f"| {what} | {interval} | {'0' if name == 'quality' else '1'} |")
    lines += ["", "Differences beyond noise: " + (", ".join(judged["different"]) or "none") + ".", ""]
    lines += ["| pair | side | quality | s/step | peak MB | steps to target | s to target |", "|---|---|---|---|---|---|---|"]
    for o in sorted(outcomes, key=lambda o: (o.pair, o.side)):
        if not o.failure:
            lines.append(
                f"| {o.pair} | {o.side} | {o.quality:.5f} | {o.step_seconds:.4f} | {o.peak_bytes / 1e6:.0f} | "
                f"{o.steps_to_target or '-'} | {'-' if o.seconds_to_target is None else f'{o.seconds_to_target:.1f}'} |"
            )
    lines += ["", "Failures: " + ("; ".join(judged["failures"]) or "none") + ".", "", "![curves](report.png)", ""]
    return "\n".join(lines)


def plot(args: argparse.Namespace, outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for side, color in zip(SIDES, ("tab:gray", "tab:green")):
        mine = [o for o in outcomes if o.side == side and not o.failure]
        for number, o in enumerate(mine):
            axes[0].plot(list(o.curve), list(o.curve.values()), color=color, alpha=0.6, label=side if not number else None)
        axes[1].plot([o.pair for o in mine], [o.step_seconds for o in mine], "o", color=color, label=side)
    axes[0].set(xlabel="step", ylabel=args.target_metric)
    axes[1].set(xlabel="pair", ylabel="median seconds of a step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, help="flags of the baseline alone, as one argument")
    parser.add_argument("--candidate", required=True, help="flags of the candidate alone, as one argument")
    parser.add_argument("--script", default="pretrain_bdlm.py")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1234, help="of pair 0; pair i has this plus i")
    parser.add_argument("--quality-metric", default="nelbo validation", help="TensorBoard name; smaller is better")
    parser.add_argument("--target-metric", default="lm loss", help="TensorBoard name")
    parser.add_argument("--target", type=float, help="value of --target-metric to reach")
    parser.add_argument("--max-quality-increase", type=float, default=0.01, help="relative (default 0.01)")
    parser.add_argument("--max-time-ratio", type=float, help="candidate over baseline (default: no limit)")
    parser.add_argument("--max-memory-ratio", type=float, help="candidate over baseline (default: no limit)")
    parser.add_argument("--may-differ", nargs="*", default=[], help="further resolved options that may differ")
    parser.add_argument("--report", default="runs/compare", help="folder for report.md, report.json, report.png and the runs")
    parser.add_argument("flags", nargs="+", help="flags common to both sides, behind --")
    args = parser.parse_args(arguments)
    if args.pairs < 2:
        parser.error(f"--pairs {args.pairs}: a spread needs at least two. A legal value: 5")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    folder = Path(args.report).resolve()
    outcomes: list[Outcome] = []
    for pair in range(args.pairs):
        options = {}
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            result, options[side] = run_side(args, side, pair, folder / f"pair{pair}-{side}")
            outcomes.append(result)
            print(f"pair {pair} {side}: " + (f"FAILED ({result.failure[-200:]})" if result.failure else f"{result.quality:.5f}, {result.step_seconds:.3f} s/step"), flush=True)
        different = unwanted_differences(args, options) if all(options.values()) else []
        if different:
            print("the sides differ in options that neither names (--may-differ allows one):\n  " + "\n  ".join(different), file=sys.stderr)
            return 2
    judged = judge(args, outcomes)
    plot(args, outcomes, folder / "report.png")
    (folder / "report.md").write_text(report(args, outcomes, judged))
    figures = {name: asdict(interval) for name, interval in judged["figures"].items()}
    (folder / "report.json").write_text(json.dumps({**judged, "figures": figures, "outcomes": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    print(report(args, outcomes, judged))
    return 0 if judged["verdict"] == "keep" else 3


if __name__ == "__main__":
    sys.exit(main())
