"""What a drafter's attention and forward must be, as plain loops over every row: no plan, no cache, no kernel.

    C context rows     A anchors     B block size
"""

from typing import Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor


def draft_mask(
    context: int,
    anchors: Sequence[int],
    block_size: int,
    starts: Optional[Sequence[int]] = None,
    window: Optional[int] = None,
    causal: bool = False,
) -> Tensor:
    """bool [A * B, C + A * B]: which keys, context tokens then draft rows, each draft row sees."""
    visible = torch.zeros(len(anchors) * block_size, context + len(anchors) * block_size, dtype=torch.bool)
    for number, anchor in enumerate(anchors):
        start = 0 if starts is None else starts[number]
        for k in range(block_size):
            row = number * block_size + k
            for token in range(start, anchor):
                if window is None or anchor + k - token < window:
                    visible[row, token] = True
            for other in range(block_size):
                near = window is None or abs(k - other) < window
                if near and (other <= k or not causal):
                    visible[row, context + number * block_size + other] = True
    return visible


def draft_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention of q [r, H, d] on k, v [keys, G, d] under bool [r, keys]; a row that sees nothing gives zero."""
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].t() * q.shape[2] ** -0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
        out.append(torch.nan_to_num(weights, nan=0.0) @ v[:, head // group])
    return torch.stack(out, 1)


def drafter_forward(
    tensors: Mapping[str, Tensor],
    layers: int,
    rows: Tensor,
    features: Tensor,
    positions: Sequence[int],
    context_positions: Sequence[int],
    masks: Callable[[int], Tensor],
    theta: float,
    eps: float,
) -> Tensor:
    """Hidden states [r, D] of a DFlash drafter with tensors by published name, row by row where that is plainer."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * tensors[name]

    def turned(x: Tensor, at: Sequence[int]) -> Tensor:
        half = x.shape[2] // 2
        out = x.clone()
        for row, position in enumerate(at):
            for i in range(half):
                angle = torch.tensor(float(position) * theta ** (-i / half), dtype=x.dtype)
                a, b = x[row, :, i], x[row, :, half + i]
                out[row, :, i] = a * angle.cos() - b * angle.sin()
                out[row, :, half + i] = b * angle.cos() + a * angle.sin()
        return out

    context = norm(features @ tensors["fc.weight"].t(), "hidden_norm.weight")
    x = rows
    for layer in range(layers):
        at = f"layers.{layer}."
        d = len(tensors[at + "self_attn.q_norm.weight"])

        def heads(y: Tensor, name: str) -> Tensor:
            return (y @ tensors[f"{at}self_attn.{name}_proj.weight"].t()).unflatten(-1, (-1, d))

        normed = norm(x, at + "input_layernorm.weight")
        q = turned(norm(heads(normed, "q"), at + "self_attn.q_norm.weight"), positions)
        keys = torch.cat((
            turned(norm(heads(context, "k"), at + "self_attn.k_norm.weight"), context_positions),
            turned(norm(heads(normed, "k"), at + "self_attn.k_norm.weight"), positions),
        ))
        values = torch.cat((heads(context, "v"), heads(normed, "v")))
        seen = draft_attention(q, keys, values, masks(layer)).flatten(1)
        x = x + seen @ tensors[at + "self_attn.o_proj.weight"].t()
        normed = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (normed @ tensors[f"{at}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ tensors[at + "mlp.down_proj.weight"].t()
    return norm(x, "norm.weight")
