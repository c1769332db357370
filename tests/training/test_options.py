"""Options that a checkpoint keeps: a run that loads it and says otherwise is refused."""

from types import SimpleNamespace

import pytest

from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.training.options import check_against_checkpoint, print_options


def test_a_resumed_run_keeps_its_place_in_the_block_size_schedule():
    """Fault D3: the size is a function of the iteration, so the schedule itself must be the checkpoint's."""
    saved = SimpleNamespace(bdlm_mask_token_id=5, bdlm_block_size=32, bdlm_block_size_schedule="0:4,100:32")
    same = BDLMConfig(bdlm_mask_token_id=5, bdlm_block_size=32, bdlm_block_size_schedule="0:4,100:32")
    other = BDLMConfig(bdlm_mask_token_id=5, bdlm_block_size=32, bdlm_block_size_schedule="0:4,50:32")
    check_against_checkpoint(same, saved, "folder", resuming=True)
    with pytest.raises(BDLMConfigError, match="--bdlm-block-size-schedule 0:4,50:32: .* was written with 0:4,100:32.* legal value: 0:4,100:32"):
        check_against_checkpoint(other, saved, "folder", resuming=True)
    check_against_checkpoint(other, saved, "folder")  # a new run from these weights


@pytest.mark.parametrize("corruption, what", [("absorbing", "NELBO"), ("uniform", "cross entropy")])
def test_the_range_of_validation_is_printed(corruption, what, capsys):
    """Fault F4: whatever range training is clipped to, the start says what validation covers."""
    print_options(BDLMConfig(bdlm_t_min=0.3, bdlm_t_max=0.8, bdlm_corruption=corruption))
    printed = capsys.readouterr().out
    assert f"validation: {what}" in printed and "t in [0.001, 1.0]" in printed
