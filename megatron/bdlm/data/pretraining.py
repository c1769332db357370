"""Pretraining samples: exactly L clean tokens, eligibility, a stable identity, document numbers on request.

Built on the engine's `GPTDataset` and `BlendedMegatronDatasetBuilder` (blends, splits, index caches).
A sample is a dict of fixed shapes, so that the default collate stacks it:

    tokens        int64 [L]   clean ids; no shifted labels, no extra token
    eligible      bool  [L]   real and supervised: False for padding (and for eod under --eod-mask-loss)
    sample_index  int64 []    identity of the sample for the noise
    epoch         int64 []    pass over the data that `sample_index` does not tell apart; 0 here (see below)
    documents     int32 [L]   number of the document inside the sample, -1 padding; only when documents are separate

**Documents.** By default a sample is one stream of L tokens that runs across ends of documents, as usual in
pretraining. With `--dataloader-inter-document-masking` (or the older pair `--reset-position-ids
--reset-attention-mask`) a document is a unit of its own: positions and blocks restart, nothing is seen across.
Boundaries come from the index, not from token ids.

**Identity.** Noise is a pure function of (seed, sample_index, epoch, ..). Training: `sample_index` is the place in
the training order, i.e. the number of samples consumed before this one. The engine lays several passes over the
data into one order, so a second pass has other indices and other noise, and `epoch` stays 0; the order and thus the
identity depend on --seed, --seq-length, the data and the number of samples, not on topology, data workers or resume.
Validation and test: every evaluation draws the same `evaluation_samples` samples, `sample_index` counts from 0 within
them, so that noise is fixed and evaluations of one run, and of runs that differ in the model only, compare.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path

from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.indexed import check_pair, check_tokenizer, pair_fingerprint, read_manifest
from megatron.bdlm.data.mock import MockDocuments
from megatron.bdlm.data.tokenizers import (
    TokenizerSource,
    end_of_document_id,
    mask_token_id,
    padding_id,
    tokenizer_identity,
    vocabulary_size,
)

Sample = dict[str, Any]


@dataclass
class BDLMDatasetConfig(GPTDatasetConfig):
    """The engine's dataset configuration with what our samples need; `add_extra_token_to_sequence` is off."""

    separate_documents: bool = False
    """Give `documents`: positions, blocks and attention restart at every document."""

    mask_token_id: Optional[int] = None
    """Never occurs in a sample; mock data avoids it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A block diffusion target sits at its own position: with the engine's default every sample would read
        # a token that only shifted labels need.
        self.add_extra_token_to_sequence = False
        self.create_attention_mask = False


class BDLMPretrainingDataset(GPTDataset):
    """One split of one indexed dataset as samples of exactly L clean tokens (see the module's docstring)."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BDLMDatasetConfig) -> IndexedDataset:
        """The indexed dataset, checked for missing or truncated files first.

        Raises:
            DataError: naming the file and what is wrong with it.
        """
        if not is_object_storage_path(dataset_path) and not config.fast_cache_load:
            check_pair(dataset_path)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Everything that decides which tokens a sample holds; the cache key names each."""
        return [
            *GPTDataset._key_config_attributes(),
            "add_extra_token_to_sequence",
            "drop_last_partial_validation_sequence",
        ]

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        """The engine's indices, with the data's fingerprint in the cache key and an empty split refused.

        The engine's key knows the data by path only: data rebuilt under the same prefix would be read through the
        old cache. A split without a token would make its epoch count loop for ever.

        Raises:
            DataError: the split holds no token.
        """
        if self.config.fast_cache_load or self.config.defer_npy_index_mmap:
            return super()._build_document_sample_shuffle_indices()
        if self._get_num_tokens_per_epoch() == 0:
            raise DataError(
                f"--split {self.config.split}: the {self.index_split.name} split of {self.dataset_path} gets none of "
                f"its {len(self.dataset.sequence_lengths)} documents; a legal value gives it at least one, for example "
                "90,5,5"
            )
        if self.dataset_path is not None and not is_object_storage_path(self.dataset_path):
            self.unique_identifiers["data"] = pair_fingerprint(self.dataset_path)
            self._rekey()
        return super()._build_document_sample_shuffle_indices()

    def _rekey(self) -> None:
        """Recompute the engine's cache key from `unique_identifiers`, as its constructor does."""
        self.unique_description = json.dumps(
            self.unique_identifiers, indent=4, default=lambda value: value.unique_identifiers
        )
        self.unique_description_hash = hashlib.md5(
            self.unique_description.encode("utf-8"), usedforsecurity=False
        ).hexdigest()

    def __getitem__(self, idx: Optional[int]) -> Sample:
        """Sample `idx` of this split; None gives a sample without an eligible token (batch padding)."""
        text, _, lengths = self._query_document_sample_shuffle_indices(0 if idx is None else int(idx))
        real = sum(lengths)
        tokens = text[: self.config.sequence_length]
        # The engine pads with an id that may be -1 or a real token: padding is known by place, never by id.
        tokens[real:] = 0
        eligible = np.arange(tokens.size) < (0 if idx is None else real)
        if self.config.eod_mask_loss:
            eligible &= tokens != self.config.tokenizer.eod
        sample = {
            "tokens": torch.from_numpy(tokens),
            "eligible": torch.from_numpy(eligible),
            "sample_index": torch.tensor(0 if idx is None else int(idx), dtype=torch.int64),
            "epoch": torch.tensor(0, dtype=torch.int64),
        }
        if self.config.separate_documents:
            sample["documents"] = torch.from_numpy(number_documents(lengths, tokens.size))
        return sample


class MockBDLMDataset(BDLMPretrainingDataset):
    """The same samples over `MockDocuments`, for runs without files."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: MockDocuments) -> int:
        """Documents to split."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: Optional[str], config: BDLMDatasetConfig) -> MockDocuments:
        """Mock documents over the tokenizer's vocabulary, without its mask and padding ids."""
        excluded = {mask_token_id(config.tokenizer), padding_id(config.tokenizer), config.mask_token_id} - {None}
        return MockDocuments(
            vocabulary_size(config.tokenizer), end_of_document_id(config.tokenizer), frozenset(excluded)
        )


class NumberedSamples(torch.utils.data.Dataset):
    """Gives the samples of a (blended) dataset their identity: `sample_index` = place in the order.

    With `repeat` = n the order is the first n samples again and again, up to `length`, and the identity
    counts within them: every evaluation sees the same samples under the same noise.
    """

    def __init__(self, dataset: Any, length: Optional[int] = None, repeat: Optional[int] = None) -> None:
        self.dataset = dataset
        # The engine's loader asks a dataset for its split to choose the batch size.
        self.split = getattr(dataset, "split", None) or dataset.index_split
        self.repeat = min(repeat, len(dataset)) if repeat else None
        self.length = len(dataset) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, idx: Optional[int]) -> Sample:
        if idx is None:
            return self.dataset[None]
        place = int(idx) % self.repeat if self.repeat else int(idx)
        sample = {key: value for key, value in self.dataset[place].items() if key != "dataset_id"}
        return {**sample, "sample_index": torch.tensor(place, dtype=torch.int64)}


