"""From the command line to validated options: the engine's flags plus the `bdlm` group.

`parse_arguments` is what an entry script calls first. Combinations that cannot run are refused
here, before a process group exists, with the flags and a legal value.
"""

import argparse
import contextlib
import functools
import io
import math
import sys
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_and_validate_args, parse_args, validate_args

from megatron.bdlm.config import BDLMConfig, BDLMConfigError, config_from_args, recipe_values
from megatron.bdlm.data.tokenizers import Vocabulary, resolve_vocabulary
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
    moe_token_dispatcher_type="alltoall",  # the stock one refuses the row counts that vary in a pipeline, in dense models too
)
"""Engine flags (by destination) whose stock defaults do not fit a block diffusion run; a flag given wins."""


def add_bdlm_arguments(parser: argparse.ArgumentParser, group: type | None = None) -> argparse.ArgumentParser:
    """Add the `bdlm` group, that of an entry script, and our defaults of engine flags; for `extra_args_provider`."""
    ArgumentGroupFactory(BDLMConfig).build_group(parser, "bdlm")
    if group is not None:
        ArgumentGroupFactory(group).build_group(parser, group.__name__)
    parser.set_defaults(**ENGINE_DEFAULTS)
    if cpu.is_active():
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
    _check_before_engine(parse_args(provider, ignore_unknown_args=True))
    args = parse_and_validate_args(extra_args_provider=provider)
    config = config_from_args(args)
    check_combination(args, config)
    if group is None and config.bdlm_tail_policy != "ragged":
        raise BDLMConfigError(
            f"--bdlm-tail-policy {config.bdlm_tail_policy}: pretraining samples are full of text, so only fine-tuning has tails "
            "to fill. A legal value: ragged"
        )

    vocabulary = resolve_vocabulary(get_tokenizer(), config.bdlm_mask_token_id)
    config.bdlm_mask_token_id = vocabulary.mask_token_id
    args.bdlm_tokenizer_vocab_size = vocabulary.tokenizer_size
    args.bdlm_candidate_tokens = vocabulary.size
    args.padded_vocab_size = _padded_vocab_size(args, vocabulary)
    if config.bdlm_noise_seed is None:
        config.bdlm_noise_seed = args.seed
    _, config.block_parallel_size = config.resolved_strategy(args.context_parallel_size)
    for name in ("bdlm_mask_token_id", "bdlm_noise_seed", "block_parallel_size"):
        setattr(args, name, getattr(config, name))
    args.hierarchical_context_parallel_sizes = hierarchical_sizes(args.context_parallel_size, config.block_parallel_size)
    # rows per rank depend on the sample's documents and targets; the interleaved schedule honours only this
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    return args, config


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


def check_combination(args: Any, config: BDLMConfig) -> None:
    """Refuse engine flags that block diffusion cannot honour.

    Raises:
        BDLMConfigError: naming the flag, its value, the rule and a legal value.
    """
    def refuse(when: bool, flag: str, value: object, rule: str, legal: str) -> None:
        if when:
            raise BDLMConfigError(f"{flag} {value}: {rule}. A legal value: {legal}")

    refuse(args.attention_dropout > 0, "--attention-dropout", args.attention_dropout, "block diffusion attention has no dropout", "0.0")
    refuse(
        args.position_embedding_type not in ("rope", "none", "learned_absolute"),
        "--position-embedding-type", args.position_embedding_type, "positions are explicit; this kind takes none", "rope",
    )
    refuse(not args.calculate_per_token_loss, "--calculate-per-token-loss", False, "the loss is divided once, by global counts", "set")
    refuse(args.multi_latent_attention, "--multi-latent-attention", True, "its core attention is not replaced", "unset")
    refuse(args.mtp_num_layers is not None, "--mtp-num-layers", args.mtp_num_layers, "multi-token prediction has no noisy rows", "unset")
    refuse(args.num_experts is not None, "--num-experts", args.num_experts, "mixture of experts is not supported yet", "unset")
    refuse(
        args.heterogeneous_layers_config_path is not None, "--heterogeneous-layers-config-path",
        args.heterogeneous_layers_config_path, "layers must be alike", "unset",
    )
    refuse(args.sft, "--sft", True, "the engine's own fine-tuning averages losses per micro-batch; use finetune_bdlm.py", "unset")
    refuse(
        args.dataloader_type not in ("single", None), "--dataloader-type", args.dataloader_type,
        "noise is keyed by the sample's place in the training order, which only this loader keeps", "single",
    )
    refuse(args.fp16_lm_cross_entropy, "--fp16-lm-cross-entropy", True, "log-likelihoods are computed in float32", "unset")
    refuse(args.multiple_validation_sets, "--multiple-validation-sets", True, "one validation set is read, the same at every evaluation", "unset")
    if cpu.is_active():
        sharded = args.use_torch_fsdp2 or args.use_megatron_fsdp
        refuse(bool(sharded), "--use-torch-fsdp2/--use-megatron-fsdp", True, "sharded data parallelism needs CUDA", "--use-distributed-optimizer")
        refuse(
            args.transformer_impl != "local", "--transformer-impl", args.transformer_impl, "its layers need CUDA to be built", "local",
        )


def _padded_vocab_size(args: Any, vocabulary: Vocabulary) -> int:
    """Embedding rows: those of the vocabulary, and no fewer than the checkpoint had (--use-checkpoint-args)."""
    rows = vocabulary.padded(args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    saved = getattr(args, "padded_vocab_size", None) if args.use_checkpoint_args else None
    if saved is not None and saved > rows:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
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
    if length is None:
        return
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
