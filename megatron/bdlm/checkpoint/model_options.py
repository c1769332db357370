"""Options of a model in the two worlds: `config.json` of Hugging Face, and the engine's flags and arguments.

Import: `flags_of(config)` is the command line of a run with that model; parsed, it is what the checkpoint holds.
Export: `config_of(args)` is the reverse, over the values of the config that the model once came from (fields that
the engine does not know, such as token ids).
"""

import json
from pathlib import Path
from typing import Any, Mapping, Optional

import torch

from megatron.bdlm.checkpoint.architectures import BASE_FLAGS, Architecture
from megatron.bdlm.checkpoint.layout import ConversionError, Sizes
from megatron.bdlm.config import ROPE_PARAMETERS

VOCAB_MULTIPLE = 128
"""Embedding rows of an imported checkpoint are a multiple of this (the engine's --make-vocab-size-divisible-by)."""

BDLM_KEYS = {
    "block_size": "bdlm_block_size",
    "mask_token_id": "bdlm_mask_token_id",
    "label_shift": "bdlm_label_shift",
    "clean_attention": "bdlm_clean_attention",
    "noisy_attention": "bdlm_noisy_attention",
    "keep_mask_logit": "bdlm_keep_mask_logit",
    "candidate_tokens": "bdlm_candidate_tokens",
    "corruption": "bdlm_corruption",
}
"""Keys that an exported config.json has for a block diffusion model, and the arguments that they come from."""

ENGINE_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
"""What the engine's --use-rope-scaling means."""


def is_gguf(source: Path) -> bool:
    """Whether a path is a GGUF file by its name."""
    return source.suffix.lower() == ".gguf"


def read_config(source: Path) -> Any:
    """The `transformers` configuration of a folder or GGUF file; old spellings are brought up to date by it.

    Raises:
        ConversionError: there is none, or the weights are quantised.
    """
    from transformers import AutoConfig

    if is_gguf(source):
        return AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    if not (source / "config.json").is_file():
        raise ConversionError(f"{source}: no config.json in it")
    config = AutoConfig.from_pretrained(str(source))
    if getattr(config, "quantization_config", None) is not None:
        raise ConversionError(f"{source}: its weights are quantised (quantization_config); convert the original ones")
    return config


