#!/usr/bin/env python3
"""Turn JSON lines, plain text files or folders of them into Megatron's .bin/.idx, with a manifest beside them."""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that no data tool needs

from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.preprocess import PreprocessOptions, preprocess  # noqa: E402
from megatron.bdlm.data.tokenizers import TOKENIZER_TYPES, TokenizerSource  # noqa: E402


def parse_arguments() -> PreprocessOptions:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Example: python tools/preprocess_data.py "
        "--input corpus.jsonl --output-prefix data/corpus --tokenizer-model tokenizer --append-eod",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="JSON lines (.jsonl, .json), text files (one document each), or folders of them",
    )
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin, PREFIX.idx and PREFIX.manifest.json")
    parser.add_argument("--json-key", default="text", help="key of the text in a JSON line (default: %(default)s)")
    parser.add_argument(
        "--append-eod", action="store_true", help="end every document with the tokenizer's end-of-document token"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="worker processes; the output does not depend on it (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    parser.add_argument(
        "--skip-mask-token",
        action="store_true",
        help="leave out documents that contain the mask token, instead of an error",
    )
    group = parser.add_argument_group("tokenizer", "the same flags as in a training run")
    group.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", help=f"{', '.join(TOKENIZER_TYPES)} (default: %(default)s)"
    )
    group.add_argument("--tokenizer-model", default=None, help="a local Hugging Face folder, or the tokenizer's file")
    group.add_argument("--vocab-file", default=None, help="vocabulary file of GPT2BPETokenizer")
    group.add_argument("--merge-file", default=None, help="merges file of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, default=None, help="size for NullTokenizer, whose text is numbers")
    a = parser.parse_args()
    source = TokenizerSource(a.tokenizer_type, a.tokenizer_model, a.vocab_file, a.merge_file, a.vocab_size)
    return PreprocessOptions(
        tuple(a.input), a.output_prefix, source, a.json_key, a.append_eod, a.workers, a.overwrite, a.skip_mask_token
    )


def main() -> None:
    options = parse_arguments()
    manifest = preprocess(options)
    print(f"{options.output_prefix}.bin/.idx: {manifest['documents']} documents, {manifest['tokens']} tokens")
    for key, reason in (
        ("empty_documents_left_out", "without a token"),
        ("mask_token_documents_left_out", "with the mask token"),
    ):
        if manifest[key]:
            print(f"left out: {manifest[key]} documents {reason}", file=sys.stderr)
    print(f"unigram entropy: {manifest['unigram_entropy_nats_per_token']:.4f} nats/token")


if __name__ == "__main__":
    run_tool(main)
