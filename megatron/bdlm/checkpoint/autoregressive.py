"""Autoregressive checkpoint to block diffusion checkpoint: a row for the mask token, and what the model is.

Everything but the embedding (and the output layer, if it is not tied) is copied, layer by layer. The mask token is an
existing row of the vocabulary or a new one behind it; padding rows follow as the engine wants them. Options such as
block size and label shift go into the checkpoint's arguments: later runs read them there and refuse others.

A new row must look like a token: a row near zero, or a copy of the last one, makes gradients explode at the start.

    mean         the mean e of all token rows
    mean+noise   e + s * N(0, 1), s the standard deviation of each column: a row with a token's norm
    copy:ID      the row of token ID
    keep         the row that is there (an existing row only)

Shapes: v token rows, h hidden size.
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import torch

from megatron.bdlm.checkpoint.folders import new_folder
from megatron.bdlm.checkpoint.huggingface import Progress, common_state, copy_tokenizer, empty_extra_states
from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.model_options import padded, sizes_of
from megatron.bdlm.checkpoint.safetensors_folder import TensorInfo
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder, Piece, layer_piece, whole_piece, write_checkpoint
from megatron.bdlm.config import BDLMConfig

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

NORM_RATIO = (0.5, 2.0)
"""A mask row whose norm is outside these multiples of the mean norm is told."""

INITIAL_ROWS = ("mean", "mean+noise", "copy:ID", "keep")


@dataclass(frozen=True)
class MaskRow:
    """The mask token's row and how it begins."""

    token_id: int
    initial: str  # one of INITIAL_ROWS, with the number of a token for ID
    seed: int = 1234

    def copied_token(self) -> Optional[int]:
        """ID of `copy:ID`, None for the other kinds.

        Raises:
            ConversionError: no known kind.
        """
        if self.initial in ("mean", "mean+noise", "keep"):
            return None
        kind, _, token = self.initial.partition(":")
        if kind != "copy" or not token.isdecimal():
            raise ConversionError(
                f"--mask-init {self.initial}: known are {', '.join(INITIAL_ROWS)}, for example copy:17"
            )
        return int(token)


@dataclass(frozen=True)
class Conversion:
    """What is converted, and into what."""

    checkpoint: CheckpointFolder
    args: Any  # arguments of the autoregressive checkpoint
    options: BDLMConfig  # options of the block diffusion model
    mask: MaskRow
    tokens: int
    """Tokens of the autoregressive model: rows that the mean is taken over."""
    tokenizer_tokens: int
    """Tokens of the tokenizer afterwards."""
    save_tokenizer: Optional[Callable[[Path], None]] = None
    tokenizer_source: Optional[Path] = None
    """Folder whose other files (generation config, config.json) go with the tokenizer."""

    @property
    def candidate_tokens(self) -> int:
        """Rows that may be a token: the tokenizer's, and the mask token's."""
        return max(self.tokenizer_tokens, self.mask.token_id + 1)


def convert(
    conversion: Conversion, save: Path, overwrite: bool = False, progress: Optional[Callable[[int], Progress]] = None
) -> list[str]:
    """Write the block diffusion checkpoint.

    Returns:
        lines to be shown: the rows that were made, and warnings about them.

    Raises:
        ConversionError: no such row, or `save` is taken.
    """
    report: list[str] = []
    checkpoint, rows = conversion.checkpoint, _rows(conversion)
    names = [name for name in checkpoint.tensors if not name.startswith("optimizer.")]
    layers = conversion.args.num_layers
    stacked = [
        name for name in names if name.startswith("decoder.layers.") and checkpoint.tensors[name].shape[0] == layers
    ]
    whole = [name for name in names if name not in stacked]
    groups = [[_whole(conversion, name, rows, report)] for name in whole]
    groups += [[_layer(checkpoint, name, layer, layers) for name in stacked] for layer in range(layers)]
    sizes = sizes_of(conversion.args, conversion.candidate_tokens, rows)
    with new_folder(save, overwrite) as folder:
        args = _arguments(conversion, rows, Path(save).resolve() / "tokenizer")
        done = progress(sum(map(len, groups))) if progress else None
        write_checkpoint(folder, groups, empty_extra_states(sizes), common_state(args), done)
        if conversion.save_tokenizer is not None:
            _write_tokenizer(conversion, folder / "tokenizer")
    return report


def _rows(conversion: Conversion) -> int:
    """Embedding rows afterwards: none fewer than before, enough for the mask token, a multiple as the engine wants."""
    stored = conversion.checkpoint.tensors.get(EMBEDDING)
    if stored is None:
        raise ConversionError(f"{conversion.checkpoint.folder}: tensors missing: {EMBEDDING}")
    mask, copied = conversion.mask, conversion.mask.copied_token()
    if mask.initial == "keep" and mask.token_id >= conversion.tokens:
        raise ConversionError(f"--mask-init keep: token {mask.token_id} has no row yet. A legal value: mean+noise")
    if copied is not None and not 0 <= copied < conversion.tokens:
        raise ConversionError(f"--mask-init copy:{copied}: the vocabulary has tokens 0 to {conversion.tokens - 1}")
    multiple = getattr(conversion.args, "make_vocab_size_divisible_by", 128)
    return max(stored.shape[0], padded(conversion.candidate_tokens, multiple))


