"""Hugging Face weights: a folder of safetensors files, read and written one tensor at a time.

A safetensors file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}},
then the data. The header needs no data, so the writer writes it first and the tensors as they come.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

import torch
from safetensors import SafetensorError, safe_open

from megatron.bdlm.checkpoint.layout import ConversionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors that are read one at a time."""

    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor:
        """A tensor with memory of its own."""


class SafetensorsFolder:
    """Tensors of `*.safetensors` files of a folder, sharded or not.

    Raises:
        ConversionError: no such files, or a broken one, named.
    """

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path in _files(folder):
            for name, entry in _header(path).items():
                if name in self._file_of:
                    raise ConversionError(f"{path}: tensor {name} is also in {self._file_of[name].name}")
                self._file_of[name] = path
                self.tensors[name] = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]])

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, read anew each time (the file's memory map is not kept)."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name).clone()


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConversionError(f"{folder / INDEX} names files that are not there: {', '.join(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]  # some folders hold the same weights a second time, in another layout
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConversionError(f"{folder}: no *.safetensors file in it; other kinds of weights are not read")
    return found


def _header(path: Path) -> dict[str, Any]:
    """The header of a file whose length agrees with it."""
    try:
        with safe_open(path, framework="pt"):  # checks the offsets and the length of the file
            pass
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path}: not a whole safetensors file ({error})") from None
    with open(path, "rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    header.pop("__metadata__", None)
    unknown = [f"{name} ({entry['dtype']})" for name, entry in header.items() if entry["dtype"] not in DTYPES]
    if unknown:
        raise ConversionError(f"{path}: tensors of an unsupported type: {', '.join(unknown)}")
    return header


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written, made when its turn comes."""

    name: str
    info: TensorInfo


def write_folder(
    folder: Path,
    groups: Sequence[Sequence[NewTensor]],
    make: Callable[[Sequence[NewTensor]], Mapping[str, torch.Tensor]],
    shard_bytes: int,
    progress: Optional[Callable[[int], None]] = None,
) -> None:
    """Write safetensors files as `transformers` names them: one, or shards with an index.

    Args:
        groups: tensors that are made together (a layer); a group is in one shard.
        make: the tensors of a group, by name.
        shard_bytes: a shard is closed before it would exceed this.
        progress: called with the number of tensors written.

    Raises:
        ConversionError: `make` gave another shape or type than announced.
    """
    shards = _shards(groups, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for name, shard in zip(names, shards):
        _write_file(folder / name, shard, make, progress)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards) for group in shard for tensor in group}
        total = sum(tensor.info.bytes for group in groups for tensor in group)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(groups: Sequence[Sequence[NewTensor]], limit: int) -> list[list[Sequence[NewTensor]]]:
    shards: list[list[Sequence[NewTensor]]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.info.bytes for tensor in group)
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += size
    return shards


def _write_file(path: Path, groups, make, progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in (tensor for group in groups for tensor in group):
        end = place + tensor.info.bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.info.dtype],
            "shape": list(tensor.info.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for group in groups:
            made = make(group)
            for tensor in group:
                value = made[tensor.name]
                if tuple(value.shape) != tensor.info.shape or value.dtype != tensor.info.dtype:
                    raise ConversionError(
                        f"{tensor.name}: {tuple(value.shape)} {value.dtype} instead of "
                        f"{tensor.info.shape} {tensor.info.dtype}"
                    )
                stream.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
                if progress is not None:
                    progress(1)
