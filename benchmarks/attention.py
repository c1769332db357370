"""Speed of block diffusion attention on a CPU, measured side by side.

    python benchmarks/attention.py local --masks --json local.json --plot local.png
    python benchmarks/attention.py ranks --lengths 4096 16384 --block-sizes 32 --json ranks.json --plot ranks.png

The committed figures are in benchmarks/results: attention_cpu (local) and attention_ranks.

`local` (one process): this project's attention against

    dense    one maskless call of torch's scaled_dot_product_attention of the same area: the ceiling
    flex     compiled FlexAttention with the same mask, forward
    masked   scaled_dot_product_attention with the dense mask, forward

Rates are visible (query, key) pairs a second; `share of ceiling` is ours over dense. Runs are interleaved, figures
are medians. The clock is the processor time of the one computing thread, so that other work on the machine disturbs
little; `--clock wall` reads the wall. `outside kernels` is the share of our time that is spent outside the kernel
(merging, sums, Python).

`ranks` (4 gloo processes on this machine, no network limit): csbp over direct against conventional context
parallelism over a ring that skips empty work and overlaps too; wall clock of the slowest rank, interleaved. `cpu
ratio` compares the processor time of all ranks: on a machine with other work it is the steadier figure.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.bdlm.attention import functional
from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.attention.kernels.base import AttentionKernel
from megatron.bdlm.attention.kernels.torch_cpu import TorchCpuKernel
from megatron.bdlm.parallel.exchange import traffic
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.testing.distributed import run_distributed

HEADS, HEAD_SIZE = 8, 64
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


# ---- one process ----------------------------------------------------------------------------------


def measure_local(length: int, block_size: int, repeats: int, clock: Callable[[], float], with_masks: bool) -> dict:
    """One row of the table: medians in seconds, rates relative to the dense call of the same area."""
    plan = SequencePlan.build(length, block_size)
    area = plan.program().area
    side = math.isqrt(area)
    ours = random_leaves(2 * length, 1, HEADS, HEAD_SIZE)
    dense = random_leaves(1, HEADS, side, HEAD_SIZE)
    forwards = {
        "ours": lambda: block_diffusion_attention(*ours, plan),
        "dense": lambda: torch.nn.functional.scaled_dot_product_attention(*dense),
    }
    inputs = {"ours": ours, "dense": dense}
    others = masked_forwards(length, block_size) if with_masks else {}
    forward_times: dict[str, list[float]] = {name: [] for name in (*forwards, *others)}
    backward_times: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(repeats + 1):  # the first round warms up
        for name, forward in forwards.items():
            seconds, out = timed(forward, clock)
            forward_times[name].append(seconds)
            gradient = torch.randn_like(out)
            seconds, _ = timed(lambda: torch.autograd.grad(out, inputs[name], gradient), clock)
            backward_times[name].append(seconds)
        with torch.no_grad():
            for name, forward in others.items():
                forward_times[name].append(timed(forward, clock)[0])
    forward = {name: statistics.median(times[1:]) for name, times in forward_times.items()}
    backward = {name: statistics.median(times[1:]) for name, times in backward_times.items()}
    row = {
        "length": length,
        "block_size": block_size,
        "area": area,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_share_of_ceiling": forward["dense"] / side**2 * area / forward["ours"],
        "backward_share_of_ceiling": backward["dense"] / side**2 * area / backward["ours"],
        "outside_kernels": outside_kernels(ours, plan, clock),
    }
    for name in others:
        row[f"forward_times_{name}"] = forward[name] / forward["ours"]
    return row


def random_leaves(*shape: int) -> list[torch.Tensor]:
    """q, k, v."""
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)]


def timed(call: Callable, clock: Callable[[], float]) -> tuple[float, object]:
    start = clock()
    result = call()
    return clock() - start, result


def masked_forwards(length: int, block_size: int) -> dict[str, Callable]:
    """Forward with the same mask: compiled FlexAttention; scaled_dot_product_attention with a mask tensor."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch, head, query, key):
        query_noisy, key_noisy = query < length, key < length
        query_block = torch.where(query_noisy, query, query - length) // block_size
        key_block = torch.where(key_noisy, key, key - length) // block_size
        own = query_noisy & key_noisy & (query_block == key_block)
        earlier = query_noisy & ~key_noisy & (key_block < query_block)
        clean = ~query_noisy & ~key_noisy & (key_block <= query_block)
        return own | earlier | clean

    q, k, v = (torch.randn(1, HEADS, 2 * length, HEAD_SIZE) for _ in range(3))
    mask = create_block_mask(visible, None, None, 2 * length, 2 * length, device="cpu")
    rows = torch.arange(2 * length)
    dense_mask = visible(None, None, rows[:, None], rows[None, :])
    compiled = torch.compile(flex_attention)
    return {
        "flex": lambda: compiled(q, k, v, block_mask=mask),
        "masked": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask),
    }


