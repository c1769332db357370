"""The engine's core attention, replaced by ours.

`BlockDiffusionCoreAttention` stands where a layer spec names `core_attention`. It owns no
parameter and knows no mask: what a row sees is a matter of the sequence parameters that the
engine hands through every layer, recompute and pipeline stage (`packed_seq_params`). Their
`attend` method does the work:

* `BlockDiffusionParams` (training): `block_diffusion_attention` over the plan of this sample;
* a sampler's parameters: attention against a cache of clean keys and values.

Shapes: s local rows, b samples, n query heads, k key-value heads, d head size.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.bdlm.attention.functional import block_diffusion_attention
from megatron.bdlm.parallel.device import to_device
from megatron.bdlm.parallel.plan import SequencePlan


GRADIENT_DTYPES = {"fp32": None, "bf16": torch.bfloat16}  # None: the type of the sum, float32 or float64


COUNTED_PLANE = 0
LOAD_PLANES = [1, 2]
"""Planes of `row_classes`: rows whose routing counts for losses and balance; then clean and noisy rows that the load counts."""


@dataclass(frozen=True)
class AttentionOptions:
    """How attention runs, the same for every layer and sample (flags of `BDLMConfig`)."""

    transport: str = "auto"
    kernel: str = "auto"
    gradient_dtype: str = "fp32"  # on the wire: fp32, bf16, or input for that of the keys
    ranks_per_node: Optional[int] = None
    diagonal_kernel: str = "auto"


@dataclass
class BlockDiffusionParams(PackedSeqParams):
    """What every layer needs to know of the rows of a micro-batch; `qkv_format` stays 'sbhd'."""

    plan: Optional[SequencePlan] = None
    position_ids: Optional[torch.Tensor] = None  # int64 [s], rotary position of each local row
    is_clean: Optional[torch.Tensor] = None  # bool [s], rows of the clean stream
    group: Optional[torch.distributed.ProcessGroup] = None  # context-parallel group
    options: AttentionOptions = AttentionOptions()
    final_rows: Optional[int] = None  # rows that the last layer computes (the first ones: noisy); None for all
    row_classes: Optional[torch.Tensor] = None  # bool [b, s, 3]: counted, clean, noisy; for the routers of experts

    @classmethod
    def from_plan(
        cls,
        plan: SequencePlan,
        group: Optional[torch.distributed.ProcessGroup],
        options: AttentionOptions,
        device: torch.device,
        final_rows: Optional[int] = None,
    ) -> "BlockDiffusionParams":
        """Parameters of the rows of `plan` on this rank."""
        return cls(
            qkv_format="sbhd", max_seqlen_q=plan.seq_length, max_seqlen_kv=plan.seq_length, plan=plan,
            position_ids=to_device(plan.position_ids, device), is_clean=to_device(plan.is_clean, device), group=group, options=options,
            final_rows=final_rows,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer_number: int,
        softmax_scale: Optional[float],
        window: Optional[int],
        final: bool = False,
    ) -> torch.Tensor:
        """Block diffusion attention of one layer.

        Args:
            query, key, value: [s, b, n, d], [s, b, k, d], [s, b, k, d_v], rows in the plan's local order.
            layer_number: 1-based; unused in training, a sampler keeps a cache per layer.
            window: clean keys that a clean row sees at most, itself included; None for no window.
            final: this is the model's last layer.

        Returns:
            [s, b, n, d_v]; in the last layer only the first `final_rows` rows, if that is set.
        """
        noisy_only = final and self.final_rows is not None
        out = block_diffusion_attention(
            query, key, value, self.plan, self.group,
            transport=self.options.transport, kernel=self.options.kernel, softmax_scale=softmax_scale, window=window,
            queries="noisy" if noisy_only else "all",
            grad_dtype=key.dtype if self.options.gradient_dtype == "input" else GRADIENT_DTYPES[self.options.gradient_dtype],
            ranks_per_node=self.options.ranks_per_node, diagonal_kernel=self.options.diagonal_kernel,
        )
        return out[: self.final_rows] if noisy_only else out


class BlockDiffusionCoreAttention(MegatronModule):
    """Core attention for a layer spec; see the module docstring.

    Raises:
        ValueError: attention dropout, which block diffusion attention does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type=None,
        attention_type=None,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"--attention-dropout {dropout}: block diffusion attention has no dropout. A legal value: 0.0")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.window = layer_window(config, layer_number)
        self.final = layer_number == config.num_layers

    def forward(
        self, query, key, value, attention_mask=None, /, *, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """[s, b, n, d] and [s, b, k, d] in, [rows, b, n*d] out; visibility comes from `packed_seq_params`."""
        out = packed_seq_params.attend(
            query, key, value, layer_number=self.layer_number, softmax_scale=self.softmax_scale,
            window=self.window, final=self.final,
        )
        return out.reshape(out.size(0), out.size(1), -1)


def layer_window(config: TransformerConfig, layer_number: int) -> Optional[int]:
    """Window W of a layer from the engine's --window-size LEFT,RIGHT: W = LEFT + 1 keys including the row itself."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, _ = config.window_size
    return None if left < 0 else left + 1
