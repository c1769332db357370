"""What a run would do, said before it starts: `--dry-run` of an entry script, on one process, for any number of ranks.

Options are parsed and checked as in the run, by the engine's rules and ours; the plan of every context-parallel rank is built,
for a sample full of text; memory, bytes and time are the planner's. No process group, no GPU; nothing is written but the report
that --dry-run-json asks for.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.bdlm.attention.core_attention import layer_window
from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.indexed import check_pair
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.planner.costs import predict
from megatron.bdlm.planner.hardware import GPUS
from megatron.bdlm.planner.models import Model
from megatron.bdlm.planner.resolved import layout_of, model_of, workload_of
from megatron.bdlm.planner.search import flags
from megatron.bdlm.planner.traffic import Sizes, exact
from megatron.bdlm.planner.work import Layout, Machine, Prediction, Workload
from megatron.bdlm.training.arguments import parse_arguments
from megatron.bdlm.training.options import check_start

EXACT_RANKS = 8
"""Bytes are counted message by message for every rank of a group of at most this size, else for these many of its ranks."""


@dataclass(frozen=True)
class RankPlan:
    """What one context-parallel rank holds and computes for one sample."""

    rank: int
    noisy_rows: int
    clean_rows: int
    padding_rows: int
    area: int  # visible query-key pairs of a layer with full attention
    sent: Optional[dict[str, int]] = None  # bytes of a micro-batch in all its layers; None where they were not counted


@dataclass(frozen=True)
class Report:
    """The answer of a dry run."""

    world_size: int
    gpu: str
    gpus_per_node: int
    flags: str  # the layout as the planner writes it
    model: Model
    workload: Workload
    prediction: Prediction
    balance: float  # attention area of the heaviest rank over the mean
    ranks: tuple[RankPlan, ...]
    data: dict[str, Any]
    train_iterations: int
    notes: tuple[str, ...]

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.prediction.step_seconds

    def as_json(self) -> str:
        values = {**dataclasses.asdict(self), "steps_per_hour": self.steps_per_hour}
        return json.dumps(values, indent=1) + "\n"


def asked(arguments: list[str]) -> bool:
    """Whether a command line asks for a dry run."""
    return "--dry-run" in arguments


def main(group: type | None = None) -> int:
    """Do the dry run of `sys.argv`; the exit code: 0, or 1 for a run that would not start, with one error on stderr.

    Args:
        group: a further dataclass whose fields are flags of the entry script.
    """
    _take_world_size(sys.argv)
    _check_local_world_size()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # the engine lists several hundred arguments
            args, config = parse_arguments(group)
            notes = check_start(args, config)
            report = report_of(args, config, notes)
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        print(f"dry run: this run would not start: {_reason(error)}", file=sys.stderr)
        return 1
    if args.rank != 0:
        return 0
    if args.dry_run_json:
        try:
            Path(args.dry_run_json).write_text(report.as_json())
        except OSError as error:
            print(f"--dry-run-json {args.dry_run_json}: cannot be written ({error.strerror}). A legal value: report.json", file=sys.stderr)
            return 1
    print(summary(report), flush=True)
    return 0


def _take_world_size(arguments: list[str]) -> None:
    """--dry-run-world-size is the engine's WORLD_SIZE: it reads the environment only."""
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--dry-run-world-size":
            value = value or "".join(arguments[place + 1 : place + 2])
            if not value.isdecimal() or int(value) < 1:
                print(f"--dry-run-world-size {value}: a number of processes. A legal value: 64", file=sys.stderr)
                raise SystemExit(1)
            os.environ["WORLD_SIZE"], os.environ["RANK"] = value, "0"


