"""Options that contradict each other while the model is built."""

from types import SimpleNamespace

import pytest

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.config import BDLMConfig, BDLMConfigError  # noqa: E402
from megatron.bdlm.model.builder import _fold_attention_factor  # noqa: E402

YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}'


def config(rotary_percent=1.0, softmax_scale=None):
    transformer = SimpleNamespace(kv_channels=16, softmax_scale=softmax_scale)
    return SimpleNamespace(bdlm=BDLMConfig(bdlm_rope_parameters=YARN), transformer=transformer, rotary_percent=rotary_percent)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rotary_percent=0.5), "--rotary-percent 0.5: .* A legal value: 1.0"),
        (dict(softmax_scale=0.3), "softmax_scale 0.3: --bdlm-rope-parameters implies .* A legal value: None"),
    ],
)
def test_the_attention_factor_of_scaled_frequencies_needs(options, message):
    with pytest.raises(BDLMConfigError, match=message):
        _fold_attention_factor(config(**options))


def test_the_attention_factor_becomes_the_softmax_scale_and_stays_it():
    chosen = config()
    _fold_attention_factor(chosen)
    first = chosen.transformer.softmax_scale
    _fold_attention_factor(chosen)
    assert chosen.transformer.softmax_scale == first > 16**-0.5
