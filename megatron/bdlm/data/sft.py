"""Fine-tuning samples: whole items (conversations.py) packed into L tokens, in a resumable order.

Preparation reads the files once, encodes every item, applies the policies (packing.py) and keeps the result beside
a cache key that names everything it depends on: content of the files, tokenizer, chat template, L, policies, and the
block size where the tail policy needs it. Items that leave nothing to score are left out, counted and named by line.

A sample has the keys of a pretraining sample and `restarts`:

    tokens int64 [L]   eligible bool [L]   documents int32 [L] (-1 padding)   restarts bool [L]
    sample_index int64 []   epoch int64 []

`sample_index` is the number of the packed sample, `epoch` the pass over them: noise is a pure function of both. The
order of a pass is a function of (seed, epoch), so that the number of consumed samples is all that a resume needs.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import torch
from tqdm import tqdm

from megatron.bdlm.data.conversations import ConversationEncoder
from megatron.bdlm.data.documents import JSON_SUFFIXES, DataError, input_files, is_json_lines, iterate_records
from megatron.bdlm.data.indexed import file_sha256
from megatron.bdlm.data.packing import Piece, assemble, epoch_order, fill, fit, pack
from megatron.bdlm.data.partial import partial_output
from megatron.bdlm.data.pretraining import require_validation
from megatron.bdlm.data.tokenizers import TokenizerSource, tokenizer_identity

ARRAYS = ("tokens", "eligible", "offsets", "restarts", "restart_offsets", "padding")


@dataclass
class FinetuneOptions:
    """Options of fine-tuning data; a field is a flag."""

    bdlm_sft_packing: Literal["first-fit", "sequential", "none"] = "first-fit"
    """How conversations share a sample: packed tightly, packed in order, or one a sample, like lengths side by side."""

    bdlm_sft_too_long: Literal["error", "drop", "truncate-left"] = "error"
    """A conversation longer than --seq-length: stop with its file and line, leave it out (counted), or keep its end."""


@dataclass(frozen=True)
class Policies:
    """What preparation depends on besides files and tokenizer."""

    seq_length: int
    too_long: str = "error"
    tail: str = "ragged"
    block_size: int = 0
    """0 where the tail policy does not depend on it"""

    @classmethod
    def of(cls, seq_length: int, too_long: str, tail: str, block_size: int) -> "Policies":
        """Policies with only what matters, so that a block-size change rebuilds only what it changes."""
        return cls(seq_length, too_long, tail, 0 if tail == "ragged" else block_size)


@dataclass(frozen=True)
class PreparedItems:
    """Encoded items in flat arrays; item i is tokens[offsets[i] : offsets[i + 1]]."""

    arrays: dict[str, np.ndarray]
    report: dict[str, Any]

    def __len__(self) -> int:
        return len(self.arrays["padding"])

    def piece(self, item: int) -> Piece:
        """Item `item`, as fresh arrays."""
        arrays = self.arrays
        part = slice(arrays["offsets"][item], arrays["offsets"][item + 1])
        restarts = arrays["restarts"][arrays["restart_offsets"][item] : arrays["restart_offsets"][item + 1]]
        return Piece(
            arrays["tokens"][part].astype(np.int64),
            np.array(arrays["eligible"][part]),
            tuple(restarts.tolist()),
            int(arrays["padding"][item]),
        )

    @property
    def rooms(self) -> np.ndarray:
        """Tokens that each item takes in a sample, int64 [items]."""
        return np.diff(self.arrays["offsets"]) + self.arrays["padding"]


def prepare_items(
    inputs: Iterable[str],
    encoder: ConversationEncoder,
    source: TokenizerSource,
    policies: Policies,
    cache: Optional[Path] = None,
    progress: bool = False,
) -> PreparedItems:
    """Encoded items of JSON lines files, from the cache if it holds them.

    Raises:
        DataError: a broken item, or no item that can be trained on.
    """
    files = input_files(inputs, JSON_SUFFIXES)
    for path in files:
        if not is_json_lines(path):
            raise DataError(
                f"{path}: fine-tuning data are JSON lines, in a file that ends in {' or '.join(JSON_SUFFIXES)}"
            )
    if cache is None:
        return _encode(files, encoder, policies, progress)
    folder = cache / f"conversations-{_cache_key(files, encoder, source, policies)}"
    if not folder.is_dir():
        prepared = _encode(files, encoder, policies, progress)
        with partial_output(folder) as partial:
            partial.mkdir()
            for name in ARRAYS:
                np.save(partial / f"{name}.npy", prepared.arrays[name])
            (partial / "report.json").write_text(json.dumps(prepared.report, indent=2) + "\n")
            try:
                os.replace(partial, folder)
            except OSError:
                if not folder.is_dir():  # another process was first, with the same contents
                    raise
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return PreparedItems(arrays, json.loads((folder / "report.json").read_text()))


def _cache_key(files: list[Path], encoder: ConversationEncoder, source: TokenizerSource, policies: Policies) -> str:
    key = {
        "files": [file_sha256(path) for path in files],
        "tokenizer": tokenizer_identity(encoder.tokenizer, source)["content_sha256"],
        "template": getattr(encoder.tokenizer, "chat_template", None),
        "mask": encoder.mask,
        "policies": asdict(policies),
        "format": 1,
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _encode(files: list[Path], encoder: ConversationEncoder, policies: Policies, progress: bool) -> PreparedItems:
    pieces: list[Piece] = []
    left_out: dict[str, list[str]] = {"too_long": [], "without_target": [], "truncated": []}
    with tqdm(
        total=sum(path.stat().st_size for path in files),
        unit="B",
        unit_scale=True,
        desc="encoding",
        disable=not progress,
    ) as bar:
        for record in iterate_records(files):
            bar.update(len(record.data))
            whole = encoder.encode(record)
            piece = fit(whole, policies.seq_length, policies.too_long, record.place)
            if piece is None:
                left_out["too_long"].append(record.place)
            elif not piece.eligible.any():
                left_out["without_target"].append(record.place)
            else:
                if piece is not whole:
                    left_out["truncated"].append(record.place)
                pieces.append(fill(piece, policies.seq_length, policies.block_size, policies.tail, encoder.end))
    if not pieces:
        counts = ", ".join(f"{name.replace('_', ' ')} {len(places)}" for name, places in left_out.items())
        raise DataError(f"{', '.join(map(str, files))}: no item that can be trained on ({counts})")
    report = {
        "items": len(pieces),
        "tokens": sum(len(piece) for piece in pieces),
        "supervised_tokens": sum(int(piece.eligible.sum()) for piece in pieces),
        **{name: {"count": len(places), "first": places[:20]} for name, places in left_out.items()},
    }
    return PreparedItems(_flat(pieces), report)


def _flat(pieces: list[Piece]) -> dict[str, np.ndarray]:
    def offsets(counts: Iterable[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(list(counts), dtype=np.int64)])

    return {
        "tokens": np.concatenate([piece.tokens for piece in pieces]).astype(np.int32),
        "eligible": np.concatenate([piece.eligible for piece in pieces]),
        "offsets": offsets(len(piece) for piece in pieces),
        "restarts": np.array([start for piece in pieces for start in piece.restarts], dtype=np.int32),
        "restart_offsets": offsets(len(piece.restarts) for piece in pieces),
        "padding": np.array([piece.padding for piece in pieces], dtype=np.int32),
    }


@dataclass(frozen=True)
class Order:
    """How the samples of a split follow each other."""

    seed: int = 1234
    shuffle: bool = True
    """Off: always the order of the files, and always epoch 0 (validation)"""
    bucket: int = 0
    """Samples that run side by side; > 0 puts samples of like length together"""


class ConversationSamples(torch.utils.data.Dataset):
    """Packed samples of some items of a preparation.

    Args:
        prepared: all items.
        items: numbers of those of this split.
        seq_length: L.
        method: packing (packing.pack).
        length: samples to give; passes over the split follow each other until they suffice. None: one pass.
        repeat: start again, with the same identities, after so many samples (validation); None: never.
        split: the engine's Split, by which its loader chooses the batch size.
    """

    def __init__(
        self,
        prepared: PreparedItems,
        items: np.ndarray,
        seq_length: int,
        method: str,
        order: Order,
        split: Any,
        length: Optional[int] = None,
        repeat: Optional[int] = None,
    ) -> None:
        self.prepared, self.seq_length, self.order, self.split = prepared, seq_length, order, split
        # Neighbours in a file are often alike: a packed sample should mix them.
        mixed = items[epoch_order(len(items), order.seed, 0)] if order.shuffle else items
        rooms = prepared.rooms
        packing = pack(rooms[mixed], seq_length, method)
        self.samples = [mixed[list(numbers)] for numbers in packing.samples]
        self.rooms = np.array([rooms[numbers].sum() for numbers in self.samples])
        self.repeat = min(repeat, len(self.samples)) if repeat else None
        self.length = len(self.samples) if length is None else length
        self._pass: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.length

    def _place(self, idx: int) -> tuple[int, int]:
        """(number of the packed sample, epoch) at place `idx` of the order."""
        if self.repeat:
            idx %= self.repeat
        epoch, place = divmod(idx, len(self.samples))
        if not self.order.shuffle:
            return place, 0
        if self._pass[0] != epoch:
            # + 1: pass 0 of the generator mixed the items before they were packed
            self._pass = (
                epoch,
                epoch_order(len(self.samples), self.order.seed, epoch + 1, self.rooms, self.order.bucket),
            )
        return int(self._pass[1][place]), epoch

    def __getitem__(self, idx: Optional[int]) -> dict[str, torch.Tensor]:
        """Sample at place `idx` of the order; None gives a sample without an eligible token (batch padding)."""
        number, epoch = self._place(0 if idx is None else int(idx))
        arrays = assemble([self.prepared.piece(item) for item in self.samples[number].tolist()], self.seq_length)
        if idx is None:
            arrays["eligible"][:] = False
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {
            **sample,
            "sample_index": torch.tensor(number, dtype=torch.int64),
            "epoch": torch.tensor(epoch, dtype=torch.int64),
        }


def split_items(count: int, split: str) -> list[np.ndarray]:
    """Item numbers of train, validation and test: consecutive shares, as the engine splits documents.

    Raises:
        DataError: no item for training.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    ends = np.round(np.cumsum(parse_and_normalize_split(split)) * count).astype(np.int64)
    parts = [np.arange(begin, end) for begin, end in zip([0, *ends[:-1]], ends)]
    if not len(parts[0]):
        raise DataError(f"--split {split}: the train split gets none of {count} items; a legal value: 90,5,5")
    return parts


