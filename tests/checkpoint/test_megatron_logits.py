"""An imported model in the engine, at TP 1 and 2, PP 1 and 2, saved and loaded across them.

Logits are those of transformers, tensors are kept.
"""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.config import config_from_args  # noqa: E402
from megatron.bdlm.generation import loading  # noqa: E402
from megatron.bdlm.generation.autoregressive import next_token_logits  # noqa: E402
from megatron.bdlm.model.builder import BlockDiffusionModelBuilder, BlockDiffusionModelConfig  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import LENGTH, MODELS, logits, make_model, save_model  # noqa: E402

LAYOUTS = {"TP 2": (2, 1), "PP 2": (1, 2), "one process": (1, 1)}
"""(tensor-parallel, pipeline-parallel) size; each loads what the one before it saved."""

SAVED = ("llama", "mistral, window 7", "qwen2, windows by layer", "qwen3, yarn")
"""Models that are saved in every layout: one of each architecture (a save starts processes, which takes seconds)."""


def build(saved, tensor, pipeline, expert=1):
    """Our model of a checkpoint's arguments in a layout."""
    args = loading._sampling_arguments(saved, tensor)
    args.expert_model_parallel_size = expert
    args.pipeline_model_parallel_size, args.pipeline_dtype = pipeline, torch.float32
    config = gpt_config_from_args(args, model_config_cls=BlockDiffusionModelConfig)
    config.bdlm, config.parallel_output = config_from_args(args), False
    return BlockDiffusionModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()


def logits_of(model, tokens, pipeline):
    """Logits on the last stage, None before it."""
    if pipeline == 1:
        return next_token_logits(model, tokens)
    if parallel_state.is_pipeline_first_stage():
        dist.send(next_token_logits(model, tokens).contiguous(), dst=1)
        return None
    hidden = torch.empty(tokens.size(1), tokens.size(0), model.config.hidden_size)
    dist.recv(hidden, src=0)
    model.set_input_tensor(hidden)
    return next_token_logits(model, tokens)


def _through_layouts(folders, saving, tokens):
    """Load and run each folder's checkpoint in every layout, and save those in `saving`.

    Returns:
        logits by folder and layout; the last rank has all of them.
    """
    multiprocessing.current_process()._config["daemon"] = False  # the engine's writer starts a process of its own
    found = {}
    for folder in folders:
        path = folder / "megatron" / "release"
        saved = dist_checkpointing.load_common_state_dict(str(path))["args"]
        for name, (tensor, pipeline) in LAYOUTS.items():
            parallel_state.initialize_model_parallel(tensor, pipeline)
            model_parallel_cuda_manual_seed(1)
            model = build(saved, tensor, pipeline)
            model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))["model"])
            found[folder.name, name] = logits_of(model, tokens, pipeline)
            if folder.name not in saving:
                parallel_state.destroy_model_parallel()
                continue
            path = folder / name.replace(" ", "-")
            if dist.get_rank() == 0:
                path.mkdir()
            dist.barrier()
            args = copy.copy(saved)
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tensor, pipeline
            state = {"args": args, "iteration": 1, "checkpoint_version": 3.0, "model": model.sharded_state_dict()}
            dist_checkpointing.save(state, str(path), async_strategy="mcore")
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = []
    for number, name in enumerate(MODELS):
        folder = root / str(number)
        save_model(folder / "source", name)
        huggingface.import_model(huggingface.open_source(folder / "source"), folder / "megatron", arguments_of)
        folders.append(folder)
    tokens = torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    saving = [folder.name for name, folder in zip(MODELS, folders) if name in SAVED]
    return (
        dict(zip(MODELS, folders)),
        tokens,
        run_distributed(_through_layouts, 2, folders, saving, tokens, timeout=300)[-1],
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tensors(name, runs):
    folders, tokens, found = runs
    folder = folders[name]
    expected = logits(make_model(name), tokens)
    assert expected.abs().max() > 1
    source = huggingface.open_source(folder / "source")
    for layout in LAYOUTS:
        ours = found[folder.name, layout]
        assert ours.shape == (2, LENGTH, 128)
        torch.testing.assert_close(ours[..., :100], expected, rtol=0, atol=1e-5)
        if name not in SAVED:
            continue
        exported = folder / f"exported {layout}"
        huggingface.export_model(CheckpointFolder(folder / layout.replace(" ", "-")), exported)
        result = compare_tensors(source.tensors, huggingface.open_source(exported).tensors)
        assert result.identical, result.text()


def test_a_wrong_layout_would_be_seen(runs):
    """Two query heads exchanged in the file change the logits: the comparison has teeth."""
    _, tokens, _ = runs
    model = make_model("llama")
    expected = logits(model, tokens)
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.copy_(weight.unflatten(0, (4, 16))[[1, 0, 2, 3]].flatten(0, 1))
    assert (logits(model, tokens) - expected).abs().max() > 1e-2
