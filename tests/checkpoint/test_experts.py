"""Imported experts in the engine's own mixture-of-experts model at EP 2, TP 2 and PP 2, saved and loaded across them.

Our model is dense so far; the engine's GPTModel with its causal attention shows that names, order and shapes are right.
"""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.generation import loading  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import EXPERTS, LENGTH, logits, make_model, save_model  # noqa: E402


LAYOUTS = {"EP 2": (1, 1, 2), "TP 2": (2, 1, 1), "PP 2": (1, 2, 1), "one process": (1, 1, 1)}
"""(tensor, pipeline, expert) parallel size; each but the first loads what the one before it saved."""


def _model(saved, tensor, pipeline, expert):
    """The engine's mixture-of-experts model of a checkpoint's arguments, and the arguments of this layout."""
    args = loading._sampling_arguments(saved, tensor)
    args.pipeline_model_parallel_size, args.expert_model_parallel_size = pipeline, expert
    args.pipeline_dtype, args.moe_token_dispatcher_type = torch.float32, "allgather"
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")  # the engine's map is that of a dense layer
    model = GPTModel(
        core_transformer_config_from_args(args), spec, args.padded_vocab_size, 64,
        position_embedding_type="rope", rotary_base=args.rotary_base, parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    return model.eval(), args


@torch.no_grad()
def _logits(model, tokens, pipeline):
    """Logits on the last stage, None before it."""
    length = tokens.size(1)
    hidden = torch.ones(length, length).triu(1).bool()[None, None]
    positions = torch.arange(length).expand(tokens.size(0), -1)
    if pipeline == 2 and not parallel_state.is_pipeline_first_stage():
        received = torch.empty(length, tokens.size(0), model.config.hidden_size)
        dist.recv(received, src=0)
        model.set_input_tensor(received)
    out = model(tokens, positions, hidden)
    if parallel_state.is_pipeline_last_stage():
        return out
    dist.send(out.contiguous(), dst=1)
    return None


def _through_layouts(folders, tokens):
    """Load, run and save each folder's checkpoint in every layout; logits by folder and layout, all on the last rank."""
    multiprocessing.current_process()._config["daemon"] = False  # the engine's writer starts a process of its own
    found = {}
    for folder in folders:
        path = str(folder / "megatron" / "release")
        saved = dist_checkpointing.load_common_state_dict(path)["args"]
        for name, (tensor, pipeline, expert) in LAYOUTS.items():
            parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
            model_parallel_cuda_manual_seed(1)
            model, args = _model(saved, tensor, pipeline, expert)
            model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, path)["model"])
            found[folder.name, name] = _logits(model, tokens, pipeline)
            path = str(folder / name.replace(" ", "-"))
            if dist.get_rank() == 0:
                os.mkdir(path)
            dist.barrier()
            state = {"args": args, "iteration": 1, "checkpoint_version": 3.0, "model": model.sharded_state_dict()}
            dist_checkpointing.save(state, path, async_strategy="mcore")
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in EXPERTS}
    for name, folder in folders.items():
        source = huggingface.open_source(save_model(folder / "source", name))
        huggingface.import_model(source, folder / "megatron", arguments_of)
    tokens = torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return folders, tokens, run_distributed(_through_layouts, 2, list(folders.values()), tokens, timeout=300)[-1]


@pytest.mark.parametrize("name", EXPERTS)
def test_logits_are_those_of_transformers_and_tensors_are_kept(name, runs):
    folders, tokens, found = runs
    folder = folders[name]
    expected = logits(make_model(name), tokens)
    source = huggingface.open_source(folder / "source")
    for layout in LAYOUTS:
        torch.testing.assert_close(found[folder.name, layout][..., :100], expected, rtol=0, atol=1e-5)
        exported = folder / f"exported {layout}"
        huggingface.export_model(CheckpointFolder(folder / layout.replace(" ", "-")), exported)
        result = compare_tensors(source.tensors, huggingface.open_source(exported).tensors)
        assert result.identical, result.text()
