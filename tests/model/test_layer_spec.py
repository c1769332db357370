"""The Transformer Engine spec, asserted without Transformer Engine: which module stands where. Its layers need a GPU.

Where the package is missing the engine has no classes for it, so a provider with empty ones of their names stands in.
"""

from types import SimpleNamespace

import pytest

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.bdlm.attention.core_attention import BlockDiffusionCoreAttention  # noqa: E402
from megatron.bdlm.model import layer_spec  # noqa: E402

FP8 = {
    "none": {},
    "delayed": dict(fp8="hybrid", fp8_recipe="delayed"),
    "tensorwise": dict(fp8="e4m3", fp8_recipe="tensorwise"),
    "blockwise": dict(fp8="e4m3", fp8_recipe="blockwise"),
    "mxfp8": dict(fp8="e4m3", fp8_recipe="mxfp8"),
}


class StandIns(TESpecProvider):
    """The engine's provider; what it takes from Transformer Engine are empty classes."""

    classes = {
        name: type(name, (), {})
        for name in ("TELinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear", "TENorm")
    }

    def linear(self):
        return self.classes["TELinear"]

    def column_parallel_linear(self):
        return self.classes["TEColumnParallelLinear"]

    def row_parallel_linear(self):
        return self.classes["TERowParallelLinear"]

    def column_parallel_layer_norm_linear(self):
        return self.classes["TELayerNormColumnParallelLinear"]

    def layer_norm(self, *_, **__):
        return self.classes["TENorm"]

    def core_attention(self):
        return object


def block(monkeypatch, implementation, **options):
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", StandIns)
    monkeypatch.setattr(layer_spec, "get_num_layers_to_build", lambda config, vp_stage: config.num_layers)
    monkeypatch.setattr(layer_spec, "get_transformer_layer_offset", lambda config, vp_stage: 0)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=2, normalization="RMSNorm", qk_layernorm=True,
        transformer_impl=implementation, gated_linear_unit=True, add_bias_linear=False, bf16=True, **options,
    )
    return config, layer_spec.block_diffusion_layer_spec(SimpleNamespace(transformer=config))


def feed_forward(layer):
    """Its linear modules; the engine gives them to a partial function."""
    return layer.submodules.mlp.keywords["submodules"]


@pytest.mark.parametrize("recipe", FP8)
def test_fused_modules_of_transformer_engine_with_our_core_attention(monkeypatch, recipe):
    config, spec = block(monkeypatch, "transformer_engine", **FP8[recipe])
    assert len(spec.layer_specs) == 3 and spec.layer_norm is layer_spec.LayerNormImpl
    for layer in spec.layer_specs:
        attention, mlp = layer.submodules.self_attention.submodules, feed_forward(layer)
        assert attention.core_attention is BlockDiffusionCoreAttention
        assert attention.linear_qkv is mlp.linear_fc1 is StandIns.classes["TELayerNormColumnParallelLinear"]
        assert attention.linear_proj is mlp.linear_fc2 is StandIns.classes["TERowParallelLinear"]
        assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is IdentityOp  # fused into the linear
        assert attention.q_layernorm is attention.k_layernorm is StandIns.classes["TENorm"]
    assert (config.fp8, config.fp8_recipe) == (FP8[recipe].get("fp8"), FP8[recipe].get("fp8_recipe", "delayed"))


def test_the_last_layer_leaves_clean_rows_out_in_both_specs(monkeypatch):
    for implementation in ("transformer_engine", "local"):
        _, spec = block(monkeypatch, implementation)
        adds = [layer.submodules.self_attn_bda for layer in spec.layer_specs]
        assert adds[2] is layer_spec.noisy_rows_bias_dropout_add and adds[0] is adds[1] is not adds[2]


def test_both_specs_have_the_same_places_so_that_checkpoints_fit(monkeypatch):
    """The keys of a dense layer's weights follow the places; the engine maps the norms' (see the design of its specs)."""
    (_, ours), (_, theirs) = (block(monkeypatch, kind) for kind in ("local", "transformer_engine"))
    for places in (lambda layer: layer.submodules.self_attention.submodules, feed_forward):
        local, fused = (vars(places(spec.layer_specs[0])) for spec in (ours, theirs))
        assert {key for key, part in local.items() if part} == {key for key, part in fused.items() if part}
    mapped = ours.layer_specs[0].submodules.sharded_state_dict_keys_map
    assert mapped == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
