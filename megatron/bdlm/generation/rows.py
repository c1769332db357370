"""The rows of one sampling forward, who sees whom among them and the cache, and attention over both.

A forward may hold, for each sequence of a batch, clean rows (a piece of the prompt, or a block that has just been
finished) followed by the noisy rows of the block that is being filled. The rule is the block diffusion mask
(docs/concepts.md) over the keys [cached clean rows; rows of this forward]:

    clean row, block b     clean keys of blocks <= b (block-causal) or up to its own position (token-causal)
    noisy row, block b     clean keys of blocks < b, noisy rows of block b (or only up to itself: causal)
    padding row            itself; nobody sees it

`SamplingParams` goes through the model as `packed_seq_params`; its `attend` stands where training has block
diffusion attention. A forward has few rows (a block, a piece of a prompt), so an explicit mask is cheap here.

Shapes: b sequences, s rows, m keys (longest cached length + s), n query heads, k key-value heads, g = n/k, d head size.
"""

from dataclasses import dataclass, field
from typing import Literal, Optional

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.bdlm.generation.cache import KeyValueCache

PADDING, CLEAN, NOISY = 0, 1, 2


@dataclass(frozen=True)
class BlockRules:
    """What a checkpoint fixes about blocks and tokens; the sampler never chooses these."""

    block_size: int
    mask_token_id: int
    vocab_size: int
    """Real rows of the vocabulary, mask token included; padded rows behind them are never sampled."""
    label_shift: Literal["none", "next"] = "none"
    clean_attention: Literal["block-causal", "token-causal"] = "block-causal"
    noisy_attention: Literal["bidirectional", "causal"] = "bidirectional"
    keep_mask_logit: bool = False

    def __post_init__(self):
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"--bdlm-mask-token-id {self.mask_token_id}: it must be a real row of the vocabulary. "
                f"A legal value: {self.vocab_size - 1}"
            )


@dataclass(frozen=True)
class SamplingRows:
    """Rows of one forward; per sequence clean rows, then noisy rows, then padding."""

    input_ids: torch.Tensor  # int64 [b, s]
    position_ids: torch.Tensor  # int64 [b, s]
    kind: torch.Tensor  # int8 [b, s]: PADDING, CLEAN or NOISY
    clean_counts: torch.Tensor  # int64 [b]: clean rows of each sequence


def visibility(rows: SamplingRows, lengths: torch.Tensor, rules: BlockRules, window: Optional[int] = None) -> torch.Tensor:
    """Who sees whom in one forward.

    Args:
        rows: the rows of this forward.
        lengths: int64 [b], cached clean rows of each sequence; key index i < length is the clean row of token i.
        window: clean keys that a clean row sees at most, itself included; None for no window.

    Returns:
        bool [b, s, m].
    """
    batch, count = rows.kind.shape
    index = torch.arange(int(lengths.max()) + count, device=lengths.device).expand(batch, -1)  # [b, m]
    own = index - lengths[:, None]  # index among the rows of this forward
    cached = own < 0
    inside = own.clamp(0, count - 1)
    key_kind = torch.where(cached, CLEAN, rows.kind.gather(1, inside))
    key_kind = torch.where(own >= count, PADDING, key_kind)[:, None, :]
    key_position = torch.where(cached, index, rows.position_ids.gather(1, inside))[:, None, :]
    kind, position = rows.kind[:, :, None], rows.position_ids[:, :, None]
    size = rules.block_size
    block, key_block = position // size, key_position // size

    to_clean = key_block <= block if rules.clean_attention == "block-causal" else key_position <= position
    to_earlier = key_block < block
    if window is not None:
        to_clean &= key_position > position - window
        # the last W-1 clean rows before the block's start, the same set for every row of the block
        to_earlier &= key_position > block * size - window
    to_noisy = key_block == block
    if rules.noisy_attention == "causal":
        to_noisy &= key_position <= position
    itself = own[:, None, :] == torch.arange(count, device=own.device)[:, None]
    return (
        ((kind == CLEAN) & (key_kind == CLEAN) & to_clean)
        | ((kind == NOISY) & (key_kind == CLEAN) & to_earlier)
        | ((kind == NOISY) & (key_kind == NOISY) & to_noisy)
        | ((kind == PADDING) & itself)
    )


@dataclass
class SamplingParams(PackedSeqParams):
    """Sequence parameters of one sampling forward; make a new one each time."""

    rows: Optional[SamplingRows] = None
    rules: Optional[BlockRules] = None
    cache: Optional[KeyValueCache] = None
    position_ids: Optional[torch.Tensor] = None  # int64 [b, s], rotary positions
    _masks: dict[Optional[int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: SamplingRows, rules: BlockRules, cache: KeyValueCache) -> "SamplingParams":
        """Parameters of these rows against this cache."""
        longest = int(cache.lengths.max()) + rows.kind.size(1)
        return cls(
            qkv_format="sbhd", max_seqlen_q=rows.kind.size(1), max_seqlen_kv=longest,
            rows=rows, rules=rules, cache=cache, position_ids=rows.position_ids,
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
        """Attention of one layer over the cache and the rows of this forward.

        Args:
            query, key, value: [s, b, n, d], [s, b, k, d], [s, b, k, d_v].
            layer_number: names the layer's cache.
            window: clean keys that a clean row sees at most, itself included; None for no window.
            final: not used; the output of every row may be asked for.

        Returns:
            [s, b, n, d_v].
        """
        if window not in self._masks:
            self._masks[window] = visibility(self.rows, self.cache.lengths, self.rules, window)
        visible = self._masks[window]  # [b, s, m]
        keys, values = self.cache.write(layer_number, key, value)  # [m, b, k, d]
        return masked_attention(query, keys, values, visible, softmax_scale)


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, softmax_scale: Optional[float]
) -> torch.Tensor:
    """Attention of a few rows, [s, b, n, d] over [m, b, k, d] and [m, b, k, d_v], under a mask bool [b or 1, s, m] -> [s, b, n, d_v]."""
    rows, batch, heads, size = query.shape
    groups = keys.size(2)
    share = heads // groups
    # query heads of one key-value head become rows of it, so keys are not repeated: [b, k, g*s, d]
    folded = query.view(rows, batch, groups, share, size).permute(1, 2, 3, 0, 4).reshape(batch, groups, share * rows, size)
    out = F.scaled_dot_product_attention(
        folded, keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3),
        attn_mask=visible.repeat(1, share, 1)[:, None], scale=softmax_scale,
    )
    return out.view(batch, groups, share, rows, -1).permute(3, 0, 1, 2, 4).reshape(rows, batch, heads, -1)
