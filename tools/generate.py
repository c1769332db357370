#!/usr/bin/env python3
"""Sample continuations block by block from a checkpoint of pretrain_bdlm.py, or from an exported Hugging Face folder.

    python tools/generate.py --load runs/quickstart/checkpoints --prompt "def main(" --max-new-tokens 64
    torchrun --nproc-per-node 2 tools/generate.py --tensor-model-parallel-size 2 --load ... --prompt ...
    python tools/generate.py --hf exported --prompt "def main("      # `transformers` runs the model

Block size, mask token and label shift are read from the checkpoint, or from the folder's config.json.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that sampling does not need

from megatron.bdlm.platform import cpu  # noqa: E402

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

import torch  # noqa: E402

from megatron.bdlm.config import BDLMConfigError  # noqa: E402
from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.data.tokenizers import TokenizerSource, end_of_document_id, load_tokenizer  # noqa: E402
from megatron.bdlm.generation import loading  # noqa: E402
from megatron.bdlm.generation.diffusion_gemma import CanvasOptions, sample_canvases  # noqa: E402
from megatron.bdlm.generation.policy import SamplingOptions  # noqa: E402
from megatron.bdlm.generation.rows import BlockRules  # noqa: E402
from megatron.bdlm.generation.sampler import Model, SamplingStatistics, sample  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", metavar="FOLDER", help="checkpoint folder (--save of the run, or one iter_* in it)")
    source.add_argument("--hf", metavar="FOLDER", type=Path, help="folder of `convert_checkpoint.py export`, run by transformers")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times, sampled as one batch")
    parser.add_argument("--prompt-file", action="append", default=[], type=Path, help="file whose whole text is a prompt; may be given several times")
    parser.add_argument("--tokenizer-model", help="tokenizer folder or file, if it is no longer where the run had it")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)

    group = parser.add_argument_group("sampling", "without --steps, --tokens-per-step and --threshold one token is committed a step")
    group.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    group.add_argument("--steps", type=int, help="denoising steps a block, each with an equal share of its tokens")
    group.add_argument("--tokens-per-step", type=int, help="tokens committed a step, the most confident first")
    group.add_argument("--threshold", type=float, help="commit besides every token whose probability is at least this, for example 0.9")
    group.add_argument("--temperature", type=float, default=0.0, help="0: the most probable token (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="sample from the smallest set of tokens with this probability (default: %(default)s)")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-document token")

    group = parser.add_argument_group("checks", "the checkpoint's values are used; a different one given here is refused")
    group.add_argument("--bdlm-block-size", type=int)
    group.add_argument("--bdlm-mask-token-id", type=int)
    group.add_argument("--bdlm-label-shift", choices=("none", "next"))
    group.add_argument("--bdlm-clean-attention", choices=("block-causal", "token-causal"))
    group.add_argument("--bdlm-noisy-attention", choices=("bidirectional", "causal"))
    args = parser.parse_args()
    if not args.prompt and not args.prompt_file:
        parser.error("--prompt or --prompt-file is needed")
    return args


def report(statistics: SamplingStatistics) -> str:
    return (
        f"{statistics.new_tokens} tokens in {statistics.seconds:.2f} s ({statistics.tokens_per_second:.1f} tokens/s); "
        f"{statistics.tokens_per_forward:.2f} tokens per forward; {statistics.forwards} forwards of the model, "
        f"{statistics.clean_rows} clean and {statistics.noisy_rows} noisy rows"
    )


@dataclass(frozen=True)
class Source:
    """A model to sample from, with its tokenizer."""

    name: str
    model: Model
    rules: BlockRules
    seq_length: Optional[int]  # tokens of a training sample, where it is known
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_token_id: Optional[int]


def from_checkpoint(args: argparse.Namespace, device: torch.device) -> Source:
    """A checkpoint of the engine, on the tensor-parallel ranks."""
    checkpoint = loading.find_checkpoint(args.load)
    saved = loading.saved_arguments(checkpoint)
    rules = loading.block_rules(saved, {name: value for name, value in vars(args).items() if name.startswith("bdlm_")})
    tokenizer = load_tokenizer(
        TokenizerSource(
            saved.tokenizer_type, args.tokenizer_model or saved.tokenizer_model, saved.vocab_file, saved.merge_file, saved.vocab_size
        )
    )
    return Source(
        f"checkpoint {checkpoint}", loading.load_model(checkpoint, saved, args.tensor_model_parallel_size, device), rules,
        saved.seq_length, lambda text: list(map(int, tokenizer.tokenize(text))), tokenizer.detokenize, end_of_document_id(tokenizer),
    )


def from_huggingface(args: argparse.Namespace, device: torch.device) -> Source:
    """An exported folder, on this process."""
    from megatron.bdlm.generation import huggingface

    rules = huggingface.block_rules(args.hf)
    for name in ("block_size", "mask_token_id", "label_shift", "clean_attention", "noisy_attention"):
        wish, own = getattr(args, f"bdlm_{name}"), getattr(rules, name)
        if wish not in (None, own):
            flag = f"--bdlm-{name.replace('_', '-')}"
            raise huggingface.FolderError(f"{flag} {wish}: config.json in {args.hf} says {own}. A legal value: {own}")
    tokenizer = huggingface.load_tokenizer(Path(args.tokenizer_model or args.hf), "--tokenizer-model" if args.tokenizer_model else "--hf")
    return Source(
        f"folder {args.hf}", huggingface.load_model(args.hf, device), rules, None,
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.decode, tokenizer.eos_token_id,
    )


def print_canvases(args: argparse.Namespace, texts: list[str], device: torch.device) -> None:
    """Sample from a DiffusionGemma checkpoint, prompt by prompt (docs/diffusion_gemma.md), and print it."""
    checkpoint = loading.find_checkpoint(args.load)
    saved = loading.saved_arguments(checkpoint)
    for flag, value, default in (("--threshold", args.threshold, None), ("--tokens-per-step", args.tokens_per_step, None), ("--top-p", args.top_p, 1.0), ("--temperature", args.temperature, 0.0)):
        if value != default:
            raise loading.LoadError(f"{flag} {value}: canvases are sampled by generation_config.json. A legal value: {default or 'leave it out'}")
    tokenizer = load_tokenizer(
        TokenizerSource(saved.tokenizer_type, args.tokenizer_model or saved.tokenizer_model, saved.vocab_file, saved.merge_file, saved.vocab_size)
    )
    folder = Path(args.tokenizer_model or saved.tokenizer_model)
    options = CanvasOptions.of_folder(
        folder if folder.is_dir() else None, max_new_tokens=args.max_new_tokens, max_denoising_steps=args.steps,
        eos_token_ids=() if args.ignore_eos else None,
    )
    model = loading.load_model(checkpoint, saved, args.tensor_model_parallel_size, device).model
    torch.manual_seed(args.seed)
    first = torch.distributed.get_rank() == 0
    for number, text in enumerate(texts):
        prompt = list(map(int, tokenizer.tokenize(text)))
        result = sample_canvases(model, [prompt], saved.bdlm_block_size, options, device)
        if first:
            print(f"--- prompt {number}: {len(prompt)} tokens, {int(result.new_tokens)} new, {float(result.tokens_per_forward):.2f} tokens per forward")
            print(tokenizer.detokenize(result.sequences[0].tolist()))
    if first:
        print("---")


def main() -> int:
    args = parse_arguments()
    cpu.adapt_engine(ON_CPU)
    processes = max(args.tensor_model_parallel_size, int(os.environ.get("WORLD_SIZE", "1")))
    if args.hf and processes != 1:
        raise loading.LoadError(
            f"--tensor-model-parallel-size {processes}: with --hf one process runs the model, without torchrun. A legal value: 1"
        )
    texts = [*args.prompt, *(path.read_text(encoding="utf-8") for path in args.prompt_file)]
    device = loading.initialize_processes(args.tensor_model_parallel_size, args.seed)
    if args.load and loading.saved_arguments(loading.find_checkpoint(args.load)).bdlm_diffusion_gemma is not None:
        print_canvases(args, texts, device)
        torch.distributed.destroy_process_group()
        return 0
    source = from_huggingface(args, device) if args.hf else from_checkpoint(args, device)
    ends = source.end_token_id is not None and not args.ignore_eos
    options = SamplingOptions(
        args.max_new_tokens, args.steps, args.tokens_per_step, args.threshold, args.temperature, args.top_p, args.seed,
        eos_token_ids=(source.end_token_id,) if ends else (),
    )
    prompts = [source.encode(text) for text in texts]
    first = torch.distributed.get_rank() == 0
    longest = max(map(len, prompts)) + options.max_new_tokens
    if first and source.seq_length is not None and longest > source.seq_length:
        print(f"note: {longest} tokens in all, but the model was trained on samples of {source.seq_length}", file=sys.stderr)
    result = sample(source.model, prompts, source.rules, options, device=device)
    if first:
        print(f"{source.name}, block size {source.rules.block_size}, label shift {source.rules.label_shift}", file=sys.stderr)
        for number, sequence in enumerate(result.sequences):
            print(f"--- prompt {number}: {len(sequence.prompt)} tokens, {len(sequence.tokens)} new ({sequence.finish})")
            print(source.decode(sequence.shown(options.eos_token_ids)))
        print("---")
        print(report(result.statistics))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (loading.LoadError, BDLMConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
