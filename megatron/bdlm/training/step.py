"""One micro-batch: from clean samples to this rank's rows, their sequence parameters and their targets.

    samples (every rank reads the same) -> corrupt -> targets -> plan -> this rank's rows -> model -> scored rows

Every rank of a model- and context-parallel cell reads the same samples and draws the same noise
(a pure function of the sample's identity), then takes the rows that the plan gives it. Nothing is
broadcast.

Shapes: b samples of L tokens, V views, s local rows, n scored rows of this rank.
"""

import dataclasses
import functools
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any, Iterator, Optional

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import get_args

from megatron.bdlm.attention.core_attention import AttentionOptions, BlockDiffusionParams
from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data.noise import VALIDATION_T_RANGE, Noised, block_starts_of, corrupt, is_self_conditioned
from megatron.bdlm.data.pretraining import document_lengths
from megatron.bdlm.model.router import has_router_losses, has_router_statistics, router_loss_scale
from megatron.bdlm.objective.loss import GlobalCounts, ScoredRows, block_diffusion_loss, sample_counts, select_rows
from megatron.bdlm.objective.targets import Targets, build_targets, target_blocks
from megatron.bdlm.parallel.device import to_device
from megatron.bdlm.parallel.plan import SequencePlan
from megatron.bdlm.platform.ranges import span, spanned
from megatron.bdlm.training.hooks import RowCounter

processed_rows = RowCounter()
"""Rows of the current iteration, counted on the last pipeline stage: each row once."""

VALIDATION_METRICS = ("lm loss", "nelbo", "masked cross entropy")
"""What validation reports; the engine prints the exponential of each, so that of `nelbo` is the perplexity bound."""

Sample = dict[str, torch.Tensor]  # of a micro-batch, stacked
ArraySample = dict[str, np.ndarray]  # one of them


@dataclass(frozen=True)
class Batch:
    """A micro-batch as this rank's pipeline stage needs it."""

    input_ids: Optional[torch.Tensor]  # int64 [b, s]; None on a stage without embedding
    position_ids: torch.Tensor  # int64 [b, s]
    params: BlockDiffusionParams
    rows: Optional[ScoredRows]  # None on a stage without output layer
    config: BDLMConfig  # that of training or of validation
    global_counts: Optional[GlobalCounts]  # denominators of the global batch, where two losses share it
    training: bool
    self_conditioned: Optional[torch.Tensor] = None  # bool [b], samples that run twice; None where the model has no such thing

    @property
    def model_inputs(self) -> dict[str, Any]:
        """What the model takes by name."""
        inputs = dict(packed_seq_params=self.params, scored_rows=self.rows)
        return inputs if self.self_conditioned is None else inputs | dict(self_conditioned=self.self_conditioned)


def training_config(config: BDLMConfig, iteration: int) -> BDLMConfig:
    """The options of a training iteration: the block size follows its schedule."""
    return dataclasses.replace(config, bdlm_block_size=config.block_size_at(iteration), bdlm_block_size_schedule=None)


def validation_config(config: BDLMConfig) -> BDLMConfig:
    """The objective of every validation: one view with fixed noise over the whole range of t, the NELBO where it exists.

    Uniform corruption has no such bound: its validation is the cross entropy of all supervised tokens.
    """
    weight = "nelbo" if config.bdlm_corruption == "absorbing" else "unit"
    return dataclasses.replace(
        config, bdlm_views=1, bdlm_loss_weight=weight, bdlm_loss_denominator="supervised", bdlm_t_min=VALIDATION_T_RANGE[0],
        bdlm_t_max=VALIDATION_T_RANGE[1], bdlm_force_one_corrupted=False, bdlm_clean_loss_weight=0.0, bdlm_diffusion_loss_weight=1.0,
    )


