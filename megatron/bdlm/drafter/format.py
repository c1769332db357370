"""A drafter's shape, its published config.json, and the tensors that a folder of it holds.

A published folder is config.json and model.safetensors with the drafter's own tensors alone: the embedding and the output
layer are the target's. Layer ids are indices i of the target's decoder layers, from 0; the feature is that layer's OUTPUT,
`hidden_states[i + 1]` of transformers. (Other formats store i + 1; a folder of ours holds i, in `dflash_config`.)

    D hidden     m feature layers     n draft layers     H / G query / key heads     d head size     I ffn     V vocabulary
    T, g taps and channel group of DFlash2's convolution     r rank, K candidates of its selector
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megatron.bdlm.config import BDLMConfigError

ARCHITECTURES = {1: "DFlashDraftModel", 2: "DFlash2DraftModel"}


class DrafterError(BDLMConfigError):
    """A drafter, or options of one, that cannot be; the message names the value, the rule and a legal value."""


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The published choice: the middle layer for one draft layer, else evenly from 1 to L - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + j * (target_layers - 4) / (draft_layers - 1)) for j in range(draft_layers))


@dataclass(frozen=True)
class DrafterConfig:
    """Everything about a drafter but its weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` of each layer; empty: all full"""
    sliding_window: Optional[int] = None
    causal: Optional[bool] = None
    """inside a block; None: sliding layers are causal, full ones bidirectional"""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: Optional[float] = None
    conv_kernel_size: int = 0
    """taps of DFlash2's convolution; 0 for DFlash"""
    conv_group_size: int = 1
    selector_rank: int = 0
    selector_top_k: int = 0

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        for name in ("layer_types", "target_layer_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()

    def _check(self) -> None:
        _rule(self.block_size >= 2, "block_size", self.block_size, "the anchor and at least one mask", 16)
        _rule(
            self.target_layer_ids and all(0 <= i < self.num_target_layers for i in self.target_layer_ids),
            "target_layer_ids", list(self.target_layer_ids), f"layers 0..{self.num_target_layers - 1} of the target, counted from 0",
            list(default_layer_ids(self.num_target_layers, max(self.num_hidden_layers, 1))),
        )
        _rule(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads", self.num_key_value_heads, f"it must divide num_attention_heads {self.num_attention_heads}", 1,
        )
        _rule(0 <= self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id, "a token of the vocabulary", 0)
        _rule(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= {"full_attention", "sliding_attention"},
            "layer_types", list(self.layer_types), "full_attention or sliding_attention for every layer",
            ["full_attention"] * self.num_hidden_layers,
        )
        _rule(
            "sliding_attention" not in self.layer_types or (self.sliding_window or 0) > 0,
            "sliding_window", self.sliding_window, "sliding layers need a window of at least one token", 2048,
        )
        _rule(self.head_dim % 2 == 0, "head_dim", self.head_dim, "rotary positions turn pairs", 64)
        if self.version == 2:
            _rule(
                self.hidden_size % self.conv_group_size == 0,
                "conv_group_size", self.conv_group_size, f"it must divide hidden_size {self.hidden_size}", 1,
            )
            _rule(self.selector_rank > 0, "selector_rank", self.selector_rank, "DFlash2 has a candidate selector", 256)
            _rule(
                0 < self.selector_top_k <= self.vocab_size,
                "selector_top_k", self.selector_top_k, f"1..{self.vocab_size} candidates", min(16, self.vocab_size),
            )

    @property
    def version(self) -> int:
        """1 for DFlash, 2 for DFlash2."""
        return 2 if self.conv_kernel_size else 1

    @property
    def feature_size(self) -> int:
        """m * D."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> Optional[int]:
        """Tokens that a row of the layer reaches back, itself included; None: no limit."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def is_causal(self, layer: int) -> bool:
        """Whether a row sees its own block up to itself only."""
        return self.layer_types[layer] == "sliding_attention" if self.causal is None else self.causal

    def widest_window(self) -> Optional[int]:
        """The widest window of all layers; None if one has no limit."""
        windows = [self.window(layer) for layer in range(self.num_hidden_layers)]
        return None if None in windows else max(windows)

    # ---- the published file -----------------------------------------------------------------

    def published(self, dtype: str = "float32") -> dict[str, Any]:
        """Contents of config.json."""
        plain = {name: getattr(self, name) for name in _TOP}
        inner = {name: getattr(self, name) for name in ("mask_token_id", "block_size", *(_INNER_2 if self.version == 2 else ()))}
        inner |= {name: getattr(self, name) for name, default in _INNER_OPTIONAL.items() if getattr(self, name) != default}
        return {
            "architectures": [ARCHITECTURES[self.version]],
            "model_type": "qwen3",
            "dtype": dtype,
            **plain,
            "layer_types": list(self.layer_types),
            "use_sliding_window": "sliding_attention" in self.layer_types,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **({} if self.causal is None else {"is_causal": self.causal}),
            "dflash_config": {**inner, "target_layer_ids": list(self.target_layer_ids)},
        }

    @staticmethod
    def from_published(config: dict[str, Any]) -> "DrafterConfig":
        """The shape of a config.json.

        Raises:
            DrafterError: not a drafter of a known kind, or fields that contradict each other.
        """
        inner = config.get("dflash_config")
        _rule(isinstance(inner, dict), "dflash_config", inner, "a published drafter has it", {"mask_token_id": 0, "target_layer_ids": [1]})
        names = {field.name for field in dataclasses.fields(DrafterConfig)}
        values = {name: config[name] for name in names if config.get(name) is not None}
        values |= {name: inner[name] for name in names if inner.get(name) is not None}
        _rule(
            config.get("block_size") in (None, values.get("block_size")),
            "block_size", config.get("block_size"), "equal at both levels", values.get("block_size"),
        )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        _rule(kind == "default", "rope_parameters", kind, "plain rotary positions", "default")
        values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        values["causal"] = _causal(config, inner)
        missing = {f.name for f in dataclasses.fields(DrafterConfig) if f.default is dataclasses.MISSING} - set(values)
        _rule(not missing, "config.json", f"without {', '.join(sorted(missing))}", "a drafter is described whole", "every field")
        return DrafterConfig(**values)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a published folder."""
        D, I, d, r = self.hidden_size, self.intermediate_size, self.head_dim, self.selector_rank
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, self.feature_size), "hidden_norm.weight": (D,), "norm.weight": (D,)}
        layer = {
            "input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (q, D), "self_attn.k_proj.weight": (kv, D), "self_attn.v_proj.weight": (kv, D),
            "self_attn.o_proj.weight": (D, q), "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (I, D), "mlp.up_proj.weight": (I, D), "mlp.down_proj.weight": (D, I),
        }
        if self.version == 2:
            T = self.conv_kernel_size
            for part in ("attention_conv", "mlp_conv"):
                layer[f"{part}.base_kernel"] = (2, T, D)
                layer[f"{part}.kernel_projection.weight"] = (2 * T * D // self.conv_group_size, D)
            shapes |= {f"candidate_selector.{side}_codebook": (self.vocab_size, r) for side in ("predecessor", "successor")}
            shapes["candidate_selector.hidden_projection.weight"] = (r, D)
        for number in range(self.num_hidden_layers):
            shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        return shapes


_TOP = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "num_target_layers", "block_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "sliding_window",
)
_INNER_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_INNER_OPTIONAL = {"causal": None, "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


def _causal(config: dict[str, Any], inner: dict[str, Any]) -> Optional[bool]:
    """Whether blocks are causal; the three fields that say so must agree."""
    said = [value for value in (config.get("is_causal"), inner.get("causal")) if value is not None]
    if config.get("sliding_window_non_causal"):
        said.append(False)
    _rule(len(set(said)) < 2, "is_causal", said, "is_causal, dflash_config.causal and sliding_window_non_causal must agree", "one of them")
    return said[0] if said else None


def _rule(holds: Any, name: str, value: object, rule: str, legal: object) -> None:
    if not holds:
        raise DrafterError(f"{name} {value}: {rule}. A legal value: {legal}")


def read_config(folder: Path) -> DrafterConfig:
    """The shape of the drafter in `folder`.

    Raises:
        DrafterError: no config.json, or not that of a drafter.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise DrafterError(f"{folder}: no config.json in it. A legal value: a folder that tools/export_dflash.py wrote")
    return DrafterConfig.from_published(json.loads(path.read_text(encoding="utf-8")))
