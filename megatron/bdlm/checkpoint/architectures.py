"""One declarative mapping per architecture: which tensors, and which options of `config.json` are which flags.

A `Rule` says of what Hugging Face tensors one tensor of the engine consists (the layouts are in `layout.py`). An
`Architecture` lists its rules, the flags that it always has, and the values that `config.json` must have because the
model has nothing else. To add one, write one here; nothing else in the conversion knows names.

Names of the engine are those of its Transformer Engine spec, which its local spec stores too: a norm before a
projection is `linear_qkv.layer_norm_weight`, and layers are stacked on axis 0.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Mapping, Optional

from megatron.bdlm.checkpoint.layout import ConversionError


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor; `{layer}` and `{expert}` in the name, dimensions as `Sizes.of` knows them."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A tensor of the engine and the parts that it is made of."""

    target: str
    parts: tuple[Part, ...]
    layout: str = "same"
    in_layer: bool = True
    experts: bool = False
    """The parts exist once for every expert."""
    untied_only: bool = False


@dataclass(frozen=True)
class Option:
    """An option of `config.json`, its flag, and the attribute of the engine's arguments that the flag sets."""

    key: str
    flag: str
    attribute: str


OPTIONS = (
    Option("num_hidden_layers", "--num-layers", "num_layers"),
    Option("hidden_size", "--hidden-size", "hidden_size"),
    Option("intermediate_size", "--ffn-hidden-size", "ffn_hidden_size"),
    Option("num_attention_heads", "--num-attention-heads", "num_attention_heads"),
    Option("num_key_value_heads", "--num-query-groups", "num_query_groups"),
    Option("head_dim", "--kv-channels", "kv_channels"),
    Option("rms_norm_eps", "--norm-epsilon", "layernorm_epsilon"),
    Option("max_position_embeddings", "--max-position-embeddings", "max_position_embeddings"),
)
"""Options that every architecture here has; rotary frequencies, windows, vocabulary and ties are
translated in `model_options.py`."""

EXPERT_OPTIONS = (
    Option("num_experts_per_tok", "--moe-router-topk", "moe_router_topk"),
    Option("router_aux_loss_coef", "--moe-aux-loss-coeff", "moe_aux_loss_coeff"),
)


@dataclass(frozen=True)
class Architecture:
    """A model family."""

    model_type: str
    """`model_type` of config.json."""
    causal_lm: str
    """Class name in config.json's `architectures`."""
    rules: tuple[Rule, ...]
    options: tuple[Option, ...] = OPTIONS
    flags: tuple[str, ...] = ()
    """Flags beside those of `BASE_FLAGS`."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json without which it is another model; an absent key counts as right."""
    window: Literal["none", "every layer", "layer types"] = "none"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of names of tensors that old files hold and no model reads."""

    def recognises(self, args: Any) -> bool:
        """Whether a checkpoint's arguments are those of this family (the first that says so is taken)."""
        marks = {
            "--add-qkv-bias": getattr(args, "add_qkv_bias", False),
            "--qk-layernorm": getattr(args, "qk_layernorm", False),
        }
        has_experts = getattr(args, "num_experts", None) is not None
        window_fits = getattr(args, "window_size", None) is None or self.window != "none"
        return (
            all(value == (flag in self.flags) for flag, value in marks.items())
            and has_experts == any(rule.experts for rule in self.rules)
            and window_fits
        )


BASE_FLAGS = (
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--group-query-attention",
)
"""Flags that every architecture here has."""

LAYER, HF_LAYER = "decoder.layers.", "model.layers.{layer}."
_QKV = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "key"))


def _attention(*, bias: bool = False, norm: bool = False) -> tuple[Rule, ...]:
    """Attention of one layer: projections, their bias, norms of queries and keys."""
    ours, theirs = LAYER + "self_attention.", HF_LAYER + "self_attn."
    rules = [
        Rule(ours + "linear_qkv.layer_norm_weight", (Part(HF_LAYER + "input_layernorm.weight", ("hidden",)),)),
        Rule(
            ours + "linear_qkv.weight", tuple(Part(f"{theirs}{n}.weight", (size, "hidden")) for n, size in _QKV), "qkv"
        ),
    ]
    if bias:
        rules.append(
            Rule(ours + "linear_qkv.bias", tuple(Part(f"{theirs}{n}.bias", (size,)) for n, size in _QKV), "qkv")
        )
    if norm:
        rules += [
            Rule(f"{ours}{letter}_layernorm.weight", (Part(f"{theirs}{letter}_norm.weight", ("head",)),))
            for letter in "qk"
        ]
    return (*rules, Rule(ours + "linear_proj.weight", (Part(theirs + "o_proj.weight", ("hidden", "query")),)))


_OUTER = (
    Rule(
        "embedding.word_embeddings.weight",
        (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
        "rows",
        in_layer=False,
    ),
    Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),), in_layer=False),
    Rule(
        "output_layer.weight", (Part("lm_head.weight", ("vocab", "hidden")),), "rows", in_layer=False, untied_only=True
    ),
)

