"""From the command line to validated options: the engine's flags plus the `bdlm` group.

`parse_arguments` is what an entry script calls first. Combinations that cannot run are refused
here, before a process group exists, with the flags and a legal value.
"""

import argparse
import contextlib
import functools
import io
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal, Optional

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_and_validate_args, parse_args, validate_args
from megatron.training.checkpointing import load_args_from_checkpoint
from megatron.training.global_vars import set_global_variables

from megatron.bdlm.attention.kernels import NAMES as KERNEL_NAMES
from megatron.bdlm.config import BDLMConfig, BDLMConfigError, config_from_args, recipe_values
from megatron.bdlm.data.tokenizers import Vocabulary, resolve_vocabulary, vocabulary_without_mask
from megatron.bdlm.parallel.state import hierarchical_sizes
from megatron.bdlm.platform import cpu
from megatron.bdlm.training.options import checkpoint_arguments, checkpoint_defaults, starting_folder

ENGINE_DEFAULTS = dict(
    calculate_per_token_loss=True,  # without it each rank divides by its own count and the layout changes training
    create_attention_mask_in_dataloader=False,  # an L x L mask nobody reads
    attention_dropout=0.0,
    hidden_dropout=0.0,
    position_embedding_type="rope",
    normalization="RMSNorm",
    eval_interval=1000,  # the engine has none and divides by it, whatever --eval-iters says
    moe_token_dispatcher_type="alltoall",  # the stock one refuses the row counts that vary in a pipeline, in dense models too
)
"""Engine flags (by destination) whose stock defaults do not fit a block diffusion run; a flag given wins."""


BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "none")
"""Kinds of --moe-router-load-balancing-type that do not depend on the layout."""

MOST_TOKENS = 2**31 - 1
"""Of one global batch: the engine adds up what a loss is divided by in an int32."""


@dataclass
class DryRunOptions:
    """What would this run do? Answered on one process, without GPUs; nothing is trained."""

    dry_run: bool = False
    """Check the options, plan every rank, predict memory, bytes and time, print them and exit; exit code 1 for a run that would not start."""

    dry_run_world_size: Optional[int] = None
    """Number of processes of the run that --dry-run asks about; default: WORLD_SIZE, else 1."""

    dry_run_gpu: Literal["a100", "h100", "h200", "b200"] = "h200"
    """Kind of GPU that --dry-run predicts for; LOCAL_WORLD_SIZE says how many a node has (default: its usual node)."""

    dry_run_json: Optional[str] = None
    """File to which --dry-run also writes its report."""


def add_bdlm_arguments(parser: argparse.ArgumentParser, group: type | None = None) -> argparse.ArgumentParser:
    """Add the `bdlm` group, that of an entry script, and our defaults of engine flags; for `extra_args_provider`."""
    ArgumentGroupFactory(BDLMConfig).build_group(parser, "bdlm")
    ArgumentGroupFactory(DryRunOptions).build_group(parser, "dry run")
    if group is not None:
        ArgumentGroupFactory(group).build_group(parser, group.__name__)
    parser.set_defaults(**ENGINE_DEFAULTS)
    if cpu.is_active() and "--dry-run" not in sys.argv:  # which asks about a machine with GPUs
        parser.set_defaults(**cpu.CPU_DEFAULTS)
    # values of the checkpoint and of a recipe become defaults, so that every flag given beside them wins
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--bdlm-recipe", "--load", "--pretrained-checkpoint"):
        first.add_argument(flag)
    first.add_argument("--use-checkpoint-args", action="store_true")
    given = first.parse_known_args(sys.argv[1:])[0]
    saved = checkpoint_arguments(starting_folder(given.load, given.pretrained_checkpoint))
    parser.set_defaults(**checkpoint_defaults(saved, given.use_checkpoint_args))
    if given.bdlm_recipe is not None:
        parser.set_defaults(**recipe_values(given.bdlm_recipe))
    return parser