@spanned("bdlm/batch")
def next_batch(data_iterator: Iterator[Sample], model: Any) -> Batch:
    """The next micro-batch of `data_iterator` for `model`, a pipeline stage (wrapped or not)."""
    stage = unwrap_model(model)
    training = model.training
    config = training_config(stage.bdlm, get_args().curr_iteration) if training else validation_config(stage.bdlm)
    with span("bdlm/data"):
        stacked, global_counts = _next_samples(data_iterator, stage, config, training)
    samples = _unstack(stacked)
    plan = _plan_of(samples, config, stage.config)
    noised = [_noised(sample, stage, config, training) for sample in samples]
    device = torch.device(torch.cuda.current_device())

    rows = None
    if stage.post_process:
        share = 1.0 / (get_num_microbatches() * parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        targets = [_targets(sample, noise, config) for sample, noise in zip(samples, noised)]
        rows = select_rows(targets, plan.rows, plan.scored_clean, share).to(device)
    input_ids = None
    if stage.pre_process:
        streams = torch.stack([_global_rows(sample, noise) for sample, noise in zip(samples, noised)], dim=1)
        input_ids = to_device(plan.take(streams, 0).t().contiguous(), device)
    params = BlockDiffusionParams.from_plan(
        plan, parallel_state.get_context_parallel_group(), _attention_options(config), device,
        _final_rows(plan, config, stage.config, training),
    )
    if stage.config.num_moe_experts is not None and training:
        params.row_classes = to_device(row_classes(plan, samples, config.bdlm_router_rows), device)
    if training and stage.post_process:
        processed_rows.add(plan.s_local * len(samples))
    positions = params.position_ids.expand(len(samples), -1)
    chosen = _self_conditioned(samples, config, training)
    return Batch(
        input_ids, positions, params, rows, config, global_counts, training, None if chosen is None else to_device(chosen, device)
    )


def batch_loss(batch: Batch, nll: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum, count, metrics) for the engine out of the scored rows' negative log-likelihoods [n]."""
    loss, count, metrics = block_diffusion_loss(nll, batch.rows, batch.config, batch.global_counts, diagnostics=batch.training)
    if batch.training:
        _validate(loss.detach() / count.clamp(min=1))
    else:
        metrics = {name: metrics[name] for name in VALIDATION_METRICS if name in metrics}
    return loss, count, metrics


SPIKE = 10.0
"""--check-for-spiky-loss: this many times the largest loss that a rank has seen."""


def _validate(loss: torch.Tensor) -> None:
    """Hand this rank's loss to the engine's rerun machinery, which reruns the step of a refused value (--rerun-mode)."""
    args, machine = get_args(), get_rerun_state_machine()
    checks = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "found NaN in the local loss", True), (torch.isinf, "found Inf in the local loss", True)]
    if args.check_for_spiky_loss:
        spiky = functools.partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        checks.append((spiky, f"local loss above {SPIKE:g} times its largest value", False))
    for refuse, message, fatal in checks:
        machine.validate_result(result=loss, rejection_func=refuse, message=message, tolerance=0.0, fatal=fatal)


def _unstack(samples: Sample) -> list[ArraySample]:
    """[b, ..] tensors -> b samples of arrays."""
    arrays = {name: value.numpy() for name, value in samples.items()}
    return [{name: value[i] for name, value in arrays.items()} for i in range(len(arrays["tokens"]))]


@dataclass(frozen=True)
class _Layout:
    """What a sample decides about the plan; samples of one micro-batch must agree in it."""

    documents: Optional[tuple[int, ...]]  # lengths, padding as the last one; None for one stream
    restarts: tuple[int, ...]  # further tokens at which blocks start anew (turns of a conversation)
    target_blocks: Optional[tuple[int, ...]]  # blocks with noisy rows; None for all


def _documents(sample: ArraySample, block_size: int) -> Optional[tuple[int, ...]]:
    """Document lengths; padding behind the last document counts as documents of one block each, so that it costs little."""
    if "documents" not in sample:
        return None
    lengths = document_lengths(sample["documents"])
    if sample["documents"][-1] >= 0:
        return tuple(lengths)
    padding = lengths.pop()
    whole, rest = divmod(padding, block_size)
    return (*lengths, *(block_size,) * whole, *(rest,) * (rest > 0))


def _restarts(sample: ArraySample) -> tuple[int, ...]:
    return tuple(np.flatnonzero(sample["restarts"]).tolist()) if "restarts" in sample else ()


