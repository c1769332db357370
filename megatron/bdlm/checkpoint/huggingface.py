"""Hugging Face models to checkpoints of the engine, and back.

    import   safetensors folder or GGUF file -> SAVE/release (torch_dist), SAVE/tokenizer, tracker
    export   checkpoint                      -> safetensors, config.json, tokenizer, chat template, generation config

Both go layer by layer: what is in memory is one layer, or one of the embeddings. Names, shapes and options are in
`architectures.py`, the order of rows in `layout.py`. SAVE/tokenizer holds the source's config.json and generation
config beside the tokenizer files, so that an export of a trained checkpoint finds the fields that the engine does not
keep.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch

from megatron.bdlm.checkpoint.architectures import Architecture, Part, Rule, architecture_of, architecture_of_arguments
from megatron.bdlm.checkpoint.folders import new_folder
from megatron.bdlm.checkpoint.gguf_file import GGUFFile, open_gguf
from megatron.bdlm.checkpoint.layout import LAYOUTS, ConversionError, Sizes
from megatron.bdlm.checkpoint.model_options import (
    config_of,
    flags_of,
    is_gguf,
    padded,
    read_config,
    rotary_base,
    sizes_of,
)
from megatron.bdlm.checkpoint.safetensors_folder import (
    NewTensor,
    SafetensorsFolder,
    TensorInfo,
    TensorSource,
    write_folder,
)
from megatron.bdlm.checkpoint.torch_dist import (
    CheckpointFolder,
    Piece,
    extra_states,
    layer_piece,
    whole_piece,
    write_checkpoint,
)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files of a Hugging Face folder that go with the tokenizer."""

EXTRA_STATE_MODULES = tuple(
    f"decoder.layers.{name}"
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
)
EXPERT_STATE_MODULES = tuple(f"decoder.layers.mlp.experts.experts.linear_fc{number}" for number in (1, 2))
"""Modules whose (empty) extra state a run may ask for: linear layers always, norms and attention with Transformer
Engine."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Source:
    """A Hugging Face model to read."""

    path: Path
    config: Any
    architecture: Architecture
    tensors: TensorSource


def open_source(path: Path) -> Source:
    """A folder with safetensors files, or a GGUF file.

    Raises:
        ConversionError: nothing that can be read, or an unknown architecture.
    """
    if not path.exists():
        raise ConversionError(f"{path}: no such folder or file")
    file = open_gguf(path) if is_gguf(path) else None
    config = read_config(path)
    architecture = architecture_of(config.model_type)
    if file is not None:
        tensors: TensorSource = GGUFFile(file, config.num_attention_heads, config.num_key_value_heads)
    else:
        tensors = SafetensorsFolder(path)
    return Source(path, config, architecture, tensors)


# ---- which tensors -------------------------------------------------------------------------


def applied_rules(architecture: Architecture, sizes: Sizes, tied: bool) -> Iterator[tuple[Optional[int], list[Rule]]]:
    """(layer, its rules) in the order of the model: embedding, layers, final norm and output layer (layer None)."""
    outer = [rule for rule in architecture.rules if not rule.in_layer and not (rule.untied_only and tied)]
    inner = [rule for rule in architecture.rules if rule.in_layer]
    yield None, outer[:1]
    for layer in range(sizes.layers):
        yield layer, inner
    for rule in outer[1:]:
        yield None, [rule]


def parts_of(rule: Rule, layer: Optional[int], sizes: Sizes) -> list[Part]:
    """Parts of a rule with the numbers of layer and expert in their names."""
    experts = range(sizes.experts) if rule.experts else [None]
    return [Part(part.name.format(layer=layer, expert=expert), part.shape) for expert in experts for part in rule.parts]


def expected_tensors(architecture: Architecture, sizes: Sizes, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors of a model, by name."""
    return {
        part.name: tuple(map(sizes.of, part.shape))
        for layer, rules in applied_rules(architecture, sizes, tied)
        for rule in rules
        for part in parts_of(rule, layer, sizes)
    }


