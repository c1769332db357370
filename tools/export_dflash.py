"""A checkpoint of pretrain_dflash.py as a published drafter folder: config.json and model.safetensors.

    export_dflash.py --load CHECKPOINTS --save FOLDER

Names and shapes are those that servers read; layer ids in it count from 0. See docs/drafters.md.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.platform import cpu  # noqa: E402

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

import torch  # noqa: E402

from megatron.bdlm.checkpoint.layout import ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.checkpoint.tracker import is_complete, newest_checkpoint  # noqa: E402
from megatron.bdlm.drafter.folder import write_drafter  # noqa: E402
from megatron.bdlm.drafter.format import DrafterError  # noqa: E402
from megatron.bdlm.drafter.options import options_from_args  # noqa: E402

PREFIX = "drafter."


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="checkpoint folder (--save of the run, or one iter_* in it)")
    parser.add_argument("--save", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    folder = args.load if is_complete(args.load) else newest_checkpoint(str(args.load))
    if folder is None:
        raise DrafterError(f"--load {args.load}: no complete checkpoint in it. A legal value: the --save folder of pretrain_dflash.py")
    checkpoint = CheckpointFolder(Path(folder))
    saved = checkpoint.common_state().get("args")
    if not hasattr(saved, "dflash_target"):
        raise DrafterError(f"--load {folder}: not a drafter's checkpoint. A legal value: the --save folder of pretrain_dflash.py")
    config = options_from_args(saved).config()
    names = [name for name in checkpoint.tensors if name.startswith(PREFIX)]
    tensors = {name.removeprefix(PREFIX): checkpoint.read(name) for name in names}
    write_drafter(args.save, config, tensors, getattr(torch, args.dtype))
    print(f"{config.published()['architectures'][0]}, {len(tensors)} tensors: {args.save}")


if __name__ == "__main__":
    try:
        main()
    except (DrafterError, ConversionError, OSError) as error:
        sys.exit(f"error: {error}")
