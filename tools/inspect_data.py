#!/usr/bin/env python3
"""Look at .bin/.idx data: statistics, one sample with its noise and blocks, a histogram PNG.

Every flag of the training group `bdlm` is taken, so that the noise shown is the noise of a run with the same flags.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that no data tool needs

from megatron.bdlm.platform import cpu  # noqa: E402

cpu.enable()  # before the engine's argument factory is imported; nothing where CUDA is available

from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402

from megatron.bdlm.config import BDLMConfig, config_from_args, recipe_values  # noqa: E402
from megatron.bdlm.data import inspection  # noqa: E402
from megatron.bdlm.data.command import run_tool  # noqa: E402
from megatron.bdlm.data.tokenizers import (  # noqa: E402
    TOKENIZER_TYPES,
    TokenizerSource,
    load_tokenizer,
    resolve_vocabulary,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python tools/inspect_data.py data/corpus --tokenizer-model tokenizer --bdlm-block-size 16",
    )
    parser.add_argument("prefix", help="data prefix, without .bin or .idx")
    parser.add_argument(
        "--sample", type=int, default=0, help="sample of the training order to show; -1: none (default: %(default)s)"
    )
    parser.add_argument("--seq-length", type=int, default=256, help="clean tokens of a sample (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the order and the noise (default: %(default)s)")
    parser.add_argument("--separate-documents", action="store_true", help="blocks restart at every document")
    parser.add_argument(
        "--plot", type=Path, default=None, help="write histograms of document lengths and noise levels to this PNG"
    )
    parser.add_argument(
        "--no-color", action="store_true", help="mark corrupted tokens by brackets (also when stdout is no terminal)"
    )
    group = parser.add_argument_group("tokenizer", "needed to show a sample")
    group.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", help=f"{', '.join(TOKENIZER_TYPES)} (default: %(default)s)"
    )
    group.add_argument("--tokenizer-model", default=None, help="a local Hugging Face folder, or the tokenizer's file")
    group.add_argument("--vocab-file", default=None, help="vocabulary file of GPT2BPETokenizer")
    group.add_argument("--merge-file", default=None, help="merges file of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, default=None, help="size for NullTokenizer")
    ArgumentGroupFactory(BDLMConfig).build_group(parser, "bdlm")
    recipe = parser.parse_args().bdlm_recipe
    if recipe is not None:
        parser.set_defaults(**recipe_values(recipe))
    return parser.parse_args()


def show_statistics(prefix: str) -> None:
    found = inspection.statistics(prefix, progress=True)
    lengths = ", ".join(f"{name} {length}" for name, length in found.length_quantiles.items())
    print(
        f"{prefix}: {found.documents} documents, {found.tokens} tokens ({found.dtype}), {found.distinct} distinct ids"
    )
    print(f"document lengths: {lengths}")
    print(f"unigram entropy: {found.entropy:.4f} nats/token")
    print("most frequent ids: " + ", ".join(f"{token} {share:.2%}" for token, share in found.frequent))


def show_sample(a: argparse.Namespace, config: BDLMConfig) -> None:
    tokenizer = load_tokenizer(
        TokenizerSource(a.tokenizer_type, a.tokenizer_model, a.vocab_file, a.merge_file, a.vocab_size)
    )
    vocabulary = resolve_vocabulary(tokenizer, config.bdlm_mask_token_id)
    config.bdlm_mask_token_id = vocabulary.mask_token_id
    sample = inspection.training_sample(a.prefix, tokenizer, a.sample, a.seq_length, a.seed, a.separate_documents)
    noised = inspection.noised_sample(sample, config, config.bdlm_noise_seed, vocabulary.size)
    colour = sys.stdout.isatty() and not a.no_color and "NO_COLOR" not in os.environ
    for view in range(len(noised.xt)):
        share = noised.corrupted[view].mean()
        print(
            f"sample {a.sample}, view {view}: {len(noised.block_starts)} blocks, {share:.1%} of {a.seq_length} tokens "
            "corrupted; |t| starts a block"
        )
        print(inspection.render(sample, noised, inspection.decoder(tokenizer), view, colour))


def main() -> None:
    a = parse_arguments()
    config = config_from_args(a)
    if config.bdlm_noise_seed is None:
        config.bdlm_noise_seed = a.seed
    show_statistics(a.prefix)
    if a.sample >= 0 and (a.tokenizer_model or a.vocab_file or a.vocab_size):
        show_sample(a, config)
    if a.plot is not None:
        samples = range(max(1, min(200, 20_000 // max(1, a.seq_length // config.bdlm_block_size))))
        inspection.plot(
            a.prefix, a.plot, inspection.block_levels(samples, a.seq_length, config, config.bdlm_noise_seed)
        )
        print(f"wrote {a.plot}")


if __name__ == "__main__":
    run_tool(main)
