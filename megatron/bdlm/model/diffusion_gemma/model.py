"""DiffusionGemma as a model over the rows of a sequence plan.

    rows [xt ; x0] -> embedding * sqrt(h) -> noisy rows through self-conditioning -> layers -> 30 tanh(x E^T / 30)

Noisy and clean rows (the published model's decoder and encoder) go through one stack of layers. With self-conditioning
the rows run twice: first without gradient and with a zero signal; what that pass predicts for the noisy rows of the
chosen samples is their signal in the second. The first pass needs the output layer and the embedding on one stage.

Shapes: s local rows (divided by the tensor-parallel size under sequence parallel where noted), b samples, h hidden size,
m noisy rows of this rank, V vocabulary.
"""

from typing import Any, Optional

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron.bdlm.model.diffusion_gemma.layer import column, local_rows
from megatron.bdlm.model.diffusion_gemma.rotary import PairedRotaryEmbedding
from megatron.bdlm.model.diffusion_gemma.self_conditioning import SelfConditioning
from megatron.bdlm.model.diffusion_gemma.spec import mlp_submodules
from megatron.bdlm.model.gpt import BlockDiffusionGPTModel
from megatron.bdlm.objective.soft_embedding import soft_embedding


class DiffusionGemmaModel(BlockDiffusionGPTModel):
    """See the module docstring; arguments as `BlockDiffusionGPTModel`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        self.options = self.bdlm.diffusion_gemma()
        self.logit_softcap = self.options.logit_softcap
        # there is no mask token: every token may be predicted
        self.excluded_token, self.candidate_tokens = None, self.options.vocab_size
        self.rotary_pos_emb = PairedRotaryEmbedding(config.kv_channels, self.rotary_base, self.options)
        if self.pre_process:
            self.self_conditioning = SelfConditioning(config, mlp_submodules(config), self.pg_collection.tp)

    def forward(
        self, input_ids, position_ids, attention_mask=None, *, packed_seq_params, scored_rows=None,
        self_conditioned: Optional[Tensor] = None, soft: Optional[Tensor] = None, **kwargs,
    ):
        """As `BlockDiffusionGPTModel.forward`.

        Args:
            self_conditioned: bool [b], samples whose noisy rows take the prediction of a first pass; None: no first pass.
            soft: [s, b, h], the signal itself (a sampler's); None: zero.
        """
        rows = dict(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, packed_seq_params=packed_seq_params)
        if self.pre_process:
            embedded = self._embedded(input_ids, position_ids)
            if self_conditioned is not None:
                with torch.no_grad():
                    predicted = super().forward(
                        **rows, decoder_input=self._inputs(embedded, packed_seq_params.is_clean, None),
                        output_processor=self._soft_of_noisy_rows, output_processor_context=packed_seq_params.is_clean,
                    )
                soft = predicted * self_conditioned[None, :, None]
            kwargs["decoder_input"] = self._inputs(embedded, packed_seq_params.is_clean, soft)
        if scored_rows is None:
            kwargs.setdefault("output_processor", self._capped_logits)
        return super().forward(**rows, scored_rows=scored_rows, **kwargs)

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Ids [b, s] -> E[ids] * sqrt(h), rows as hidden states are laid out; a pad token's row gets no gradient."""
        config = self.config
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        pad = local_rows(column(input_ids == self.options.pad_token_id), config, self.pg_collection.tp)
        return torch.where(pad, embedded.detach(), embedded) * self._embedding_scale(embedded.dtype)

    def _embedding_scale(self, dtype: torch.dtype) -> float:
        """sqrt(h) rounded to the type of the weight, as published: 53.0660 is 53.0 in bfloat16."""
        return torch.tensor(self.config.hidden_size**0.5, dtype=dtype).item()

    def _inputs(self, embedded: Tensor, is_clean: Tensor, soft: Optional[Tensor]) -> Tensor:
        """What the first layer reads: clean rows as embedded, noisy rows with their signal (soft [s, b, h], None: zero)."""
        group = self.pg_collection.tp
        clean = local_rows(column(is_clean), self.config, group)
        soft = torch.zeros_like(embedded) if soft is None else local_rows(soft, self.config, group)
        return torch.where(clean, embedded, self.self_conditioning(embedded, soft))

    def _soft_of_noisy_rows(self, *, hidden_states: Tensor, output_layer, output_weight: Tensor, context: Tensor, **_) -> Tensor:
        """The signal [s, b, h] of all rows out of the first pass: zero for clean rows."""
        hidden_states = self._all_rows(hidden_states)
        noisy = (~column(context)).expand(*hidden_states.shape[:2], 1).squeeze(2)
        soft = torch.zeros_like(hidden_states)
        soft[noisy] = self.soft_embedding(hidden_states[noisy], self._head(output_layer, output_weight))
        return soft

    def soft_embedding(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Final hidden states [m, h] -> expected embedding of the predicted token [m, h]; no gradient."""
        mean = soft_embedding(
            hidden, weight, softcap=self.logit_softcap, vocab_size=self.candidate_tokens, tp_group=self.pg_collection.tp
        )
        return mean.to(weight.dtype) * self._embedding_scale(weight.dtype)

    @torch.no_grad()
    def soft_of_logits(self, logits: Tensor) -> Tensor:
        """Softcapped (or tempered) logits of noisy rows [b, s, V] -> their signal [s, b, h]: what a sampler feeds back."""
        weight, group = self.shared_embedding_or_output_weight(), self.pg_collection.tp
        shares = logits[..., : self.candidate_tokens].softmax(-1, dtype=torch.float32).to(weight.dtype)
        first = group.rank() * weight.shape[0]
        shares = shares[..., first : first + weight.shape[0]]
        mean = shares @ weight[: shares.shape[-1]]
        if group.size() > 1:
            torch.distributed.all_reduce(mean, group=group)
        return mean.transpose(0, 1) * self._embedding_scale(weight.dtype)

    def _capped_logits(self, *, hidden_states: Tensor, output_layer, output_weight: Tensor, **_) -> Tensor:
        """Logits [b, s, V] in float32."""
        logits, _ = output_layer(hidden_states, weight=output_weight)
        return (self.logit_softcap * torch.tanh(logits.float() / self.logit_softcap)).transpose(0, 1).contiguous()

    def _all_rows(self, hidden_states: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return hidden_states
        return gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)

    @staticmethod
    def _head(output_layer, output_weight: Optional[Tensor]) -> Tensor:
        return output_layer.weight if output_weight is None else output_weight
