"""What `tools/convert_checkpoint.py` needs beyond tensors: options, tokenizers, and the two models side by side."""

import argparse
import copy
import dataclasses
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron.bdlm.checkpoint.autoregressive import Conversion, MaskRow
from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.model_options import is_gguf
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder
from megatron.bdlm.config import BDLMConfig, config_from_args, recipe_values
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer, resolve_vocabulary, vocabulary_size
from megatron.bdlm.generation import autoregressive, loading
from megatron.bdlm.training.options import is_block_diffusion

CHOSEN_OPTIONS = (
    "bdlm_recipe",
    "bdlm_block_size",
    "bdlm_block_size_schedule",
    "bdlm_label_shift",
    "bdlm_clean_attention",
    "bdlm_noisy_attention",
    "bdlm_keep_mask_logit",
)
"""Options that `to-bdlm` takes; they stay with the model."""

NEW_TOKEN = "<|mask|>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `to-bdlm` besides --load and --save."""
    parser.add_argument(
        "--mask-token",
        metavar="TEXT",
        help=f"mask token by its text, for example {NEW_TOKEN}; added if the tokenizer lacks it",
    )
    parser.add_argument(
        "--mask-token-id",
        type=int,
        metavar="ID",
        help="mask token by its id: a special token without a role, or one behind the last",
    )
    parser.add_argument(
        "--mask-init",
        metavar="KIND",
        help="mean, mean+noise, copy:ID or keep (default: mean+noise for a new row, keep for an existing one)",
    )
    parser.add_argument("--mask-seed", type=int, default=1234, help="seed of the noise (default: %(default)s)")
    parser.add_argument(
        "--tokenizer-model", type=Path, help="tokenizer folder or file, if it is no longer where the checkpoint says"
    )
    others = [field.name for field in dataclasses.fields(BDLMConfig) if field.name not in CHOSEN_OPTIONS]
    ArgumentGroupFactory(BDLMConfig, exclude=others).build_group(parser, "block diffusion")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--bdlm-recipe")
    recipe = first.parse_known_args(sys.argv[1:])[0].bdlm_recipe
    if recipe is not None:
        parser.set_defaults(**{name: value for name, value in recipe_values(recipe).items() if name in CHOSEN_OPTIONS})


def plan_of(args: argparse.Namespace, checkpoint: Path) -> Conversion:
    """The conversion that `to-bdlm` was asked for.

    Raises:
        ConversionError, DataError: no mask token that no text contains; the checkpoint is a block diffusion model.
    """
    source = CheckpointFolder(checkpoint)
    saved = source.common_state().get("args")
    if saved is None:
        raise ConversionError(
            f"--load {checkpoint}: no arguments in it; it was not written by the engine's training or by import"
        )
    if is_block_diffusion(saved):
        raise ConversionError(
            f"--load {checkpoint}: it is a block diffusion model already (mask token {saved.bdlm_mask_token_id})"
        )
    tokenizer = _tokenizer_source(saved, args.tokenizer_model)
    tokens = vocabulary_size(load_tokenizer(tokenizer))
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        mask_id, after, save = _extended(tokenizer, args.mask_token, args.mask_token_id)
    else:
        mask_id, after, save = _unchanged(tokenizer, args.mask_token, args.mask_token_id)
    options = _options(args, saved, mask_id)
    initial = args.mask_init or ("mean+noise" if mask_id >= tokens else "keep")
    folder = Path(tokenizer.tokenizer_model) if save is not None else None
    return Conversion(source, saved, options, MaskRow(mask_id, initial, args.mask_seed), tokens, after, save, folder)


def _tokenizer_source(saved: Any, model: Optional[Path]) -> TokenizerSource:
    named = str(model) if model is not None else getattr(saved, "tokenizer_model", None)
    return TokenizerSource(saved.tokenizer_type, named, saved.vocab_file, saved.merge_file, saved.vocab_size)


def _options(args: argparse.Namespace, saved: Any, mask_id: int) -> BDLMConfig:
    """Our options: those chosen, the checkpoint's rotary parameters, defaults for what only training needs."""
    chosen = {name: getattr(args, name) for name in CHOSEN_OPTIONS}
    if args.bdlm_recipe is not None:
        chosen = {**recipe_values(args.bdlm_recipe), **chosen}
    rope = getattr(saved, "bdlm_rope_parameters", None)
    options = BDLMConfig(**{**chosen, "bdlm_rope_parameters": rope, "bdlm_mask_token_id": mask_id})
    return config_from_args(options)


