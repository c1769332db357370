"""Are two sets of tensors the same, bit by bit?"""

from dataclasses import dataclass
from typing import Iterable, Optional

import torch

from megatron.bdlm.checkpoint.safetensors_folder import TensorSource


@dataclass(frozen=True)
class TensorComparison:
    """Names of tensors by what became of them."""

    same: list[str]
    different: list[str]
    missing: list[str]
    """In the first set only."""
    new: list[str]
    """In the second set only."""

    @property
    def identical(self) -> bool:
        """Whether the second set has every tensor of the first, bit for bit, and no other."""
        return not (self.different or self.missing or self.new)

    def text(self) -> str:
        lines = [f"{len(self.same)} tensors identical bit by bit"]
        for name, names in (("different", self.different), ("missing", self.missing), ("new", self.new)):
            if names:
                lines.append(f"{len(names)} {name}: {', '.join(names)}")
        return "\n".join(lines)


def compare_tensors(first: TensorSource, second: TensorSource, names: Optional[Iterable[str]] = None) -> TensorComparison:
    """Compare two sources tensor by tensor; one pair is in memory at a time.

    Args:
        names: tensors of the first source that count; None: all.
    """
    names = list(first.tensors if names is None else names)
    same, different = [], []
    for name in names:
        if name in second.tensors:
            equal = first.tensors[name] == second.tensors[name] and _bits_equal(first.read(name), second.read(name))
            (same if equal else different).append(name)
    missing = [name for name in names if name not in second.tensors]
    new = [name for name in second.tensors if name not in names]
    return TensorComparison(same, different, missing, new)


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bytes: -0.0 is not 0.0, and a NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
