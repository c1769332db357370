"""Samples for drafter training: prompts, each with the target's own greedy answer, which alone is supervised.

    generate_dflash_data.py --target FOLDER --prompts prompts.jsonl --new-tokens 64 --output SAMPLES

A line of the prompts is {"prompt": "text"} or {"messages": [..]}, which goes through the tokenizer's chat template. A
sample is one prompt and its answer, padded to the longest. See docs/drafters.md.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from megatron.bdlm.drafter.data import write_samples  # noqa: E402
from megatron.bdlm.drafter.format import DrafterError  # noqa: E402
from megatron.bdlm.drafter.target import greedy_answers, load_target  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target, with its tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl of prompts")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of an answer at most (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="prompts of one length that run together (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type to compute in (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="samples folder to write")
    return parser.parse_args()


def prompt_ids(line: str, tokenizer) -> list[int]:
    """Token ids of one line of the prompts."""
    record = json.loads(line)
    if "messages" in record:
        return tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=False)
    return tokenizer(record["prompt"])["input_ids"]


def main() -> None:
    args = parse_arguments()
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target, local_files_only=True)
    prompts = [prompt_ids(line, tokenizer) for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    target = load_target(args.target, getattr(torch, args.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    answers = greedy_answers(target, prompts, args.new_tokens, args.batch)
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    length += -length % 2  # the engine wants an even sequence
    tokens, documents = np.zeros((len(prompts), length), np.int32), np.full((len(prompts), length), -1, np.int32)
    supervised = np.zeros((len(prompts), length), bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        stop = len(prompt) + len(answer)
        tokens[row, :stop], documents[row, :stop] = [*prompt, *answer], 0
        supervised[row, len(prompt) : stop] = True
    write_samples(args.output, tokens, supervised, documents, dict(target=str(args.target), new_tokens=args.new_tokens))
    print(f"{len(prompts)} samples of {length} tokens, {int(supervised.sum())} supervised: {args.output}")


if __name__ == "__main__":
    try:
        main()
    except (DrafterError, OSError) as error:
        sys.exit(f"error: {error}")
