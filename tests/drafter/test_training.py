"""Options and layouts of drafter training that are refused, and what options resolve to."""

from types import SimpleNamespace

import pytest

from megatron.bdlm.platform import cpu

ON_CPU = cpu.enable()

from megatron.bdlm.drafter.format import DrafterError  # noqa: E402
from megatron.bdlm.drafter.options import DrafterOptions  # noqa: E402
from megatron.bdlm.drafter.training import check_layout  # noqa: E402
from tests.drafter.tiny_target import make_target  # noqa: E402

ENGINE = dict(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1, context_parallel_size=4, fp16=False
)


@pytest.mark.parametrize("changed, slots, message", [
    (dict(tensor_model_parallel_size=2), None, "--tensor-model-parallel-size 2: a drafter's weights are whole on every rank. A legal value: 1"),
    (dict(pipeline_model_parallel_size=2), None, "--pipeline-model-parallel-size 2: a drafter's weights are whole"),
    ({}, 3, "--block-parallel-size 3: it must divide --context-parallel-size 4. A legal value: 4"),
    (dict(fp16=True), None, "--fp16: the loss is scaled once, after all ranks. A legal value: --bf16"),
])
def test_layouts_that_are_not_served_are_refused(changed, slots, message):
    with pytest.raises(DrafterError, match=message):
        check_layout(SimpleNamespace(**{**ENGINE, **changed}), DrafterOptions(block_parallel_size=slots))


@pytest.mark.parametrize("options, message", [
    ({}, "--dflash-target: it is needed. A legal value: a Hugging Face folder"),
    (dict(dflash_target="t"), "--dflash-data: it is needed"),
    (dict(dflash_target="t", dflash_data="d"), "--dflash-mask-token-id: it is needed"),
    (dict(dflash_target="t", dflash_data="d", dflash_mask_token_id=1, dflash_anchors=0), "--dflash-anchors 0: at least one. A legal value: 512"),
    (dict(dflash_target="t", dflash_data="d", dflash_mask_token_id=1, dflash_layers=0), "--dflash-layers 0: at least one. A legal value: 5"),
    (dict(dflash_target="t", dflash_data="d", dflash_mask_token_id=1, dflash_chunk=0), "--dflash-chunk 0: at least one"),
    (dict(dflash_target="t", dflash_data="d", dflash_mask_token_id=1, dflash_sliding_window=0), "--dflash-sliding-window 0: at least one"),
    (dict(dflash_target="t", dflash_data="d", dflash_mask_token_id=1, dflash_gamma=0.0), "--dflash-gamma 0.0: .* A legal value: 7.0"),
])
def test_missing_options_are_named(options, message):
    with pytest.raises(DrafterError, match=message):
        DrafterOptions(**options).check()


def test_shape_follows_the_target(tmp_path):
    make_target(tmp_path)
    options = DrafterOptions(dflash_target=str(tmp_path), dflash_mask_token_id=3, dflash_layers=2, dflash_block_size=8, dflash_sliding_window=16)
    config = options.config()
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.vocab_size) == (32, 2, 8, 64)
    assert config.target_layer_ids == (1, 3) and config.layer_types == ("sliding_attention",) * 2 and config.widest_window() == 16
    with pytest.raises(DrafterError, match="--dflash-layer-ids a,b: numbers and commas. A legal value: 1,9,17"):
        DrafterOptions(dflash_layer_ids="a,b").layer_ids()


@pytest.mark.parametrize("changed, message", [
    (dict(dflash_block_size=6), "--dflash-block-size 6: the checkpoint in runs is of a drafter with 4. A legal value: 4"),
    (dict(dflash_layer_ids="2,4"), "--dflash-layer-ids 2,4: the checkpoint in runs is of a drafter with None. A legal value: unset"),
    (dict(dflash_mask_token_id=5), "--dflash-mask-token-id 5: .* with 63"),
])
def test_going_on_with_another_drafter_is_refused(changed, message):
    """Fault E5: the checkpoint's shape and the flags must not disagree."""
    saved = dict(dflash_block_size=4, dflash_mask_token_id=63)
    DrafterOptions(**saved, dflash_anchors=7).check_same_shape(DrafterOptions(**saved), "runs")
    with pytest.raises(DrafterError, match=message):
        DrafterOptions(**{**saved, **changed}).check_same_shape(DrafterOptions(**saved), "runs")