def _whole(conversion: Conversion, name: str, rows: int, report: list[str]) -> Piece:
    info = conversion.checkpoint.tensors[name]
    if name not in (EMBEDDING, OUTPUT):
        return whole_piece(name, info, lambda: conversion.checkpoint.read(name))

    def make() -> torch.Tensor:
        stored = conversion.checkpoint.read(name)
        table = torch.cat([stored, stored.new_zeros(rows - stored.size(0), stored.size(1))])
        report.extend(f"{name}: {line}" for line in set_mask_row(table, conversion.mask, conversion.tokens))
        return table

    return whole_piece(name, TensorInfo((rows, info.shape[1]), info.dtype), make)


def _layer(checkpoint: CheckpointFolder, name: str, layer: int, layers: int) -> Piece:
    info = checkpoint.tensors[name]
    return layer_piece(
        name, layer, layers, TensorInfo(info.shape[1:], info.dtype), lambda: checkpoint.read_layer(name, layer)
    )


def set_mask_row(table: torch.Tensor, mask: MaskRow, tokens: int) -> list[str]:
    """Fill the mask token's row of `table` [rows, h] in place; `tokens` rows of it are tokens.

    Returns:
        a line about the row, and a warning if its norm is far from the mean norm of tokens.
    """
    row_norms, mean, deviation = _statistics(table, tokens, mask.token_id)
    copied = mask.copied_token()
    if mask.initial == "mean":
        table[mask.token_id] = mean
    elif mask.initial == "mean+noise":
        noise = torch.randn(mean.numel(), generator=torch.Generator().manual_seed(mask.seed), dtype=torch.float64)
        table[mask.token_id] = mean + deviation * noise
    elif copied is not None:
        table[mask.token_id] = table[copied]
    norm, typical = float(table[mask.token_id].double().norm()), float(row_norms.mean())
    lines = [
        f"row {mask.token_id} ({mask.initial}): norm {norm:.4f}, mean norm of {len(row_norms)} tokens {typical:.4f}"
    ]
    ratio = norm / typical if typical else float("inf")
    if not NORM_RATIO[0] <= ratio <= NORM_RATIO[1]:
        lines.append(
            f"warning: the mask row's norm is {ratio:.2f} times the tokens' mean norm; "
            "--mask-init mean+noise gives about 1"
        )
    return lines


def _statistics(
    table: torch.Tensor, tokens: int, left_out: int, rows: int = 4096
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms of token rows [v], their mean [h] and standard deviation by column [h], in float64 a slice at a time."""
    total = squares = torch.zeros(table.size(1), dtype=torch.float64)
    norms = []
    for start in range(0, tokens, rows):
        index = torch.arange(start, min(start + rows, tokens))
        part = table[index[index != left_out]].double()
        total, squares = total + part.sum(0), squares + (part * part).sum(0)
        norms.append(part.norm(dim=1))
    row_norms = torch.cat(norms)
    mean = total / len(row_norms)
    return row_norms, mean, (squares / len(row_norms) - mean * mean).clamp(min=0).sqrt()


def _arguments(conversion: Conversion, rows: int, tokenizer: Path) -> Any:
    """Arguments of the new checkpoint: the old ones, our options, and no trace of the old run's place in its data."""
    args = copy.copy(conversion.args)
    for option in dataclasses.fields(BDLMConfig):
        setattr(args, option.name, getattr(conversion.options, option.name))
    args.bdlm_mask_token_id = conversion.mask.token_id
    args.bdlm_candidate_tokens = conversion.candidate_tokens
    args.bdlm_tokenizer_vocab_size = conversion.tokenizer_tokens
    args.padded_vocab_size = rows
    args.load = args.save = args.pretrained_checkpoint = None
    if conversion.save_tokenizer is not None:
        args.tokenizer_model = str(tokenizer)
    return args


def _write_tokenizer(conversion: Conversion, folder: Path) -> None:
    folder.mkdir()
    source = conversion.tokenizer_source
    if source is not None:
        copy_tokenizer(source, folder)
        if (source / "config.json").is_file():
            (folder / "config.json").write_text((source / "config.json").read_text())
    conversion.save_tokenizer(folder)


def bdlm_options(saved: Any, chosen: BDLMConfig, names: Sequence[str]) -> BDLMConfig:
    """`chosen`, with options outside `names` as the checkpoint has them (rotary parameters, for example)."""
    kept = {
        field.name: getattr(saved, field.name)
        for field in dataclasses.fields(BDLMConfig)
        if field.name not in names and getattr(saved, field.name, None) is not None
    }
    return dataclasses.replace(chosen, **kept)
