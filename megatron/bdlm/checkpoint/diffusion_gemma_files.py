"""DiffusionGemma from a Hugging Face folder to a checkpoint of the engine, and back; names and options: diffusion_gemma.py.

Tensors go one by one. Those that are no part of the trained model (the vision tower) are kept in SAVE/tokenizer beside
config.json, and put back by an export.
"""

import json
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

from megatron.bdlm.checkpoint import diffusion_gemma as mapping
from megatron.bdlm.checkpoint.folders import new_folder
from megatron.bdlm.checkpoint.huggingface import (
    Progress,
    check_tensors,
    common_state,
    copy_tokenizer,
    model_tensors,
    run_flags,
    tokenizer_of,
)
from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.model_options import VOCAB_MULTIPLE, padded, read_config, sizes_of
from megatron.bdlm.checkpoint.safetensors_folder import NewTensor, SafetensorsFolder, TensorInfo, write_folder
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder, extra_states, whole_piece, write_checkpoint

UNTRAINED = "untrained.safetensors"
"""File beside the tokenizer with the tensors that training never reads."""

UNTRAINED_NAMES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


def is_folder(source: Path) -> bool:
    """Whether a Hugging Face folder holds this model."""
    path = source / "config.json"
    return path.is_file() and json.loads(path.read_text()).get("model_type") == mapping.MODEL_TYPE


def is_checkpoint(checkpoint: CheckpointFolder) -> bool:
    """Whether a checkpoint of the engine holds this model."""
    return mapping.options_of(checkpoint.common_state().get("args")) is not None


def import_model(
    source: Path,
    save: Path,
    arguments_of: Callable[[list[str]], Any],
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    progress: Optional[Callable[[int], Progress]] = None,
) -> list[str]:
    """Write a checkpoint folder `save`; arguments and errors as `huggingface.import_model`.

    Returns:
        names of the tensors that make the model.
    """
    config, found = read_config(source), SafetensorsFolder(source)
    stored = dtype or found.tensors[mapping.DECODER + "embed_tokens.weight"].dtype
    tokenizer = Path(save).resolve() / "tokenizer"
    args = arguments_of([*mapping.flags_of(config, VOCAB_MULTIPLE), *run_flags(stored, tokenizer)])
    args.rotary_base = config.text_config.rope_parameters["sliding_attention"]["rope_theta"]
    options = mapping.options_of(args)
    args.padded_vocab_size = padded(options.vocab_size)
    args.bdlm_candidate_tokens = args.bdlm_tokenizer_vocab_size = options.vocab_size
    args.bdlm_mask_token_id = -1  # there is none
    wanted = _tensors(args)
    untrained = [name for name in found.tensors if name.startswith(UNTRAINED_NAMES)]
    shapes = {part.name: shape for each in wanted for part, shape in zip(each.parts, each.part_shapes)}
    check_tensors(found.tensors, shapes, str(source), (*untrained, "lm_head.weight"))

    def piece(each: mapping.Tensor):
        def make() -> torch.Tensor:
            return each.join({part.name: found.read(part.name).to(stored) for part in each.parts})

        return whole_piece(each.target, TensorInfo(each.shape, stored), make)

    with new_folder(save, overwrite) as folder:
        done = progress(len(wanted)) if progress else None
        write_checkpoint(folder, [[piece(each)] for each in wanted], _extra_states(args), common_state(args), done)
        (folder / "tokenizer").mkdir()
        copy_tokenizer(source, folder / "tokenizer")
        (folder / "tokenizer" / "config.json").write_text((source / "config.json").read_text())
        if untrained:
            from safetensors.torch import save_file

            save_file({name: found.read(name) for name in untrained}, str(folder / "tokenizer" / UNTRAINED))
    return list(shapes)


def export_model(
    checkpoint: CheckpointFolder,
    save: Path,
    tokenizer: Optional[Path] = None,
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    shard_bytes: int = 5 * 10**9,
    progress: Optional[Callable[[int], Progress]] = None,
) -> dict[str, Any]:
    """Write a Hugging Face folder; arguments, result and errors as `huggingface.export_model`."""
    args = checkpoint.common_state()["args"]
    tokenizer = tokenizer or tokenizer_of(args)
    base, kept = _beside_tokenizer(tokenizer)
    wanted = _tensors(args)
    check_tensors(model_tensors(checkpoint), {each.target: each.shape for each in wanted}, str(checkpoint.folder))
    stored = dtype or checkpoint.tensors["embedding.word_embeddings.weight"].dtype
    config = mapping.config_of(args, stored, base)

    groups = [
        [NewTensor(part.name, TensorInfo(shape, stored)) for part, shape in zip(each.parts, each.part_shapes)] for each in wanted
    ]
    groups += [[NewTensor(name, TensorInfo(tuple(tensor.shape), stored))] for name, tensor in kept.items()]
    by_name = {each.parts[0].name: each for each in wanted}

    def make(group: Sequence[NewTensor]) -> dict[str, torch.Tensor]:
        first = group[0].name
        parts = {first: kept[first]} if first in kept else by_name[first].split(checkpoint.read(by_name[first].target))
        return {name: part.to(stored) for name, part in parts.items()}

    with new_folder(save, overwrite) as folder:
        write_folder(folder, groups, make, shard_bytes, progress(sum(map(len, groups))) if progress else None)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return config | {"vocab_size": mapping.options_of(args).vocab_size}


def _tensors(args: Any) -> list[mapping.Tensor]:
    options = mapping.options_of(args)
    sizes = sizes_of(args, options.vocab_size, args.padded_vocab_size)
    return list(mapping.tensors(sizes, mapping.full_sizes(sizes, options), mapping.full_layers(args)))


def _extra_states(args: Any) -> dict[str, Any]:
    """Entries that the engine asks for beside the tensors."""
    states = extra_states(("self_conditioning.mlp.linear_fc1", "self_conditioning.mlp.linear_fc2"), 1)
    for layer in range(args.num_layers):
        states |= extra_states([f"decoder.layers.{layer}.{name}" for name in mapping.EXTRA_STATE_MODULES], 1)
        experts = [f"decoder.layers.{layer}.mlp.experts.experts.linear_fc{number}" for number in (1, 2)]
        states |= extra_states(experts, args.num_experts)
    return states


def _beside_tokenizer(tokenizer: Optional[Path]) -> tuple[Optional[Mapping[str, Any]], dict[str, torch.Tensor]]:
    """config.json and the tensors kept at import.

    Raises:
        ConversionError: no config.json, without which the vision part of the model is not known.
    """
    if tokenizer is None or not (tokenizer / "config.json").is_file():
        raise ConversionError(f"--tokenizer {tokenizer}: a folder with the config.json that the model came with is needed")
    kept: dict[str, torch.Tensor] = {}
    if (tokenizer / UNTRAINED).is_file():
        from safetensors.torch import load_file

        kept = load_file(str(tokenizer / UNTRAINED))
    return json.loads((tokenizer / "config.json").read_text()), kept
