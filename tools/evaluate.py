"""Likelihood of a block diffusion checkpoint: perplexity bound of a held-out text, zero-shot multiple choice.

    evaluate.py --load FOLDER --text held_out.txt --draws 8 --output result.json
    evaluate.py --load FOLDER --choices questions.jsonl        # {"context": "..", "choices": ["..", ".."], "answer": 0}
    torchrun --nproc-per-node 2 tools/evaluate.py --tensor-model-parallel-size 2 --load ...

Block size, mask token and label shift are read from the checkpoint. The noise is fixed by --seed, so that two
checkpoints are compared on the same draws. See docs/conversion.md.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # the engine warns at import about optional packages that evaluation does not need

from megatron.bdlm.platform import cpu  # noqa: E402

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from megatron.bdlm.config import BDLMConfigError, config_from_args  # noqa: E402
from megatron.bdlm.data.documents import DataError, input_files, iterate_records, record_text  # noqa: E402
from megatron.bdlm.data.tokenizers import TokenizerSource, end_of_document_id, load_tokenizer  # noqa: E402
from megatron.bdlm.generation import loading  # noqa: E402
from megatron.bdlm.training import evaluation  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--load", required=True, metavar="FOLDER", help="checkpoint folder (--save of the run, or one iter_* in it)"
    )
    parser.add_argument(
        "--text", type=Path, help="held-out text: .txt (one document), .jsonl (one a line), or a folder of them"
    )
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl (default: %(default)s)")
    parser.add_argument(
        "--choices", type=Path, help=".jsonl of questions: context, choices, answer (number of the right choice)"
    )
    parser.add_argument("--draws", type=int, default=4, help="draws of the noise (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, help="tokens of a sample (default: the run's)")
    parser.add_argument("--limit", type=int, help="samples or questions at most")
    parser.add_argument("--batch", type=int, default=4, help="samples in one forward (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the noise (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type to compute in (default: the run's)")
    parser.add_argument("--tokenizer-model", help="tokenizer folder or file, if it is no longer where the run had it")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    if args.text is None and args.choices is None:
        parser.error("--text or --choices is needed")
    if args.draws < 1 or args.batch < 1:
        parser.error("--draws and --batch must be at least 1")
    return args


def read_questions(path: Path) -> list[evaluation.Question]:
    """Questions of a JSONL file.

    Raises:
        DataError: naming file and line.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = evaluation.Question(entry["context"], tuple(entry["choices"]), int(entry["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: no question with context, choices and answer ({error!r})") from None
        if not 0 <= question.answer < len(question.choices):
            raise DataError(f"{path}:{number}: answer {question.answer} of {len(question.choices)} choices")
        questions.append(question)
    if not questions:
        raise DataError(f"{path}: no question in it")
    return questions


def evaluate_text(args, likelihood, tokenizer, length: int, first: bool) -> dict:
    end, stream, size = end_of_document_id(tokenizer), [], 0
    for text in (record_text(record, args.json_key) for record in iterate_records(input_files([args.text]))):
        size += len(text.encode())
        stream += [*map(int, tokenizer.tokenize(text)), *([] if end is None else [end])]
    samples = evaluation.cut(stream, length)
    if args.limit is not None and len(samples) > args.limit:
        samples, size = samples[: args.limit], 0
    if not samples:
        raise DataError(f"{args.text}: no text in it")
    with tqdm(total=len(samples) * args.draws, desc="text", unit="sample", disable=not first) as bar:
        return evaluation.evaluate_text(likelihood, samples, args.draws, args.batch, size, bar.update)


def evaluate_choices(args, likelihood, tokenizer, first: bool) -> dict:
    questions = read_questions(args.choices)[: args.limit]
    with tqdm(total=len(questions), desc="questions", disable=not first) as bar:
        return evaluation.evaluate_choices(
            likelihood,
            questions,
            lambda text: list(map(int, tokenizer.tokenize(text))),
            args.draws,
            args.batch,
            bar.update,
        )


def main() -> int:
    args = parse_arguments()
    cpu.adapt_engine(ON_CPU)
    checkpoint = loading.find_checkpoint(args.load)
    saved = loading.saved_arguments(checkpoint)
    if args.dtype is not None:
        saved.params_dtype = getattr(torch, args.dtype)
        saved.bf16, saved.fp16 = args.dtype == "bfloat16", False
    tokenizer = load_tokenizer(
        TokenizerSource(
            saved.tokenizer_type,
            args.tokenizer_model or saved.tokenizer_model,
            saved.vocab_file,
            saved.merge_file,
            saved.vocab_size,
        )
    )
    device = loading.initialize_processes(args.tensor_model_parallel_size, args.seed)
    model = loading.load_model(checkpoint, saved, args.tensor_model_parallel_size, device).model

    def row_likelihood(input_ids, position_ids, params, rows):
        return model(input_ids, position_ids, packed_seq_params=params, scored_rows=rows)

    config = config_from_args(saved)
    likelihood = evaluation.Likelihood(row_likelihood, config, args.seed, saved.bdlm_tokenizer_vocab_size, device)
    first = torch.distributed.get_rank() == 0
    result = {
        "checkpoint": str(checkpoint),
        "block_size": config.bdlm_block_size,
        "label_shift": config.bdlm_label_shift,
        "seed": args.seed,
    }
    if args.text is not None:
        result["text"] = {
            "file": str(args.text),
            **evaluate_text(args, likelihood, tokenizer, args.seq_length or saved.seq_length, first),
        }
    if args.choices is not None:
        result["choices"] = {"file": str(args.choices), **evaluate_choices(args, likelihood, tokenizer, first)}
    if first:
        report(result)
        if args.output is not None:
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    return 0


def report(result: dict) -> None:
    print(f"checkpoint {result['checkpoint']}, block size {result['block_size']}, label shift {result['label_shift']}")
    if "text" in result:
        text = result["text"]
        around = "" if text["nelbo_95"] is None else f" +- {text['nelbo_95']:.4f} (95%, {text['draws']} draws)"
        print(
            f"NELBO {text['nelbo']:.4f}{around} nats per token, "
            f"PPL bound {text['ppl_bound']:.3f}, {text['tokens']} tokens"
        )
        for level in text["by_noise_level"]:
            if level["nelbo"] is not None and level["masked_cross_entropy"] is not None:
                print(
                    f"  t {level['t'][0]:.1f}-{level['t'][1]:.1f}  NELBO {level['nelbo']:.4f}  "
                    f"masked cross entropy {level['masked_cross_entropy']:.4f}"
                )
    if "choices" in result:
        choices = result["choices"]
        for name in ("accuracy", "accuracy_per_byte"):
            print(
                f"{name.replace('_', ' ')} {choices[name]:.3f} +- {choices[name + '_standard_error']:.3f} "
                f"over {choices['questions']} questions"
            )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (loading.LoadError, BDLMConfigError, DataError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
