"""What the planner knows of a model: sizes of its layers, read from a Hugging Face config.json or from Megatron's flags."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence


class PlannerError(ValueError):
    """A model, machine or layout that cannot be planned; names flag, value, rule and a legal value."""


@dataclass(frozen=True)
class AttentionLayers:
    """Layers of one kind."""

    count: int
    key_heads: int
    head_size: int
    window: Optional[int] = None
    linear: bool = False  # a recurrent layer: no attention, nothing to exchange but a small state


@dataclass(frozen=True)
class Model:
    """A decoder."""

    name: str
    hidden: int
    query_heads: int
    kinds: tuple[AttentionLayers, ...]
    ffn: int  # of the dense MLP of every layer (with experts: of the part that every token passes)
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    gated: bool = True  # the MLP has an up and a gate projection
    source: str = field(default="", compare=False)

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def attention_parameters(self, kind: AttentionLayers) -> int:
        """Projections of one layer."""
        return self.hidden * kind.head_size * (2 * self.query_heads + 2 * kind.key_heads)

    @property
    def matrices(self) -> int:
        """Of an MLP."""
        return 3 if self.gated else 2

    @property
    def dense_parameters(self) -> int:
        """Of all layers, without experts and embeddings."""
        attention = sum(kind.count * self.attention_parameters(kind) for kind in self.kinds)
        return attention + self.layers * (self.matrices * self.hidden * self.ffn + self.hidden * self.experts + 2 * self.hidden)

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * self.matrices * self.hidden * self.expert_ffn

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters + self.embedding_parameters

    @property
    def parameters_per_row(self) -> int:
        """That one row is multiplied with, without embedding and head."""
        active = self.layers * self.experts_per_token * self.matrices * self.hidden * self.expert_ffn
        return self.dense_parameters + active

    @property
    def least_key_heads(self) -> int:
        return min(kind.key_heads for kind in self.kinds)


def from_config(source: Path) -> Model:
    """From a Hugging Face config.json, or the folder that holds it.

    Raises:
        PlannerError: no such file, or a size that the planner needs is missing.
    """
    path = source / "config.json" if source.is_dir() else source
    if not path.is_file():
        raise PlannerError(f"--model {source}: no config.json there. A legal value: a folder of a Hugging Face model")
    values = json.loads(path.read_text())
    return from_values(values.get("text_config", values), values.get("_name_or_path") or source.stem)


def from_values(values: Mapping[str, Any], name: str) -> Model:
    """From the values of a config.json."""
    try:
        hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
        vocabulary = values["vocab_size"]
    except KeyError as missing:
        raise PlannerError(f"--model {name}: config.json lacks {missing}. A legal value: a decoder's config.json") from None
    head_size = values.get("head_dim") or hidden // heads
    key_heads = values.get("num_key_value_heads") or heads
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    expert_ffn = values.get("moe_intermediate_size") or values.get("intermediate_size") or 0
    kinds = values.get("layer_types") or ["full_attention"] * layers
    window = values.get("sliding_window")
    groups = {
        "full_attention": AttentionLayers(
            0, values.get("num_global_key_value_heads") or key_heads, values.get("global_head_dim") or head_size
        ),
        "sliding_attention": AttentionLayers(0, key_heads, head_size, window),
        "linear_attention": AttentionLayers(0, key_heads, head_size, linear=True),
    }
    unknown = set(kinds) - set(groups)
    if unknown:
        raise PlannerError(f"--model {name}: layer types {sorted(unknown)} are unknown. Legal values: {', '.join(groups)}")
    counted = tuple(_counted(group, kinds.count(kind)) for kind, group in groups.items() if kind in kinds)
    return Model(
        name, hidden, heads, counted, 0 if experts and not values.get("dense_mlp") else values.get("intermediate_size", 4 * hidden),
        vocabulary, bool(values.get("tie_word_embeddings", False)), experts,
        values.get("num_experts_per_tok", 0) if experts else 0, expert_ffn if experts else 0,
    )


def _counted(group: AttentionLayers, count: int) -> AttentionLayers:
    return AttentionLayers(count, group.key_heads, group.head_size, group.window, group.linear)


def from_flags(flags: Sequence[str]) -> Model:
    """From Megatron's flags, as they stand in a run script.

    Raises:
        PlannerError: a flag that the planner needs is missing.
    """
    given = {flag: value for flag, value in zip(flags, [*flags[1:], ""]) if flag.startswith("--")}

    def number(flag: str, default: Optional[int] = None) -> int:
        value = given.get(flag, default)
        if value is None:
            raise PlannerError(f"{flag}: missing; the planner needs it. A legal value: {flag} 32")
        return int(value)

    hidden, heads = number("--hidden-size"), number("--num-attention-heads")
    key_heads = number("--num-query-groups", heads) if "--group-query-attention" in given else heads
    experts = number("--num-experts", 0)
    gated = "--swiglu" in given
    ffn = number("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    kind = AttentionLayers(number("--num-layers"), key_heads, number("--kv-channels", hidden // heads))
    return Model(
        "flags", hidden, heads, (kind,), 0 if experts else ffn, number("--padded-vocab-size", number("--vocab-size", 152064)),
        "--untie-embeddings-and-output-weights" not in given, experts,
        number("--moe-router-topk", 2) if experts else 0, number("--moe-ffn-hidden-size", ffn) if experts else 0,
        gated,
    )


def _full(layers: int, key_heads: int, head_size: int = 128) -> tuple[AttentionLayers, ...]:
    return (AttentionLayers(layers, key_heads, head_size),)


KNOWN = {
    model.name: model
    for model in (
        Model("3b", 2048, 16, _full(36, 2), 11008, 151936, True, source="Qwen2.5-3B config.json"),
        Model("8b", 4096, 32, _full(36, 8), 12288, 151936, source="Qwen3-8B config.json"),
        Model("14b", 5120, 40, _full(40, 8), 17408, 151936, source="Qwen3-14B config.json"),
        Model("30b-a3b", 2048, 32, _full(48, 4), 0, 151936, False, 128, 8, 768, source="Qwen3-30B-A3B config.json"),
        Model(
            "26b-a4b", 2816, 16, (AttentionLayers(25, 8, 256, 1024), AttentionLayers(5, 2, 512)), 2112, 262144, True, 128, 8, 704,
            source="25 of 30 layers at window 1024; sizes of DiffusionGemma 26B-A4B",
        ),
        Model(
            "27b-hybrid", 5120, 24, (AttentionLayers(16, 4, 256), AttentionLayers(48, 4, 256, linear=True)), 17408, 248320,
            source="64 layers, every fourth with full attention; sizes of Qwen3.5-27B",
        ),
    )
}
"""Models by name: those of the published figures that `published.py` compares with, and of the batch scripts in examples/slurm."""
