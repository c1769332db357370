"""The drafter: published names and shapes, one forward for training and for the client.

    r draft rows (blocks of B)     c context rows     D hidden     H / G query / key heads     d head size

    context = RMSNorm(fc(features))                            once, for all layers: never updated, emits no queries
    each layer: q, k, v of the normed draft rows, and k, v of the context with the same weights; per-head RMSNorm on q and
    k, rotary positions, attention, o; SwiGLU. DFlash2 convolves around both sublayers (`dflash2`).

Who sees whom is not known here: `attend(layer, q, k, v, context_k, context_v)` does the attention. Training hands in
the parallel one (`attention.DraftAttention`), the client one with a cache (`client`).
"""

from typing import Callable, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron.bdlm.drafter.dflash2 import BlockConvolution, CandidateSelector
from megatron.bdlm.drafter.format import DrafterConfig

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [r, H, d], k [r, G, d], v [r, G, d], context k [c, G, d], context v [c, G, d]) -> [r, H, d]"""

Rotary = tuple[Tensor, Tensor]  # cos, sin [rows, 1, d]


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines of int positions [rows], computed in float64 or float32, given in `dtype`."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=exact, device=positions.device) / head_dim)
    angles = positions.to(exact)[:, None, None] * torch.cat((frequencies, frequencies))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Turn the halves of x [rows, heads, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * by[0] + torch.cat((-second, first), dim=-1) * by[1]


class DraftAttentionProjections(nn.Module):
    """q, k, v, o and the per-head norms of one layer."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(D, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, D, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)

    def queries(self, x: Tensor, by: Rotary) -> Tensor:
        """[r, D] -> [r, H, d]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), by)

    def keys_values(self, x: Tensor, by: Rotary) -> tuple[Tensor, Tensor]:
        """[rows, D] -> k, v [rows, G, d]; draft rows and context rows alike."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(keys, by), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, number: int):
        super().__init__()
        self.number = number
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttentionProjections(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        self.attention_conv = self.mlp_conv = None
        if config.version == 2:
            shape = (config.hidden_size, config.conv_kernel_size, config.conv_group_size, config.block_size)
            self.attention_conv, self.mlp_conv = BlockConvolution(*shape), BlockConvolution(*shape)

    def forward(self, x: Tensor, context: Tensor, by: Rotary, context_by: Rotary, attend: Attend) -> Tensor:
        """[r, D], [c, D] -> [r, D]."""

        def attention(rows: Tensor) -> Tensor:
            keys, values = self.self_attn.keys_values(rows, by)
            context_keys, context_values = self.self_attn.keys_values(context, context_by)
            queries = self.self_attn.queries(rows, by)
            seen = attend(self.number, queries, keys, values, context_keys, context_values)
            return self.self_attn.o_proj(seen.flatten(1))

        x = x + _convolved(self.attention_conv, self.input_layernorm(x), attention)
        return x + _convolved(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _convolved(conv: Optional[BlockConvolution], x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """The sublayer of x [r, D], between two convolutions where there are some; both take their taps from x."""
    if conv is None:
        return sublayer(x)
    delta = conv.deltas(x)
    return conv.convolve(sublayer(conv.convolve(x, delta, 0)), delta, 1)


class Drafter(nn.Module):
    """A DFlash or DFlash2 drafter; its state is that of a published folder, tensor for tensor."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.shape = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.candidate_selector = None
        if config.version == 2:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, config.selector_rank, config.selector_top_k
            )

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> "Drafter":
        """Draw every matrix from normal(0, std), in the order of modules, on the CPU: a function of `seed` alone."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.empty(module.weight.shape, device="cpu").normal_(0.0, std, generator=generator))
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.reset()
        if self.candidate_selector is not None:
            codebook = self.candidate_selector.predecessor_codebook
            codebook.copy_(torch.empty(codebook.shape, device="cpu").normal_(0.0, 0.02, generator=generator))
            self.candidate_selector.successor_codebook.zero_()
        return self

    def forward(
        self, rows: Tensor, features: Tensor, positions: Tensor, context_positions: Tensor, attend: Attend
    ) -> Tensor:
        """Hidden states of draft rows, ready for the target's output layer.

        Args:
            rows: [r, D] embeddings by the target: of the anchor's token, then of the mask, block after block.
            features: [c, m * D] of the context.
            positions, context_positions: int64 [r], [c], in the target's numbering.

        Returns:
            [r, D].
        """
        config = self.shape
        context = self.hidden_norm(self.fc(features))
        by, context_by = (rotary(p, config.head_dim, config.rope_theta, rows.dtype) for p in (positions, context_positions))
        x = rows * config.input_embedding_scale if config.input_embedding_scale != 1.0 else rows
        for layer in self.layers:
            x = layer(x, context, by, context_by, attend)
        return self.norm(x)


def transform_logits(logits: Tensor, config: DrafterConfig) -> Tensor:
    """The output multiplier, then the soft cap c * tanh(x / c)."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)
