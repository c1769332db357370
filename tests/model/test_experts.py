"""Fresh experts depend on their number in the model, not on the layout; which layers have experts."""

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.bdlm.config import BDLMConfig  # noqa: E402
from megatron.bdlm.model import layer_spec  # noqa: E402
from megatron.bdlm.model.builder import BlockDiffusionModelBuilder, BlockDiffusionModelConfig  # noqa: E402
from megatron.bdlm.model.experts import ExpertLayer, expert_layers, local_row_classes  # noqa: E402
from megatron.bdlm.model.router import BlockDiffusionRouter  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402


def _model(expert_ranks, frequency=1):
    transformer = TransformerConfig(
        num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, num_moe_experts=4, moe_ffn_hidden_size=8,
        moe_layer_freq=frequency, moe_router_topk=2, expert_model_parallel_size=expert_ranks, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
        transformer_impl="local", normalization="RMSNorm", moe_token_dispatcher_type="alltoall", attention_dropout=0.0, hidden_dropout=0.0,
    )
    return BlockDiffusionModelConfig(transformer=transformer, vocab_size=32, should_pad_vocab=False, seq_length=16, bdlm=BDLMConfig())


def _weights(expert_ranks):
    """Weights of a fresh model by name, experts under their number in the model, and which are reduced with the others."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_ranks)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(11)
    model = BlockDiffusionModelBuilder(_model(expert_ranks)).build_model(ProcessGroupCollection.use_mpu_process_groups())
    first = parallel_state.get_expert_model_parallel_rank() * (4 // expert_ranks)
    weights, apart = {}, set()
    for name, parameter in model.named_parameters():
        before, local, after = name.partition("local_experts.")
        if local:
            number, _, after = after.partition(".")
            name = f"{before}{int(number) + first}.{after}"
        weights[name] = parameter.detach().clone()
        if not getattr(parameter, "allreduce", True):
            apart.add(bool(local))
    parallel_state.destroy_model_parallel()
    return weights, apart


def _alone_and_shared():
    return [_weights(size) for size in (1, dist.get_world_size())]


def test_fresh_weights_do_not_depend_on_expert_parallelism():
    """Each of 4 experts differs from the others; EP 1 and 2 start alike, dense layers behind experts included."""
    runs = run_distributed(_alone_and_shared, 2, timeout=120)
    whole, apart = runs[0][0]
    assert apart == {True}, "experts, and nothing else, are kept apart at EP 1 too"
    experts = [name for name in whole if ".experts." in name and name.endswith("linear_fc1.weight")]
    assert len(experts) == 8
    assert not any(torch.equal(whole[a], whole[b]) for a in experts for b in experts if a < b)
    found = {}
    for _, (weights, apart) in runs:
        assert apart == {True}
        for name, value in weights.items():
            assert torch.equal(value, whole[name]), name
        found |= weights
    assert found.keys() == whole.keys()


@pytest.mark.parametrize("frequency, expected", [(1, [1, 1]), (2, [1, 0]), ([0, 1], [0, 1])])
def test_layers_with_experts(frequency, expected):
    config = _model(1, frequency)
    assert expert_layers(config.transformer) == [bool(kind) for kind in expected]


@pytest.mark.parametrize("experts", [False, True])
def test_the_spec_of_a_layer(experts):
    """With experts: our layer and router, and a norm before the MLP under its own name in checkpoints, as in other specs."""
    layer, _ = layer_spec._layer_spec(_model(1).transformer, experts)
    assert (layer.module is ExpertLayer) is experts
    assert ("pre_mlp_layernorm." in layer.submodules.sharded_state_dict_keys_map) is not experts
    assert not experts or layer.submodules.mlp.keywords["submodules"].router is BlockDiffusionRouter


def test_a_list_of_layers_of_another_length_is_refused():
    config = _model(1).transformer
    config.moe_layer_freq = [1]
    with pytest.raises(ValueError, match=r"--moe-layer-freq \[1\]: one entry a layer, and --num-layers is 2. A legal value: \[1, 1\]"):
        expert_layers(config)


class _Rank:
    def __init__(self, number):
        self.number = number

    def rank(self):
        return self.number


def test_rows_of_a_sequence_parallel_rank():
    """8 rows of which the first 4 are noisy: ranks hold 4 and 4, in a last layer of noisy rows only 2 and 2."""
    classes = torch.arange(8)[None, :, None].expand(1, 8, 3)
    for rows, expected in ((4, [[0, 1, 2, 3], [4, 5, 6, 7]]), (2, [[0, 1], [2, 3]])):
        assert [local_row_classes(classes, rows, _Rank(r))[0, :, 0].tolist() for r in (0, 1)] == expected
    assert local_row_classes(classes, 4, None)[0, :, 2].tolist() == [0, 1, 2, 3]
