"""A small drafter, random samples and features: the same for every layout."""

from dataclasses import replace

import numpy as np
import torch

from megatron.bdlm.attention.functional import DraftLink
from megatron.bdlm.drafter.anchors import AnchorDraw
from megatron.bdlm.drafter.attention import PlannedAttention
from megatron.bdlm.drafter.batch import Cell, DraftSample, build_batch
from megatron.bdlm.drafter.format import DrafterConfig
from megatron.bdlm.drafter.model import Drafter
from megatron.bdlm.drafter.objective import DraftObjective, draft_forward, draft_loss

V1 = DrafterConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=50, num_target_layers=6, target_layer_ids=(1, 4), mask_token_id=49, block_size=4,
)
V2 = replace(V1, conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=5)
WINDOWED = replace(V1, layer_types=("sliding_attention",) * 2, sliding_window=6)
MIXED = replace(V1, layer_types=("sliding_attention", "full_attention"), sliding_window=6)


class RandomFeatures:
    """Features that are a function of the sample's index, as a frozen target's would be."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype = torch.float64):
        self.config, self.dtype = config, dtype

    def whole(self, sample: DraftSample, width: int, purpose: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * purpose + sample.sample_index)
        return torch.randn(len(sample.tokens), width, dtype=torch.float64, generator=generator).to(self.dtype)

    def features(self, sample, tokens):
        return self.whole(sample, self.config.feature_size, 1)[torch.from_numpy(tokens)]

    def last_hidden(self, sample, tokens):
        return self.whole(sample, self.config.hidden_size, 2)[torch.from_numpy(tokens)]


class Fixed:
    """A draw of given anchors."""

    def __init__(self, anchors):
        self.anchors = np.array(anchors)

    def draw(self, *_):
        return self.anchors


def drafter(config: DrafterConfig, seed: int = 3, dtype: torch.dtype = torch.float64, std: float = 0.2) -> Drafter:
    """Random weights; those that start without effect are drawn too."""
    model = Drafter(config).to(dtype).initialise(seed, std)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "conv." in name or "successor" in name or name.endswith("norm.weight"):
                tensor.add_(torch.randn(tensor.shape, dtype=torch.float64, generator=generator).to(dtype), alpha=0.2)
    return model


def target_tables(config: DrafterConfig, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output layer [V, D]."""
    generator = torch.Generator().manual_seed(9)
    shape = (2, config.vocab_size, config.hidden_size)
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).mul(0.5))


def samples(count: int, length: int = 24, config: DrafterConfig = V1, supervised: bool = True) -> list[DraftSample]:
    """Samples of two documents with holes in the loss mask."""
    made = []
    for index in range(count):
        random = np.random.default_rng(index)
        mask = random.random(length) < (0.8 if index % 2 == 0 else 0.4)
        documents = (np.arange(length) >= length // 3).astype(np.int64)
        made.append(DraftSample(random.integers(0, config.vocab_size - 1, length), mask & supervised, documents, index))
    return made


def loss_and_gradients(config, data, cell=Cell(), link=DraftLink(), objective=DraftObjective(), count=6, source=None):
    """(sum, weight, {name: gradient}) of this rank; summed over ranks they are the global batch's."""
    model, (embedding, head) = drafter(config), target_tables(config)
    draw = AnchorDraw(count=count, block_size=config.block_size, seed=5)
    batch = build_batch(data, source or RandomFeatures(config), config, draw, cell, teacher=objective.kind == "kl")
    hidden = draft_forward(model, batch, embedding, PlannedAttention(batch.plan, config, link))
    loss = draft_loss(hidden, batch, head, model, objective)
    loss.total.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.total.detach(), loss.weight.detach(), gradients
