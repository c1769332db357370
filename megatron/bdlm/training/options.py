"""The resolved options of a run: printed at start, written beside the checkpoint, checked on resume.

A checkpoint holds every argument of the run that wrote it (the engine saves them). The options
that define what a model *is* - block size, mask token, label shift, attention of the clean
stream, which tensors it has - must not change silently when it is loaded: the checkpoint's value
is the default, and another one given by a flag is refused.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Optional

from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.data.noise import VALIDATION_T_RANGE

MODEL_OPTIONS = (
    "bdlm_block_size",
    "bdlm_mask_token_id",
    "bdlm_label_shift",
    "bdlm_clean_attention",
    "bdlm_noisy_attention",
    "bdlm_keep_mask_logit",
    "bdlm_rope_parameters",
    "bdlm_diffusion_gemma",
)
"""Options that belong to the model; a checkpoint's value wins over a default and refuses another flag value."""

TENSOR_OPTIONS = (
    "qk_layernorm", "add_qkv_bias", "add_bias_linear", "swiglu", "normalization", "untie_embeddings_and_output_weights",
    "num_experts", "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_enable_expert_bias",
)
"""Engine options that decide which tensors a model has; the engine ignores tensors that the model lacks."""

NUMERIC_OPTIONS = (
    "layernorm_epsilon", "rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
    "use_rope_scaling", "window_size", "window_attn_skip_freq", "position_embedding_type", "moe_router_load_balancing_type", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk",
)
"""Engine options that change what the same tensors compute; a change may be meant (longer samples), so it is told."""

FILE_NAME = "bdlm_options.json"


def resolved_options(args: Any) -> dict[str, Any]:
    """Every argument of the run as plain JSON values, sorted by name."""
    return {name: _plain(value) for name, value in sorted(vars(args).items())}


def print_options(config: BDLMConfig) -> None:
    """Print the block diffusion options, one a line, as Megatron prints its arguments."""
    print("------------------------ block diffusion options ------------------------", flush=True)
    for field in dataclasses.fields(config):
        name = field.name
        print(f"  {name} {'.' * (48 - len(name))} {getattr(config, name)}", flush=True)
    bound = "NELBO" if config.bdlm_corruption == "absorbing" else "cross entropy of all supervised tokens"
    print(f"  validation: {bound} of one view under fixed noise, t in [{VALIDATION_T_RANGE[0]}, {VALIDATION_T_RANGE[1]}]", flush=True)
    print("-------------------------------------------------------------------------", flush=True)


def write_options(args: Any, folder: Optional[str]) -> None:
    """Write the resolved options to `folder`/bdlm_options.json; whole or not at all."""
    if not folder:
        return
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(resolved_options(args), indent=1) + "\n")
    os.replace(temporary, path)


def check_start(args: Any, config: BDLMConfig) -> list[str]:
    """Check the options against the checkpoint that the run starts from.

    Returns:
        lines about options of the model that differ.

    Raises:
        BDLMConfigError: options that contradict the checkpoint.
    """
    source = starting_folder(args.load, args.pretrained_checkpoint)
    saved = checkpoint_arguments(source)
    if saved is None:
        return []
    check_against_checkpoint(config, saved, source, resuming=source == args.load and not args.finetune)
    return check_engine_options(args, saved, source)


def starting_folder(load: Optional[str], pretrained: Optional[str]) -> Optional[str]:
    """The folder that a run starts from: --load where it holds a checkpoint, else --pretrained-checkpoint."""
    from megatron.bdlm.checkpoint.tracker import newest_checkpoint

    return next((folder for folder in (load, pretrained) if newest_checkpoint(folder) is not None), None)


def checkpoint_defaults(saved: Optional[Any], use_checkpoint_args: bool) -> dict[str, Any]:
    """Options whose default is the checkpoint's value.

    Args:
        saved: the checkpoint's arguments, or None.
        use_checkpoint_args: the engine's flag, which takes the model's shape from the checkpoint, but not all of it.
    """
    if saved is None:
        return {}
    names = MODEL_OPTIONS if is_block_diffusion(saved) else ()
    if use_checkpoint_args:
        names += TENSOR_OPTIONS + NUMERIC_OPTIONS
    return {name: getattr(saved, name) for name in names if hasattr(saved, name)}


def is_block_diffusion(saved: Any) -> bool:
    """Whether a checkpoint's arguments are those of a block diffusion model, not of an autoregressive one."""
    return getattr(saved, "bdlm_mask_token_id", None) is not None


def checkpoint_arguments(load: Optional[str]) -> Optional[Any]:
    """The argument namespace inside the newest complete checkpoint of folder `load`, or None if there is none."""
    from megatron.core import dist_checkpointing

    from megatron.bdlm.checkpoint.tracker import newest_checkpoint

    folder = newest_checkpoint(load)
    if folder is None:
        return None
    return dist_checkpointing.load_common_state_dict(str(folder)).get("args")


def check_against_checkpoint(config: BDLMConfig, saved: Any, load: str, resuming: bool = False) -> None:
    """Refuse a run whose model options differ from those of the checkpoint that it loads.

    Args:
        resuming: the run goes on where the checkpoint stopped, so its block-size schedule must be the same too.

    Raises:
        BDLMConfigError: naming the flag and both values; or an autoregressive checkpoint.
    """
    if not is_block_diffusion(saved):
        raise BDLMConfigError(
            f"--load {load}: it holds an autoregressive model, which has no mask token. "
            "Convert it first: tools/convert_checkpoint.py to-bdlm"
        )
    for name in MODEL_OPTIONS:
        if not hasattr(saved, name):
            continue
        ours, theirs = getattr(config, name), getattr(saved, name)
        if ours != theirs:
            flag = "--" + name.replace("_", "-")
            raise BDLMConfigError(
                f"{flag} {ours}: the checkpoint in {load} was written with {theirs}; a model keeps this option. "
                f"A legal value: {theirs}"
            )


    theirs = getattr(saved, "bdlm_block_size_schedule", None)
    if resuming and config.bdlm_block_size_schedule != theirs:
        raise BDLMConfigError(
            f"--bdlm-block-size-schedule {config.bdlm_block_size_schedule}: the checkpoint in {load} was written with {theirs}, and "
            f"a resumed run keeps its place in it. A legal value: {theirs or 'leave it out'}, or --finetune for a new run"
        )


def check_engine_options(args: Any, saved: Any, load: str) -> list[str]:
    """Refuse engine options under which tensors of the checkpoint would be left out or missed.

    Returns:
        lines about other options of the model that differ.

    Raises:
        BDLMConfigError: naming the option and both values.
    """
    def differing(names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
        values = [(name, getattr(args, name), getattr(saved, name)) for name in names if hasattr(saved, name)]
        return [(name, ours, theirs) for name, ours, theirs in values if _comparable(ours) != _comparable(theirs)]

    for name, ours, theirs in differing(TENSOR_OPTIONS):
        raise BDLMConfigError(
            f"{name} {ours}: the checkpoint in {load} was written with {theirs}, so it has other tensors. "
            f"A legal value: {theirs} (or --use-checkpoint-args)"
        )
    return [
        f"warning: {name} is {ours}, the checkpoint in {load} was written with {theirs}"
        for name, ours, theirs in differing(NUMERIC_OPTIONS)
    ]


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)
