"""Convert checkpoints: Hugging Face to Megatron and back, autoregressive to block diffusion.

    convert_checkpoint.py import    --source HF_FOLDER_OR_GGUF --save FOLDER
    convert_checkpoint.py to-bdlm   --load FOLDER --save FOLDER --mask-token "<|mask|>" --bdlm-recipe fast-dllm-v2
    convert_checkpoint.py export    --load FOLDER --save HF_FOLDER
    convert_checkpoint.py roundtrip --source HF_FOLDER_OR_GGUF
    convert_checkpoint.py verify    --source HF_FOLDER_OR_GGUF --load FOLDER --prompt TEXT

A checkpoint folder serves any tensor-, pipeline- and context-parallel size. Nothing here needs a GPU.
See docs/conversion.md.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that conversion does not need

from megatron.bdlm.platform import cpu  # noqa: E402

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron.bdlm.checkpoint import autoregressive, comparison, diffusion_gemma_files, folders, huggingface  # noqa: E402
from megatron.bdlm.checkpoint.layout import ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.safetensors_folder import SafetensorsFolder  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.checkpoint.tracker import is_complete, newest_checkpoint  # noqa: E402
from megatron.bdlm.config import BDLMConfigError  # noqa: E402
from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.training import arguments, conversion  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PROMPTS = (
    "The capital of France is",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str, *, source=False, load=False, save=False, dtype=False) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        if source:
            added.add_argument(
                "--source", required=True, type=Path, help="Hugging Face folder (safetensors) or GGUF file"
            )
        if load:
            added.add_argument(
                "--load", required=True, type=Path, help="checkpoint folder (--save of a run, or one iter_* in it)"
            )
        if save:
            added.add_argument(
                "--save", required=True, type=Path, help="folder to be written; it appears whole or not at all"
            )
            added.add_argument("--overwrite", action="store_true", help="replace a folder that this tool wrote")
        if dtype:
            added.add_argument(
                "--dtype", choices=sorted(DTYPES), help="type of the written tensors (default: as they are)"
            )
        return added

    verb(
        "import",
        "Hugging Face folder or GGUF file -> Megatron checkpoint (torch_dist)",
        source=True,
        save=True,
        dtype=True,
    )
    conversion.add_arguments(
        verb("to-bdlm", "autoregressive checkpoint -> block diffusion checkpoint", load=True, save=True)
    )
    export = verb("export", "Megatron checkpoint -> Hugging Face folder", load=True, save=True, dtype=True)
    export.add_argument(
        "--tokenizer", type=Path, help="Hugging Face folder with tokenizer and config.json (default: the checkpoint's)"
    )
    export.add_argument(
        "--shard-gb", type=float, default=5.0, help="largest size of a safetensors file (default: %(default)s)"
    )
    roundtrip = verb("roundtrip", "import, export, compare every tensor bit by bit", source=True)
    roundtrip.add_argument("--work", type=Path, help="folder for the intermediate results (default: a temporary one)")
    verify = verb("verify", "logits of the same prompts in transformers and in Megatron", source=True, load=True)
    verify.add_argument("--prompt", action="append", help="may be given several times (default: five built in)")
    verify.add_argument(
        "--tolerance", type=float, default=2e-4, help="largest absolute difference in float32 (default: %(default)s)"
    )
    return parser.parse_args()


def bar(text: str):
    """A progress bar of tensors, as the conversions ask for it."""

    def start(total: int):
        progress = tqdm(total=total, desc=text, unit="tensor", mininterval=0.5)

        def done(count: int) -> None:
            progress.update(count)
            if progress.n >= total:
                progress.close()

        return done

    return start


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint that a folder stands for: itself, or the newest complete one in it."""
    found = folder if is_complete(folder) else newest_checkpoint(str(folder))
    if found is None:
        raise ConversionError(f"--load {folder}: no complete torch_dist checkpoint in it")
    return found


