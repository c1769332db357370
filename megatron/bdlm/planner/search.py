"""Every legal layout of a model on a machine, predicted and ranked; the best few as ready flags."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.planner.costs import predict
from megatron.bdlm.planner.models import Model, PlannerError
from megatron.bdlm.planner.work import Layout, Machine, Prediction, Workload

EXACT_PLAN_RANKS = 64  # a layout's exact balance is computed up to this size


@dataclass(frozen=True)
class Ranked:
    """All predictions, best first: those that fit before those that do not."""

    predictions: tuple[Prediction, ...]

    @property
    def fitting(self) -> int:
        return sum(prediction.fits for prediction in self.predictions)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layouts(model: Model, machine: Machine, workload: Workload) -> Iterator[Layout]:
    """All legal ones.

    tp divides the key heads and stays inside a node; pp divides the layers; 2 cp divides L (the engine's rule); csbp and bp need
    K <= L/S; ep divides the experts and cp * dp; dp divides the global batch.
    """
    gpus, blocks = machine.count, -(-workload.length // workload.block_size)
    node = machine.gpu.gpus_per_node
    for tp in divisors(gpus):
        if model.least_key_heads % tp or tp > node:
            continue
        for pp in divisors(gpus // tp):
            if model.layers % pp:
                continue
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if workload.length % (2 * cp) or workload.global_batch % dp:
                    continue
                for ep in divisors(dp * cp) if model.experts else [1]:
                    if model.experts and model.experts % ep:
                        continue
                    yield from _attention_choices(Layout(tp, pp, cp, 1, ep, dp), blocks, machine)


def _attention_choices(layout: Layout, blocks: int, machine: Machine) -> Iterator[Layout]:
    """The layout with every strategy, its transports, and both ways to keep activations."""
    choices: list[tuple[str, int, str]] = [("csbp", 1, "direct")]
    if layout.cp > 1:
        choices = [("cp", 1, "ring")]
        spans = layout.cp > layout.ranks_per_node(machine.gpu) > 1
        transports = ("direct", "hierarchical") if spans else ("direct",)
        for slots in divisors(layout.cp)[1:]:
            if slots > blocks:
                continue
            strategy = "csbp" if slots == layout.cp else "hybrid"
            choices += [(strategy, slots, transport) for transport in transports]
            if strategy == "csbp":
                choices.append(("bp", slots, "direct"))
    for strategy, slots, transport in choices:
        for recompute in (False, True):
            yield Layout(
                layout.tp, layout.pp, layout.cp, slots, layout.ep, layout.dp, strategy, transport, recompute
            )


def search(model: Model, machine: Machine, workload: Workload) -> Ranked:
    """Predict every legal layout.

    Raises:
        PlannerError: there is none.
    """
    found = [predict(model, machine, workload, layout) for layout in layouts(model, machine, workload)]
    if not found:
        raise PlannerError(
            f"--gpus {machine.count} --seq-length {workload.length} --global-batch-size {workload.global_batch}: no legal layout; "
            f"the data-parallel size must divide the batch, 2 x CP the length. A legal value: --global-batch-size {machine.count}"
        )
    return Ranked(tuple(sorted(found, key=lambda p: (not p.fits, p.step_seconds if p.fits else p.memory_total))))


def exact_balance(workload: Workload, layout: Layout) -> float | None:
    """Heaviest over mean attention area, from the sequence plan itself; None above EXACT_PLAN_RANKS."""
    if layout.cp > EXACT_PLAN_RANKS:
        return None
    plan = SequencePlan.build(
        workload.length, workload.block_size, layout.cp, layout.bp, views=workload.views, strategy=layout.strategy
    )
    return plan.balance()


def flags(workload: Workload, layout: Layout) -> str:
    """The layout as flags of pretrain_bdlm.py."""
    parts = [
        f"--tensor-model-parallel-size {layout.tp}", "--sequence-parallel" if layout.tp > 1 else "",
        f"--pipeline-model-parallel-size {layout.pp}", f"--context-parallel-size {layout.cp}",
        f"--block-parallel-size {layout.bp}", f"--bdlm-strategy {layout.strategy}",
        f"--bdlm-transport {layout.transport}", f"--expert-model-parallel-size {layout.ep}" if layout.ep > 1 else "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" if layout.recompute else "",
        "--use-distributed-optimizer" if layout.dp * layout.cp > 1 else "",
        f"--seq-length {workload.length}", f"--bdlm-block-size {workload.block_size}",
        f"--micro-batch-size 1 --global-batch-size {workload.global_batch}",
        f"--bdlm-views {workload.views}" if workload.views > 1 else "",
    ]
    return " ".join(part for part in parts if part)
