"""Explicit positions give the rows of the engine's own rotary table; scaled frequencies are those of transformers."""

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402

from megatron.bdlm.config import BDLMConfig, BDLMConfigError  # noqa: E402
from megatron.bdlm.model.rotary import ExplicitRotaryEmbedding, attention_factor, attention_scale  # noqa: E402


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("options", [{}, {"rope_scaling": True}, {"seq_len_interpolation_factor": 2.0}, {"rotary_percent": 0.5}])
def test_rows_of_the_stock_table(interleaved, options):
    arguments = dict(kv_channels=16, rotary_percent=1.0, rotary_interleaved=interleaved, use_cpu_initialization=True, cp_group=None)
    arguments.update(options)
    table = RotaryEmbedding(**arguments).get_emb(50)
    ours = ExplicitRotaryEmbedding(**arguments)
    ours.positions = torch.tensor([0, 7, 7, 49, 3])
    torch.testing.assert_close(ours(0), table[ours.positions])
    ours.positions = torch.tensor([[0, 7, 9], [1, 2, 49]])
    for sample in range(2):
        torch.testing.assert_close(ours(0)[:, sample : sample + 1], table[ours.positions[sample]])


def test_nothing_of_the_sequence_length_is_held():
    ours = ExplicitRotaryEmbedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True)
    ours.positions = torch.tensor([1_000_000])
    assert ours(1_000_001).numel() == 16


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.8, "mscale_all_dim": 1.0,
        "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_frequencies_are_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = SCALED[name]
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=256,
        rope_parameters={"rope_theta": 50000.0, **parameters},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours = ExplicitRotaryEmbedding(
        kv_channels=64, rotary_percent=1.0, rotary_base=50000.0, rope_parameters=parameters, use_cpu_initialization=True
    )
    torch.testing.assert_close(ours.inv_freq, wanted, rtol=1e-6, atol=0)
    assert attention_factor(parameters) == pytest.approx(factor)
    scale = attention_scale(parameters, 64)
    assert (1 / 8 if scale is None else scale) == pytest.approx(factor**2 / 8)


@pytest.mark.parametrize(
    "text, message",
    [
        ("linear", "--bdlm-rope-parameters linear: no JSON"),
        ('{"rope_type": "dynamic", "factor": 2.0}', "rope_type is one of linear, llama3, yarn"),
        ('{"rope_type": "llama3", "factor": 8.0}', "needs positive numbers for low_freq_factor, high_freq_factor, original"),
    ],
)
def test_refused_parameters(text, message):
    with pytest.raises(BDLMConfigError, match=message):
        BDLMConfig(bdlm_rope_parameters=text).validate()
