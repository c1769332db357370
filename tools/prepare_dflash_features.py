"""Run a frozen target once over a samples folder and keep the hidden states that a drafter reads.

    prepare_dflash_features.py --target FOLDER --data SAMPLES --draft-layers 5 --output FEATURES

Layer ids count from 0: the feature of layer i is the output of decoder layer i. See docs/drafters.md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm  # noqa: E402

from megatron.bdlm.drafter.data import read_samples, write_features  # noqa: E402
from megatron.bdlm.drafter.format import DrafterError, default_layer_ids  # noqa: E402
from megatron.bdlm.drafter.options import target_config  # noqa: E402
from megatron.bdlm.drafter.target import OnlineFeatures, load_target  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--data", type=Path, required=True, help="samples folder of generate_dflash_data.py")
    layers = parser.add_mutually_exclusive_group(required=True)
    layers.add_argument("--layer-ids", help="target layers, comma-separated, counted from 0")
    layers.add_argument("--draft-layers", type=int, help="draft layers, for the published choice of target layers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type on disk (default: %(default)s)")
    parser.add_argument("--last-hidden", action="store_true", help="keep the last hidden states too, which --dflash-loss kl needs")
    parser.add_argument("--samples-per-file", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="features folder to write")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    import torch

    samples = read_samples(args.data)
    count = target_config(args.target)["num_hidden_layers"]
    layer_ids = tuple(map(int, args.layer_ids.split(","))) if args.layer_ids else default_layer_ids(count, args.draft_layers)
    target = load_target(args.target, device="cuda" if torch.cuda.is_available() else "cpu")
    with tqdm(total=len(samples), desc="samples", mininterval=5) as bar:
        source = OnlineFeatures(target, layer_ids, torch.float32)
        write_features(
            args.output, samples, source, layer_ids, args.dtype, args.last_hidden, str(args.target), args.samples_per_file, bar.update
        )
    print(f"features of layers {list(layer_ids)} of {len(samples)} samples: {args.output}")


if __name__ == "__main__":
    try:
        main()
    except (DrafterError, OSError) as error:
        sys.exit(f"error: {error}")
