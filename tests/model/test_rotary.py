"""Explicit positions give the rows of the engine's own rotary table."""

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402

from megatron.bdlm.model.rotary import ExplicitRotaryEmbedding  # noqa: E402


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
