"""A tiny target of `transformers` with random weights, and samples of its own greedy text."""

from pathlib import Path

import numpy as np
import torch

from megatron.bdlm.drafter.data import write_samples
from megatron.bdlm.drafter.format import DrafterConfig

VOCAB, LAYERS, HIDDEN = 64, 6, 32
MASK = VOCAB - 1


def make_target(folder: Path | None = None, kind: str = "llama"):
    """A model with 6 layers; saved to `folder` where one is given."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rope_theta=10000.0, tie_word_embeddings=False,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    model = model_class(config).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


def drafter_config(version: int = 1, block_size: int = 4) -> DrafterConfig:
    second = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=5) if version == 2 else {}
    return DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, num_target_layers=LAYERS, target_layer_ids=(1, 3), mask_token_id=MASK, block_size=block_size,
        max_position_embeddings=128, **second,
    )


def make_samples(folder: Path, count: int = 8, length: int = 32) -> None:
    """Random prompts of 8 tokens, everything behind supervised; the last tokens of odd samples are padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB - 1, (count, length))
    mask, documents = np.zeros((count, length), bool), np.zeros((count, length), int)
    mask[:, 8:] = True
    mask[1::2, -4:], documents[1::2, -4:] = False, -1
    write_samples(folder, tokens, mask, documents, {})
