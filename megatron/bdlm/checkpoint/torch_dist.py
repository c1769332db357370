"""The engine's `torch_dist` checkpoints without the engine's model: tensors read and written a piece at a time.

Such a folder is a checkpoint of `torch.distributed.checkpoint`: boxes of named global tensors in data files, and
`.metadata` saying which box is where. Layers of a model are stacked on axis 0 of one tensor, one box a layer (and
tensor-parallel rank). A run reads the boxes it needs, so the files serve every layout. Besides tensors there are
objects: `common_state` (iteration, arguments, ..) and the `_extra_state` of layers.

No process group is needed.
"""

import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.safetensors_folder import TensorInfo
from megatron.bdlm.checkpoint.tracker import TRACKER, is_complete

RELEASE = "release"
"""Name of a checkpoint that no training iteration wrote; the engine asks it for no optimizer state."""


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, made when its turn to be written comes."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def layer_piece(name: str, layer: int, layers: int, info: TensorInfo, make: Callable[[], torch.Tensor]) -> Piece:
    """The tensor of one layer in the stacked tensor of all; `make` gives it without the layer axis."""
    offsets = (layer, *(0 for _ in info.shape))
    return Piece(name, (layers, *info.shape), offsets, (1, *info.shape), info.dtype, lambda: make()[None])


def whole_piece(name: str, info: TensorInfo, make: Callable[[], torch.Tensor]) -> Piece:
    """A tensor that is written in one box."""
    return Piece(name, info.shape, tuple(0 for _ in info.shape), info.shape, info.dtype, make)


def write_checkpoint(
    folder: Path,
    groups: Sequence[Sequence[Piece]],
    objects: Mapping[str, Any],
    common_state: Mapping[str, Any],
    progress: Optional[Callable[[int], None]] = None,
) -> None:
    """Write `folder`/release and the tracker file.

    Args:
        folder: an existing folder.
        groups: pieces by data file; they are made and written one after the other.
        objects: other entries, by name.
        common_state: what the engine calls the common state (arguments, iteration, ..).
        progress: called with the number of pieces written.
    """
    target = folder / RELEASE
    target.mkdir()
    entries = {**objects, "common_state/shard_0_1": common_state}
    blobs = {name: _serialized([value]) for name, value in entries.items()}
    planner = _WritePieces({_index(piece): piece for group in groups for piece in group}, blobs, progress)
    plans = [SavePlan([_tensor_item(piece) for piece in group]) for group in groups]
    plans.append(SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in blobs]))
    plans, metadata = create_default_global_save_plan(plans)

    writer = FileSystemWriter(str(target), sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan(plans)  # one data file a plan, as if each came from a process of its own
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(metadata, results)

    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    save_config(CheckpointingConfig("torch_dist", 1), str(target))
    (folder / TRACKER).write_text(RELEASE)


def extra_states(names: Sequence[str], *counts: int) -> dict[str, Any]:
    """Empty `_extra_state` entries of modules that exist `counts[0]` (x `counts[1]`) times, as the engine names them.

    The engine asks for them; Transformer Engine fills them for FP8. Module `a` of two layers and three experts gives
    `a._extra_state/shard_0.0_2.3` to `a._extra_state/shard_1.2_2.3`.
    """
    whole = ".".join(map(str, counts))
    places = [".".join(map(str, place)) for place in itertools.product(*map(range, counts))]
    return {f"{name}._extra_state/shard_{place}_{whole}": None for name in names for place in places}


class CheckpointFolder:
    """Tensors of a complete checkpoint folder (`release`, `iter_*`), whatever layout wrote it.

    Raises:
        ConversionError: it is not complete, or of another format.
    """

    def __init__(self, folder: Path):
        if not is_complete(folder):
            raise ConversionError(f"{folder}: not a complete torch_dist checkpoint (no metadata.json and .metadata)")
        self.folder = folder
        self._reader = FileSystemReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = [name for name in self._metadata.state_dict_metadata if name not in self.tensors]

    def common_state(self) -> dict[str, Any]:
        """Iteration, arguments and the like."""
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_common_state_dict(str(self.folder))

    def read(
        self, name: str, offsets: Optional[Sequence[int]] = None, sizes: Optional[Sequence[int]] = None
    ) -> torch.Tensor:
        """A box of a tensor, or all of it."""
        entry = self._metadata.state_dict_metadata[name]
        offsets = (0,) * len(entry.size) if offsets is None else offsets
        sizes = tuple(entry.size) if sizes is None else sizes
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        self._reader.read_data(LoadPlan(create_read_items_for_chunk_list(name, entry, [box])), _ReadBox(target)).wait()
        return target

    def read_layer(self, name: str, layer: int) -> torch.Tensor:
        """One layer of a stacked tensor, without the layer axis."""
        shape = self.tensors[name].shape
        return self.read(name, (layer, *(0 for _ in shape[1:])), (1, *shape[1:]))[0]

    def boxes(self, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, sizes) of the stored boxes of a tensor."""
        chunks = self._metadata.state_dict_metadata[name].chunks
        return sorted({(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks})


class _WritePieces(DefaultSavePlanner):
    """Makes the data of a write item at the moment it is written."""

    def __init__(self, pieces: Mapping[MetadataIndex, Piece], blobs: Mapping[str, io.BytesIO], progress):
        super().__init__()
        self._pieces, self._blobs, self._progress = pieces, blobs, progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return self._blobs[write_item.index.fqn]
        piece = self._pieces[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        made = piece.make()
        if tuple(made.shape) != tuple(piece.sizes) or made.dtype != piece.dtype:
            raise ConversionError(
                f"{piece.name}: {tuple(made.shape)} {made.dtype} instead of {piece.sizes} {piece.dtype}"
            )
        if self._progress is not None:
            self._progress(1)
        return made.contiguous()


class _ReadBox(LoadPlanner):
    """Receives what is read into one tensor."""

    def __init__(self, target: torch.Tensor):
        self._target = target

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        raise NotImplementedError("a box is read from a plan made beforehand")

    create_local_plan = create_global_plan = finish_plan = set_up_planner

    def load_bytes(self, read_item, value):
        raise NotImplementedError(f"{read_item.dest_index.fqn} is an object, not a tensor")

    def resolve_tensor(self, read_item) -> torch.Tensor:
        target = self._target
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item, tensor):
        pass


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.offsets))


def _tensor_item(piece: Piece) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    data = TensorWriteData(box, TensorProperties(dtype=piece.dtype), torch.Size(piece.shape))
    return WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=data)


def _serialized(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream
