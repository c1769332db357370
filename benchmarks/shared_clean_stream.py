"""What sharing the clean stream saves, per training step (forward and backward) of a small model on one process.

* two complementary views in one pass against two passes of one view each
* fine-tuning samples with a long prompt: noisy rows for supervised blocks only against noisy rows for all blocks

Both members of a pair give the same loss and gradients (tests/objective/test_shared_clean_stream.py); runs are interleaved,
the figure is the ratio of medians.

    python benchmarks/shared_clean_stream.py --output benchmarks/results/shared_clean_stream.json

writes a plot beside the figures.
"""

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.config import BDLMConfig  # noqa: E402
from megatron.bdlm.data.noise import corrupt  # noqa: E402
from megatron.bdlm.testing.tiny_model import TinyModel, TinySample, TinyShape, step_loss  # noqa: E402


def seconds_of_step(model: TinyModel, samples: list[TinySample], config: BDLMConfig) -> float:
    model.zero_grad()
    start = time.perf_counter()
    total, _ = step_loss(model, samples, config)
    total.backward()
    return time.perf_counter() - start


def compare(model: TinyModel, ours: tuple, theirs: tuple, repeats: int) -> dict:
    """Interleaved medians of two (samples, config) steps."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for repeat in range(repeats + 1):
        for name, step in (("ours", ours), ("theirs", theirs)):
            seconds = seconds_of_step(model, *step)
            if repeat:  # the first round builds plans and warms caches
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": medians, "all": times, "speedup": medians["theirs"] / medians["ours"]}


def views(length: int, vocabulary: int) -> tuple[tuple, tuple]:
    config = BDLMConfig(bdlm_block_size=32, bdlm_views=2, bdlm_loss_weight="unit", bdlm_mask_token_id=vocabulary - 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary - 1, length)
    eligible = np.ones(length, bool)
    noised = corrupt(tokens, eligible, config)

    def view(v: int) -> TinySample:
        arrays = {
            f.name: getattr(noised, f.name)[v : v + 1]
            for f in dataclasses.fields(noised)
            if getattr(getattr(noised, f.name), "ndim", 0) == 2
        }
        return TinySample(tokens, eligible, dataclasses.replace(noised, **arrays))

    one = ([TinySample(tokens, eligible, noised)], config)
    return one, ([view(0), view(1)], dataclasses.replace(config, bdlm_views=1))


def prompts(length: int, vocabulary: int, share: float) -> tuple[tuple, tuple]:
    config = BDLMConfig(bdlm_block_size=32, bdlm_mask_token_id=vocabulary - 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary - 1, length)
    eligible = np.arange(length) >= int(share * length)
    samples = [TinySample(tokens, eligible, corrupt(tokens, eligible, config))]
    return (samples, config), (samples, dataclasses.replace(config, bdlm_noisy_rows="all"))


def plot(results: dict, path: Path) -> None:
    """Every repeat as a point, medians as bars."""
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for place, (name, result) in enumerate(results.items()):
        for side, label in ((0, "ours"), (1, "theirs")):
            at, colour = place + 0.3 * side, f"C{side}"
            axis.bar(at, result["seconds"][label], 0.28, color=colour, alpha=0.5, label=("shared", "not shared")[side] if not place else None)
            axis.plot([at] * len(result["all"][label]), result["all"][label], ".", color=colour)
        axis.text(place + 0.15, result["seconds"]["theirs"], f"{result['speedup']:.2f} x\n", ha="center")
    axis.set_xticks([place + 0.15 for place in range(len(results))], list(results))
    axis.set_ylabel("seconds a step")
    axis.set_ylim(0, 1.2 * max(result["seconds"]["theirs"] for result in results.values()))
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample (default 4096)")
    parser.add_argument("--prompt-share", type=float, default=0.75, help="share of prompt tokens (default 0.75)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; heads of 64 (default 256)")
    parser.add_argument("--layers", type=int, default=2, help="layers (default 2)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="vocabulary (default 2048)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    heads = args.hidden // 64
    model = TinyModel(TinyShape(args.vocabulary, args.hidden, args.layers, heads, max(1, heads // 2)))
    results = {
        "two views in one pass": compare(model, *views(args.length, args.vocabulary), args.repeats),
        "noisy rows for supervised blocks only": compare(
            model, *prompts(args.length, args.vocabulary, args.prompt_share), args.repeats
        ),
    }
    for name, result in results.items():
        seconds = result["seconds"]
        print(f"{name:40} {seconds['ours']:.3f} s against {seconds['theirs']:.3f} s: {result['speedup']:.2f} times faster")
    if args.output:
        machine = {"processor": platform.machine(), "torch": torch.__version__, "threads": args.threads, "date": str(date.today())}
        options = {name: str(value) for name, value in vars(args).items()}
        args.output.write_text(json.dumps({"machine": machine, "options": options, "results": results}, indent=1) + "\n")
        plot(results, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
