"""Samples a drafter trains on, and the target's features of them, on disk.

Samples folder: `tokens.npy` int32 [N, S], `loss_mask.npy` bool [N, S], `documents.npy` int32 [N, S] (-1 padding),
`manifest.json` (seq_length, a hash of the tokens, how they came about).

Features folder: `features-00000.npy`, .. of `samples_per_file` samples each, [n, S, m * D], `last_hidden-00000.npy`, ..
[n, S, D] where they were asked for, and `manifest.json`: layer ids (from 0), the hash of the tokens, type, target. Files
are mapped, and a rank reads the rows that its plan holds and no others. bfloat16 is stored as its 16 bits.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from megatron.bdlm.data.packing import epoch_order
from megatron.bdlm.data.partial import partial_output
from megatron.bdlm.drafter.batch import DraftSample, FeatureSource
from megatron.bdlm.drafter.format import DrafterError

ARRAYS = {"tokens": np.int32, "loss_mask": np.bool_, "documents": np.int32}
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class DraftSamples:
    """The samples of a folder."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def seq_length(self) -> int:
        """S."""
        return self.tokens.shape[1]

    def sample(self, number: int, epoch: int = 0) -> DraftSample:
        """Sample `number`, as fresh arrays."""
        return DraftSample(
            self.tokens[number].astype(np.int64), np.array(self.loss_mask[number]), self.documents[number].astype(np.int64), number, epoch
        )


def write_samples(folder: Path, tokens: np.ndarray, loss_mask: np.ndarray, documents: np.ndarray, about: dict[str, Any]) -> None:
    """Write a samples folder, whole or not at all; arrays [N, S]."""
    folder = Path(folder)
    if folder.exists():
        raise DrafterError(f"--output {folder}: it is there already. A legal value: a new folder")
    arrays = dict(tokens=tokens, loss_mask=loss_mask, documents=documents)
    with partial_output(folder) as partial:
        partial.mkdir(parents=True)
        for name, kind in ARRAYS.items():
            np.save(partial / f"{name}.npy", np.asarray(arrays[name]).astype(kind))
        manifest = {**about, "samples": len(tokens), "seq_length": int(np.shape(tokens)[1]), "tokens_sha256": _token_hash(tokens)}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(folder)


