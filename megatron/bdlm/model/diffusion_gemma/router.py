"""Router of DiffusionGemma: what the engine's top-k router lacks.

    r = N(x) * scale * h^(-1/2)    p = softmax(r Wr^T) over the chosen experts    weight of expert e = p_e * per_expert_scale[e]

x is the residual itself, not the experts' normed input. There is no balancing loss.
"""

import torch
from torch import Tensor, nn

from megatron.bdlm.model.diffusion_gemma.norms import unweighted_norm
from megatron.bdlm.model.router import BlockDiffusionRouter


class GemmaRouter(BlockDiffusionRouter):
    """`BlockDiffusionRouter` (load statistics of noisy and clean rows) with the norm and scale before it and the scale of each expert behind it."""

    def __init__(self, config, pg_collection=None, is_mtp_layer: bool = False):
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        for name, count in (("scale", config.hidden_size), ("per_expert_scale", config.num_moe_experts)):
            parameter = nn.Parameter(torch.ones(count, dtype=config.params_dtype))
            parameter.sequence_parallel = config.sequence_parallel
            self.register_parameter(name, parameter)

    def gating(self, input: Tensor) -> Tensor:
        """Residual [s, b, h] -> logits [s, b, E]."""
        normed = unweighted_norm(input, self.config.layernorm_epsilon)
        return super().gating(normed * self.scale * self.config.hidden_size**-0.5)

    def routing(self, logits: Tensor, padding_mask=None) -> tuple[Tensor, Tensor]:
        """Logits -> weights (0 where not chosen) and choice, [s * b, E] each; `padding_mask` carries row classes."""
        probs, routing_map = super().routing(logits, padding_mask)
        return probs * self.per_expert_scale.to(probs.dtype), routing_map
