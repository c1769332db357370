"""GGUF files (llama.cpp): tensors dequantised one at a time, under their Hugging Face names.

`transformers` reads configuration and tokenizer of such a file, and is the reference for the values: dequantised to
float32, and for the architecture `llama` the rows of query and key projections put back from llama.cpp's order
(rotary pairs adjacent) to halves. Needs the package `gguf`.
"""

import re
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.bdlm.checkpoint.architectures import GGUF_NAMES
from megatron.bdlm.checkpoint.layout import ConversionError
from megatron.bdlm.checkpoint.safetensors_folder import TensorInfo


class GGUFFile:
    """Tensors of a GGUF file as float32.

    Args:
        reader: what `open_gguf` returned.
        heads, groups: query and key-value heads, to undo the permutation of `llama` files.
    """

    def __init__(self, reader: Any, heads: int, groups: int):
        architecture = reader.fields["general.architecture"].contents()
        self._permuted = {"self_attn.q_proj": heads, "self_attn.k_proj": groups} if architecture == "llama" else {}
        self._stored: dict[str, Any] = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self.tensors = {
            name: TensorInfo(tuple(int(size) for size in reversed(tensor.shape)), torch.float32)
            for name, tensor in self._stored.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, dequantised."""
        from gguf import dequantize

        stored = self._stored[name]
        values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).reshape(self.tensors[name].shape)
        heads = next((count for part, count in self._permuted.items() if part in name), None)
        return values if heads is None else _halves(values, heads)


def open_gguf(path: Path) -> Any:
    """The package's reader of a file; its data stay on disk (a memory map).

    Raises:
        ConversionError: the package is missing, or the file is broken.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConversionError(f"{path}: reading GGUF needs the package gguf: pip install gguf") from None
    try:
        return GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise ConversionError(f"{path}: not a whole GGUF file ({error})") from None


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that has none keeps its own, so that it is reported."""
    found: Optional[re.Match] = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        return GGUF_NAMES.get(name, name)
    template = GGUF_NAMES.get(f"blk.{{layer}}.{found[2]}")
    return name if template is None else template.format(layer=found[1])


def _halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..)."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
