#!/usr/bin/env python3
"""Train a byte-level BPE tokenizer (or make a plain byte tokenizer) and save a folder that Hugging Face loads."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm  # noqa: E402

from megatron.bdlm.data import tokenizer_training as training  # noqa: E402
from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.documents import input_files, iterate_records, record_text  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Example: python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output tokenizer",
    )
    parser.add_argument(
        "--input", nargs="+", default=[], help="JSON lines (.jsonl, .json), text files, or folders of them"
    )
    parser.add_argument("--json-key", default="text", help="key of the text in a JSON line (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="tokens, special tokens included (default: %(default)s)"
    )
    parser.add_argument(
        "--bytes", action="store_true", help="no training: one token a byte, 256 and the special tokens"
    )
    parser.add_argument(
        "--extra-special-tokens", nargs="*", default=[], help="more special tokens, for example of a chat template"
    )
    parser.add_argument(
        "--chat-template", type=Path, default=None, help="file with a Jinja chat template to keep in the folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    arguments = parser.parse_args()
    if not arguments.bytes and not arguments.input:
        parser.error("--input is needed (or --bytes)")
    return arguments


def texts(arguments: argparse.Namespace) -> Iterator[str]:
    files = input_files(arguments.input)
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading") as bar:
        for record in iterate_records(files):
            yield record_text(record, arguments.json_key)
            bar.update(len(record.data))


def main() -> None:
    arguments = parse_arguments()
    if arguments.bytes:
        tokenizer = training.byte_tokenizer(arguments.extra_special_tokens)
    else:
        tokenizer = training.train_byte_pair_encoding(
            texts(arguments), arguments.vocab_size, arguments.extra_special_tokens
        )
    template = arguments.chat_template.read_text(encoding="utf-8") if arguments.chat_template else None
    training.save_tokenizer(tokenizer, arguments.output, template, arguments.overwrite)
    names = ", ".join(f"{token} {tokenizer.token_to_id(token)}" for token in training.SPECIAL_TOKENS)
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens; {names}")


if __name__ == "__main__":
    run_tool(main)
