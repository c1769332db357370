"""The validation objective, and the denominators of two losses."""

from types import SimpleNamespace

from megatron.bdlm.platform import cpu

cpu.enable()

import pytest  # noqa: E402
import torch  # noqa: E402

from megatron.bdlm.config import RECIPES, BDLMConfig  # noqa: E402
from megatron.bdlm.model.router import router_loss_scale  # noqa: E402
from megatron.bdlm.parallel.plan import SequencePlan  # noqa: E402
from megatron.bdlm.training import step  # noqa: E402
from megatron.bdlm.training.step import training_config, validation_config  # noqa: E402


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_validation_is_the_bound_of_one_view(recipe):
    """Fault F4: whatever is trained, validation reports the NELBO over t in [1e-3, 1]; uniform noise has none."""
    config = validation_config(BDLMConfig(**RECIPES[recipe]))
    config.validate()
    weight = "nelbo" if config.bdlm_corruption == "absorbing" else "unit"
    assert (config.bdlm_t_min, config.bdlm_t_max) == (1e-3, 1.0)
    assert (config.bdlm_views, config.bdlm_loss_weight, config.bdlm_loss_denominator) == (1, weight, "supervised")
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


def test_router_losses_are_divided_by_what_the_global_batch_counts(monkeypatch):
    """Fault B8: three micro-batches of 8, 5 and 0 supervised tokens, a second data-parallel rank with as many: N = 26 over 6 parts."""
    monkeypatch.setattr(step, "get_num_microbatches", lambda: 3)
    monkeypatch.setattr(step.parallel_state, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(step.parallel_state, "get_data_parallel_group", lambda: None)
    monkeypatch.setattr(step.torch.distributed, "all_reduce", lambda totals, group: totals.mul_(2))
    routers = SimpleNamespace(num_moe_experts=4, moe_z_loss_coeff=None, moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss")
    config = BDLMConfig(bdlm_block_size=4, bdlm_mask_token_id=9, bdlm_noise_seed=1)
    stage = SimpleNamespace(config=routers, post_process=False, tokenizer_tokens=9)
    samples = [
        dict(tokens=torch.arange(8)[None], eligible=torch.arange(8)[None] < count, sample_index=torch.tensor([i]), epoch=torch.tensor([0]))
        for i, count in enumerate((8, 5, 0))
    ]
    iterator = iter(samples)
    for sample in samples:
        got, counts = step._next_samples(iterator, stage, config, training=True)
        assert got is sample and counts.noisy == 26
        assert router_loss_scale.factor == 26 / 6
    router_loss_scale.factor = 1.0


@pytest.mark.parametrize("coefficient, counted, skips", [(0.0, "clean", True), (0.01, "clean", False), (0.01, "all", False), (0.01, "noisy", True)])
def test_the_last_layer_is_whole_where_its_router_counts_clean_rows(coefficient, counted, skips):
    model = SimpleNamespace(
        num_moe_experts=4, moe_z_loss_coeff=None, moe_aux_loss_coeff=coefficient, moe_router_load_balancing_type="aux_loss", moe_router_enable_expert_bias=False,
        attention_output_gate=False, sequence_parallel=False, fp8=None,
    )
    plan, config = SequencePlan.build(16, 4), BDLMConfig(bdlm_router_rows=counted)
    assert step._final_rows(plan, config, model, training=True) == (16 if skips else None)
    assert step._final_rows(plan, config, model, training=False) == 16, "validation has no router losses"


@pytest.mark.parametrize(
    ("sequence_parallel", "fp8", "recipe", "expected"),
    [(False, None, "delayed", 1), (True, None, "delayed", 2), (False, "hybrid", "delayed", 16), (True, "e4m3", "mxfp8", 64)],
)
def test_rows_are_aligned_for_sequence_parallelism_and_fp8(sequence_parallel, fp8, recipe, expected):
    model = SimpleNamespace(
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, fp8=fp8, fp8_recipe=recipe, num_moe_experts=None,
        attention_output_gate=False,
    )
    assert step.row_alignment(model) == expected
    plan = SequencePlan.build(24, 4, row_multiple=expected)
    assert plan.s_local % expected == 0
    # 24 noisy rows alone are a product of their own in the last layer: all rows where they are not aligned
    assert step._final_rows(plan, BDLMConfig(), model, training=True) == (24 if expected <= 2 else None)
