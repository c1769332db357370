"""What the Megatron module of block diffusion attention refuses."""

import pytest

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron.bdlm.attention.core_attention import BlockDiffusionCoreAttention  # noqa: E402


def config(**changes):
    return TransformerConfig(**{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "attention_dropout": 0.0, **changes})


@pytest.mark.parametrize("options, own", [(dict(attention_dropout=0.1), None), ({}, 0.1)])
def test_dropout_is_refused(options, own):
    with pytest.raises(ValueError, match="--attention-dropout 0.1: block diffusion attention has no dropout. A legal value: 0.0"):
        BlockDiffusionCoreAttention(config(**options), 1, attention_dropout=own)


def test_no_dropout_is_accepted():
    assert BlockDiffusionCoreAttention(config(), 1).final
