"""Mean accepted length of a drafter on the held-out samples of a folder, replayed and by a real client.

    evaluate_dflash.py --drafter FOLDER --target FOLDER --data SAMPLES --held-out 8 --client transformers --output result.json

Replaying drafts on the target's known greedy answers; it is what a client with greedy decoding counts. The client checks
that its text equals plain greedy decoding. 1.0 means that nothing drafted was right, the block size is the most.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron.bdlm.drafter.acceptance import no_acceptance, walk  # noqa: E402
from megatron.bdlm.drafter.data import PreparedFeatures, read_samples  # noqa: E402
from megatron.bdlm.drafter.folder import read_drafter, target_tables  # noqa: E402
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError, read_config  # noqa: E402
from megatron.bdlm.drafter.huggingface import assistant_of, assisted, referenced  # noqa: E402
from megatron.bdlm.drafter.model import Drafter  # noqa: E402
from megatron.bdlm.drafter.target import OnlineFeatures, load_target  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, help="published drafter folder")
    parser.add_argument("--untrained", action="store_true", help="its shape with fresh weights: the figure before training")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--data", type=Path, required=True, help="samples folder")
    parser.add_argument("--features", type=Path, help="features folder; without it the target runs")
    parser.add_argument("--held-out", type=int, default=0, help="last samples of the folder; 0: all (default)")
    parser.add_argument("--client", choices=("none", "transformers", "reference"), default="none")
    parser.add_argument("--client-samples", type=int, default=2, help="samples that the client decodes (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def replayed(args: argparse.Namespace, drafter: Drafter, samples, numbers, source) -> dict:
    """Accepted lengths of replayed drafting over the samples."""
    embedding, head = target_tables(args.target)
    total = sum((walk(drafter, samples.sample(int(n)), source, embedding, head) for n in numbers), no_acceptance(drafter.shape.block_size))
    return dict(
        mean_accepted_length=total.mean, verifications=len(total.lengths), samples=len(numbers),
        accepted_by_position=[round(value, 4) for value in total.by_position],
    )


def by_client(args: argparse.Namespace, drafter: Drafter, samples, numbers, target) -> dict:
    """Accepted lengths that a real client counts, and whether its text is plain greedy decoding."""
    assistant = assistant_of(drafter) if args.client == "transformers" else None
    lengths, equal, seconds, tokens = [], 0, 0.0, 0
    for number in numbers[: args.client_samples]:
        sample = samples.sample(int(number))
        supervised = np.flatnonzero(sample.loss_mask)
        prompt, answer = sample.tokens[: supervised[0]].tolist(), sample.tokens[supervised].tolist()
        start = time.perf_counter()
        if assistant is not None:
            out, counted = assisted(target, assistant, prompt, len(answer))
        else:
            out, counted = referenced(target, args.drafter, prompt, len(answer))
        seconds += time.perf_counter() - start
        tokens += len(out)
        lengths += counted
        equal += out == answer
    return dict(
        client=args.client, mean_accepted_length=sum(lengths) / max(len(lengths), 1), verifications=len(lengths),
        accepted_lengths=lengths, samples=min(args.client_samples, len(numbers)), equal_to_greedy=equal,
        tokens_per_second=round(tokens / seconds, 2) if seconds else None,
    )


def main() -> None:
    args = parse_arguments()
    config: DrafterConfig = read_config(args.drafter)
    drafter = Drafter(config).initialise(1234) if args.untrained else read_drafter(args.drafter, torch.float32)
    samples = read_samples(args.data)
    numbers = np.arange(len(samples))[-args.held_out :] if args.held_out else np.arange(len(samples))
    target = None if args.features and args.client == "none" else load_target(args.target, torch.float32)
    if args.features:
        source = PreparedFeatures(args.features, samples, config.target_layer_ids, torch.float32)
    else:
        source = OnlineFeatures(target, config.target_layer_ids, torch.float32)
    result = {"drafter": str(args.drafter), "untrained": args.untrained, "block_size": config.block_size}
    result["replayed"] = replayed(args, drafter, samples, numbers, source)
    if args.client != "none":
        if args.untrained:
            raise DrafterError("--untrained: a client reads the folder's weights. A legal value: --client none")
        result["by_client"] = by_client(args, drafter, samples, numbers, target)
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    try:
        main()
    except (DrafterError, OSError) as error:
        sys.exit(f"error: {error}")