def check_tensors(
    found: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[int, ...]], where: str, ignored: Sequence[str] = ()
) -> None:
    """Compare names and shapes.

    Args:
        ignored: ends of names that may be there too.

    Raises:
        ConversionError: listing every tensor that is missing, not known, or of another shape.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and not name.endswith(tuple(ignored) or ("\0",))]
    shapes = [
        f"{name} {found[name].shape} instead of {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    faults = [("missing", missing), ("not known", extra), ("of another shape", shapes)]
    told = "; ".join(f"tensors {fault}: {', '.join(names)}" for fault, names in faults if names)
    if told:
        raise ConversionError(f"{where}: {told}")


# ---- import --------------------------------------------------------------------------------


def import_model(
    source: Source,
    save: Path,
    arguments_of: Callable[[list[str]], Any],
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    progress: Optional[Callable[[int], Progress]] = None,
) -> list[str]:
    """Write a checkpoint folder `save` that holds the model, its tokenizer and its configuration.

    Args:
        arguments_of: the engine's validated arguments for a list of flags (`training.arguments.arguments_of`).
        dtype: type of the stored tensors; None: as they are in the source.
        progress: given the number of tensors, returns what is called with the number written.

    Returns:
        names of the tensors that make the model; a source may hold others (a tied head, buffers of old files).

    Raises:
        ConversionError: tensors missing, unknown or of another shape; options that are not supported; `save` is taken.
    """
    config, architecture = source.config, source.architecture
    tied = bool(config.tie_word_embeddings)
    types = {dtype} if dtype else {info.dtype for info in source.tensors.tensors.values()}
    model_dtype = next(iter(types)) if len(types) == 1 else source.tensors.tensors["model.embed_tokens.weight"].dtype
    tokenizer = Path(save).resolve() / "tokenizer"
    args = arguments_of([*flags_of(config, architecture), *run_flags(model_dtype, tokenizer)])
    args.rotary_base = rotary_base(config)
    args.padded_vocab_size = padded(config.vocab_size)
    args.bdlm_candidate_tokens = args.bdlm_tokenizer_vocab_size = config.vocab_size
    sizes = sizes_of(args, config.vocab_size, args.padded_vocab_size)

    wanted = expected_tensors(architecture, sizes, tied)
    ignored = architecture.ignored
    if tied and "lm_head.weight" in source.tensors.tensors:
        _check_tied_head(source)
        ignored = (*ignored, "lm_head.weight")
    check_tensors(source.tensors.tensors, wanted, str(source.path), ignored)

    groups = [
        [_import_piece(rule, layer, source.tensors, sizes, dtype) for rule in rules]
        for layer, rules in applied_rules(architecture, sizes, tied)
    ]
    with new_folder(save, overwrite) as folder:
        done = progress(sum(map(len, groups))) if progress else None
        write_checkpoint(folder, groups, empty_extra_states(sizes), common_state(args), done)
        save_tokenizer(source, folder / "tokenizer")
    return list(wanted)


def run_flags(dtype: torch.dtype, tokenizer: Path) -> list[str]:
    precision = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}.get(dtype, [])
    return [
        *precision,
        "--micro-batch-size",
        "1",
        "--ckpt-format",
        "torch_dist",
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(tokenizer),
    ]


def common_state(args: Any) -> dict[str, Any]:
    """What the engine stores beside the tensors, for a checkpoint that no iteration wrote."""
    args.iteration = args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


def empty_extra_states(sizes: Sizes) -> dict[str, Any]:
    """Entries that the engine asks for beside the tensors of a model."""
    states = extra_states(EXTRA_STATE_MODULES, sizes.layers) | extra_states(("decoder.final_layernorm",), 1)
    return states | (extra_states(EXPERT_STATE_MODULES, sizes.layers, sizes.experts) if sizes.experts else {})


def _import_piece(
    rule: Rule, layer: Optional[int], tensors: TensorSource, sizes: Sizes, dtype: Optional[torch.dtype]
) -> Piece:
    parts = parts_of(rule, layer, sizes)
    stored = dtype or tensors.tensors[parts[0].name].dtype

    def make() -> torch.Tensor:
        return LAYOUTS[rule.layout].join([tensors.read(part.name).to(stored) for part in parts], sizes)

    info = TensorInfo(_joined_shape(rule, parts, sizes), stored)
    return (
        whole_piece(rule.target, info, make)
        if layer is None
        else layer_piece(rule.target, layer, sizes.layers, info, make)
    )


def _joined_shape(rule: Rule, parts: Sequence[Part], sizes: Sizes) -> tuple[int, ...]:
    """Shape of a joined tensor, found on tensors without data."""
    empty = [torch.empty(tuple(map(sizes.of, part.shape)), device="meta") for part in parts]
    return tuple(LAYOUTS[rule.layout].join(empty, sizes).shape)


def _check_tied_head(source: Source) -> None:
    head, embedding = (source.tensors.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not torch.equal(head, embedding):
        raise ConversionError(
            f"{source.path}: tie_word_embeddings is true, but lm_head.weight differs from "
            "model.embed_tokens.weight; one of them would be lost"
        )


def save_tokenizer(source: Source, folder: Path) -> None:
    """Tokenizer files, chat template, generation config and config.json of a source."""
    folder.mkdir()
    if is_gguf(source.path):
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source.path.parent), gguf_file=source.path.name).save_pretrained(str(folder))
    else:
        copy_tokenizer(source.path, folder)
    (folder / "config.json").write_text(
        json.dumps(source.config.to_dict(), indent=2, sort_keys=True, default=str) + "\n"
    )


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer that are there."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


# ---- export --------------------------------------------------------------------------------


def export_model(
    checkpoint: CheckpointFolder,
    save: Path,
    tokenizer: Optional[Path] = None,
    dtype: Optional[torch.dtype] = None,
    overwrite: bool = False,
    shard_bytes: int = 5 * 10**9,
    progress: Optional[Callable[[int], Progress]] = None,
) -> dict[str, Any]:
    """Write a Hugging Face folder that `transformers` loads; returns its config.json.

    Args:
        tokenizer: folder with tokenizer files and the config.json that the model once had; None: the checkpoint's.
        dtype, overwrite, progress: as for `import_model`.

    Raises:
        ConversionError: tensors missing, unknown or of another shape; no architecture fits; `save` is taken.
    """
    args = checkpoint.common_state()["args"]
    tokenizer = tokenizer or tokenizer_of(args)
    base = None
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        base = json.loads((tokenizer / "config.json").read_text())
    architecture = architecture_of_arguments(args, (base or {}).get("model_type"))
    tied = not args.untie_embeddings_and_output_weights
    stored_rows = _tensor(checkpoint, "embedding.word_embeddings.weight").shape[0]
    sizes = sizes_of(args, _exported_rows(args, base, stored_rows), stored_rows)
    check_tensors(model_tensors(checkpoint), _checkpoint_tensors(architecture, sizes, tied), str(checkpoint.folder))

    embedding_dtype = dtype or checkpoint.tensors["embedding.word_embeddings.weight"].dtype
    config = config_of(args, architecture, sizes, embedding_dtype, base)
    groups, made_by = [], {}
    for layer, rules in applied_rules(architecture, sizes, tied):
        for rule in rules:
            stored = dtype or checkpoint.tensors[rule.target].dtype
            group = [
                NewTensor(p.name, TensorInfo(tuple(map(sizes.of, p.shape)), stored))
                for p in parts_of(rule, layer, sizes)
            ]
            groups.append(group)
            made_by[group[0].name] = (rule, layer, stored)

    def make(group: Sequence[NewTensor]) -> dict[str, torch.Tensor]:
        rule, layer, stored = made_by[group[0].name]
        tensor = checkpoint.read(rule.target) if layer is None else checkpoint.read_layer(rule.target, layer)
        return dict(
            zip((new.name for new in group), (part.to(stored) for part in LAYOUTS[rule.layout].split(tensor, sizes)))
        )

    with new_folder(save, overwrite) as folder:
        write_folder(folder, groups, make, shard_bytes, progress(sum(map(len, groups))) if progress else None)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return config


def tokenizer_of(args: Any) -> Optional[Path]:
    """The tokenizer folder that a checkpoint names, if it is there."""
    named = getattr(args, "tokenizer_model", None)
    return Path(named) if named and Path(named).is_dir() else None


def _exported_rows(args: Any, base: Optional[Mapping[str, Any]], stored: int) -> int:
    """Embedding rows to export: those that the model came with, and those of tokens added since; no padding."""
    known = [(base or {}).get("vocab_size"), getattr(args, "bdlm_candidate_tokens", None)]
    rows = max((count for count in known if count), default=stored)
    return min(rows, stored)


def model_tensors(checkpoint: CheckpointFolder) -> dict[str, TensorInfo]:
    """Tensors of the model, without those of the optimizer."""
    return {name: info for name, info in checkpoint.tensors.items() if not name.startswith("optimizer.")}


def _tensor(checkpoint: CheckpointFolder, name: str) -> TensorInfo:
    if name not in checkpoint.tensors:
        raise ConversionError(f"{checkpoint.folder}: tensors missing: {name}")
    return checkpoint.tensors[name]


def _checkpoint_tensors(architecture: Architecture, sizes: Sizes, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the engine's tensors of a model, by name."""
    return {
        rule.target: (
            *(() if layer is None else (sizes.layers,)),
            *_joined_shape(rule, parts_of(rule, layer, sizes), sizes),
        )
        for layer, rules in applied_rules(architecture, sizes, tied)
        for rule in rules
    }
