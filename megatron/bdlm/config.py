"""Every option of a block diffusion run, in one dataclass.

A field is a flag: its name with hyphens, its docstring the help text (Megatron's
`ArgumentGroupFactory` builds the argument group from it). The rules between options stand
below the fields, in `validate`. A recipe (`RECIPES`) is a named set of field values; a flag
that the user gives wins over the recipe.

Terms: block size S, noise level t, corruption probability p(t), clean stream x0, noisy
streams xt_1..xt_V ("views").
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

SWITCH = {"argparse_meta": {"action": argparse.BooleanOptionalAction}}
"""A switch that recipes set: --no-... turns it off again."""


class BDLMConfigError(ValueError):
    """An option or a combination of options that cannot run; the message names flag, value, rule and a legal value."""


@dataclass(frozen=True)
class DiffusionGemmaOptions:
    """What DiffusionGemma's layers need beside the engine's flags: the keys of `--bdlm-diffusion-gemma`."""

    vocab_size: int  # tokens: what noise draws from and softmax runs over; rows of the embedding behind them are padding
    full_head_size: int  # of layers without a window; --kv-channels is that of the others
    full_key_heads: int  # key-value heads of layers without a window
    full_rotary_base: float = 1e6
    full_rotary_factor: float = 0.25  # share of the pairs that turn
    logit_softcap: float = 30.0  # logits are cap * tanh(logits / cap)
    pad_token_id: int = 0  # its embedding gets no gradient from rows that hold it


@dataclass
class BDLMConfig:
    """Block diffusion language model options."""

    bdlm_recipe: Optional[str] = None
    """Named set of values for the options of this group (see RECIPES); a flag given beside it wins."""

    # ---- blocks and visibility -------------------------------------------------------------
    bdlm_block_size: int = 32
    """Tokens per block, S."""

    bdlm_block_size_schedule: Optional[str] = None
    """Block-size warm-up as comma-separated ITERATION:SIZE pairs, for example 0:1,100:4,500:32; the first iteration is 0."""

    bdlm_clean_attention: Literal["block-causal", "token-causal"] = "block-causal"
    """What a clean row sees of the clean stream: its own and earlier blocks, or tokens up to itself."""

    bdlm_noisy_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """What a noisy row sees of its own noisy block: all of it, or tokens up to itself."""

    bdlm_views: Literal[1, 2] = 1
    """Noisy streams over one clean stream; 2 corrupts complementary sets of tokens, so each is scored once over the pair."""

    bdlm_tail_policy: Literal["ragged", "eos-fill", "pad"] = "ragged"
    """The last block of a document: kept short, filled with supervised EOS, or filled with invisible padding (fine-tuning only: pretraining takes ragged)."""

    bdlm_rope_parameters: Optional[str] = None
    """Scaled rotary frequencies as JSON, in the words of a Hugging Face config: {"rope_type": "linear", "llama3" or "yarn", "factor": 8.0, ..}."""

    bdlm_diffusion_gemma: Optional[str] = None
    """The model is a DiffusionGemma: options of its layers as JSON, {"vocab_size": 262144, "full_head_size": 512, "full_key_heads": 2}; None: an ordinary model."""

    # ---- vocabulary ------------------------------------------------------------------------
    bdlm_mask_token_id: Optional[int] = None
    """Id of the mask token; default: the tokenizer's mask token, else a new row behind its vocabulary."""

    bdlm_keep_mask_logit: bool = field(default=False, metadata=SWITCH)
    """Leave the mask token's logit in the softmax (by default it is excluded: the mask can never be predicted)."""

    # ---- noise -----------------------------------------------------------------------------
    bdlm_corruption: Literal["absorbing", "uniform"] = "absorbing"
    """A corrupted token becomes the mask token, or a token drawn uniformly from the vocabulary."""

    bdlm_noise_schedule: Literal["linear", "quadratic", "sqrt", "log", "cosine"] = "linear"
    """Corruption probability p(t): (1-eps)t+eps, t^2, sqrt t, ln(1+t)/ln 2, 1-(1-eps)cos(pi t/2)."""

    bdlm_noise_eps: float = 1e-3
    """Floor eps of the linear and cosine schedules."""

    bdlm_noise_level_per: Literal["block", "document", "sequence"] = "block"
    """What shares one noise level t."""

    bdlm_noise_draw: Literal["uniform", "stratified"] = "stratified"
    """How t is drawn: independently, or stratified over the blocks of a sample (over samples where t is per document or sequence)."""

    bdlm_t_min: float = 1e-3
    """Smallest training noise level; validation always uses [0.001, 1]."""

    bdlm_t_max: float = 1.0
    """Largest training noise level."""

    bdlm_force_one_corrupted: bool = field(default=False, metadata=SWITCH)
    """Corrupt at least one token in every block that has an eligible one."""

    bdlm_noise_seed: Optional[int] = None
    """Seed of the noise; default: --seed."""

    # ---- loss ------------------------------------------------------------------------------
    bdlm_loss_weight: Literal["nelbo", "unit"] = "nelbo"
    """Weight of a corrupted token: p'(t)/p(t) (the NELBO bound) or 1."""

    bdlm_loss_denominator: Literal["supervised", "masked", "block-mean"] = "supervised"
    """What the loss is divided by: all eligible tokens (keeps the bound), the corrupted ones, or documents, each the mean of its blocks' means."""

    bdlm_label_shift: Literal["none", "next"] = "none"
    """Row i predicts token i, or token i+1 (models converted from autoregressive ones; token 0 is never scored)."""

    bdlm_diffusion_loss_weight: float = 1.0
    """Factor of the diffusion loss on noisy rows."""

    bdlm_clean_loss_weight: float = 0.0
    """Factor of a next-token loss on clean rows; needs --bdlm-clean-attention token-causal."""

    bdlm_clean_loss_tokens: Literal["supervised", "all"] = "supervised"
    """Tokens that clean rows score: supervised ones, or every token of a document behind its first."""

    bdlm_cross_entropy_chunk: int = 4096
    """Rows whose logits are held at a time by the chunked linear cross entropy; 0 holds all of them."""

    bdlm_self_conditioning: float = 0.0
    """Share of samples whose noisy rows also see what a first pass without gradient predicted for them (DiffusionGemma)."""

    bdlm_freeze_router: bool = field(default=False, metadata=SWITCH)
    """Leave the routers of a mixture of experts as they are."""

    # ---- parallelism -----------------------------------------------------------------------
    block_parallel_size: Optional[int] = None
    """Block-parallel size K, a divisor of --context-parallel-size P: P shards blocks and the clean stream (CSBP), 1 is conventional context parallelism, between them both are combined; default P."""

    bdlm_strategy: Literal["auto", "csbp", "cp", "bp", "hybrid"] = "auto"
    """Attention strategy; auto follows --block-parallel-size. bp replicates the clean stream on every rank."""

    bdlm_transport: Literal["auto", "direct", "hierarchical", "ring", "allgather"] = "auto"
    """How clean keys and values travel; auto: hierarchical when the group spans nodes, else direct."""

    bdlm_ranks_per_node: Optional[int] = None
    """Ranks on one node for the hierarchical transport; default: LOCAL_WORLD_SIZE."""

    bp_grad_dtype: Literal["fp32", "bf16", "input"] = "fp32"
    """Data type of key and value gradients on the wire; they are always summed in float32 (float64 inputs: float64)."""

    bdlm_attention_kernel: str = "auto"
    """Kernel of the dense attention tiles: auto, torch, flash_attn, transformer_engine, flex, math."""

    bdlm_diagonal_kernel: Literal["auto", "triton", "dense"] = "auto"
    """Small rectangles near the diagonal: one Triton launch, or batches for the dense kernel; auto: triton on GPUs in 16 bits."""

    bdlm_noisy_rows: Literal["targets", "all"] = "targets"
    """Which blocks have noisy rows: those with a supervised token (prompts have none), or all."""

    bdlm_full_last_layer: bool = False
    """Compute clean rows of the last layer even when no loss needs them."""

    # ---- mixture of experts ----------------------------------------------------------------
    bdlm_router_rows: Literal["clean", "noisy", "all"] = "clean"
    """Rows whose routing counts for the routers' losses and balance: clean ones (no other than without noise), noisy ones, or all; padding never counts."""

    # ---- logging ---------------------------------------------------------------------------
    bdlm_json_log: Optional[str] = None
    """File to which every logged iteration and every evaluation is appended as one line of JSON, with TensorBoard's names; a resumed run appends."""

    # ---- running ---------------------------------------------------------------------------
    bdlm_keep_checkpoints: Optional[int] = None
    """Newest complete checkpoints of --save to keep; older ones are deleted once a newer one stands, default: all stay."""

    def validate(self) -> None:
        """Check the rules between the options of this group.

        Raises:
            BDLMConfigError: naming the flag, its value, the rule and a legal value.
        """
        _require(self.bdlm_block_size >= 1, "--bdlm-block-size", self.bdlm_block_size, "a block holds at least one token", "32")
        _require(
            self.bdlm_recipe is None or self.bdlm_recipe in RECIPES,
            "--bdlm-recipe", self.bdlm_recipe, "known recipes: " + ", ".join(sorted(RECIPES)), next(iter(RECIPES)),
        )
        _require(0.0 <= self.bdlm_noise_eps < 1.0, "--bdlm-noise-eps", self.bdlm_noise_eps, "0 <= eps < 1", "0.001")
        _require(
            0.0 < self.bdlm_t_min <= self.bdlm_t_max <= 1.0,
            "--bdlm-t-min/--bdlm-t-max", f"{self.bdlm_t_min}/{self.bdlm_t_max}", "0 < t_min <= t_max <= 1", "0.001/1.0",
        )
        _require(
            self.bdlm_clean_loss_weight == 0.0 or self.bdlm_clean_attention == "token-causal",
            "--bdlm-clean-loss-weight", self.bdlm_clean_loss_weight,
            "a next-token loss on clean rows needs --bdlm-clean-attention token-causal", "0",
        )
        _require(
            0.0 <= self.bdlm_clean_loss_weight < math.inf,
            "--bdlm-clean-loss-weight", self.bdlm_clean_loss_weight, "not negative, finite", "0",
        )
        _require(
            0.0 < self.bdlm_diffusion_loss_weight < math.inf,
            "--bdlm-diffusion-loss-weight", self.bdlm_diffusion_loss_weight, "positive, finite", "1.0",
        )
        _require(
            self.bdlm_views == 1 or self.bdlm_corruption == "absorbing",
            "--bdlm-views", self.bdlm_views, "complementary views need --bdlm-corruption absorbing", "1",
        )
        _require(
            self.bdlm_views == 1 or not self.bdlm_force_one_corrupted,
            "--bdlm-force-one-corrupted", self.bdlm_force_one_corrupted,
            "with --bdlm-views 2 every eligible token is corrupted in one of the views anyway", "False",
        )
        _require(
            self.bdlm_corruption == "absorbing" or not self.bdlm_force_one_corrupted,
            "--bdlm-force-one-corrupted", self.bdlm_force_one_corrupted,
            "--bdlm-corruption uniform scores every supervised token anyway, and its replacement may be the same token", "False",
        )
        _require(
            self.bdlm_corruption == "absorbing" or self.bdlm_loss_weight == "unit",
            "--bdlm-loss-weight", self.bdlm_loss_weight,
            "p'(t)/p(t) is the bound of absorbing corruption; --bdlm-corruption uniform has none", "unit",
        )
        _require(
            self.bdlm_corruption == "absorbing" or self.bdlm_loss_denominator != "masked",
            "--bdlm-loss-denominator", self.bdlm_loss_denominator,
            "--bdlm-corruption uniform scores every supervised token, replaced or not", "supervised",
        )
        _require(
            self.bdlm_loss_denominator != "block-mean" or (self.bdlm_loss_weight == "unit" and self.bdlm_views == 1),
            "--bdlm-loss-denominator", self.bdlm_loss_denominator,
            "a mean of block means has its own weights: --bdlm-loss-weight unit and --bdlm-views 1", "supervised",
        )
        _require(
            self.bdlm_keep_checkpoints is None or self.bdlm_keep_checkpoints >= 1,
            "--bdlm-keep-checkpoints", self.bdlm_keep_checkpoints, "the newest checkpoint always stays", "2",
        )
        self.block_sizes()
        _require(
            self.bdlm_ranks_per_node is None or self.bdlm_ranks_per_node >= 1,
            "--bdlm-ranks-per-node", self.bdlm_ranks_per_node, "a node has at least one rank", "8",
        )
        _require(
            self.bp_grad_dtype == "fp32" or self.bdlm_transport != "allgather",
            "--bp-grad-dtype", self.bp_grad_dtype, "--bdlm-transport allgather sums gradients on the wire, in float32", "fp32",
        )
        self.rope_parameters()
        gemma = self.diffusion_gemma()
        if gemma is not None:
            self._check_diffusion_gemma()
        _require(
            0.0 <= self.bdlm_self_conditioning <= 1.0, "--bdlm-self-conditioning", self.bdlm_self_conditioning, "a share of samples", "0",
        )
        _require(self.bdlm_cross_entropy_chunk >= 0, "--bdlm-cross-entropy-chunk", self.bdlm_cross_entropy_chunk, "not negative", "4096")

    def block_sizes(self) -> list[tuple[int, int]]:
        """(first iteration, block size) pairs of the schedule, ascending; one pair without a schedule.

        Raises:
            BDLMConfigError: a pair that cannot be read, iterations that do not ascend from 0, or a last size other
                than --bdlm-block-size, which is the size of the model that comes out.
        """
        text = self.bdlm_block_size_schedule
        if text is None:
            return [(0, self.bdlm_block_size)]
        legal = f"0:1,1000:4,5000:{self.bdlm_block_size}"
        try:
            pairs = [(int(first), int(size)) for first, size in (pair.split(":") for pair in text.split(","))]
        except ValueError:
            raise BDLMConfigError(f"--bdlm-block-size-schedule {text}: ITERATION:SIZE pairs. A legal value: {legal}") from None
        firsts = [first for first, _ in pairs]
        _require(
            firsts[0] == 0 and all(a < b for a, b in zip(firsts, firsts[1:])) and all(size >= 1 for _, size in pairs),
            "--bdlm-block-size-schedule", text, "iterations ascend from 0, sizes are positive", legal,
        )
        _require(
            pairs[-1][1] == self.bdlm_block_size,
            "--bdlm-block-size-schedule", text, f"its last size must be --bdlm-block-size {self.bdlm_block_size}", legal,
        )
        return pairs

    def rope_parameters(self) -> Optional[dict[str, Any]]:
        """Scaling of the rotary frequencies, None for the engine's own.

        Raises:
            BDLMConfigError: no JSON object, an unknown `rope_type`, or a parameter that the type needs and lacks.
        """
        text, flag = self.bdlm_rope_parameters, "--bdlm-rope-parameters"
        if text is None:
            return None
        legal = '{"rope_type": "linear", "factor": 4.0}'
        try:
            parameters = json.loads(text)
        except json.JSONDecodeError as error:
            raise BDLMConfigError(f"{flag} {text}: no JSON ({error}). A legal value: {legal}") from None
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        _require(kind in ROPE_PARAMETERS, flag, text, "rope_type is one of " + ", ".join(ROPE_PARAMETERS), legal)
        faulty = [name for name in ROPE_PARAMETERS[kind] if not _is_positive(parameters.get(name))]
        _require(not faulty, flag, text, f"rope_type {kind} needs positive numbers for " + ", ".join(faulty), legal)
        return parameters

    def diffusion_gemma(self) -> Optional[DiffusionGemmaOptions]:
        """Options of DiffusionGemma's layers, None for an ordinary model.

        Raises:
            BDLMConfigError: no JSON object, an unknown or missing key, or a value that is no positive number.
        """
        text, flag = self.bdlm_diffusion_gemma, "--bdlm-diffusion-gemma"
        if text is None:
            return None
        legal = '{"vocab_size": 262144, "full_head_size": 512, "full_key_heads": 2}'
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise BDLMConfigError(f"{flag} {text}: no JSON ({error}). A legal value: {legal}") from None
        names = [each.name for each in dataclasses.fields(DiffusionGemmaOptions)]
        needed = names[:3]
        known = isinstance(values, dict) and set(needed) <= set(values) <= set(names)
        _require(known, flag, text, f"an object with {', '.join(needed)}; further keys are {', '.join(names[3:])}", legal)
        faulty = [name for name, value in values.items() if not (_is_positive(value) or (name, value) == ("pad_token_id", 0))]
        _require(not faulty, flag, text, "positive numbers for " + ", ".join(faulty), legal)
        return DiffusionGemmaOptions(**values)

    def _check_diffusion_gemma(self) -> None:
        """Its published training is one objective; the mask is part of the model."""
        model = "--bdlm-diffusion-gemma"
        for flag, value, needed in (
            ("--bdlm-clean-attention", self.bdlm_clean_attention, "token-causal"),
            ("--bdlm-noisy-attention", self.bdlm_noisy_attention, "bidirectional"),
            ("--bdlm-corruption", self.bdlm_corruption, "uniform"),
            ("--bdlm-label-shift", self.bdlm_label_shift, "none"),
            ("--bdlm-rope-parameters", self.bdlm_rope_parameters, None),
        ):
            _require(value == needed, flag, value, f"a model with {model} has another", "leave it out" if needed is None else needed)

    def block_size_at(self, iteration: int) -> int:
        """Block size of a training iteration (from 0): a function of the iteration alone, so a resume keeps its place."""
        return [size for first, size in self.block_sizes() if first <= iteration][-1]

    def resolved_strategy(self, context_parallel_size: int) -> tuple[str, int]:
        """The attention strategy and block-parallel size K for P = `context_parallel_size` ranks.

        Raises:
            BDLMConfigError: K does not divide P, the strategy contradicts K, or hybrid without K.
        """
        size = context_parallel_size
        slots = self.block_parallel_size
        if slots is None and self.bdlm_strategy == "hybrid":
            between = next((f"--block-parallel-size {k}" for k in range(2, size) if size % k == 0), "csbp")
            rule = f"it needs a --block-parallel-size, a divisor between 1 and --context-parallel-size {size}"
            _require(False, "--bdlm-strategy", "hybrid", rule, between)
        if slots is None:
            slots = 1 if self.bdlm_strategy == "cp" else size
        _require(
            1 <= slots <= size and size % slots == 0,
            "--block-parallel-size", slots, f"it must divide --context-parallel-size {size}", str(size),
        )
        implied = "csbp" if slots == size else "cp" if slots == 1 else "hybrid"
        strategy = implied if self.bdlm_strategy == "auto" else self.bdlm_strategy
        allowed = {"csbp": slots == size, "bp": slots == size, "cp": slots == 1, "hybrid": True}
        _require(
            allowed[strategy], "--bdlm-strategy", strategy,
            f"--block-parallel-size {slots} of --context-parallel-size {size} means {implied}", implied,
        )
        return strategy, slots


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _require(holds: bool, flag: str, value: object, rule: str, legal: str) -> None:
    if not holds:
        raise BDLMConfigError(f"{flag} {value}: {rule}. A legal value: {legal}")


ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kinds of rotary scaling and the parameters that each needs."""


RECIPES: dict[str, dict[str, Any]] = {
    "bd3lm": dict(bdlm_block_size=16, bdlm_t_min=0.3, bdlm_t_max=0.8),
    "sdar": dict(bdlm_block_size=32, bdlm_noise_level_per="document", bdlm_force_one_corrupted=True),
    "fast-dllm-v2": dict(
        bdlm_block_size=32, bdlm_loss_weight="unit", bdlm_views=2, bdlm_label_shift="next", bdlm_keep_mask_logit=True,
    ),
    "llada2-sft": dict(
        bdlm_block_size=32, bdlm_loss_weight="unit", bdlm_t_min=0.3, bdlm_t_max=0.8,
        bdlm_loss_denominator="masked", bdlm_views=2,
    ),
    "nemotron-joint": dict(
        bdlm_block_size=64, bdlm_clean_attention="token-causal", bdlm_diffusion_loss_weight=0.3, bdlm_clean_loss_weight=1.0,
    ),
    "i-dlm": dict(
        bdlm_block_size=3, bdlm_clean_attention="token-causal", bdlm_noisy_attention="causal", bdlm_loss_weight="unit",
        bdlm_label_shift="next", bdlm_t_min=1.0, bdlm_t_max=1.0, bdlm_clean_loss_weight=0.2,
    ),
    "diffusion-gemma": dict(
        bdlm_clean_attention="token-causal", bdlm_corruption="uniform", bdlm_noise_eps=0.0,
        bdlm_loss_weight="unit", bdlm_loss_denominator="block-mean", bdlm_clean_loss_weight=1.0, bdlm_clean_loss_tokens="all", bdlm_keep_mask_logit=True,
        bdlm_self_conditioning=0.5, bdlm_freeze_router=True,
    ),
}
"""Published recipes as values of `BDLMConfig`; sources and formulas: docs/objectives.md."""


def recipe_values(name: str) -> dict[str, Any]:
    """Field values of a recipe.

    Raises:
        BDLMConfigError: unknown name.
    """
    _require(name in RECIPES, "--bdlm-recipe", name, "known recipes: " + ", ".join(sorted(RECIPES)), next(iter(RECIPES)))
    return {"bdlm_recipe": name, **RECIPES[name]}


def config_from_args(args: Any) -> BDLMConfig:
    """The options of this group out of a parsed argument namespace, validated."""
    config = BDLMConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(BDLMConfig)})
    config.validate()
    return config