def number_documents(lengths: list[int], total: int) -> np.ndarray:
    """Document number of each of `total` tokens, int32; -1 behind the last document. Empty parts take no number.

    lengths [2, 0, 1], total 5 -> [0, 0, 1, -1, -1].
    """
    kept = [length for length in lengths if length]
    numbers = np.full(total, -1, dtype=np.int32)
    used = np.repeat(np.arange(len(kept), dtype=np.int32), kept)
    numbers[: used.size] = used
    return numbers


def document_lengths(documents: Any) -> list[int]:
    """Lengths of the runs of equal numbers in a sample's `documents` [L]; they sum to L, padding is the last run.

    [0, 0, 1, -1, -1] -> [2, 1, 2].
    """
    numbers = np.asarray(documents)
    ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, numbers.size)
    return np.diff(ends, prepend=0).tolist()


def documents_are_separate(args: Any) -> bool:
    """Whether the engine's flags ask for separate documents.

    Raises:
        DataError: only one of --reset-position-ids and --reset-attention-mask is given.
    """
    positions, attention = args.reset_position_ids, args.reset_attention_mask
    if positions != attention:
        given, other = ("--reset-position-ids", "--reset-attention-mask")[:: 1 if positions else -1]
        raise DataError(
            f"{given}: positions, blocks and attention restart together at a document; give {other} too, or only "
            "--dataloader-inter-document-masking"
        )
    return positions or args.dataloader_inter_document_masking