def _layout(sample: ArraySample, config: BDLMConfig) -> _Layout:
    documents, restarts = _documents(sample, config.bdlm_block_size), _restarts(sample)
    if config.bdlm_noisy_rows == "all":
        return _Layout(documents, restarts, None)
    starts = block_starts_of(len(sample["tokens"]), config.bdlm_block_size, documents, restarts)
    targets = target_blocks(sample["eligible"], starts, documents, config.bdlm_label_shift)
    return _Layout(documents, restarts, None if len(targets) == len(starts) else tuple(targets.tolist()))


@spanned("bdlm/noise")
def _noised(sample: ArraySample, stage: Any, config: BDLMConfig, training: bool) -> Noised:
    documents, restarts = _documents(sample, config.bdlm_block_size), _restarts(sample)
    starts = block_starts_of(len(sample["tokens"]), config.bdlm_block_size, documents, restarts) if restarts else None
    return corrupt(
        sample["tokens"], sample["eligible"], config, config.bdlm_noise_seed, int(sample["sample_index"]), int(sample["epoch"]),
        block_starts=starts, documents=documents, vocab_size=stage.tokenizer_tokens,
        purpose="train" if training else "validation",
    )


def _self_conditioned(samples: list[ArraySample], config: BDLMConfig, training: bool) -> Optional[torch.Tensor]:
    """bool [b]: samples that run a first pass; None where none does, the same on every rank that shares experts.

    Ranks that exchange rows of experts hold different samples but must run equally many passes: they always run it.
    """
    if not (training and config.bdlm_self_conditioning > 0.0):
        return None
    chosen = [
        is_self_conditioned(config.bdlm_self_conditioning, config.bdlm_noise_seed, int(sample["sample_index"]), int(sample["epoch"]))
        for sample in samples
    ]
    return torch.tensor(chosen) if any(chosen) or parallel_state.get_expert_model_parallel_world_size() > 1 else None


@spanned("bdlm/targets")
def _targets(sample: ArraySample, noised: Noised, config: BDLMConfig) -> Targets:
    clean = None
    if config.bdlm_clean_loss_tokens == "all":
        clean = sample["documents"] >= 0 if "documents" in sample else np.ones_like(sample["eligible"])
    documents = _documents(sample, config.bdlm_block_size)
    return build_targets(sample["tokens"], sample["eligible"], noised, documents, config, clean_eligible=clean)


def _global_rows(sample: ArraySample, noised: Noised) -> torch.Tensor:
    """[(V+1)*L] ids in the global order [xt_1; ..; xt_V; x0]."""
    return torch.from_numpy(np.concatenate([noised.xt.reshape(-1), sample["tokens"]]))


@spanned("bdlm/plan")
def _plan_of(samples: list[ArraySample], config: BDLMConfig, model_config: Any) -> SequencePlan:
    """The plan that every sample of the micro-batch shares.

    Raises:
        ValueError: samples of one micro-batch whose documents, turns or supervised blocks differ.
    """
    layouts = {_layout(sample, config) for sample in samples}
    if len(layouts) > 1:
        raise ValueError(
            f"--micro-batch-size {len(samples)}: samples whose documents, turns or supervised blocks differ have other rows and "
            "cannot share a micro-batch. A legal value: 1"
        )
    ranks = parallel_state.get_context_parallel_world_size()
    return _plan(
        len(samples[0]["tokens"]), config.bdlm_block_size, config.bdlm_views, layouts.pop(), config.bdlm_clean_attention,
        config.bdlm_noisy_attention, config.resolved_strategy(ranks), row_alignment(model_config), ranks, parallel_state.get_context_parallel_rank(),
    )


def row_alignment(model_config: Any) -> int:
    """What a rank's rows are a multiple of: sequence parallelism shares them out, and FP8 products need them aligned."""
    tensor_ranks = model_config.tensor_model_parallel_size if model_config.sequence_parallel else 1
    return tensor_ranks * (get_fp8_align_size(model_config.fp8_recipe) if model_config.fp8 else 1)


