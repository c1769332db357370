"""Model configuration and builder for `megatron.training.pretrain`.

`BlockDiffusionModelConfig` is the engine's GPTModelConfig plus our options; its builder makes
one `BlockDiffusionGPTModel` per pipeline stage. Everything around it (DDP, precision wrappers,
virtual stages) is inherited.
"""

import dataclasses
from typing import Any, ClassVar, Optional

from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.model.diffusion_gemma.model import DiffusionGemmaModel
from megatron.bdlm.model.diffusion_gemma.spec import adapt_configuration, check_configuration, diffusion_gemma_layer_spec
from megatron.bdlm.model.gpt import BlockDiffusionGPTModel
from megatron.bdlm.model.layer_spec import block_diffusion_layer_spec
from megatron.bdlm.model.rotary import attention_scale


@dataclasses.dataclass(kw_only=True)
class BlockDiffusionModelConfig(GPTModelConfig):
    """GPTModelConfig with the options of block diffusion."""

    builder: ClassVar[str] = "megatron.bdlm.model.builder.BlockDiffusionModelBuilder"
    bdlm: BDLMConfig = dataclasses.field(default_factory=BDLMConfig)
    candidate_tokens: Optional[int] = None
    """Real rows of the vocabulary, mask token included; rows behind them are padding."""
    tokenizer_tokens: Optional[int] = None
    """Tokens of the tokenizer, from which uniform corruption draws."""


class BlockDiffusionModelBuilder(GPTModelBuilder):
    """Builds `BlockDiffusionGPTModel` stages from a `BlockDiffusionModelConfig`."""

    def build_model(
        self,
        pg_collection: Any,
        pre_process: Optional[bool] = None,
        post_process: Optional[bool] = None,
        vp_stage: Optional[int] = None,
    ) -> BlockDiffusionGPTModel:
        """One pipeline stage; the arguments are the engine's."""
        config = self._model_config
        vp_size = config.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size) and is_pp_last_stage(pg_collection.pp)
        padded_vocab_size = config.vocab_size
        if config.should_pad_vocab:
            padded_vocab_size = calculate_padded_vocab_size(
                config.vocab_size, config.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
            )
        gemma = config.bdlm.diffusion_gemma()
        if gemma is None:
            _fold_attention_factor(config)
            model, layers = BlockDiffusionGPTModel, block_diffusion_layer_spec(config, vp_stage)
        else:
            check_configuration(config.transformer, gemma)
            adapt_configuration(config.transformer)
            model, layers = DiffusionGemmaModel, diffusion_gemma_layer_spec(config.transformer, gemma, vp_stage)
        return model(
            config=config.transformer,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab_size,
            max_sequence_length=config.seq_length,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=config.rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            seq_len_interpolation_factor=config.seq_len_interpolation_factor,
            scatter_embedding_sequence_parallel=config.scatter_embedding_sequence_parallel,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            candidate_tokens=config.candidate_tokens,
            tokenizer_tokens=config.tokenizer_tokens,
            bdlm=config.bdlm,
        )


def _fold_attention_factor(config: BlockDiffusionModelConfig) -> None:
    """Put the attention factor of scaled rotary frequencies into the softmax scale; the same result if called again.

    Raises:
        BDLMConfigError: the factor would reach dimensions that are not rotated, or another scale is set.
    """
    scale = attention_scale(config.bdlm.rope_parameters(), config.transformer.kv_channels)
    if scale is None:
        return
    if config.rotary_percent != 1.0:
        raise BDLMConfigError(
            f"--rotary-percent {config.rotary_percent}: the attention factor of --bdlm-rope-parameters needs every dimension "
            "rotated. A legal value: 1.0"
        )
    if config.transformer.softmax_scale not in (None, scale):
        raise BDLMConfigError(
            f"softmax_scale {config.transformer.softmax_scale}: --bdlm-rope-parameters implies {scale}. A legal value: None"
        )
    config.transformer.softmax_scale = scale
