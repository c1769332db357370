"""How tensors of Hugging Face files join to the engine's, and part again; pure tensor functions.

Every layout is a pair `join(parts, sizes) -> tensor`, `split(tensor, sizes) -> parts`, exact inverses: values are
moved, never computed.

    same      one part, as it is
    qkv       q [n*d, ..], k [g*d, ..], v [g*d, ..] -> [g * (n/g + 2) * d, ..]: for each key-value head its query
              heads, then its key, then its value; weights and biases alike.
              n = 4, g = 2, d = 1: q0 q1 k0 v0 q2 q3 k1 v1
    qk        q and k alone, grouped alike: q0 q1 k0 q2 q3 k1 (a model whose values are its keys)
    gate_up   gate [f, h], up [f, h] -> [2*f, h]
    experts   parts of e experts, each a tensor or a (gate, up) pair -> [e, ..]
    rows      one part [rows, h] -> [padded rows, h], zero rows behind; `split` cuts them off

Shapes: n query heads, g key-value heads, d head size, h hidden size, f size of the MLP, e experts.
"""

from dataclasses import dataclass
from typing import Callable, Sequence

import torch


class ConversionError(ValueError):
    """A model that cannot be converted; the message says which tensors, options or files, and why."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; `of` gives those that shapes are written in."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    """Rows of the embedding in the Hugging Face file."""
    padded_vocab: int
    """Rows of the embedding in the engine's checkpoint."""
    experts: int = 0
    expert_ffn: int = 0

    def of(self, name: str) -> int:
        """Length of a named dimension: a field, or `query`, `key` (rows of the projections)."""
        derived = {"query": self.heads * self.head, "key": self.groups * self.head}
        return derived[name] if name in derived else getattr(self, name)


Parts = Sequence[torch.Tensor]


def _join_same(parts: Parts, sizes: Sizes) -> torch.Tensor:
    return parts[0]


def _split_same(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    return [tensor]


def _join_qkv(parts: Parts, sizes: Sizes) -> torch.Tensor:
    query, key, value = (part.unflatten(0, (sizes.groups, -1)) for part in parts)  # [g, .., rest]
    return torch.cat([query, key, value], dim=1).flatten(0, 1)


def _split_qkv(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    share = sizes.heads // sizes.groups * sizes.head
    grouped = tensor.unflatten(0, (sizes.groups, -1))
    return [part.flatten(0, 1) for part in grouped.split([share, sizes.head, sizes.head], dim=1)]


def _join_qk(parts: Parts, sizes: Sizes) -> torch.Tensor:
    query, key = (part.unflatten(0, (sizes.groups, -1)) for part in parts)
    return torch.cat([query, key], dim=1).flatten(0, 1)


def _split_qk(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    grouped = tensor.unflatten(0, (sizes.groups, -1))
    return [part.flatten(0, 1) for part in grouped.split([sizes.heads // sizes.groups * sizes.head, sizes.head], dim=1)]


def _join_gate_up(parts: Parts, sizes: Sizes) -> torch.Tensor:
    return torch.cat(list(parts))


def _split_gate_up(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    return list(tensor.chunk(2))


def _join_experts(parts: Parts, sizes: Sizes) -> torch.Tensor:
    share = len(parts) // sizes.experts
    return torch.stack([torch.cat(list(parts[i : i + share])) for i in range(0, len(parts), share)])


def _split_experts(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    pair = tensor.size(1) == 2 * sizes.expert_ffn
    return [part for expert in tensor for part in (expert.chunk(2) if pair else (expert,))]


def _join_rows(parts: Parts, sizes: Sizes) -> torch.Tensor:
    missing = sizes.padded_vocab - parts[0].size(0)
    return torch.cat([parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])]) if missing else parts[0]


def _split_rows(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    return [tensor[: sizes.vocab]]


@dataclass(frozen=True)
class Layout:
    join: Callable[[Parts, Sizes], torch.Tensor]
    split: Callable[[torch.Tensor, Sizes], list[torch.Tensor]]


LAYOUTS = {
    "same": Layout(_join_same, _split_same),
    "qkv": Layout(_join_qkv, _split_qkv),
    "qk": Layout(_join_qk, _split_qk),
    "gate_up": Layout(_join_gate_up, _split_gate_up),
    "experts": Layout(_join_experts, _split_experts),
    "rows": Layout(_join_rows, _split_rows),
}