def import_model(args: argparse.Namespace) -> int:
    folders.check_target(args.save, args.overwrite)
    if diffusion_gemma_files.is_folder(args.source):
        names = diffusion_gemma_files.import_model(
            args.source, args.save, arguments.arguments_of, DTYPES.get(args.dtype), args.overwrite, bar("import")
        )
        print(f"diffusion_gemma, {len(names)} tensors -> {args.save}; those of the vision tower are kept beside the tokenizer")
        return 0
    source = huggingface.open_source(args.source)
    huggingface.import_model(
        source, args.save, arguments.arguments_of, DTYPES.get(args.dtype), args.overwrite, bar("import")
    )
    print(f"{source.architecture.model_type}, {len(source.tensors.tensors)} tensors -> {args.save}")
    return 0


def to_bdlm(args: argparse.Namespace) -> int:
    folders.check_target(args.save, args.overwrite)
    plan = conversion.plan_of(args, checkpoint_of(args.load))
    report = autoregressive.convert(plan, args.save, args.overwrite, bar("to-bdlm"))
    for line in report:
        print(line)
    print(f"{plan.checkpoint.folder} -> {args.save}")
    return 0


def export_model(args: argparse.Namespace) -> int:
    checkpoint = CheckpointFolder(checkpoint_of(args.load))
    family = diffusion_gemma_files if diffusion_gemma_files.is_checkpoint(checkpoint) else huggingface
    config = family.export_model(
        checkpoint,
        args.save,
        args.tokenizer,
        DTYPES.get(args.dtype),
        args.overwrite,
        int(args.shard_gb * 10**9),
        bar("export"),
    )
    print(
        f"{checkpoint.folder} -> {args.save} "
        f"({config['architectures'][0]}, {config['vocab_size']} vocabulary rows, {config['dtype']})"
    )
    return 0


def roundtrip(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bdlm-roundtrip-", dir=args.work) as work:
        if diffusion_gemma_files.is_folder(args.source):
            return roundtrip_diffusion_gemma(args.source, Path(work))
        source = huggingface.open_source(args.source)
        imported, exported = Path(work) / "megatron", Path(work) / "huggingface"
        read = huggingface.import_model(source, imported, arguments.arguments_of, progress=bar("import"))
        huggingface.export_model(CheckpointFolder(checkpoint_of(imported)), exported, progress=bar("export"))
        result = comparison.compare_tensors(source.tensors, huggingface.open_source(exported).tensors, read)
    print(result.text())
    left_out = [name for name in source.tensors.tensors if name not in read]
    if left_out:
        print(f"{len(left_out)} not part of the model, left out at import: {', '.join(left_out)}")
    return 0 if result.identical else 1


def roundtrip_diffusion_gemma(source: Path, work: Path) -> int:
    """The same for DiffusionGemma, whose every tensor comes back."""
    diffusion_gemma_files.import_model(source, work / "megatron", arguments.arguments_of, progress=bar("import"))
    checkpoint = CheckpointFolder(checkpoint_of(work / "megatron"))
    diffusion_gemma_files.export_model(checkpoint, work / "huggingface", progress=bar("export"))
    result = comparison.compare_tensors(SafetensorsFolder(source), SafetensorsFolder(work / "huggingface"))
    print(result.text())
    return 0 if result.identical else 1


def verify(args: argparse.Namespace) -> int:
    results = conversion.verify(args.source, checkpoint_of(args.load), args.prompt or PROMPTS)
    worst = 0.0
    for result in results:
        worst = max(worst, result.error)
        print(
            f"{result.tokens:4d} tokens  max |difference| {result.error:.2e}  max |logit| {result.largest:.2f}  "
            f"same most probable token at {result.agreement:.1%}  {result.prompt!r}"
        )
    verdict = "ok" if worst <= args.tolerance else "FAILED"
    print(f"largest difference {worst:.2e}, tolerance {args.tolerance:.1e}: {verdict}")
    return 0 if worst <= args.tolerance else 1


VERBS = {"import": import_model, "to-bdlm": to_bdlm, "export": export_model, "roundtrip": roundtrip, "verify": verify}


def main() -> int:
    args = parse_arguments()
    cpu.adapt_engine(ON_CPU)
    started = time.perf_counter()
    code = VERBS[args.verb](args)
    print(
        f"{time.perf_counter() - started:.1f} s, peak memory {cpu.peak_memory_bytes() / 2**20:.0f} MiB", file=sys.stderr
    )
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConversionError, BDLMConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
