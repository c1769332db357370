"""The feed-forward part of a DiffusionGemma layer: a dense branch and routed experts over one residual x.

    d = N_post1( Dense( N_pre1(x) ) )     m = N_post2( sum_e w_e(x) * Expert_e( N_pre2(x) ) )     out = d + m

The router reads x itself. The engine's layer has one input for all three and adds the branches unnormed, so the order
of steps is ours; dispatch, experts (grouped or one by one) and expert parallelism are the engine's.
"""

from typing import Optional

from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor

from megatron.bdlm.model.diffusion_gemma.norms import GemmaRMSNorm


class GemmaMoELayer(MoELayer):
    """See the module docstring; `shared_experts` is the dense branch."""

    def __init__(self, config, submodules: MoESubmodules, **kwargs):
        super().__init__(config, submodules, **kwargs)
        for name in ("pre_shared_expert_layernorm", "post_shared_expert_layernorm", "pre_expert_layernorm", "post_expert_layernorm"):
            self.add_module(name, GemmaRMSNorm(config, config.hidden_size, config.layernorm_epsilon))

    def forward(self, residual: Tensor, intermediate_tensors=None, padding_mask=None) -> tuple[Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias); `padding_mask`: row classes bool [b, s, 3] for the router's statistics."""
        classes = None if padding_mask is None else padding_mask.transpose(0, 1)
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._branches, False, residual, classes), None
        return self._branches(residual, classes), None

    def _branches(self, residual: Tensor, classes: Optional[Tensor]) -> Tensor:
        dense = self.post_shared_expert_layernorm(self.shared_experts_compute(self.pre_shared_expert_layernorm(residual)))
        probs, routing_map = self.route(residual, classes)
        rows, probs = self.preprocess(self.pre_expert_layernorm(residual), probs, routing_map)
        output, _ = self.routed_experts_compute(*self.dispatch(rows, probs))
        output = self.postprocess(self.combine(output), None)
        return dense + self.post_expert_layernorm(output)