def _extended(
    source: TokenizerSource, token: Optional[str], token_id: Optional[int]
) -> tuple[int, int, Callable[[Path], None]]:
    """Mask id, tokens and writer of a Hugging Face tokenizer that has the mask token, added if it lacked it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_model)
    if token_id is not None and token_id < len(tokenizer):
        if token is not None and tokenizer.convert_tokens_to_ids(token) != token_id:
            raise ConversionError(
                f"--mask-token {token} is not the token --mask-token-id {token_id}; give one of the two flags"
            )
        if token_id < 0:
            raise ConversionError(
                f"--mask-token-id {token_id}: ids begin at 0. A legal value: {len(tokenizer)}, one new row"
            )
        token = tokenizer.convert_ids_to_tokens(token_id)
    elif token is None and token_id is not None:
        token = NEW_TOKEN
    if token is not None:
        tokenizer.add_special_tokens({"mask_token": token})
    if tokenizer.mask_token_id is None:
        raise ConversionError(
            f"the tokenizer has no mask token; give --mask-token, for example --mask-token '{NEW_TOKEN}', "
            "or --mask-token-id"
        )
    if token_id is not None and tokenizer.mask_token_id != token_id:
        raise ConversionError(
            f"--mask-token-id {token_id}: outside the vocabulary of {len(tokenizer) - 1} tokens. "
            f"A legal value: {tokenizer.mask_token_id}, one new row behind them"
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        extended = load_tokenizer(dataclasses.replace(source, tokenizer_model=folder))
        vocabulary = resolve_vocabulary(extended, tokenizer.mask_token_id)
        _refuse_ordinary(source, vocabulary.mask_token_id)
    return vocabulary.mask_token_id, vocabulary.tokenizer_size, lambda folder: tokenizer.save_pretrained(str(folder))


def _refuse_ordinary(source: TokenizerSource, mask_id: int) -> None:
    """The original tokenizer must not produce the mask token from text: it is reserved there, or not in it."""
    original = load_tokenizer(source)
    if mask_id < vocabulary_size(original):
        resolve_vocabulary(original, mask_id)


def _unchanged(source: TokenizerSource, token: Optional[str], token_id: Optional[int]) -> tuple[int, int, None]:
    """Mask id and tokens of a tokenizer that cannot be extended: its own mask token, a reserved one, or a new row."""
    if token is not None:
        raise ConversionError(
            f"--mask-token {token}: a {source.tokenizer_type} cannot be extended. A legal value: --mask-token-id"
        )
    vocabulary = resolve_vocabulary(load_tokenizer(source), token_id)
    return vocabulary.mask_token_id, vocabulary.tokenizer_size, None


# ---- the two models side by side -----------------------------------------------------------


@dataclass(frozen=True)
class LogitComparison:
    """One prompt in both models."""

    prompt: str
    tokens: int
    error: float
    """Largest absolute difference of two logits."""
    largest: float
    """Largest absolute logit of the reference."""
    agreement: float
    """Share of positions whose most probable token is the same."""


def verify(source: Path, checkpoint: Path, prompts: Sequence[str]) -> Iterator[LogitComparison]:
    """Logits of prompts in `transformers` and in Megatron, both in float32; one model is in memory at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = dict(pretrained_model_name_or_path=str(source))
    if is_gguf(source):
        named = dict(pretrained_model_name_or_path=str(source.parent), gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(**named)
    ids = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in prompts]
    reference = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [reference(tokens).logits[0] for tokens in ids]
    del reference
    gc.collect()

    device = loading.initialize_processes(1, seed=1)
    saved = copy.copy(CheckpointFolder(checkpoint).common_state()["args"])
    model = autoregressive.load_autoregressive(checkpoint, saved, torch.float32, device)
    for prompt, tokens, expected in zip(prompts, ids, wanted):
        found = autoregressive.next_token_logits(model, tokens.to(device))[0].cpu()
        yield compare_logits(prompt, found, expected)
    torch.distributed.destroy_process_group()


def compare_logits(prompt: str, found: torch.Tensor, expected: torch.Tensor) -> LogitComparison:
    """Compare logits [L, padded vocabulary] with those of the reference [L, vocabulary]."""
    found = found[:, : expected.size(1)]
    return LogitComparison(
        prompt,
        expected.size(0),
        float((found - expected).abs().max()),
        float(expected.abs().max()),
        float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
    )