def read_samples(folder: Path) -> DraftSamples:
    """The samples of a folder, mapped.

    Raises:
        DrafterError: no samples folder, or tokens that are not those of its manifest.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").is_file():
        raise DrafterError(f"--dflash-data {folder}: no manifest.json in it. A legal value: a folder of tools/generate_dflash_data.py")
    manifest = json.loads((folder / "manifest.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    if _token_hash(arrays["tokens"]) != manifest["tokens_sha256"]:
        raise DrafterError(f"--dflash-data {folder}: tokens.npy is not that of its manifest. A legal value: the folder as it was written")
    return DraftSamples(**arrays, manifest=manifest)


def _token_hash(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int32).tobytes()).hexdigest()


class DraftDataset(torch.utils.data.Dataset):
    """Samples in a resumable order: a place of the training is (sample, epoch), a function of the seed alone.

    Args:
        length: samples that the engine may ask for.
        seed: of the order of each pass; None: in order, always epoch 0.
        repeat: start again after so many places (every validation sees the same).
    """

    def __init__(self, samples: DraftSamples, numbers: np.ndarray, length: int, seed: Optional[int] = None, repeat: Optional[int] = None):
        self.samples, self.numbers, self.length, self.seed, self.repeat = samples, numbers, length, seed, repeat

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """int64 tokens [S], loss_mask, documents, sample_index [], epoch []."""
        count, place = len(self.numbers), int(place) if self.repeat is None else int(place) % self.repeat
        epoch, index = divmod(place, count)
        if self.seed is None:
            epoch = 0
        else:
            index = epoch_order(count, self.seed, epoch)[index]
        number = int(self.numbers[index])
        sample = self.samples.sample(number, epoch)
        arrays = dict(tokens=sample.tokens, loss_mask=sample.loss_mask, documents=sample.documents)
        return {
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            "sample_index": torch.tensor(number), "epoch": torch.tensor(sample.epoch),
        }


def samples_of(stacked: dict[str, Tensor]) -> list[DraftSample]:
    """A collated micro-batch as samples."""
    arrays = {name: tensor.cpu().numpy() for name, tensor in stacked.items()}
    return [
        DraftSample(arrays["tokens"][i], arrays["loss_mask"][i], arrays["documents"][i], int(arrays["sample_index"][i]), int(arrays["epoch"][i]))
        for i in range(len(arrays["tokens"]))
    ]


# ---- features -----------------------------------------------------------------------------------


def write_features(
    folder: Path, samples: DraftSamples, source: FeatureSource, layer_ids: tuple[int, ...], dtype: str, last_hidden: bool,
    target: str = "", samples_per_file: int = 64, progress=None,
) -> None:
    """Run `source` over all samples once and keep what it says; the folder appears whole or not at all."""
    folder = Path(folder)
    if folder.exists():
        raise DrafterError(f"--output {folder}: it is there already. A legal value: a new folder")
    everything, count = np.arange(samples.seq_length), len(samples)
    with partial_output(folder) as partial:
        partial.mkdir(parents=True)
        files: dict[str, np.ndarray] = {}
        for number in range(count):
            sample = samples.sample(number)
            states = {"features": source.features(sample, everything)}
            if last_hidden:
                states["last_hidden"] = source.last_hidden(sample, everything)
            for name, state in states.items():
                if number % samples_per_file == 0:
                    shape = (min(samples_per_file, count - number), *state.shape)
                    path = partial / f"{name}-{number // samples_per_file:05d}.npy"
                    files[name] = np.lib.format.open_memmap(path, "w+", np.float32 if dtype == "float32" else np.uint16, shape)
                files[name][number % samples_per_file] = _stored(state, dtype)
            if progress is not None:
                progress(1)
        for file in files.values():
            file.flush()
        manifest = dict(
            layer_ids=list(layer_ids), tokens_sha256=samples.manifest["tokens_sha256"], dtype=dtype, last_hidden=last_hidden,
            samples=count, samples_per_file=samples_per_file, target=target,
        )
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(folder)


def _stored(state: Tensor, dtype: str) -> np.ndarray:
    state = state.to("cpu", STORED[dtype])
    return state.numpy() if dtype == "float32" else state.view(torch.uint16).numpy()


class PreparedFeatures:
    """`batch.FeatureSource` that reads a features folder.

    Raises:
        DrafterError: features of other samples or of other layers.
    """

    def __init__(self, folder: Path, samples: DraftSamples, layer_ids: tuple[int, ...], dtype: torch.dtype):
        folder = Path(folder)
        if not (folder / "manifest.json").is_file():
            raise DrafterError(f"--dflash-features {folder}: no manifest.json in it. A legal value: a folder of tools/prepare_dflash_features.py")
        self.folder, self.dtype = folder, dtype
        self.manifest = manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["tokens_sha256"] != samples.manifest["tokens_sha256"]:
            raise DrafterError(f"--dflash-features {folder}: they are of other tokens than --dflash-data. A legal value: features of that folder")
        if tuple(manifest["layer_ids"]) != tuple(layer_ids):
            raise DrafterError(f"--dflash-layer-ids {list(layer_ids)}: {folder} holds others. A legal value: {manifest['layer_ids']}")
        self._maps: dict[str, np.ndarray] = {}

    def features(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), m * D]; only these rows are read."""
        return self._rows("features", sample, tokens)

    def last_hidden(self, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        """[len(tokens), D]."""
        if not self.manifest["last_hidden"]:
            raise DrafterError(
                f"--dflash-features {self.folder}: kl needs the last hidden state. A legal value: features prepared with --last-hidden"
            )
        return self._rows("last_hidden", sample, tokens)

    def _rows(self, kind: str, sample: DraftSample, tokens: np.ndarray) -> Tensor:
        file, place = divmod(sample.sample_index, self.manifest["samples_per_file"])
        name = f"{kind}-{file:05d}.npy"
        if name not in self._maps:
            self._maps[name] = np.load(self.folder / name, mmap_mode="r")
        rows = torch.from_numpy(np.array(self._maps[name][place, tokens]))
        return (rows if rows.dtype == torch.float32 else rows.view(torch.bfloat16)).to(self.dtype)


def split_numbers(count: int, held_out: int) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Training samples, and the last `held_out` for validation (None for none)."""
    if not 0 <= held_out < count:
        raise DrafterError(f"--dflash-held-out {held_out}: fewer than the {count} samples. A legal value: {count // 10}")
    return np.arange(count - held_out), np.arange(count - held_out, count) if held_out else None
