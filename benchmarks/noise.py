"""Speed of corruption: tokens per second of one core, for one sample of L tokens.

    python benchmarks/noise.py                     # table for L = 262144
    python benchmarks/noise.py --length 65536 --output noise.json

Processor time, the best of `--repeats` calls: the others measure what else the machine did.
"""

import argparse
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

from megatron.bdlm.config import BDLMConfig  # noqa: E402
from megatron.bdlm.data.noise import corrupt  # noqa: E402

MASK, VOCABULARY = 32000, 32000
VARIANTS = {
    "per block, stratified": {},
    "per block, uniform draw": dict(bdlm_noise_draw="uniform"),
    "cosine schedule": dict(bdlm_noise_schedule="cosine"),
    "one forced token a block": dict(bdlm_force_one_corrupted=True),
    "two complementary views": dict(bdlm_views=2, bdlm_loss_weight="unit"),
    "documents, half supervised": {},
    "uniform corruption": dict(bdlm_corruption="uniform", bdlm_loss_weight="unit"),
}


def measure(length: int, block_size: int, variant: str, repeats: int) -> float:
    """Tokens per second."""
    config = BDLMConfig(bdlm_block_size=block_size, bdlm_mask_token_id=MASK, **VARIANTS[variant])
    config.validate()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, length)
    eligible, documents = np.ones(length, dtype=bool), None
    if "documents" in variant:
        eligible[: length // 2] = False
        documents = [1000] * (length // 1000) + [length % 1000]
    best = np.inf
    for index in range(repeats + 1):
        start = time.process_time()
        corrupt(tokens, eligible, config, 1234, index, documents=documents, vocab_size=VOCABULARY)
        if index:  # the first call warms up
            best = min(best, time.process_time() - start)
    return length / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=262144, help="tokens of the sample")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 4, 16, 32, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", help="write the figures to this JSON file as well")
    args = parser.parse_args()
    print(f"million tokens/s of one core, L = {args.length}")
    print(f"{'variant':30s}" + "".join(f"{f'S = {size}':>10s}" for size in args.block_sizes))
    figures = {}
    for variant in VARIANTS:
        rates = [measure(args.length, size, variant, args.repeats) / 1e6 for size in args.block_sizes]
        figures[variant] = dict(zip(args.block_sizes, rates))
        print(f"{variant:30s}" + "".join(f"{rate:10.0f}" for rate in rates), flush=True)
    if args.output:
        with open(args.output, "w") as file:
            json.dump({"length": args.length, "million_tokens_per_second": figures}, file, indent=1)


if __name__ == "__main__":
    main()
