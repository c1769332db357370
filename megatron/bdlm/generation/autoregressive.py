"""Next-token logits of a checkpoint: the clean rows alone, each seeing the tokens up to itself.

This is the autoregressive model that a checkpoint was imported from (and, after conversion training, what is left of
it). It runs through the attention of training, on a plan without noisy rows, so comparing it with `transformers`
checks names, layouts, rotary positions and attention at once.

Shapes: b sequences of L tokens.
"""

from pathlib import Path
from typing import Any

import torch

from megatron.bdlm.attention.core_attention import AttentionOptions, BlockDiffusionParams
from megatron.bdlm.generation import loading
from megatron.bdlm.parallel.plan import SequencePlan


def load_autoregressive(checkpoint: Path, saved: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The model of a checkpoint on this process, without what makes it a block diffusion model.

    Args:
        saved: the checkpoint's arguments.
        dtype: type to compute in.
    """
    saved.params_dtype, saved.bf16, saved.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    return loading.load_model(checkpoint, saved, torch.distributed.get_world_size(), device).model


@torch.no_grad()
def next_token_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, L, padded vocabulary] of the token behind each of `tokens` int64 [b, L]."""
    length = tokens.size(1)
    plan = SequencePlan.build(
        seq_length=length,
        block_size=length,
        context_parallel_size=1,
        block_parallel_size=1,
        rank=0,
        clean_attention="token-causal",
        target_blocks=[],
    )
    params = BlockDiffusionParams.from_plan(plan, None, AttentionOptions(), tokens.device)
    positions = params.position_ids.expand(tokens.size(0), -1)
    return model(tokens, positions, packed_seq_params=params)
