"""Tiny random Hugging Face models of every architecture, and a tiny tokenizer, written to folders."""

import json
from pathlib import Path

import torch

LENGTH = 40
"""Tokens of the prompts that tests compare logits on: longer than the windows below."""

COMMON = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

MODELS = {
    "llama": ("llama", dict(tie_word_embeddings=True)),
    "llama untied, linear": ("llama", dict(rope_parameters=dict(rope_theta=5000.0, rope_type="linear", factor=4.0))),
    "llama untied, llama3": ("llama", dict(rope_parameters=dict(rope_theta=500000.0, **LLAMA3))),
    "llama untied, theta 1e4+0.5": ("llama", dict(rope_parameters=dict(rope_theta=10000.5, rope_type="default"))),
    "mistral, window 7": ("mistral", dict(sliding_window=7)),
    "mistral, no window": ("mistral", dict(sliding_window=None)),
    "qwen2 tied": ("qwen2", dict(tie_word_embeddings=True, head_dim=8)),
    "qwen2, windows by layer": (
        "qwen2",
        dict(head_dim=8, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3 tied": ("qwen3", dict(tie_word_embeddings=True)),
    "qwen3, yarn": ("qwen3", dict(rope_parameters=dict(rope_theta=1e6, **YARN))),
}
"""Dense models by name: model type and what differs from COMMON."""

EXPERTS = {
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes):
    """A random model of MODELS or EXPERTS; norms and biases are random too, so that none can be lost unseen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = {**MODELS, **EXPERTS}[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**COMMON, "tie_word_embeddings": False, **values, **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


def save_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, tokenizer: bool = False, **changes) -> Path:
    """`make_model` as a Hugging Face folder; with `tokenizer`, one of as many tokens as the model has rows."""
    model = make_model(name, dtype, **changes)
    model.save_pretrained(folder, max_shard_size="20KB")  # some shards, and an index
    if tokenizer:
        save_tokenizer(folder, model.config.vocab_size)
    return folder


def save_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of `size` tokens (at least 44): printable characters behind five special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", "<reserved>", "<other>"]
    letters = [chr(code) for code in range(97, 97 + 26)] + list("Ġ0123456789.,:") + [f"<|{n}|>" for n in range(size)]
    vocabulary = {token: index for index, token in enumerate((special + letters)[:size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a `transformers` model."""
    with torch.no_grad():
        return model(tokens).logits
