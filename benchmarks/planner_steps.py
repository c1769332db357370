"""Whole training steps against the planner: bytes of every part it predicts, and the attention FLOPs of every rank.

    python benchmarks/planner_steps.py --ranks 4 --json benchmarks/results/planner_steps.json

Runs `pretrain_bdlm.py`'s own functions on gloo ranks (float32, the engine's plain torch layers) and takes the second step:

    parameters, gradients, optimizer   sizes of the tensors that the engine holds
    activations                        held when forward ends, beyond what was held before the step
    working                            the step's peak beyond that; both by the allocator's own record
    attention FLOPs                    of the rectangles that kernels were given, with a mask its visible pairs: 4 d a pair
                                       and query head in forward, 10 d in backward

Arrays of numpy and what libraries allocate for themselves are not in the allocator's record.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WAYS = {
    "csbp": ["--bdlm-strategy", "csbp"],
    "csbp, full recompute": "--bdlm-strategy csbp --recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
    "cp/ring": ["--bdlm-strategy", "cp", "--bdlm-transport", "ring"],
    "bp": ["--bdlm-strategy", "bp"],
}
"""What is measured, by flags."""

MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 32 --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4 --eval-iters 0 --eval-interval 100000 --log-interval 100000 "
    "--train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 1022 --num-workers 0 --no-mmap-bin-files "
    "--use-distributed-optimizer --bdlm-block-size 32 --bdlm-t-min 0.5 --bdlm-t-max 0.5"
).split()
"""At noise level 0.5 half of the noisy rows are scored, the share that the planner assumes."""


# ---- on a rank ---------------------------------------------------------------------------------------


class FlopCounter:
    """Counts what a kernel is given: visible (query, key) pairs times query heads."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def install(self, kernel: type) -> None:
        """Wrap the methods of a kernel class."""
        forward, backward = kernel.forward, kernel.backward

        def counted_forward(own, q, k, v, scale, causal, mask=None):
            self.forward += _pairs(q, k, causal, mask) * (2 * q.shape[-1] + 2 * v.shape[-1])
            return forward(own, q, k, v, scale, causal, mask)

        def counted_backward(own, dout, q, k, v, out, lse, scale, causal, mask=None):
            self.backward += _pairs(q, k, causal, mask) * (6 * q.shape[-1] + 4 * v.shape[-1])
            return backward(own, dout, q, k, v, out, lse, scale, causal, mask)

        kernel.forward, kernel.backward = counted_forward, counted_backward


