#!/usr/bin/env python3
"""Check .bin/.idx data before a run: truncation, checksums, tokenizer identity, ids in range, mask token nowhere.

Exit code 0: no fault; 1: faults, listed on stderr; 2: an option cannot be used.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that no data tool needs

from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.tokenizers import TOKENIZER_TYPES, TokenizerSource  # noqa: E402
from megatron.bdlm.data.verification import verify_prefix  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="+", help="data prefixes, without .bin or .idx")
    parser.add_argument("--no-checksums", action="store_true", help="do not compare SHA-256 with the manifest")
    parser.add_argument(
        "--bdlm-mask-token-id", type=int, default=None, help="the run's mask token; default: as in a run"
    )
    group = parser.add_argument_group(
        "tokenizer", "of the run that shall read the data; default: the one in the manifest"
    )
    group.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", help=f"{', '.join(TOKENIZER_TYPES)} (default: %(default)s)"
    )
    group.add_argument("--tokenizer-model", default=None, help="a local Hugging Face folder, or the tokenizer's file")
    group.add_argument("--vocab-file", default=None, help="vocabulary file of GPT2BPETokenizer")
    group.add_argument("--merge-file", default=None, help="merges file of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, default=None, help="size for NullTokenizer")
    return parser.parse_args()


def main() -> int:
    a = parse_arguments()
    given = a.tokenizer_model or a.vocab_file or a.vocab_size
    source = (
        TokenizerSource(a.tokenizer_type, a.tokenizer_model, a.vocab_file, a.merge_file, a.vocab_size)
        if given
        else None
    )
    faults = 0
    for prefix in a.prefix:
        findings = verify_prefix(prefix, source, a.bdlm_mask_token_id, checksums=not a.no_checksums, progress=True)
        for finding in findings:
            print(f"{'fault' if finding.fault else 'note'}: {finding.message}", file=sys.stderr)
        found = sum(finding.fault for finding in findings)
        faults += found
        print(f"{prefix}: {f'{found} faults' if found else 'no fault'}")
    return 1 if faults else 0


if __name__ == "__main__":
    run_tool(main)
