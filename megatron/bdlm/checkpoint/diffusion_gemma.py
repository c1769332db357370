"""DiffusionGemma: its Hugging Face tensors and options, and those of the engine.

Layers differ in shape (two kinds of attention), so the engine's checkpoint holds each layer's tensors under names of
their own, `decoder.layers.3.mlp.router.weight`, where other models stack them.

The published model is an encoder and a decoder that share every weight. Files hold the decoder's, and of the encoder
only each layer's scalar; here both scalars are buffers of one layer. Tensors of the vision tower are no part of the
model that is trained: import puts them beside the tokenizer, export takes them from there.

`k` below: "sliding" or "full", the kind of a layer.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional

import torch

from megatron.bdlm.checkpoint.architectures import Part
from megatron.bdlm.checkpoint.layout import LAYOUTS, ConversionError, Sizes
from megatron.bdlm.config import DiffusionGemmaOptions

MODEL_TYPE = "diffusion_gemma"
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
REQUIRED = dict(attention_bias=False, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
"""Values of text_config without which it is another model."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the engine, the parts it is made of, and the sizes of its layer's kind."""

    target: str
    parts: tuple[Part, ...]
    layout: str
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the engine's tensor, found on tensors without data."""
        empty = [torch.empty(shape, device="meta") for shape in self.part_shapes]
        return tuple(LAYOUTS[self.layout].join(empty, self.sizes).shape)

    @property
    def part_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(size if isinstance(size, int) else self.sizes.of(size) for size in part.shape) for part in self.parts]

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The engine's tensor out of Hugging Face tensors by name."""
        return LAYOUTS[self.layout].join([parts[part.name] for part in self.parts], self.sizes)

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Hugging Face tensors by name."""
        return dict(zip((part.name for part in self.parts), LAYOUTS[self.layout].split(tensor, self.sizes)))


def tensors(sizes: Sizes, full: Sizes, is_full: list[bool]) -> Iterator[Tensor]:
    """Every tensor of the model, layer by layer.

    Args:
        sizes: of the model and its sliding layers.
        full: the same with head size and key-value heads of full layers.
        is_full: by layer.
    """
    def one(target: str, name: str, *shape: Any, layout: str = "same", of: Sizes = sizes) -> Tensor:
        return Tensor(target, (Part(name, shape),), layout, of)

    def pair(target: str, block: str) -> Tensor:
        gate, up = (Part(f"{DECODER}{block}.{name}_proj.weight", ("ffn", "hidden")) for name in ("gate", "up"))
        return Tensor(target, (gate, up), "gate_up", sizes)

    yield one("embedding.word_embeddings.weight", DECODER + "embed_tokens.weight", "vocab", "hidden", layout="rows")
    yield one("self_conditioning.pre_norm.weight", DECODER + "self_conditioning.pre_norm.weight", "hidden")
    yield pair("self_conditioning.mlp.linear_fc1.weight", "self_conditioning")
    yield one("self_conditioning.mlp.linear_fc2.weight", DECODER + "self_conditioning.down_proj.weight", "hidden", "ffn")
    for layer in range(sizes.layers):
        ours, theirs, kind = f"decoder.layers.{layer}.", f"layers.{layer}.", full if is_full[layer] else sizes
        head = DECODER + theirs
        letters = (("q", "query"), ("k", "key"), *((("v", "key"),) if not is_full[layer] else ()))
        projections = tuple(Part(f"{head}self_attn.{letter}_proj.weight", (size, "hidden")) for letter, size in letters)
        yield Tensor(ours + "self_attention.linear_qkv.weight", projections, "qk" if is_full[layer] else "qkv", kind)
        yield one(ours + "self_attention.linear_proj.weight", head + "self_attn.o_proj.weight", "hidden", "query", of=kind)
        for letter in "qk":
            yield one(f"{ours}self_attention.{letter}_layernorm.weight", f"{head}self_attn.{letter}_norm.weight", "head", of=kind)
        for our_norm, their_norm in _NORMS.items():
            yield one(f"{ours}{our_norm}.weight", f"{head}{their_norm}.weight", "hidden")
        yield pair(ours + "mlp.shared_experts.linear_fc1.weight", theirs + "mlp")
        yield one(ours + "mlp.shared_experts.linear_fc2.weight", head + "mlp.down_proj.weight", "hidden", "ffn")
        yield one(ours + "mlp.router.weight", head + "router.proj.weight", "experts", "hidden")
        yield one(ours + "mlp.router.scale", head + "router.scale", "hidden")
        yield one(ours + "mlp.router.per_expert_scale", head + "router.per_expert_scale", "experts")
        experts = ours + "mlp.experts.experts."
        yield one(experts + "linear_fc1.weight", head + "experts.gate_up_proj", "experts", 2 * sizes.expert_ffn, "hidden")
        yield one(experts + "linear_fc2.weight", head + "experts.down_proj", "experts", "hidden", "expert_ffn")
        yield one(ours + "layer_scalar", head + "layer_scalar", 1)
        yield one(ours + "clean_layer_scalar", ENCODER + theirs + "layer_scalar", 1)
    yield one("decoder.final_layernorm.weight", DECODER + "norm.weight", "hidden")


_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "mlp.pre_shared_expert_layernorm": "pre_feedforward_layernorm",
    "mlp.post_shared_expert_layernorm": "post_feedforward_layernorm_1",
    "mlp.pre_expert_layernorm": "pre_feedforward_layernorm_2",
    "mlp.post_expert_layernorm": "post_feedforward_layernorm_2",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}

EXTRA_STATE_MODULES = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
)
"""Modules of a layer whose (empty) extra state a run may ask for; experts and self-conditioning have their own."""


# ---- options -------------------------------------------------------------------------------


def flags_of(config: Any, vocab_multiple: int) -> list[str]:
    """The engine's flags for a `transformers` configuration.

    Raises:
        ConversionError: a value that the engine's model does not have.
    """
    text = config.text_config.to_dict()
    wrong = [
        f"{key} {text[key]!r} (it must be {value!r})" for key, value in REQUIRED.items() if text.get(key, value) != value
    ]
    if text.get("use_bidirectional_attention") == "all":
        wrong.append("use_bidirectional_attention 'all' (text must be causal: 'vision' or null)")
    rope = text["rope_parameters"]
    sliding, full = rope["sliding_attention"], rope["full_attention"]
    if (sliding["rope_type"], full["rope_type"]) != ("default", "proportional"):
        wrong.append(f"rope_type {sliding['rope_type']!r}, {full['rope_type']!r} (they must be 'default', 'proportional')")
    if wrong:
        raise ConversionError(f"{MODEL_TYPE}: options of config.json that are not supported: {', '.join(wrong)}")
    last = config.text_config.per_layer_config[text["num_hidden_layers"] - 1]  # always a full one
    options = DiffusionGemmaOptions(
        vocab_size=text["vocab_size"], full_head_size=last.head_dim, full_key_heads=last.num_key_value_heads,
        full_rotary_base=full["rope_theta"], full_rotary_factor=full.get("partial_rotary_factor", 1.0),
        logit_softcap=config.text_config.final_logit_softcapping, pad_token_id=text["pad_token_id"],
    )
    slides = [int(kind == "sliding_attention") for kind in text["layer_types"]]
    values = {flag: text[key] for key, (flag, _) in _OPTIONS.items()} | {
        "--moe-shared-expert-intermediate-size": text["intermediate_size"],
        "--seq-length": text["max_position_embeddings"],
        "--rotary-base": int(sliding["rope_theta"]),
        "--window-size": f"{text['sliding_window'] - 1},0",
        "--window-attn-skip-freq": str(slides).replace(" ", ""),
        "--init-method-std": text.get("initializer_range", 0.02),
        "--make-vocab-size-divisible-by": vocab_multiple,
        "--moe-router-load-balancing-type": "none",
        "--moe-router-score-function": "softmax",
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--bdlm-recipe": "diffusion-gemma",
        "--bdlm-block-size": config.canvas_length,
        "--bdlm-diffusion-gemma": json.dumps(dataclasses.asdict(options)),
    }
    switches = ["--swiglu", "--disable-bias-linear", "--group-query-attention", "--qk-layernorm"]
    return switches + [str(word) for pair in values.items() for word in pair]


_OPTIONS = {
    "num_hidden_layers": ("--num-layers", "num_layers"),
    "hidden_size": ("--hidden-size", "hidden_size"),
    "intermediate_size": ("--ffn-hidden-size", "ffn_hidden_size"),
    "num_attention_heads": ("--num-attention-heads", "num_attention_heads"),
    "num_key_value_heads": ("--num-query-groups", "num_query_groups"),
    "head_dim": ("--kv-channels", "kv_channels"),
    "rms_norm_eps": ("--norm-epsilon", "layernorm_epsilon"),
    "max_position_embeddings": ("--max-position-embeddings", "max_position_embeddings"),
    "num_experts": ("--num-experts", "num_experts"),
    "top_k_experts": ("--moe-router-topk", "moe_router_topk"),
    "moe_intermediate_size": ("--moe-ffn-hidden-size", "moe_ffn_hidden_size"),
}
"""Key of text_config, flag and argument of the engine."""


def options_of(args: Any) -> Optional[DiffusionGemmaOptions]:
    """The options in a checkpoint's arguments, None where it is another model."""
    text = getattr(args, "bdlm_diffusion_gemma", None)
    return None if text is None else DiffusionGemmaOptions(**json.loads(text))