def dataset_config(args: Any, tokenizer: Any, blend: Any, blend_per_split: Any) -> BDLMDatasetConfig:
    """Dataset configuration of a run; the blends are those of the engine's `get_blend_and_blend_per_split(args)`."""
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as stream:
            sequences = json.load(stream)
    return BDLMDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        separate_documents=documents_are_separate(args),
        mask_token_id=args.bdlm_mask_token_id,
    )


def check_data_tokenizer(prefixes: list[str], tokenizer: Any, source: TokenizerSource) -> None:
    """Compare the tokenizer with the manifests of the prefixes; a prefix without a manifest is taken on trust.

    Raises:
        DataError: a manifest names another tokenizer.
    """
    manifests = {prefix: manifest for prefix in prefixes if (manifest := read_manifest(prefix)) is not None}
    if not manifests:
        return
    identity = tokenizer_identity(tokenizer, source)
    for prefix, manifest in manifests.items():
        check_tokenizer(prefix, manifest, identity)


def build_pretraining_datasets(
    args: Any, sample_counts: tuple[int, Optional[int], Optional[int]]
) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets of a run, on every rank; None for a split without data.

    Args:
        args: the engine's arguments, `bdlm_mask_token_id` resolved.
        sample_counts: samples the engine asks for; None under --full-validation.

    Raises:
        DataError: files that are missing, truncated or of another tokenizer, an empty split, contradicting flags.
    """
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.dataloader_type not in (None, "single"):
        raise DataError(
            f"--dataloader-type {args.dataloader_type}: a sample's identity is its place in the training order, which "
            "only the value single keeps. A legal value: single"
        )
    tokenizer = get_tokenizer()
    blend, blend_per_split = (None, None) if args.mock_data else get_blend_and_blend_per_split(args)
    if not args.mock_data and blend is None and not any(blend_per_split or []):
        raise DataError(
            "--data-path: no data given; a legal value: a prefix that tools/preprocess_data.py wrote, or --mock-data"
        )
    config = dataset_config(args, tokenizer, blend, blend_per_split)
    prefixes = [prefix for group in (blend_per_split or [blend]) if group is not None for prefix in group[0]]
    source = TokenizerSource(
        args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size
    )
    check_data_tokenizer(prefixes, tokenizer, source)
    once = args.eval_iters * getattr(args, "eval_global_batch_size", args.global_batch_size)
    return build_numbered_datasets(config, sample_counts, evaluation_samples=once)


def require_validation(dataset: Any, count: Optional[int], flag: str) -> None:
    """Refuse evaluations without data, which the engine would notice at the first one only.

    Raises:
        DataError: the run asks for `count` validation samples and the split is empty.
    """
    if dataset is None and count != 0:
        raise DataError(
            f"{flag}: the validation split is empty and --eval-iters is not 0. "
            "A legal value: --split 90,5,5, or --eval-iters 0"
        )


def build_numbered_datasets(
    config: BDLMDatasetConfig, sample_counts: tuple[int, Optional[int], Optional[int]], evaluation_samples: int
) -> tuple[Any, Any, Any]:
    """The builder's three splits with identities; validation repeats its first `evaluation_samples` samples.

    A count of None is one pass over the split (--full-validation); several validation sets come as a list.
    """
    train, valid, test = sample_counts
    asked = [train, None if valid is None else min(valid, evaluation_samples), test]
    cls = MockBDLMDataset if config.mock else BDLMPretrainingDataset
    splits = BlendedMegatronDatasetBuilder(cls, asked, lambda: True, config).build()

    def number(dataset: Any, length: Optional[int] = None, repeat: Optional[int] = None) -> Any:
        if dataset is None or length == 0:
            return None
        if isinstance(dataset, list):
            return [number(each, length, repeat) for each in dataset]
        return NumberedSamples(dataset, length, repeat)

    require_validation(splits[1], valid, f"--split {config.split}" if config.blend else "--valid-data-path")
    if splits[0] is not None and train is not None and len(splits[0]) < train:
        raise DataError(
            f"--data-path: prefixes without weights are read once and give {len(splits[0])} training samples, the run "
            f"asks for {train}; give a weight before each prefix, for example 0.5 A 0.5 B"
        )
    return number(splits[0]), number(splits[1], valid, None if valid is None else evaluation_samples), number(splits[2], test)
