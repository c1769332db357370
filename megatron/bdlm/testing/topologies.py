"""The same training run on every topology: loss and gradient norm of each step must agree.

One process is the reference. Every other layout trains the same global batches in float32; a
layout whose fresh weights differ by the engine's design (pipeline stages seed themselves apart)
starts from the reference's initial weights, saved and resharded.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.bdlm.testing.training_run import Run, launch

RECORDING_ENTRY = "megatron/bdlm/testing/recording_entry.py"

TOY_MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --qk-layernorm --swiglu --disable-bias-linear --rotary-base 1000000 "
    "--untie-embeddings-and-output-weights --init-method-std 0.05"
).split()
TOY_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 --no-mmap-bin-files".split()
TOY_TRAINING = (
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --seed 1234 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 20 --weight-decay 0.1 --clip-grad 1.0 "
    "--eval-iters 1 --eval-interval 1000 --log-interval 1 --tensorboard-log-interval 1 --bdlm-block-size 8 "
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
).split()


@dataclass(frozen=True)
class Topology:
    """A layout: its name, processes, flags, and whether it must start from the reference's weights."""

    name: str
    processes: int
    flags: str
    from_checkpoint: bool = False


ONE_PROCESS = Topology("one process", 1, "")

TOPOLOGIES = (
    Topology("TP 2", 2, "--tensor-model-parallel-size 2"),
    Topology("TP 2 + sequence parallel", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    Topology("PP 2", 2, "--pipeline-model-parallel-size 2", True),
    Topology("PP 2 interleaved", 2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", True),
    Topology("DP 2", 2, ""),
    Topology(
        "DP 2 + distributed optimizer, overlap", 2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Topology("CP 2 / BP 2 (CSBP)", 2, "--context-parallel-size 2 --block-parallel-size 2"),
    Topology("CP 2 / BP 1 (context parallelism)", 2, "--context-parallel-size 2 --block-parallel-size 1"),
    Topology("CP 2, replicated clean stream (BP)", 2, "--context-parallel-size 2 --bdlm-strategy bp"),
    Topology("CP 4 / BP 4", 4, "--context-parallel-size 4 --block-parallel-size 4"),
    Topology("CP 4 / BP 2 (hybrid)", 4, "--context-parallel-size 4 --block-parallel-size 2"),
    Topology("CP 2 x TP 2", 4, "--context-parallel-size 2 --tensor-model-parallel-size 2"),
    Topology(
        "CP 2 x TP 2 + sequence parallel", 4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    Topology("CP 2 x PP 2", 4, "--context-parallel-size 2 --pipeline-model-parallel-size 2", True),
    Topology(
        "CP 2 / BP 2, full recompute", 2,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    Topology(
        "CP 2 / BP 2, selective recompute", 2,
        "--context-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn",
    ),
    Topology("CP 2 x DP 2, 2 workers", 4, "--context-parallel-size 2 --num-workers 2"),
)

TOY_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
).split()
"""Makes every MLP of the toy model a layer of experts."""

_EP, _CP, _TP = "--expert-model-parallel-size 2", "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"

EXPERT_TOPOLOGIES = (
    Topology("experts: EP 2 (DP 2)", 2, _EP),
    Topology("experts: CP 2 / BP 2", 2, _CP),
    Topology("experts: EP 2, CP 2 / BP 2", 2, f"{_EP} {_CP}"),
    Topology("experts: TP 2", 2, _TP),
    Topology("experts: EP 2 (DP 2), TP 2", 4, f"{_EP} {_TP}"),
    Topology("experts: CP 2 / BP 2, TP 2", 4, f"{_CP} {_TP}"),
    Topology("experts: EP 2, CP 2 / BP 2, TP 2", 4, f"{_EP} {_CP} {_TP}"),
    Topology("experts: EP 2, CP 2 / BP 1", 2, f"{_EP} {_CP} --block-parallel-size 1"),
    Topology("experts: EP 2, CP 2, replicated clean stream (BP)", 2, f"{_EP} {_CP} --bdlm-strategy bp"),
    Topology("experts: EP 4, CP 4 / BP 2 (hybrid)", 4, "--expert-model-parallel-size 4 --context-parallel-size 4 --block-parallel-size 2"),
    Topology("experts: EP 2 (DP 2), PP 2", 4, f"{_EP} --pipeline-model-parallel-size 2", True),
    Topology(
        "experts: EP 2, CP 2, PP 2 interleaved", 4,
        f"{_EP} {_CP} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", True,
    ),
    Topology("experts: EP 2, distributed optimizer, overlap", 2, f"{_EP} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    Topology(
        "experts: EP 2, CP 2, full recompute", 2,
        f"{_EP} {_CP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    Topology("experts: EP 2, CP 2, selective recompute", 2, f"{_EP} {_CP} --recompute-granularity selective --recompute-modules core_attn moe"),
)
"""Layouts of the toy model with experts."""

ROUTER_LOSSES = ("load_balancing_loss", "z_loss")
"""Losses of routers that the engine logs."""


@dataclass(frozen=True)
class Agreement:
    """Largest relative difference to the reference over all steps."""

    steps: int
    loss: float  # that of the model, and those of routers where there are any
    gradient_norm: float


def toy_flags(iterations: int, *extra: str) -> list[str]:
    """Flags of the toy run for a number of iterations."""
    return [*TOY_MODEL, *TOY_DATA, *TOY_TRAINING, "--train-iters", str(iterations), *extra]


def reference_run(folder: Path, iterations: int, script: str = "pretrain_bdlm.py", extra: tuple[str, ...] = ()) -> Run:
    """One process; also saves its initial weights to `folder`/initial for layouts that start from them."""
    frozen = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--lr-warmup-iters", "0"]
    save = ["--save", str(folder / "initial"), "--save-interval", "1"]
    launch(script, toy_flags(1, *extra, *frozen, *save), processes=1, folder=folder / "frozen")
    return launch(script, toy_flags(iterations, *extra), processes=1, folder=folder / "reference")


def topology_run(
    topology: Topology, folder: Path, iterations: int, script: str = "pretrain_bdlm.py", extra: tuple[str, ...] = ()
) -> Run:
    """The same run on another layout; `folder` is the reference's."""
    flags = topology.flags.split()
    if topology.from_checkpoint:
        flags += ["--load", str(folder / "initial"), "--finetune", "--no-load-optim", "--no-load-rng"]
    return launch(script, toy_flags(iterations, *extra, *flags), processes=topology.processes, folder=folder / _file_name(topology))


def recorded_noise(topology: Topology, workers: int, folder: Path, iterations: int = 1) -> dict[int, list[np.ndarray]]:
    """Noisy streams [V, L] by global sample index: what each rank that drew the sample in a real run got; fresh weights."""
    target = folder / f"noise_{_file_name(topology)}_{workers}"
    target.mkdir(parents=True)
    flags = toy_flags(iterations, *topology.flags.split(), "--num-workers", str(workers))
    launch(RECORDING_ENTRY, flags, processes=topology.processes, folder=target, RECORD_NOISE=str(target))
    samples: dict[int, list[np.ndarray]] = {}
    for path in sorted(target.glob("*.npy")):
        samples.setdefault(int(path.stem.split("-")[0]), []).append(np.load(path))
    return samples


def _file_name(topology: Topology) -> str:
    return "".join(c if c.isalnum() else "_" for c in topology.name)


def agreement(run: Run, reference: Run) -> Agreement:
    """Compare losses and gradient norms step by step.

    Raises:
        KeyError: a step or a metric is missing in `run`.
    """
    def largest(name: str) -> float:
        return max(abs(run.scalars[name][step] - value) / (abs(value) or 1.0) for step, value in reference.scalars[name].items())

    losses = [name for name in ("lm loss", *ROUTER_LOSSES) if name in reference.scalars]
    return Agreement(len(reference.scalars["lm loss"]), max(map(largest, losses)), largest("grad-norm"))