@functools.lru_cache(maxsize=8)
def _plan(length, block_size, views, layout, clean_attention, noisy_attention, strategy, row_multiple, ranks, rank) -> SequencePlan:
    kind, slots = strategy
    return SequencePlan.build(
        seq_length=length, block_size=block_size, context_parallel_size=ranks, block_parallel_size=slots, rank=rank,
        views=views, documents=layout.documents, clean_attention=clean_attention, strategy=kind,
        target_blocks=layout.target_blocks, noisy_attention=noisy_attention, block_restarts=layout.restarts,
        row_multiple=row_multiple,
    )


def row_classes(plan: SequencePlan, samples: list[ArraySample], counted: str) -> torch.Tensor:
    """bool [b, s, 3]: what routers make of this rank's rows: counted for losses and balance, clean, noisy.

    A row of padding (the plan's, or text that fills up a sample) is none of them; a clean row that several ranks
    compute (strategy bp) is clean where its loss would be.

    Args:
        counted: "clean", "noisy" or "all".
    """
    text = torch.from_numpy(np.stack([sample.get("documents", sample["tokens"]) >= 0 for sample in samples]))  # [b, L]; ids are not negative
    real = (plan.rows >= 0) & text[:, plan.rows.clamp(min=0) % plan.seq_length]
    clean, noisy = real & plan.scored_clean, real & (plan.view >= 0)
    return torch.stack([{"clean": clean, "noisy": noisy, "all": clean | noisy}[counted], clean, noisy], dim=-1)


def _final_rows(plan: SequencePlan, config: BDLMConfig, model_config: Any, training: bool) -> Optional[int]:
    """Rows that the last layer computes: the noisy ones where no loss reads clean rows, else None for all.

    The ranks of a context-parallel group exchange the keys of the last layer's queries, so all of them must decide alike.
    """
    if config.bdlm_full_last_layer or config.bdlm_clean_loss_weight > 0.0 or model_config.attention_output_gate:
        return None
    if config.bdlm_diffusion_gemma is not None:
        return None  # its layers return every row
    if training and has_router_statistics(model_config) and config.bdlm_router_rows != "noisy":
        return None  # the last router counts clean rows
    multiple = row_alignment(model_config)
    held = [plan.views * plan.holdings(rank).noisy.count for rank in range(plan.context_parallel_size)]
    return plan.noisy_rows if all(rows and rows % multiple == 0 for rows in held) else None


def _attention_options(config: BDLMConfig) -> AttentionOptions:
    return AttentionOptions(
        config.bdlm_transport, config.bdlm_attention_kernel, config.bp_grad_dtype, config.bdlm_ranks_per_node,
        config.bdlm_diagonal_kernel,
    )


_ahead: dict[int, deque] = {}  # per data iterator: samples read before their turn, with the counts of their global batch


def _next_samples(
    data_iterator: Iterator[Sample], stage: Any, config: BDLMConfig, training: bool
) -> tuple[Sample, Optional[GlobalCounts]]:
    """The next samples, and the denominators of their global batch where there is more than one loss.

    Clean rows and routers have losses with denominators of their own, but the engine divides once. So the whole
    global batch is read and counted at its first micro-batch: eligibility and noise are data, known before the
    model runs.
    """
    routers = has_router_losses(stage.config)
    if not training or not (routers or config.bdlm_clean_loss_weight > 0.0 and stage.post_process):
        return next(data_iterator), None
    queue = _ahead.setdefault(id(data_iterator), deque())
    if not queue:
        micro_batches = [next(data_iterator) for _ in range(get_num_microbatches())]
        local = GlobalCounts(0, 0)
        for sample in itertools.chain.from_iterable(map(_unstack, micro_batches)):
            local += sample_counts(_targets(sample, _noised(sample, stage, config, training), config))
        totals = torch.tensor([local.noisy, local.clean], dtype=torch.long, device=torch.cuda.current_device())
        torch.distributed.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        counts = GlobalCounts(*totals.tolist())
        parts = get_num_microbatches() * parallel_state.get_data_parallel_world_size()
        router_loss_scale.factor = max(counts.noisy, 1) / parts
        queue.extend((samples, counts) for samples in micro_batches)
    return queue.popleft()
