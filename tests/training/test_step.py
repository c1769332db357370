"""The validation objective, and the denominators of two losses."""

from megatron.bdlm.platform import cpu

cpu.enable()

import pytest  # noqa: E402

from megatron.bdlm.config import RECIPES, BDLMConfig  # noqa: E402
from megatron.bdlm.training.step import training_config, validation_config  # noqa: E402


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_validation_is_the_bound_of_one_view(recipe):
    """Fault F4: whatever is trained, validation reports the NELBO over t in [1e-3, 1]."""
    config = validation_config(BDLMConfig(**RECIPES[recipe]))
    config.validate()
    assert (config.bdlm_t_min, config.bdlm_t_max) == (1e-3, 1.0)
    assert (config.bdlm_views, config.bdlm_loss_weight, config.bdlm_loss_denominator) == (1, "nelbo", "supervised")
    assert config.bdlm_clean_loss_weight == 0.0 and config.bdlm_diffusion_loss_weight == 1.0


def test_uniform_corruption_validates_by_cross_entropy():
    config = validation_config(BDLMConfig(bdlm_corruption="uniform", bdlm_loss_weight="unit"))
    config.validate()
    assert config.bdlm_loss_weight == "unit"


def test_block_size_of_an_iteration():
    """Fault D3: the size is that of the iteration, whenever the run started."""
    config = BDLMConfig(bdlm_block_size=8, bdlm_block_size_schedule="0:2,5:8")
    assert [training_config(config, i).bdlm_block_size for i in (0, 4, 5)] == [2, 2, 8]
    training_config(config, 0).validate()
