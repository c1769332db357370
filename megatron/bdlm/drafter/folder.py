"""A drafter's published folder: written whole, read strictly.

config.json and model.safetensors, names without a `model.` prefix, no embedding, no output layer, codebooks without
`.weight` (that is how the servers' inventories have them).
"""

import json
import os
from pathlib import Path

import torch

from megatron.bdlm.checkpoint.safetensors_folder import NewTensor, SafetensorsFolder, TensorInfo, write_folder
from megatron.bdlm.data.partial import partial_output
from megatron.bdlm.drafter.format import DrafterConfig, DrafterError, read_config
from megatron.bdlm.drafter.model import Drafter

SHARD_BYTES = 5 * 10**9


def write_drafter(folder: Path, config: DrafterConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write a published folder; it appears whole or not at all.

    Raises:
        DrafterError: `folder` is there already, or tensors are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    if folder.exists():
        raise DrafterError(f"--save {folder}: it is there already. A legal value: a new folder")
    check_inventory(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "drafter")
    with partial_output(folder) as partial:
        partial.mkdir(parents=True)
        groups = [[NewTensor(name, TensorInfo(shape, dtype))] for name, shape in config.tensor_shapes().items()]
        write_folder(partial, groups, lambda group: {t.name: tensors[t.name].detach().to("cpu", dtype) for t in group}, SHARD_BYTES)
        text = json.dumps(config.published(str(dtype).removeprefix("torch.")), indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        os.replace(partial, folder)


def read_drafter(folder: Path, dtype: torch.dtype | None = None) -> Drafter:
    """The drafter of a published folder, every tensor accounted for.

    Args:
        dtype: type of the weights; None: that of the file.

    Raises:
        DrafterError: names or shapes that are not those of its config.json; ConversionError: a broken file.
    """
    config = read_config(folder)
    source = SafetensorsFolder(Path(folder))
    check_inventory(config, {name: info.shape for name, info in source.tensors.items()}, str(folder))
    drafter = Drafter(config)
    tensors = {name: source.read(name) for name in source.tensors}
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.to(dtype or next(iter(tensors.values())).dtype)


def check_inventory(config: DrafterConfig, found: dict[str, tuple[int, ...]], where: str) -> None:
    """Raises DrafterError naming what is missing, unexpected or of another shape."""
    wanted = config.tensor_shapes()
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": [f"{n} {found[n]} instead of {wanted[n]}" for n in sorted(wanted.keys() & found.keys()) if found[n] != wanted[n]],
    }
    told = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names)
    if told:
        raise DrafterError(f"{where}: not the tensors of its config.json ({told})")


def target_tables(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output layer [V, D] of a Hugging Face target, the same tensor where they are tied.

    Raises:
        DrafterError: the folder has no embedding under the usual name; ConversionError: no safetensors in it.
    """
    source = SafetensorsFolder(Path(folder))
    embedding = next((name for name in source.tensors if name.endswith("embed_tokens.weight")), None)
    if embedding is None:
        raise DrafterError(f"--dflash-target {folder}: no tensor embed_tokens.weight. A legal value: a Hugging Face folder of the target")
    table = source.read(embedding)
    return table, source.read("lm_head.weight") if "lm_head.weight" in source.tensors else table