def parse_arguments(group: type | None = None) -> tuple[Any, BDLMConfig]:
    """Parse and validate the command line; sets the engine's global arguments and tokenizer.

    Args:
        group: a further dataclass whose fields are flags of this entry script.

    Returns:
        The engine's argument namespace and our options, both resolved: mask token, block-parallel
        size and padded vocabulary are filled in.

    Raises:
        BDLMConfigError: a combination that cannot run.
        DataError: a mask token that text could contain, or outside the vocabulary.
    """
    from megatron.training import get_tokenizer

    provider = functools.partial(add_bdlm_arguments, group=group)
    given = parse_args(provider, ignore_unknown_args=True)
    _check_before_engine(given)
    _check_world(given)
    args = _without_writers(provider) if given.dry_run else parse_and_validate_args(extra_args_provider=provider)
    config = config_from_args(args)
    check_combination(args, config)
    _refuse(
        group is not None and max(args.micro_batch_size, args.eval_micro_batch_size or 1) > 1,
        "--micro-batch-size/--eval-micro-batch-size", max(args.micro_batch_size, args.eval_micro_batch_size or 1),
        "conversations differ in their rows and cannot share a micro-batch", "1",
    )
    if group is None and config.bdlm_tail_policy != "ragged":
        raise BDLMConfigError(
            f"--bdlm-tail-policy {config.bdlm_tail_policy}: pretraining samples are full of text, so only fine-tuning has tails "
            "to fill. A legal value: ragged"
        )

    gemma = config.diffusion_gemma()
    if gemma is None:
        vocabulary = resolve_vocabulary(get_tokenizer(), config.bdlm_mask_token_id)
    else:
        vocabulary = vocabulary_without_mask(get_tokenizer(), gemma.vocab_size)
    config.bdlm_mask_token_id = vocabulary.mask_token_id
    args.bdlm_tokenizer_vocab_size = vocabulary.tokenizer_size
    args.bdlm_candidate_tokens = vocabulary.size
    args.padded_vocab_size = _padded_vocab_size(args, vocabulary, given.padded_vocab_size)
    if config.bdlm_noise_seed is None:
        config.bdlm_noise_seed = args.seed
    _, config.block_parallel_size = config.resolved_strategy(args.context_parallel_size)
    config.bdlm_ranks_per_node = ranks_on_node(args, config)
    for name in ("bdlm_mask_token_id", "bdlm_noise_seed", "block_parallel_size", "bdlm_ranks_per_node"):
        setattr(args, name, getattr(config, name))
    args.hierarchical_context_parallel_sizes = hierarchical_sizes(args.context_parallel_size, config.block_parallel_size)
    # rows per rank depend on the sample's documents and targets; the interleaved schedule honours only this
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    return args, config


def ranks_on_node(args: Any, config: BDLMConfig) -> Optional[int]:
    """--bdlm-ranks-per-node where it was left out and tensor-parallel ranks stand between context-parallel ones; None: LOCAL_WORLD_SIZE is right.

    Example: 8 processes a node, TP 2: 4 context-parallel ranks of a group are on a node.
    """
    on_node, tensor_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), args.tensor_model_parallel_size
    if config.bdlm_ranks_per_node is not None or tensor_ranks == 1 or on_node < tensor_ranks:
        return config.bdlm_ranks_per_node
    return math.gcd(on_node // tensor_ranks, args.context_parallel_size)


def _without_writers(provider: Any) -> argparse.Namespace:
    """The engine's `parse_and_validate_args` for a process that writes no log: no TensorBoard folder, no W&B run."""
    args = parse_args(provider)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    validate_args(args)
    args.tensorboard_dir, args.wandb_project, args.enable_one_logger = None, "", False
    set_global_variables(args)
    return args


def arguments_of(flags: list[str]) -> argparse.Namespace:
    """The engine's complete, validated argument namespace for a command line, as a checkpoint holds it.

    Nothing global is set, no tokenizer is built and nothing printed: for tools that write checkpoints. Call it on one process.
    """
    argv, sys.argv = sys.argv, [sys.argv[0], *flags]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse_args(add_bdlm_arguments)
            validate_args(args)
    finally:
        sys.argv = argv
    return args


# flag, the one value that block diffusion honours, why, what to type instead
_ENGINE_RULES = (
    ("--attention-dropout", 0.0, "block diffusion attention has no dropout", "0.0"),
    ("--calculate-per-token-loss", True, "the loss is divided once, by global counts", "set"),
    ("--multi-latent-attention", False, "its core attention is not replaced", "unset"),
    ("--mtp-num-layers", None, "multi-token prediction has no noisy rows", "unset"),
    ("--heterogeneous-layers-config-path", None, "layers must be alike", "unset"),
    ("--experimental-attention-variant", None, "its core attention is not replaced", "unset"),
    ("--softmax-type", "vanilla", "block diffusion attention has no sink", "vanilla"),
    ("--use-mup", False, "the scored rows' logits are not scaled", "unset"),
    ("--hybrid-context-parallel", False, "the sequence plan shares a sample out", "unset"),
    ("--cuda-graph-impl", "none", "rows and rectangles differ from sample to sample, a captured graph would replay the first", "none"),
    ("--sft", False, "the engine's own fine-tuning averages losses per micro-batch; use finetune_bdlm.py", "unset"),
    ("--fp16-lm-cross-entropy", False, "log-likelihoods are computed in float32", "unset"),
    ("--multiple-validation-sets", False, "one validation set is read, the same at every evaluation", "unset"),
    ("--full-validation", False, "the engine needs several validation sets for it; --eval-iters says how much is read", "unset"),
)


# the same where the model has experts
_EXPERT_RULES = (
    ("--moe-expert-capacity-factor", None, "which rows are dropped would depend on the layout", "unset"),
    ("--moe-input-jitter-eps", None, "its noise would depend on the layout", "unset"),
    ("--moe-use-upcycling", False, "it builds its dense model by the engine's own builder", "unset"),
    ("--overlap-moe-expert-parallel-comm", False, "its schedule bypasses the sequence plan", "unset"),
)


def _refuse(when: bool, flag: str, value: object, rule: str, legal: str) -> None:
    if when:
        raise BDLMConfigError(f"{flag} {value}: {rule}. A legal value: {legal}")


def check_combination(args: Any, config: BDLMConfig) -> None:
    """Refuse engine flags that block diffusion cannot honour.

    Raises:
        BDLMConfigError: naming the flag, its value, the rule and a legal value.
    """
    for flag, honoured, rule, legal in _ENGINE_RULES:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        _refuse(value != honoured, flag, value, rule, legal)
    _refuse(
        args.position_embedding_type not in ("rope", "none", "learned_absolute"),
        "--position-embedding-type", args.position_embedding_type, "positions are explicit; this kind takes none", "rope",
    )
    _refuse(
        args.dataloader_type not in ("single", None), "--dataloader-type", args.dataloader_type,
        "noise is keyed by the sample's place in the training order, which only this loader keeps", "single",
    )
    window = args.window_size
    _refuse(
        window is not None and window[0] >= 0 and window[1] != 0, "--window-size", window,
        "a clean row sees LEFT keys before itself; what it sees of its own block is --bdlm-clean-attention's matter",
        f"{window[0] if window else 1023},0",
    )
    _refuse(
        list(args.cp_comm_type) != ["p2p"], "--cp-comm-type", " ".join(args.cp_comm_type),
        "--bdlm-transport says how keys and values travel", "p2p",
    )
    separate = args.reset_position_ids or args.dataloader_inter_document_masking
    largest = max(args.micro_batch_size or 1, args.eval_micro_batch_size or 1)
    _refuse(
        bool(separate) and largest > 1, "--micro-batch-size/--eval-micro-batch-size", largest,
        "samples with separate documents differ in their rows and cannot share a micro-batch", "1",
    )
    _refuse(
        config.bdlm_attention_kernel not in KERNEL_NAMES, "--bdlm-attention-kernel", config.bdlm_attention_kernel,
        f"legal values: {', '.join(KERNEL_NAMES)}", "auto",
    )
    if args.num_experts is not None:
        _check_experts(args)
    _refuse(
        config.bdlm_keep_checkpoints is not None and args.save_retain_interval is not None,
        "--save-retain-interval", args.save_retain_interval,
        "--bdlm-keep-checkpoints deletes by another rule, and the two would delete each other's", "unset",
    )
    _refuse(
        config.bdlm_keep_checkpoints is not None and not args.save, "--bdlm-keep-checkpoints", config.bdlm_keep_checkpoints,
        "without --save there is none to keep", "unset",
    )
    _refuse(
        config.bdlm_self_conditioning > 0.0 and config.bdlm_diffusion_gemma is None, "--bdlm-self-conditioning",
        config.bdlm_self_conditioning, "only a model with --bdlm-diffusion-gemma has it", "0",
    )
    _refuse(
        config.bdlm_self_conditioning > 0.0 and args.pipeline_model_parallel_size > 1, "--bdlm-self-conditioning",
        config.bdlm_self_conditioning, "the first pass ends on the last pipeline stage, and what it predicts is needed on the first", "0",
    )
    if cpu.is_active() and not args.dry_run:  # a dry run asks about another machine
        sharded = args.use_torch_fsdp2 or args.use_megatron_fsdp
        _refuse(bool(sharded), "--use-torch-fsdp2/--use-megatron-fsdp", True, "sharded data parallelism needs CUDA", "--use-distributed-optimizer")
        _refuse(
            args.transformer_impl != "local", "--transformer-impl", args.transformer_impl, "its layers need CUDA to be built", "local",
        )
        _refuse(bool(args.fp8), "--fp8-format", args.fp8, "its products need CUDA and Transformer Engine", "unset")


def _check_experts(args: Any) -> None:
    """Refuse engine flags that a model with experts cannot honour here."""
    for flag, honoured, rule, legal in _EXPERT_RULES:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        _refuse(value != honoured, flag, value, rule, legal)
    given = args.moe_router_load_balancing_type
    for kind in given if isinstance(given, list) else [given]:
        _refuse(
            kind not in BALANCING_TYPES, "--moe-router-load-balancing-type", kind,
            "its statistics depend on how micro-batches are shared out", ", ".join(BALANCING_TYPES),
        )
    _refuse(
        args.moe_token_dispatcher_type == "allgather", "--moe-token-dispatcher-type", "allgather",
        "ranks hold different numbers of rows, and it takes equal ones", "alltoall",
    )
    chosen = args.moe_router_topk
    _refuse(
        not 1 <= chosen <= args.num_experts, "--moe-router-topk", chosen,
        f"a row is sent to 1 to --num-experts {args.num_experts}", str(min(2, args.num_experts)),
    )
    ranks = args.tensor_model_parallel_size
    _refuse(
        ranks > 1 and not args.sequence_parallel, "--tensor-model-parallel-size", ranks,
        "experts need --sequence-parallel beside it, or ranks would route the same rows", "1, or with --sequence-parallel",
    )
    _refuse(
        cpu.is_active() and not args.dry_run and args.moe_grouped_gemm, "--moe-grouped-gemm", True, "its kernels need CUDA", "unset",
    )


def _padded_vocab_size(args: Any, vocabulary: Vocabulary, given: int | None = None) -> int:
    """Embedding rows: those given, else those of the vocabulary, and no fewer than the checkpoint had (--use-checkpoint-args).

    Raises:
        DataError, BDLMConfigError: given rows that lack tokens of the vocabulary, or that tensor-parallel ranks cannot share.
    """
    ranks = args.tensor_model_parallel_size
    rows = vocabulary.padded(args.make_vocab_size_divisible_by, ranks)
    if given is not None:
        vocabulary.check_padded(given)
        _refuse(given % ranks != 0, "--padded-vocab-size", given, f"--tensor-model-parallel-size {ranks} must divide it", str(rows))
        return given
    saved = getattr(args, "padded_vocab_size", None) if args.use_checkpoint_args else None
    if saved is not None and saved > rows:
        multiple = args.make_vocab_size_divisible_by * ranks
        rows = -(-saved // multiple) * multiple
    return rows


def _check_before_engine(args: Any) -> None:
    """Rules whose violation the engine would report without a legal value."""
    ranks, length = args.context_parallel_size, args.seq_length
    if length is not None and ranks > 1 and length % (2 * ranks):
        step = 2 * ranks
        below, above = length // step * step, math.ceil(length / step) * step
        nearest = f"{below} or {above}" if below else str(above)
        raise BDLMConfigError(
            f"--seq-length {length}: it must be a multiple of 2 x --context-parallel-size {ranks} = {step}. "
            f"Nearest legal values: {nearest}"
        )
    config = config_from_args(args)
    on_node = config.bdlm_ranks_per_node
    _refuse(
        on_node is not None and ranks % on_node != 0,
        "--bdlm-ranks-per-node", on_node, f"it must divide --context-parallel-size {ranks}", str(math.gcd(on_node or 1, ranks)),
    )
    data = args.data_path or args.train_data_path or args.data_args_path or args.per_split_data_args_path
    _refuse(
        bool(args.mock_data and data), "--mock-data", f"with {data if isinstance(data, str) else ' '.join(data or [])}",
        "invented data takes no --data-path", "one of the two",
    )
    if length is None:
        return
    tokens, legal = length * (args.global_batch_size or 1), MOST_TOKENS // max(1, length)
    _refuse(
        tokens > MOST_TOKENS, "--global-batch-size", args.global_batch_size,
        f"the engine counts the tokens of a global batch in 32 bits, and {tokens} of --seq-length {length} pass {MOST_TOKENS}", str(legal),
    )
    for _, size in config.block_sizes():
        _check_block_size(size, length, ranks, config)


def _check_block_size(size: int, length: int, ranks: int, config: BDLMConfig) -> None:
    """A block size of the run against the sequence length and the block-parallel ranks."""
    if config.bdlm_block_size_schedule is not None and length % size:
        raise BDLMConfigError(
            f"--bdlm-block-size-schedule {config.bdlm_block_size_schedule}: size {size} must divide --seq-length {length}. "
            f"A legal value: {math.gcd(size, length)}"
        )
    strategy, _ = config.resolved_strategy(ranks)
    blocks = math.ceil(length / size)
    if strategy in ("csbp", "bp") and blocks < ranks:
        raise BDLMConfigError(
            f"--bdlm-block-size {size}: --seq-length {length} has {blocks} blocks for {ranks} block-parallel ranks; "
            f"every rank needs one. A legal value: --bdlm-block-size {length // ranks}, or a --block-parallel-size of at most {blocks}"
        )


def _check_world(args: Any) -> None:
    """The number of processes against the parallel sizes, and what is data parallel against the batch."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    _refuse(
        args.world_size % model != 0, "WORLD_SIZE" if args.dry_run_world_size is None else "--dry-run-world-size", args.world_size,
        f"tensor-, pipeline- and context-parallel sizes {args.tensor_model_parallel_size} x {args.pipeline_model_parallel_size} x {args.context_parallel_size} "
        f"= {model} must divide the number of processes", str(math.ceil(args.world_size / model) * model),
    )
    part = (args.micro_batch_size or 1) * (args.world_size // model)
    batch = args.global_batch_size or part
    _refuse(
        batch % part != 0 and not args.decrease_batch_size_if_needed, "--global-batch-size", batch,
        f"--micro-batch-size {args.micro_batch_size} x {args.world_size // model} data-parallel ranks = {part} must divide it",
        str(math.ceil(batch / part) * part),
    )