class TimedKernel(AttentionKernel):
    """The CPU kernel with a stopwatch."""

    name = note = "timed"
    takes_mask = True

    def __init__(self, clock: Callable[[], float]):
        self.kernel, self.clock, self.seconds = TorchCpuKernel(), clock, 0.0

    def refusal(self, case):
        return self.kernel.refusal(case)

    def forward(self, *arguments):
        seconds, result = timed(lambda: self.kernel.forward(*arguments), self.clock)
        self.seconds += seconds
        return result

    def backward(self, *arguments):
        seconds, result = timed(lambda: self.kernel.backward(*arguments), self.clock)
        self.seconds += seconds
        return result


def outside_kernels(inputs: list[torch.Tensor], plan: SequencePlan, clock: Callable[[], float]) -> dict[str, float]:
    """Share of our time spent outside the kernel, forward and backward (one run)."""
    kernel = TimedKernel(clock)
    original, functional.choose = functional.choose, lambda name, case: type("Choice", (), {"kernel": kernel})
    try:
        forward, out = timed(lambda: block_diffusion_attention(*inputs, plan), clock)
        in_forward, kernel.seconds = kernel.seconds, 0.0
        backward, _ = timed(lambda: torch.autograd.grad(out, inputs, torch.ones_like(out)), clock)
    finally:
        functional.choose = original
    return {"forward": 1 - in_forward / forward, "backward": 1 - kernel.seconds / backward}


# ---- ranks ----------------------------------------------------------------------------------------

WAYS = {"csbp/direct": ("csbp", "direct"), "cp/ring": ("cp", "ring")}


def measure_on_rank(length: int, block_size: int, repeats: int) -> dict:
    """Body of a rank: seconds of every repetition and bytes, by way and direction."""
    found = {}
    calls = {}
    for name, (strategy, transport) in WAYS.items():
        plan = SequencePlan.build(length, block_size, dist.get_world_size(), rank=dist.get_rank(), strategy=strategy)
        calls[name] = plan, transport, random_leaves(plan.s_local, 1, HEADS, HEAD_SIZE)
        found[name] = {"forward": [], "backward": [], "cpu": []}
    for repetition in range(repeats + 1):
        for name in list(WAYS) if repetition % 2 else list(WAYS)[::-1]:
            plan, transport, inputs = calls[name]
            traffic()
            dist.barrier()
            processor = time.process_time()
            start = time.perf_counter()
            out = block_diffusion_attention(*inputs, plan, transport=transport)
            dist.barrier()
            middle = time.perf_counter()
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            dist.barrier()
            if repetition:
                found[name]["forward"].append(middle - start)
                found[name]["backward"].append(time.perf_counter() - middle)
                found[name]["cpu"].append(time.process_time() - processor)
            found[name]["bytes"] = traffic()
    return found


def measure_ranks(length: int, block_size: int, repeats: int, ranks: int) -> dict:
    """One row: medians of the slowest rank's seconds and the ratio cp/ring over csbp/direct."""
    results = run_distributed(measure_on_rank, ranks, length, block_size, repeats, timeout=3600)
    row = {"length": length, "block_size": block_size, "ranks": ranks, "ways": {}}
    for name in WAYS:
        slowest = {
            direction: [max(times) for times in zip(*(found[name][direction] for found in results))]
            for direction in ("forward", "backward")
        }
        whole = [forward + backward for forward, backward in zip(slowest["forward"], slowest["backward"])]
        row["ways"][name] = {
            **{f"{direction}_seconds": statistics.median(times) for direction, times in slowest.items()},
            "seconds": statistics.median(whole),
            "cpu_seconds": statistics.median(map(sum, zip(*(found[name]["cpu"] for found in results)))),
            "all_seconds": whole,
            "bytes_sent": {
                direction: sum(found[name]["bytes"][direction]["sent"] for found in results)
                for direction in ("forward", "backward")
            },
        }
    ring, direct = (row["ways"][name]["all_seconds"] for name in ("cp/ring", "csbp/direct"))
    row["ratio"] = statistics.median(slow / fast for slow, fast in zip(ring, direct))
    ring, direct = (row["ways"][name]["cpu_seconds"] for name in ("cp/ring", "csbp/direct"))
    row["cpu_ratio"] = ring / direct
    return row


