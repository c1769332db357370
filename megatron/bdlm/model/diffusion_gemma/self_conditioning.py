"""How noisy rows enter DiffusionGemma: their embedding, and what an earlier pass predicted for them.

    soft = softmax(logits of the earlier pass) E * sqrt(h), or 0
    z = N_pre(soft)      x_in = N( e(xt) + (gelu(z Wg^T) * (z Wu^T)) Wd^T )

With soft = 0 the inner term is exactly 0 (its weights get zero gradients), but x_in = N(e(xt)) is not e(xt). Clean rows
enter as e(x0).
"""

import copy

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bdlm.model.diffusion_gemma.norms import GemmaRMSNorm, unweighted_norm


class SelfConditioning(MegatronModule):
    """See the module docstring; rows may be split over tensor-parallel ranks (sequence parallel)."""

    def __init__(self, config, submodules: MLPSubmodules, tp_group):
        super().__init__(config)
        dense = copy.copy(config)
        dense.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        self.pre_norm = GemmaRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(dense, submodules, tp_group=tp_group)

    def forward(self, embedded: Tensor, soft: Tensor) -> Tensor:
        """[s, b, h] twice -> [s, b, h]."""
        signal, _ = self.mlp(self.pre_norm(soft))
        return unweighted_norm(embedded + signal, self.config.layernorm_epsilon)
