"""The engine's GPTModel with explicit positions and logits for scored rows only.

The engine announces GPTModel as deprecated; the class is used here and in `builder.py` only.

Shapes: s local rows (divided by the tensor-parallel size under sequence parallel where noted),
b samples, h hidden size, n scored rows.
"""

from typing import Any, Optional

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.model.experts import freeze_routers, mark_experts
from megatron.bdlm.model.rotary import ExplicitRotaryEmbedding
from megatron.bdlm.model.router import router_loss_scale
from megatron.bdlm.objective.linear_cross_entropy import linear_cross_entropy
from megatron.bdlm.objective.loss import ScoredRows


class BlockDiffusionGPTModel(GPTModel):
    """GPTModel whose rows are those of a sequence plan.

    Args:
        candidate_tokens: vocabulary rows that are real; those behind them are padding and never get probability.
        tokenizer_tokens: tokens of the tokenizer, from which uniform corruption draws.
        bdlm: the options of the run.
        Others: as the engine's GPTModel.
    """

    def __init__(
        self,
        *args: Any,
        candidate_tokens: Optional[int] = None,
        tokenizer_tokens: Optional[int] = None,
        bdlm: BDLMConfig,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.candidate_tokens = candidate_tokens
        self.tokenizer_tokens = tokenizer_tokens
        self.bdlm = bdlm
        self.logit_softcap: Optional[float] = None
        self.excluded_token = None if bdlm.bdlm_keep_mask_logit else bdlm.bdlm_mask_token_id
        config = self.config
        mark_experts(self)
        if bdlm.bdlm_freeze_router:
            freeze_routers(self)
        config.moe_grad_scale_func = router_loss_scale.function(config)
        self.rotary_pos_emb = ExplicitRotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=self.rotary_percent,
            rotary_interleaved=config.rotary_interleaved,
            seq_len_interpolation_factor=kwargs.get("seq_len_interpolation_factor"),
            rotary_base=self.rotary_base,
            rope_scaling=kwargs.get("rope_scaling", False),
            rope_scaling_factor=kwargs.get("rope_scaling_factor", 8.0),
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
            rope_parameters=bdlm.rope_parameters(),
        )

    def forward(self, input_ids, position_ids, attention_mask=None, *, packed_seq_params, scored_rows=None, **kwargs):
        """Run this pipeline stage.

        Args:
            input_ids: int64 [b, s].
            packed_seq_params: `BlockDiffusionParams`, or a sampler's parameters; carries `position_ids`.
            scored_rows: a `ScoredRows`: the last stage then returns their negative log-likelihoods.

        Returns:
            Hidden states [s, b, h] on an inner stage; on the last stage [n] negative log-likelihoods
            in nats where `scored_rows` is given, else logits [b, s, vocabulary].
        """
        self.rotary_pos_emb.positions = packed_seq_params.position_ids
        if scored_rows is not None:
            kwargs.update(output_processor=self._scored_rows_nll, output_processor_context=scored_rows)
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params, **kwargs)

    def _scored_rows_nll(self, *, hidden_states, output_layer, output_weight, context: ScoredRows, **_) -> torch.Tensor:
        """Negative log-likelihood [n] of the scored rows out of hidden states [s, b, h]."""
        sequence_parallel = self.config.sequence_parallel
        if sequence_parallel:
            # its backward reduce-scatters, so the rows' gradient must not be summed over ranks twice
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        rows = hidden_states.flatten(0, 1).index_select(0, context.index)
        return linear_cross_entropy(
            rows,
            output_layer.weight if output_weight is None else output_weight,
            context.target,
            chunk=self.bdlm.bdlm_cross_entropy_chunk,
            excluded_token=self.excluded_token,
            vocab_size=self.candidate_tokens,
            tp_group=self.pg_collection.tp,
            reduce_hidden_grad=not sequence_parallel,
            softcap=self.logit_softcap,
        )
