"""Supervised draft tokens a second on 4 gloo ranks: anchors dealt (BP 4) against every draft row on every rank (CP 4).

    python benchmarks/drafter_parallel.py --output benchmarks/results/drafter_parallel.json

Both divide the context over the ranks: its features, projections and attention. With CP 4 a rank attends with all draft
rows to its own context and results are merged by all-reduces; with BP 4 context keys and values move and each rank drafts
from its own anchors. Same anchors, same loss, interleaved runs of one session; a step is forward, loss, backward and the
all-reduce of the drafter's gradients. Features are zeros made beforehand: reading them and the target's forward are outside.

The ceiling is the number of ranks where draft work is everything, and 1 where context work is.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.distributed as dist

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.attention.functional import DraftLink  # noqa: E402
from megatron.bdlm.drafter.anchors import AnchorDraw  # noqa: E402
from megatron.bdlm.drafter.attention import PlannedAttention  # noqa: E402
from megatron.bdlm.drafter.batch import Cell, DraftSample, build_batch  # noqa: E402
from megatron.bdlm.drafter.format import DrafterConfig  # noqa: E402
from megatron.bdlm.drafter.model import Drafter  # noqa: E402
from megatron.bdlm.drafter.objective import DraftObjective, draft_forward, draft_loss  # noqa: E402
from megatron.bdlm.parallel.exchange import traffic  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402

RANKS = 4
WAYS = {"BP 4": 4, "CP 4": 1}  # name: block-parallel size


def config_of(args: argparse.Namespace) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 128), head_dim=64, vocab_size=args.vocabulary, num_target_layers=12,
        target_layer_ids=(1, 5, 9), mask_token_id=args.vocabulary - 1, block_size=args.block_size,
    )


class ZeroFeatures:
    """Features that cost nothing."""

    def __init__(self, config: DrafterConfig):
        self.config = config

    def features(self, sample: DraftSample, tokens: np.ndarray) -> torch.Tensor:
        return torch.zeros(len(tokens), self.config.feature_size)

    def last_hidden(self, sample: DraftSample, tokens: np.ndarray) -> torch.Tensor:
        return torch.zeros(len(tokens), self.config.hidden_size)


def link_of(slots: int) -> DraftLink:
    """Groups of this rank, rank = inner + I * slot; every rank makes them all."""
    rank, inner = dist.get_rank(), RANKS // slots
    across = [dist.new_group([i + inner * slot for slot in range(slots)]) for i in range(inner)]
    within = [dist.new_group([i + inner * slot for i in range(inner)]) for slot in range(slots)]
    return DraftLink(across[rank % inner], within[rank // inner])


class Step:
    """One way of one context length on this rank."""

    def __init__(self, args: argparse.Namespace, context: int, slots: int, link: DraftLink):
        config = config_of(args)
        random = np.random.default_rng(0)
        sample = DraftSample(random.integers(0, args.vocabulary - 1, context), np.ones(context, bool), np.zeros(context, int), 0)
        draw = AnchorDraw(args.anchors, args.block_size)
        self.model = Drafter(config).initialise(0)
        torch.manual_seed(0)  # the same tables on every rank
        self.embedding, self.head = torch.randn(args.vocabulary, args.hidden), torch.randn(args.vocabulary, args.hidden)
        self.batch = build_batch([sample], ZeroFeatures(config), config, draw, Cell(RANKS, slots, dist.get_rank()))
        self.attend = PlannedAttention(self.batch.plan, config, link)
        self.supervised = int(self.batch.scored.sum()) * self.batch.share

    def run(self) -> tuple[float, float]:
        """(seconds of the slowest rank, loss of the whole batch)."""
        self.model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        hidden = draft_forward(self.model, self.batch, self.embedding, self.attend)
        loss = draft_loss(hidden, self.batch, self.head, self.model, DraftObjective())
        loss.total.backward()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(flat)
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        sums = torch.stack((loss.total.detach(), loss.weight))
        dist.all_reduce(sums)
        return seconds.item(), (sums[0] / sums[1]).item()

    def saved_bytes(self) -> int:
        """Bytes that autograd keeps between forward and backward on this rank, each storage once."""
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            hidden = draft_forward(self.model, self.batch, self.embedding, self.attend)
            draft_loss(hidden, self.batch, self.head, self.model, DraftObjective())
        for weight in (*self.model.parameters(), self.embedding, self.head):
            kept.pop(weight.untyped_storage().data_ptr(), None)
        return sum(kept.values())


def measure_on_rank(args: argparse.Namespace) -> list[dict]:
    links = {name: link_of(slots) for name, slots in WAYS.items()}
    points = []
    for context in args.contexts:
        steps = {name: Step(args, context, slots, links[name]) for name, slots in WAYS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        losses, moved = {}, {}
        for repeat in range(args.repeats + 1):
            for name, step in steps.items():
                traffic()
                taken, losses[name] = step.run()
                counted = traffic()
                moved[name] = sum(counted[way]["sent"] for way in counted)
                if repeat:  # the first builds programs and warms caches
                    seconds[name].append(taken)
        assert abs(losses["BP 4"] - losses["CP 4"]) < 1e-4 * abs(losses["CP 4"]), losses
        point = {"context": context, "seconds": seconds, "loss": losses}
        for name, step in steps.items():
            supervised = torch.tensor([step.supervised])
            dist.all_reduce(supervised)
            worst = torch.tensor([float(moved[name]), float(step.saved_bytes()), float(step.batch.plan.draft_rows)])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            median = statistics.median(seconds[name])
            point[name] = {
                "seconds": median, "supervised_tokens": round(supervised.item()), "supervised_tokens_per_second": supervised.item() / median,
                "context_tokens_per_second": context / median, "sent_bytes_of_a_rank": int(worst[0]), "saved_bytes_of_a_rank": int(worst[1]),
                "draft_rows_of_a_rank": int(worst[2]),
            }
        point["ratio"] = point["CP 4"]["seconds"] / point["BP 4"]["seconds"]
        points.append(point)
    peak = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return [{**point, "peak_process_bytes": int(peak)} for point in points]


def plot(points: list[dict], path: Path) -> None:
    """Supervised tokens a second, and the ratio, over context."""
    figure, (rates, ratio) = plt.subplots(1, 2, figsize=(9, 3.6))
    contexts = [point["context"] for point in points]
    for number, name in enumerate(WAYS):
        rates.plot(contexts, [point[name]["supervised_tokens_per_second"] for point in points], f"C{number}-o", label=name)
        for point in points:
            each = [point[name]["supervised_tokens"] / seconds for seconds in point["seconds"][name]]
            rates.plot([point["context"]] * len(each), each, f"C{number}.", alpha=0.4)
    rates.set_ylabel("supervised draft tokens / s")
    ratio.plot(contexts, [point["ratio"] for point in points], "C2-o")
    ratio.axhline(RANKS, color="grey", linestyle=":", label="ceiling: draft work is everything")
    ratio.set_ylabel("BP 4 over CP 4")
    ratio.set_ylim(0, RANKS + 0.5)
    for axis in (rates, ratio):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("context tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768], help="context tokens (default %(default)s)")
    parser.add_argument("--anchors", type=int, default=64, help="anchors of the sample (default %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size; heads of 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="draft layers (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (default %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write; a plot beside it")
    args = parser.parse_args()
    points = run_distributed(measure_on_rank, RANKS, args)[0]
    for point in points:
        ours, theirs = point["BP 4"], point["CP 4"]
        print(
            f"context {point['context']:6d}: {ours['supervised_tokens_per_second']:8.0f} against {theirs['supervised_tokens_per_second']:8.0f} "
            f"supervised tokens/s, {point['ratio']:.2f} times; sent {ours['sent_bytes_of_a_rank'] / 2**20:.1f} against "
            f"{theirs['sent_bytes_of_a_rank'] / 2**20:.1f} MiB, kept {ours['saved_bytes_of_a_rank'] / 2**20:.0f} against "
            f"{theirs['saved_bytes_of_a_rank'] / 2**20:.0f} MiB a rank"
        )
    if args.output:
        machine = {
            "processor": platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "ranks": RANKS,
            "backend": "gloo", "date": str(date.today()),
        }
        options = {name: str(value) for name, value in vars(args).items() if name != "output"}
        args.output.write_text(json.dumps({"machine": machine, "options": options, "points": points}, indent=1) + "\n")
        plot(points, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
