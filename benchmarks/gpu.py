"""One command on one GPU: how fast attention and a training step are, and what nothing could beat.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json --plot benchmarks/results/gpu.png
    python benchmarks/gpu.py --toy                    # a CPU, seconds: that the command runs; its figures mean nothing

First the device's matmul peak, measured. Then attention of one rank of 16 (`gpu_attention.py`) at 256K and 1M tokens, S = 32
and 256, with the heads of Qwen3-8B and of a 26B-A4B model (its sliding and its full layers): ours with and without its Triton
kernels, one maskless call of the same area (the ceiling), a causal call of the same area, and compiled FlexAttention with the same mask, forward and backward. Then whole
training steps of a 1B model at growing context until memory ends: tokens/s, and MFU, the model's own flops (no recomputation)
over step time and matmul peak. Figures are medians after a warm-up; `x ours` says how many times faster ours is.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_attention import MODELS, WAYS, Point, matmul_peak, measure_point  # noqa: E402
from megatron.bdlm.planner.costs import predict  # noqa: E402
from megatron.bdlm.planner.hardware import GPUS  # noqa: E402
from megatron.bdlm.planner.models import from_flags  # noqa: E402
from megatron.bdlm.planner.work import Layout, Machine, Workload  # noqa: E402
from megatron.bdlm.testing.topologies import TOY_DATA, TOY_MODEL  # noqa: E402
from megatron.bdlm.testing.training_run import RunFailure, launch  # noqa: E402

ONE_BILLION = (  # sizes of Llama 3.2 1B
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--kv-channels 64 --vocab-size 128256 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--rotary-base 500000 --mock-data --tokenizer-type NullTokenizer --num-workers 2 --no-mmap-bin-files --bf16 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
).split()
WITHOUT_TRANSFORMER_ENGINE = (
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
).split()
STEPS = (
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4 --eval-iters 0 --eval-interval 100000 --log-interval 1 "
    "--tensorboard-log-interval 1 --bdlm-block-size 32"
).split()


# ---- a training step -------------------------------------------------------------------------------


def model_flags(toy: bool) -> list[str]:
    if toy:
        return [*TOY_MODEL, *TOY_DATA]
    return ONE_BILLION + ([] if importlib.util.find_spec("transformer_engine_torch") else WITHOUT_TRANSFORMER_ENGINE)


def measure_step(length: int, iterations: int, toy: bool, peak_flops: float) -> dict:
    """Training steps at one context; {"error": why} where the run fails."""
    flags = model_flags(toy)
    lengths = ["--seq-length", str(length), "--max-position-embeddings", str(length), "--train-iters", str(iterations)]
    visible = {} if not torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = launch(
                "pretrain_bdlm.py", [*flags, *STEPS, *lengths], processes=1, folder=Path(folder), timeout=3600.0,
                CUDA_DEVICE_MAX_CONNECTIONS="1", **visible,
            )
        except RunFailure as failure:
            return {"length": length, "error": reason(str(failure))}
    return {"length": length, **rates(run.scalars, flags, length, peak_flops)}


def reason(output: str) -> str:
    """The line of a failed run that says why: out of memory, or the last one that names an error."""
    lines = [line.strip() for line in output.splitlines()]
    memory = [line for line in lines if "out of memory" in line]
    return (memory or [line for line in lines if "Error" in line] or lines)[-1][:200]


def rates(scalars: dict, flags: list[str], length: int, peak_flops: float) -> dict:
    """Medians over the steps but the first two, which compile and warm up."""
    speeds = [value for step, value in sorted(scalars["clean tokens/s"].items())][2:]
    memory = max(scalars["peak memory GiB"].values())
    per_second = statistics.median(speeds)
    workload = Workload(length, 32, 1)
    # the GPU's own data do not enter its flops
    flops = sum(predict(from_flags(flags), Machine(GPUS["h100"], 1), workload, Layout()).flops.values())
    return {"tokens_per_second": per_second, "mfu": flops * per_second / length / peak_flops, "peak_memory_gib": memory}


def measure_steps(lengths: list[int], iterations: int, toy: bool, peak_flops: float) -> list[dict]:
    """Growing contexts, until one does not fit."""
    found = []
    for length in lengths:
        found.append(measure_step(length, iterations, toy, peak_flops))
        print_steps(found[-1:])
        if "error" in found[-1]:
            break
    return found


# ---- report ----------------------------------------------------------------------------------------


def print_point(point: dict) -> None:
    print(f"\n{point['model']}: L={point['length']}, S={point['block_size']}, one of {point['ranks']} ranks, {point['area']:.3g} pairs")
    print(f"{'way':10} {'':8} {'seconds':>10} {'TFLOP/s':>8} {'of peak':>8} {'x ours':>7}  peak GiB")
    for name, row in point["ways"].items():
        if "error" in row:
            print(f"{name:10} {row['error']}")
            continue
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:9.2f}"
        for direction in ("forward", "backward"):
            if row[f"{direction}_seconds"] is not None:
                print(
                    f"{name:10} {direction:8} {row[f'{direction}_seconds']:10.4f} {row[f'{direction}_tflops']:8.2f} "
                    f"{row[f'{direction}_share_of_peak']:8.3f} {point['ratios'].get(f'{direction} {name}', 1.0):7.2f}  {memory}"
                )


def print_steps(steps: list[dict]) -> None:
    for step in steps:
        if "error" in step:
            print(f"training step, L={step['length']}: {step['error']}")
        else:
            print(
                f"training step, L={step['length']}: {step['tokens_per_second']:.1f} clean tokens/s, MFU {step['mfu']:.3f}, "
                f"{step['peak_memory_gib']:.2f} GiB"
            )


def plot(result: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = result["attention"]
    figure, (forward, backward) = pyplot.subplots(2, 1, figsize=(max(8.0, 1.6 * len(points) + 3), 7), sharex=True)
    for axis, direction in ((forward, "forward"), (backward, "backward")):
        for number, name in enumerate(WAYS):
            rates = [point["ways"].get(name, {}).get(f"{direction}_tflops") or 0.0 for point in points]
            axis.bar([place + 0.16 * number - 0.32 for place in range(len(points))], rates, 0.15, label=name)
        axis.axhline(result["matmul_peak"] / 1e12, color="black", linestyle="--", linewidth=1, label="matmul peak, measured")
        axis.set_ylabel(f"{direction}, TFLOP/s")
    figure.legend(*forward.get_legend_handles_labels(), loc="lower center", fontsize=8, ncols=6)
    names = [f"{point['model']}\nL={point['length']}\nS={point['block_size']}" for point in points]
    backward.set_xticks(range(len(points)), names, fontsize=8)
    forward.set_title(f"{result['device']}: attention of one of {points[0]['ranks']} ranks", fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "toy"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[262144, 1048576], help="clean tokens L of attention")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--matmul-size", type=int, default=8192)
    parser.add_argument(
        "--step-lengths", type=int, nargs="*", default=[2**n for n in range(14, 21)],
        help="context of training steps, ascending; the first that does not fit ends it; none: no training",
    )
    parser.add_argument("--step-iterations", type=int, default=8)
    parser.add_argument("--toy", action="store_true", help="toy sizes in float32 on a CPU")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    args = parser.parse_args()
    if args.toy:
        args.models, args.lengths, args.ranks, args.block_sizes = ["toy"], [512], 4, [8]
        args.matmul_size, args.step_iterations = 256, 4
        args.step_lengths = args.step_lengths and [64]
    elif not torch.cuda.is_available():
        parser.error("no GPU is visible. A legal value here: --toy")
    return args


def main() -> None:
    args = parse()
    if args.toy:
        like, device = {"dtype": torch.float32, "device": "cpu"}, "CPU, toy sizes: figures mean nothing"
    else:
        like, device = {"dtype": torch.bfloat16, "device": "cuda"}, torch.cuda.get_device_name()
    torch.manual_seed(0)
    peak = matmul_peak(args.matmul_size, args.repeats, like)
    print(f"{device}; matmul peak {peak / 1e12:.2f} TFLOP/s ({args.matmul_size} squared, {str(like['dtype'])[6:]})")
    result = {
        "device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "matmul_peak": peak,
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "plot")}, "attention": [],
    }
    for model in args.models:
        for length in args.lengths:
            for block_size in args.block_sizes:
                point = Point(model, length, args.ranks, block_size)
                result["attention"].append(measure_point(point, args.repeats, like, peak, tuple(args.ways)))
                print_point(result["attention"][-1])
                save(result, args)  # an interrupted run keeps what it has
    result["training"] = measure_steps(args.step_lengths, args.step_iterations, args.toy, peak)
    save(result, args)


def save(result: dict, args: argparse.Namespace) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