def _pairs(q, k, causal: bool, mask) -> int:
    """Visible pairs of queries [n, h, r, d] and keys [n, h, c, d]."""
    count, heads, rows, _ = q.shape
    if mask is not None:
        return count * heads * int(mask.isfinite().sum())
    return count * heads * (rows * (rows + 1) // 2 if causal else rows * k.shape[2])


def bytes_of(tensors) -> int:
    """Of the storages of tensors, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class Record:
    """Wraps the engine's training step; measures the last one."""

    def __init__(self, last: int):
        self.last, self.steps, self.parts, self.flops = last, 0, {}, FlopCounter()

    def install(self) -> None:
        import torch
        from megatron.training import training as engine

        from megatron.bdlm.attention.kernels import choose
        from megatron.bdlm.attention.kernels.base import KernelCase

        stock = engine.train_step
        self.flops.install(type(choose("auto", KernelCase("cpu", torch.float32, 32, 32)).kernel))

        def train_step(forward_step, data, model, optimizer, *rest, **named):
            self.steps += 1
            if self.steps < self.last:
                return stock(forward_step, data, model, optimizer, *rest, **named)
            self.flops.forward = self.flops.backward = 0
            with torch.autograd.profiler.profile(profile_memory=True) as profiler:
                result = stock(_marked(forward_step), data, model, optimizer, *rest, **named)
            self.parts = {**self._held(model, optimizer), **_timeline(profiler)}
            return result

        engine.train_step = train_step

    def _held(self, model, optimizer) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state."""
        weights = [p for stage in model for p in stage.parameters()]
        buffers = [buffer.grad_data for stage in model for buffer in (*stage.buffers, *stage.expert_parallel_buffers)]
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        states = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
        known = {p.untyped_storage().data_ptr() for p in weights}
        own = [x for x in states if hasattr(x, "untyped_storage") and x.untyped_storage().data_ptr() not in known]
        return {"parameters": bytes_of(weights), "gradients": bytes_of(buffers), "optimizer": bytes_of(own)}


MARK = "planner_steps/forward"


def _marked(forward_step):
    """The same forward step with a mark in the profiler's record."""
    import torch

    def marked(*args, **kwargs):
        with torch.profiler.record_function(MARK):
            return forward_step(*args, **kwargs)

    return marked


def _timeline(profiler) -> dict[str, int]:
    """What is held when forward ends, and the most that is held beyond it."""
    events = list(profiler.kineto_results.events())
    end = max(event.end_ns() for event in events if event.name() == MARK)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = after_forward = 0
    for moment, change in changes:
        held += change
        peak = max(peak, held)
        if moment <= end:
            after_forward = held
    return {"activations": after_forward, "working": peak - after_forward}


def measure_on_rank(length: int, way: str, folder: str) -> None:
    """Body of a rank: two training steps; writes what the second one held and computed."""
    from megatron.bdlm.platform import cpu

    on_cpu = cpu.enable()
    import pretrain_bdlm as entry
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain

    from megatron.bdlm.config import config_from_args
    from megatron.bdlm.planner.costs import predict
    from megatron.bdlm.planner.hardware import GPUS
    from megatron.bdlm.planner.resolved import layout_of, model_of, workload_of
    from megatron.bdlm.planner.work import Machine
    from megatron.bdlm.training import run

    cpu.adapt_engine(on_cpu)
    size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    lengths = ["--seq-length", str(length), "--max-position-embeddings", str(length), "--context-parallel-size", size]
    sys.argv = ["pretrain_bdlm.py", *MODEL, *lengths, *WAYS[way]]
    container = run.prepare()
    record = Record(last=2)
    record.install()
    pretrain(container, entry.train_valid_test_datasets_provider, ModelType.encoder_or_decoder, entry.forward_step)
    args = get_args()
    strategy, slots = config_from_args(args).resolved_strategy(args.context_parallel_size)
    layout = layout_of(args, strategy, slots, int(size))
    workload = workload_of(args)
    prediction = predict(model_of(args, [None] * args.num_layers), Machine(GPUS["h200"], int(size)), workload, layout)
    found = {
        "measured": record.parts, "predicted": prediction.memory, "flops": record.flops.forward + record.flops.backward,
        "predicted flops": prediction.flops["attention"],
        "workload": dataclasses.asdict(workload), "layout": dataclasses.asdict(layout),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    run.finish()


# ---- all ranks ---------------------------------------------------------------------------------------


def measure(ranks: int, length: int, way: str) -> list[dict]:
    """What every rank found, in order.

    Raises:
        RuntimeError: a rank failed; with the end of its output.
    """
    from megatron.bdlm.testing.training_run import command, environment

    with tempfile.TemporaryDirectory() as folder:
        words = command("benchmarks/planner_steps.py", ["--length", str(length), "--way", way, "--worker", folder], ranks)
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=600)
        if done.returncode:
            raise RuntimeError(f"{way} on {ranks} ranks ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def heaviest(found: list[dict]) -> dict[str, tuple[float, float]]:
    """(measured, predicted) bytes of the rank that holds most, by part, and of all parts."""
    most = max(found, key=lambda rank: sum(rank["measured"].values()))
    parts = {name: (most["measured"][name], most["predicted"][name]) for name in most["predicted"]}
    return {**parts, "all": (sum(most["measured"].values()), sum(most["predicted"].values()))}


def balance(found: list[dict]) -> float:
    """Counted attention FLOPs of the heaviest rank over the mean."""
    flops = [rank["flops"] for rank in found]
    return max(flops) * len(flops) / sum(flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--way", choices=list(WAYS), help="only this one")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # folder of the ranks' answers
    args = parser.parse_args()
    if args.worker:
        measure_on_rank(args.length, args.way, args.worker)
        return
    from megatron.bdlm.planner.search import exact_balance
    from megatron.bdlm.planner.work import Layout, Workload

    rows = []
    print(f"{'way':22} {'ranks':>5} {'part':12} {'measured MB':>12} {'predicted MB':>12} {'ratio':>6}")
    for ranks in args.ranks:
        for way in [args.way] if args.way else WAYS:
            found = measure(ranks, args.length, way)
            parts = heaviest(found)
            for part, (measured, predicted) in parts.items():
                print(f"{way:22} {ranks:5} {part:12} {measured / 1e6:12.2f} {predicted / 1e6:12.2f} {predicted / measured:6.3f}")
            strategy = found[0]["layout"]["strategy"]
            layout = Layout(cp=ranks, bp=found[0]["layout"]["bp"], strategy=strategy)
            planned = exact_balance(Workload(args.length, 32, 1), layout)
            mean, flops = sum(rank["flops"] for rank in found) / ranks, found[0]["predicted flops"]
            print(f"{way:22} {ranks:5} balance: counted {balance(found):.4f}, planned {planned:.4f}; GFLOP a rank: {mean / 1e9:.3f}, planned {flops / 1e9:.3f}")
            rows.append({"way": way, "ranks": ranks, "bytes": parts, "balance": [balance(found), planned], "flops": [mean, flops]})
    if args.json:
        Path(args.json).write_text(json.dumps({"length": args.length, "model": " ".join(MODEL), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
