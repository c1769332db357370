"""A drafter as a server runs it: one block at a time, the context's keys and values in a cache.

    c context rows known before the anchor     B block size     V vocabulary

A call brings the target's features of the tokens accepted since the last one, appends their keys and values, and drafts
from the anchor, which stands right behind them. The block's own rows are never kept.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.bdlm.drafter.model import Drafter, transform_logits


class DraftSession:
    """Drafting for one sequence.

    Args:
        drafter: its weights' type is the one computed in.
        embedding, head: [V, D], the target's.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor):
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def length(self) -> int:
        """Context rows in the cache."""
        return len(self.keys[0]) if self.keys else 0

    @torch.no_grad()
    def hidden(self, features: Tensor, anchor: int) -> Tensor:
        """Hidden states [B, D] of the block of token `anchor`, after `features` [new, m * D] of the tokens before it."""
        config, start = self.drafter.shape, self.length
        ids = torch.full((config.block_size,), config.mask_token_id, device=self.embedding.device)
        ids[0] = anchor
        positions = torch.arange(start, start + len(features) + config.block_size, device=ids.device)
        context_positions, positions = positions.split((len(features), config.block_size))
        rows = self.embedding[ids].to(features.dtype)
        return self.drafter(rows, features, positions, context_positions, self._attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V], through the target's output layer."""
        return transform_logits(hidden @ self.head.to(hidden.dtype).t(), self.drafter.shape)

    @torch.no_grad()
    def draft(self, features: Tensor, anchor: int) -> Tensor:
        """Greedy tokens [B - 1] behind `anchor`; by the candidate selector where there is one."""
        hidden = self.hidden(features, anchor)[1:]
        logits, selector = self.logits(hidden), self.drafter.candidate_selector
        if selector is None:
            return logits.argmax(-1)
        return selector.walk(logits[None], hidden[None], torch.tensor([anchor], device=hidden.device))[0]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        if layer == len(self.keys):
            self.keys.append(context_k)
            self.values.append(context_v)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], context_k))
            self.values[layer] = torch.cat((self.values[layer], context_v))
        visible = self._visible(layer, len(self.keys[layer]), len(q), q.device)
        keys, values = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))  # [1, heads, rows, d]
        return scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True)[0].transpose(0, 1)

    def _visible(self, layer: int, context: int, rows: int, device: torch.device) -> Tensor:
        """bool [rows, context + rows]."""
        config = self.drafter.shape
        query, key = torch.arange(context, context + rows, device=device)[:, None], torch.arange(context + rows, device=device)
        visible = (key <= query) | torch.tensor(not config.is_causal(layer), device=device)
        window = config.window(layer)
        return visible if window is None else visible & (key > query - window) & (key < query + window)