def build_finetuning_datasets(
    args: Any, sample_counts: tuple[int, Optional[int], Optional[int]]
) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets of a fine-tuning run; None for a split without items.

    `--data-path FILE..` is split by --split; or --train-data-path, --valid-data-path, --test-data-path name files each.
    Rank 0 encodes, the others read its cache (--data-cache-path, by default beside the first file).

    Raises:
        DataError: an item or an option that cannot be used.
    """
    from megatron.core.datasets.utils import Split
    from megatron.training import get_tokenizer

    encoder = ConversationEncoder(get_tokenizer(), args.bdlm_mask_token_id)
    source = TokenizerSource(
        args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size
    )
    policies = Policies.of(args.seq_length, args.bdlm_sft_too_long, args.bdlm_tail_policy, args.bdlm_block_size)
    paths = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.data_path:
        shared = _prepare_once(args.data_path, encoder, source, policies, args.data_cache_path)
        parts = [(shared, items) for items in split_items(len(shared), args.split or "90,5,5")]
    else:
        if not args.train_data_path:
            raise DataError(
                "--data-path (or --train-data-path): fine-tuning needs JSON lines; a legal value: conversations.jsonl"
            )
        each = [
            _prepare_once(path, encoder, source, policies, args.data_cache_path) if path else None for path in paths
        ]
        parts = [(prepared, np.arange(len(prepared) if prepared else 0)) for prepared in each]
    once = args.eval_iters * getattr(args, "eval_global_batch_size", args.global_batch_size)
    bucket = args.global_batch_size if args.bdlm_sft_packing == "none" else 0
    datasets = []
    for split, (prepared, items), count in zip(Split, parts, sample_counts):
        training = split is Split.train
        order = Order(args.seed, training, bucket if training else 0)
        datasets.append(
            ConversationSamples(
                prepared,
                items,
                args.seq_length,
                args.bdlm_sft_packing,
                order,
                split,
                count,
                None if training or count is None else once,
            )
            if len(items) and count != 0
            else None
        )
    flag = f"--split {args.split}" if args.data_path else "--valid-data-path"
    require_validation(datasets[1], sample_counts[1], flag)
    return tuple(datasets)


def _prepare_once(
    paths: list[str], encoder: ConversationEncoder, source: TokenizerSource, policies: Policies, cache: Optional[str]
) -> PreparedItems:
    """Prepare on rank 0, then read its cache on the others; the report is printed once."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = not distributed or torch.distributed.get_rank() == 0
    folder = Path(cache) if cache else Path(paths[0]).resolve().parent / "cache"
    if first:
        prepared = prepare_items(paths, encoder, source, policies, folder, progress=True)
        print(report_line(prepared.report), flush=True)
    if distributed:
        torch.distributed.barrier()
    return prepared if first else prepare_items(paths, encoder, source, policies, folder)


def report_line(report: dict[str, Any]) -> str:
    """One line for the log: what is trained on, and what was left out or cut, with the first places."""
    parts = [
        f"fine-tuning data: {report['items']} items, {report['tokens']} tokens, {report['supervised_tokens']} "
        "supervised"
    ]
    for name in ("too_long", "without_target", "truncated"):
        entry = report[name]
        if entry["count"]:
            parts.append(f"{name.replace('_', ' ')}: {entry['count']} (first: {', '.join(entry['first'][:3])})")
    return "; ".join(parts)