def _check_local_world_size() -> None:
    """LOCAL_WORLD_SIZE, where it is set, says how many GPUs a node has."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not value.isdecimal() or int(value) < 1:
        print(f"LOCAL_WORLD_SIZE {value}: a number of processes of a node. A legal value: 8", file=sys.stderr)
        raise SystemExit(1)


def _reason(error: BaseException) -> str:
    """The message; for an assertion of the engine without one, the line that failed."""
    if str(error):
        return str(error) if isinstance(error, (BDLMConfigError, DataError)) else f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}: {last.line}"


# ---- the report ------------------------------------------------------------------------------------


def report_of(args: Any, config: BDLMConfig, notes: list[str]) -> Report:
    """The report on resolved options."""
    gpu = GPUS[args.dry_run_gpu]
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", gpu.gpus_per_node))
    gpu = dataclasses.replace(gpu, gpus_per_node=min(on_node, args.world_size))
    windows = [layer_window(args, layer) for layer in range(1, args.num_layers + 1)]
    model, workload = model_of(args, windows), workload_of(args)
    strategy, slots = config.resolved_strategy(args.context_parallel_size)
    in_group = Layout(tp=args.tensor_model_parallel_size, cp=args.context_parallel_size).ranks_per_node(gpu)
    layout = layout_of(args, strategy, slots, config.bdlm_ranks_per_node or in_group)
    prediction = predict(model, Machine(gpu, args.world_size), workload, layout)
    ranks, balance = plans_of(args, model, workload, layout, config.bdlm_ranks_per_node or in_group)
    iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    return Report(
        args.world_size, gpu.name, gpu.gpus_per_node, flags(workload, layout), model, workload, prediction, balance, ranks,
        data_of(args, iterations), iterations, (*notes, *_notes(args, prediction, gpu.memory)),
    )


def plans_of(args: Any, model: Model, workload: Workload, layout: Layout, ranks_per_node: int) -> tuple[tuple[RankPlan, ...], float]:
    """Every context-parallel rank's plan of a sample full of text, and the balance among them."""
    size = layout.cp
    counted = set(range(size)) if size <= EXACT_RANKS else {round(i * (size - 1) / (EXACT_RANKS - 1)) for i in range(EXACT_RANKS)}
    found = []
    for rank in range(size):
        plan = SequencePlan.build(
            workload.length, workload.block_size, size, layout.bp, rank, workload.views, clean_attention=args.bdlm_clean_attention,
            strategy=layout.strategy, noisy_attention=args.bdlm_noisy_attention,
            row_multiple=layout.tp if args.sequence_parallel else 1,
        )
        sent = _sent(plan, model, workload, layout, ranks_per_node) if rank in counted else None
        clean = plan.used_rows - plan.noisy_rows
        found.append(RankPlan(rank, plan.noisy_rows, clean, plan.s_local - plan.used_rows, plan.cost(), sent))
    areas = [entry.area for entry in found]
    return tuple(found), max(areas) * size / sum(areas)