# ---- report ---------------------------------------------------------------------------------------


def print_local(rows: list[dict]) -> None:
    print(f"{'L':>6} {'S':>4} | share of ceiling | outside kernels | forward, times faster than")
    print(f"{'':>6} {'':>4} |  fwd       bwd   |  fwd      bwd    |  flex    dense-masked")
    for row in rows:
        outside = row["outside_kernels"]
        others = "  ".join(f"{row.get(f'forward_times_{name}', math.nan):6.2f}" for name in ("flex", "masked"))
        print(
            f"{row['length']:6d} {row['block_size']:4d} |  {row['forward_share_of_ceiling']:.3f}     "
            f"{row['backward_share_of_ceiling']:.3f} |  {outside['forward']:.3f}    {outside['backward']:.3f}  |"
            f"  {others}"
        )


def print_ranks(rows: list[dict]) -> None:
    print(f"{'L':>6} {'S':>4} {'ranks':>5} | cp/ring s  csbp/direct s  ratio  cpu ratio | MB sent cp/ring  csbp/direct")
    for row in rows:
        ring, direct = row["ways"]["cp/ring"], row["ways"]["csbp/direct"]
        sent = [sum(way["bytes_sent"].values()) / 1e6 for way in (ring, direct)]
        print(
            f"{row['length']:6d} {row['block_size']:4d} {row['ranks']:5d} | "
            f"{ring['seconds']:9.3f} {direct['seconds']:14.3f} "
            f"{row['ratio']:6.3f} {row['cpu_ratio']:10.3f} | {sent[0]:15.1f} {sent[1]:12.1f}"
        )


def plot_local(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"L={row['length']}\nS={row['block_size']}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(1.4 * len(rows) + 3, 4))
    for offset, direction in ((-0.2, "forward"), (0.2, "backward")):
        places = [place + offset for place in range(len(rows))]
        bars = axes.bar(places, [row[f"{direction}_share_of_ceiling"] for row in rows], 0.38, label=direction)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="one maskless call of the same area")
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("rate / rate of the maskless call")
    axes.set_title(f"Block diffusion attention on a CPU ({HEADS} heads of {HEAD_SIZE}, float32, 1 thread)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_ranks(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2 * len(rows) + 3, 4))
    for number, name in enumerate(WAYS):
        places = [place + 0.4 * number - 0.2 for place in range(len(rows))]
        bars = axes.bar(places, [row["ways"][name]["seconds"] for row in rows], 0.38, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(rows)), [f"L={row['length']}\nratio {row['ratio']:.2f}" for row in rows])
    axes.set_ylabel("seconds, forward and backward")
    axes.set_title(f"{rows[0]['ranks']} gloo processes on one machine, no network limit")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> dict:
    with open("/proc/cpuinfo") as file:
        model = next(
            (line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.processor()
        )
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "load_average": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("local", "ranks"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="clean lengths L")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 32, 256], help="block sizes S")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="cpu", help="local mode: processor time of the thread, or wall"
    )
    parser.add_argument(
        "--masks", action="store_true", help="local mode: measure FlexAttention and dense-masked attention too"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print_rows, plot_rows = (print_local, plot_local) if options.mode == "local" else (print_ranks, plot_ranks)
    for length in options.lengths:
        for block_size in options.block_sizes:
            if options.mode == "local":
                row = measure_local(length, block_size, options.repeats, CLOCKS[options.clock], options.masks)
            else:
                row = measure_ranks(length, block_size, options.repeats, options.ranks)
            rows.append(row)
            print_rows([row])
    print()
    print_rows(rows)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "plot")}
        figures = {"settings": {**settings, "heads": HEADS, "head_size": HEAD_SIZE, "dtype": "float32", "threads": 1}}
        with open(options.json, "w") as file:
            json.dump({**figures, "machine": machine(), "rows": rows}, file, indent=1)
    if options.plot:
        plot_rows(rows, options.plot)


if __name__ == "__main__":
    main()
