"""Imported experts in our model at EP 2, TP 2 and PP 2, saved and loaded across them.

Logits are those of transformers, tensors are kept.
"""

import copy
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.test_megatron_logits import build, logits_of  # noqa: E402
from tests.checkpoint.tiny import EXPERTS, LENGTH, logits, make_model, save_model  # noqa: E402


LAYOUTS = {"EP 2": (1, 1, 2), "TP 2": (2, 1, 1), "PP 2": (1, 2, 1), "one process": (1, 1, 1)}
"""(tensor, pipeline, expert) parallel size; each but the first loads what the one before it saved."""


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
            model = build(saved, tensor, pipeline, expert)
            model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, path)["model"])
            found[folder.name, name] = logits_of(model, tokens, pipeline)
            path = str(folder / name.replace(" ", "-"))
            if dist.get_rank() == 0:
                os.mkdir(path)
            dist.barrier()
            args = copy.copy(saved)
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tensor, pipeline
            args.expert_model_parallel_size = expert
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
