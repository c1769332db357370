"""The drafter's attention under a plan of anchors: one layer's queries, keys and values into the parallel attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bdlm.attention.functional import DraftLink, draft_attention
from megatron.bdlm.drafter.format import DrafterConfig
from megatron.bdlm.parallel.anchor_plan import AnchorPlan


@dataclass(frozen=True)
class PlannedAttention:
    """`model.Attend` of this rank: context rows and draft rows in the plan's local order."""

    plan: AnchorPlan
    config: DrafterConfig
    link: DraftLink = DraftLink()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        keys, values = torch.cat((context_k, k)), torch.cat((context_v, v))
        q, keys, values = (x.unsqueeze(1) for x in (q, keys, values))  # one sample: [rows, 1, heads, d]
        window, causal = self.config.window(layer), self.config.is_causal(layer)
        return draft_attention(q, keys, values, self.plan, self.link, window, causal).squeeze(1)