def full_layers(args: Any) -> list[bool]:
    """Which layers have no window, by --window-attn-skip-freq: a list, or every n-th."""
    skip = args.window_attn_skip_freq
    if isinstance(skip, int):
        return [number % skip == 0 for number in range(1, args.num_layers + 1)]
    return [False] * args.num_layers if skip is None else [not slides for slides in skip]


def full_sizes(sizes: Sizes, options: DiffusionGemmaOptions) -> Sizes:
    """Sizes of full layers."""
    return dataclasses.replace(sizes, head=options.full_head_size, groups=options.full_key_heads)


def config_of(args: Any, dtype: torch.dtype, base: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Content of config.json for a checkpoint's arguments, over the one that the model came with."""
    base, options = dict(base or {}), options_of(args)
    text = {key: value for key, value in (base.get("text_config") or {}).items() if key != "per_layer_config"}
    kinds = ["full_attention" if full else "sliding_attention" for full in full_layers(args)]
    text |= {key: getattr(args, name) for key, (_, name) in _OPTIONS.items()}
    text |= dict(
        vocab_size=options.vocab_size, global_head_dim=options.full_head_size, num_global_key_value_heads=options.full_key_heads,
        final_logit_softcapping=options.logit_softcap, pad_token_id=options.pad_token_id, layer_types=kinds,
        sliding_window=args.window_size[0] + 1, dtype=str(dtype).removeprefix("torch."),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": float(args.rotary_base)},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": options.full_rotary_base,
                "partial_rotary_factor": options.full_rotary_factor,
            },
        },
        **REQUIRED,
    )
    return base | dict(
        model_type=MODEL_TYPE, architectures=["DiffusionGemmaForBlockDiffusion"], dtype=text["dtype"],
        canvas_length=args.bdlm_block_size, text_config=text,
    )