def _sent(plan: SequencePlan, model: Model, workload: Workload, layout: Layout, ranks_per_node: int) -> dict[str, int]:
    """Bytes that a rank sends for attention in one micro-batch, forward and backward of the layers of a pipeline stage."""
    total = {"all": 0, "between nodes": 0}
    for kind in model.kinds:
        heads = workload.micro_batch * max(1, kind.key_heads // layout.tp)
        sizes = Sizes.of(heads, kind.head_size, kind.head_size, workload.precision.item, workload.gradient_item)
        runs = 2 if layout.recompute else 1
        for direction, bytes_ in exact(plan, layout.transport, sizes, ranks_per_node, kind.window).items():
            times = kind.count / layout.pp * (runs if direction == "forward" else 1)
            total["all"] += round(times * bytes_["sent"])
            total["between nodes"] += round(times * bytes_["sent_inter_node"])
    return total


def data_of(args: Any, iterations: int) -> dict[str, Any]:
    """Samples that the run asks for, and what .bin/.idx data hold: what an index says, without reading tokens.

    Raises:
        DataError: a prefix whose pair is missing or broken.
    """
    found: dict[str, Any] = {"training samples": iterations * args.global_batch_size, "tokens": iterations * args.global_batch_size * args.seq_length}
    paths = [word for given in (args.data_path, args.train_data_path) if given for word in given]
    prefixes = [word for word in paths if not _is_number(word) and not word.endswith((".jsonl", ".json", ".gz", ".zst"))]
    if not args.mock_data and prefixes and not hasattr(args, "bdlm_sft_packing"):
        held = sum(check_pair(prefix).tokens for prefix in prefixes)
        found |= {"tokens held": held, "passes": found["tokens"] / max(held, 1)}
    for path in (word for word in paths if not _is_number(word) and word not in prefixes):
        if not os.access(path, os.R_OK):
            raise DataError(f"--data-path {path}: cannot be read. A legal value: a file of conversations (docs/data.md)")
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _notes(args: Any, prediction: Prediction, memory: float) -> list[str]:
    """What the prediction does not know, or what deserves a second look."""
    notes = []
    if not prediction.fits:
        notes.append(
            f"memory: {prediction.memory_total / 1e9:.1f} GB are predicted for a GPU of {memory / 1e9:.0f} GB; "
            "tools/plan_run.py lists layouts that fit"
        )
    separate = args.reset_position_ids or args.dataloader_inter_document_masking or hasattr(args, "bdlm_sft_packing")
    if separate:
        notes.append("plans depend on the documents of a sample; rows and bytes are those of one document of full length, all of it supervised")
    if args.recompute_granularity == "selective":
        notes.append("memory is predicted as without --recompute-granularity selective")
    if args.num_experts and args.moe_layer_freq != 1:
        notes.append("predicted as if every layer had experts")
    if args.bdlm_block_size_schedule:
        notes.append("plans are those of the last block size")
    return notes


# ---- as text ---------------------------------------------------------------------------------------


def summary(report: Report) -> str:
    """For people."""
    p, layout = report.prediction, report.prediction.layout
    gb = 1e9
    most = max(report.ranks, key=lambda entry: entry.area)
    lines = [
        f"dry run: this run would start on {report.world_size} {report.gpu} ({report.gpus_per_node} a node)",
        f"  layout      TP {layout.tp} PP {layout.pp} CP {layout.cp} BP {layout.bp} EP {layout.ep} DP {layout.dp}, {layout.strategy} over "
        f"{layout.transport}, {layout.micro_batches(report.workload)} micro-batches of {report.workload.micro_batch} a step",
        f"  flags       {report.flags}",
        f"  model       {report.model.parameters / 1e9:.3f}B parameters, {report.model.layers} layers, vocabulary {report.model.vocabulary}",
        f"  plan        {len(report.ranks)} context-parallel ranks, balance {report.balance:.4f} (heaviest area over the mean); rank {most.rank}: "
        f"{most.noisy_rows} noisy + {most.clean_rows} clean + {most.padding_rows} padding rows",
        "  memory      " + ", ".join(f"{name} {value / gb:.2f}" for name, value in p.memory.items())
        + f" = {p.memory_total / gb:.2f} GB of the heaviest rank ({'fits' if p.fits else 'does NOT fit'})",
        "  sent        " + ", ".join(f"{name} {value / gb:.2f}" for name, value in p.bytes.items()) + " GB a rank and step",
        "  seconds     " + ", ".join(f"{name} {value:.2f}" for name, value in p.seconds.items()),
        f"  speed       {report.steps_per_hour:.1f} steps/hour, {p.tokens_per_second:.0f} clean tokens/s; {report.train_iterations} steps: "
        f"{report.train_iterations / report.steps_per_hour:.1f} hours",
        "  data        " + ", ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in report.data.items()),
    ]
    counted = [entry for entry in report.ranks if entry.sent]
    if len(report.ranks) > 1:
        lines.insert(5, "  attention   " + ", ".join(
            f"rank {entry.rank} {entry.sent['all'] / gb:.2f} ({entry.sent['between nodes'] / gb:.2f})" for entry in counted
        ) + " GB sent (between nodes) a micro-batch, counted in the plans")
    lines += [f"  note        {note}" for note in report.notes]
    lines.append("Predicted by the planner for this kind of GPU, not measured; docs/performance.md says what it leaves out.")
    return "\n".join(lines)