_MLP = (
    Rule(
        LAYER + "mlp.linear_fc1.layer_norm_weight", (Part(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),)
    ),
    Rule(
        LAYER + "mlp.linear_fc1.weight",
        tuple(Part(HF_LAYER + f"mlp.{name}.weight", ("ffn", "hidden")) for name in ("gate_proj", "up_proj")),
        "gate_up",
    ),
    Rule(LAYER + "mlp.linear_fc2.weight", (Part(HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),)),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A layer of experts behind a router; `block` is its name in the Hugging Face file."""
    theirs = HF_LAYER + block
    pair = tuple(Part(f"{theirs}.experts.{{expert}}.{name}.weight", ("expert_ffn", "hidden")) for name in (gate, up))
    last = Part(f"{theirs}.experts.{{expert}}.{down}.weight", ("hidden", "expert_ffn"))
    return (
        Rule(LAYER + "pre_mlp_layernorm.weight", (Part(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),)),
        Rule(LAYER + "mlp.router.weight", (Part(theirs + ".gate.weight", ("experts", "hidden")),)),
        Rule(LAYER + "mlp.experts.experts.linear_fc1.weight", pair, "experts", experts=True),
        Rule(LAYER + "mlp.experts.experts.linear_fc2.weight", (last,), "experts", experts=True),
    )


_MOE_FLAGS = ("--moe-router-load-balancing-type", "aux_loss", "--moe-router-score-function", "softmax")

ARCHITECTURES = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        _OUTER + _attention() + _MLP,
        required=dict(hidden_act="silu", attention_bias=False, mlp_bias=False),
    ),
    Architecture(
        "mistral",
        "MistralForCausalLM",
        _OUTER + _attention() + _MLP,
        required=dict(hidden_act="silu"),
        window="every layer",
    ),
    Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _OUTER + _attention(bias=True) + _MLP,
        flags=("--add-qkv-bias",),
        required=dict(hidden_act="silu"),
        window="layer types",
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _OUTER + _attention(norm=True) + _MLP,
        flags=("--qk-layernorm",),
        required=dict(hidden_act="silu", attention_bias=False),
        window="layer types",
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _OUTER + _attention(norm=True) + _experts("mlp", "gate_proj", "up_proj", "down_proj"),
        options=(
            *OPTIONS,
            *EXPERT_OPTIONS,
            Option("num_experts", "--num-experts", "num_experts"),
            Option("moe_intermediate_size", "--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
        ),
        flags=("--qk-layernorm", *_MOE_FLAGS),
        required=dict(
            hidden_act="silu", attention_bias=False, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]
        ),
        window="every layer",
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        _OUTER + _attention() + _experts("block_sparse_moe", "w1", "w3", "w2"),
        options=(*OPTIONS, *EXPERT_OPTIONS, Option("num_local_experts", "--num-experts", "num_experts")),
        flags=_MOE_FLAGS,
        required=dict(hidden_act="silu"),
        window="every layer",
    ),
)

GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **{
        f"blk.{{layer}}.{theirs}": HF_LAYER + name
        for theirs, name in {
            "attn_norm.weight": "input_layernorm.weight",
            "attn_q.weight": "self_attn.q_proj.weight",
            "attn_k.weight": "self_attn.k_proj.weight",
            "attn_v.weight": "self_attn.v_proj.weight",
            "attn_q.bias": "self_attn.q_proj.bias",
            "attn_k.bias": "self_attn.k_proj.bias",
            "attn_v.bias": "self_attn.v_proj.bias",
            "attn_q_norm.weight": "self_attn.q_norm.weight",
            "attn_k_norm.weight": "self_attn.k_norm.weight",
            "attn_output.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "ffn_gate.weight": "mlp.gate_proj.weight",
            "ffn_up.weight": "mlp.up_proj.weight",
            "ffn_down.weight": "mlp.down_proj.weight",
        }.items()
    },
}
"""Names of tensors in GGUF files (llama.cpp's names) and in Hugging Face files; dense models."""


def architecture_of(model_type: str) -> Architecture:
    """The architecture of a config.json.

    Raises:
        ConversionError: it is none of these.
    """
    for architecture in ARCHITECTURES:
        if architecture.model_type == model_type:
            return architecture
    known = ", ".join(architecture.model_type for architecture in ARCHITECTURES)
    raise ConversionError(f"model_type {model_type}: no mapping; those that can be converted are {known}")


def architecture_of_arguments(args: Any, model_type: Optional[str] = None) -> Architecture:
    """The architecture of a checkpoint of the engine: `model_type` where it fits, else the first that fits.

    Raises:
        ConversionError: none fits.
    """
    for architecture in sorted(ARCHITECTURES, key=lambda a: a.model_type != model_type):
        if architecture.recognises(args):
            return architecture
    raise ConversionError(
        "no architecture has this model's combination of --add-qkv-bias, --qk-layernorm, --num-experts and "
        "--window-size; "
        f"they are {getattr(args, 'add_qkv_bias', None)}, {getattr(args, 'qk_layernorm', None)}, "
        f"{getattr(args, 'num_experts', None)}, {getattr(args, 'window_size', None)}"
    )