def padded(rows: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Rows rounded up to a multiple: 49153 rows are 49280."""
    return -(-rows // multiple) * multiple


def flags_of(config: Any, architecture: Architecture) -> list[str]:
    """The engine's flags for a model.

    Raises:
        ConversionError: an option whose value the engine's model does not have, or a rotary kind that is not supported.
    """
    wrong = [
        f"{key} {getattr(config, key)!r} (it must be {value!r})"
        for key, value in architecture.required.items()
        if getattr(config, key, value) != value
    ]
    if wrong:
        raise ConversionError(
            f"{architecture.model_type}: options of config.json that are not supported: {', '.join(wrong)}"
        )
    flags = [*BASE_FLAGS, *architecture.flags]
    for option in architecture.options:
        flags += [option.flag, str(_value(config, option.key))]
    flags += ["--seq-length", str(config.max_position_embeddings), "--init-method-std", str(config.initializer_range)]
    if not config.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    flags += ["--make-vocab-size-divisible-by", str(VOCAB_MULTIPLE)]
    return flags + _rotary_flags(config) + _window_flags(config, architecture)


def _value(config: Any, key: str) -> Any:
    value = getattr(config, key, None)
    if key == "head_dim" and value is None:
        value = config.hidden_size // config.num_attention_heads
    if value is None:
        raise ConversionError(f"{config.model_type}: config.json has no {key}")
    return value


def rotary_base(config: Any) -> float:
    """The base of the rotary frequencies (rope_theta)."""
    return config.rope_parameters["rope_theta"]


def _rotary_flags(config: Any) -> list[str]:
    parameters = dict(config.rope_parameters)
    kind = parameters.get("rope_type", "default")
    percent = parameters.pop("partial_rotary_factor", None) or 1.0
    # the flag takes whole numbers; the importer puts the exact base into the arguments
    flags = ["--rotary-base", str(int(parameters.pop("rope_theta"))), "--rotary-percent", str(percent)]
    if kind == "default":
        return flags
    if kind not in ROPE_PARAMETERS:
        raise ConversionError(f"rope_type {kind}: not supported; supported are default, {', '.join(ROPE_PARAMETERS)}")
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if kind == "yarn" and "factor" not in parameters:
        parameters["factor"] = config.max_position_embeddings / parameters["original_max_position_embeddings"]
    return [*flags, "--bdlm-rope-parameters", json.dumps(parameters, sort_keys=True)]


def _window_flags(config: Any, architecture: Architecture) -> list[str]:
    """Sliding window W of a config: a row sees W keys including itself, which the engine writes (W-1, 0)."""
    width = getattr(config, "sliding_window", None)
    layers = None
    if architecture.window == "layer types":
        layers = [int(kind == "sliding_attention") for kind in config.layer_types]
        width = width if any(layers) else None
    if architecture.window == "none" or width is None:
        return []
    flags = ["--window-size", f"{width - 1},0"]
    return flags if layers is None or all(layers) else [*flags, "--window-attn-skip-freq", str(layers).replace(" ", "")]


def sizes_of(args: Any, vocab: int, padded_vocab: int) -> Sizes:
    """Sizes of a model out of the engine's arguments.

    Args:
        vocab: embedding rows of the Hugging Face side.
        padded_vocab: embedding rows of the checkpoint.
    """
    heads = args.num_attention_heads
    return Sizes(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=heads,
        groups=args.num_query_groups if getattr(args, "group_query_attention", False) else heads,
        head=getattr(args, "kv_channels", None) or args.hidden_size // heads,
        vocab=vocab,
        padded_vocab=padded_vocab,
        experts=getattr(args, "num_experts", None) or 0,
        expert_ffn=getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size,
    )


def config_of(
    args: Any, architecture: Architecture, sizes: Sizes, dtype: torch.dtype, base: Optional[Mapping[str, Any]] = None
) -> dict[str, Any]:
    """Content of config.json for a checkpoint's arguments, over the values of `base`."""
    config = {
        key: value
        for key, value in (base or {}).items()
        if key not in ("dtype", "torch_dtype", "rope_theta", "rope_scaling")
    }
    for option in architecture.options:
        value = getattr(args, option.attribute, None)
        if value is not None:
            config[option.key] = value
    config |= dict(
        model_type=architecture.model_type,
        architectures=[architecture.causal_lm],
        dtype=str(dtype).removeprefix("torch."),
        hidden_act="silu",
        vocab_size=sizes.vocab,
        num_key_value_heads=sizes.groups,
        head_dim=sizes.head,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        rope_parameters=_rope_parameters(args),
    )
    if sizes.head == sizes.hidden // sizes.heads and (base or {}).get("head_dim") is None:
        del config["head_dim"]  # what every family takes it to be
    config |= _window_of(args, architecture)
    if getattr(args, "bdlm_mask_token_id", None) is not None:
        config |= {key: getattr(args, attribute) for key, attribute in BDLM_KEYS.items()}
    return config


def _rope_parameters(args: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default"}
    if getattr(args, "bdlm_rope_parameters", None):
        parameters = json.loads(args.bdlm_rope_parameters)
    elif getattr(args, "use_rope_scaling", False):
        parameters = dict(ENGINE_LLAMA3)
    elif getattr(args, "rotary_seq_len_interpolation_factor", None):
        parameters = {"rope_type": "linear", "factor": float(args.rotary_seq_len_interpolation_factor)}
    if args.rotary_percent != 1.0:
        parameters["partial_rotary_factor"] = args.rotary_percent
    return {"rope_theta": float(args.rotary_base), **parameters}


def _window_of(args: Any, architecture: Architecture) -> dict[str, Any]:
    if architecture.window == "none":
        return {}
    window = getattr(args, "window_size", None)
    width = None if window is None or window[0] < 0 else window[0] + 1
    if architecture.window == "every layer":
        return {"sliding_window": width}
    if width is None:
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * args.num_layers}
    skip = getattr(args, "window_attn_skip_freq", None)
    chosen = (
        skip
        if isinstance(skip, list)
        else [skip is None or number % skip != 0 for number in range(1, args.num_layers + 1)]
    )
    kinds = ["sliding_attention" if slides else "full_attention" for slides in chosen]
    return {"use_sliding_window": True, "sliding_window": width, "layer_types": kinds}
