"""Imported experts in the engine's own mixture-of-experts model on two expert-parallel ranks: logits of transformers.

Our model is dense so far; the engine's GPTModel with its causal attention shows that names, order and shapes are right.
"""

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.generation import loading  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import EXPERTS, LENGTH, logits, make_model, save_model  # noqa: E402


def _logits(folders, tokens):
    """Logits of each folder's checkpoint on two expert-parallel ranks."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    found = []
    for folder in folders:
        path = str(folder / "megatron" / "release")
        args = loading._sampling_arguments(dist_checkpointing.load_common_state_dict(path)["args"], 1)
        args.expert_model_parallel_size, args.moe_token_dispatcher_type = 2, "allgather"
        spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm"
        )
        spec.submodules.sharded_state_dict_keys_map.pop(
            "pre_mlp_layernorm."
        )  # the engine's map is that of a dense layer
        model = GPTModel(
            core_transformer_config_from_args(args),
            spec,
            args.padded_vocab_size,
            64,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
        ).eval()
        model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, path)["model"])
        length = tokens.size(1)
        hidden = torch.ones(length, length).triu(1).bool()[None, None]
        with torch.no_grad():
            found.append(model(tokens, torch.arange(length).expand(tokens.size(0), -1), hidden))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in EXPERTS]
    for name, folder in zip(EXPERTS, folders):
        source = huggingface.open_source(save_model(folder / "source", name))
        huggingface.import_model(source, folder / "megatron", arguments_of)
    tokens = torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return tokens, run_distributed(_logits, 2, folders, tokens)


@pytest.mark.parametrize("place, name", enumerate(EXPERTS))
def test_logits_are_those_of_transformers(place, name, runs):
    tokens, found = runs
    expected = logits(make_model(name), tokens)
    for rank in found:
        torch.testing.assert_close(rank[place][..., :100], expected, rtol=0, atol=1e-5)
