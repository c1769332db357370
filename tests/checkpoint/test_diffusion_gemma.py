"""DiffusionGemma folders: there and back bit by bit on one process, and what is refused."""

import json

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

pytest.importorskip("transformers.models.diffusion_gemma")

from megatron.bdlm.checkpoint import diffusion_gemma as mapping  # noqa: E402
from megatron.bdlm.checkpoint import diffusion_gemma_files as files  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.layout import LAYOUTS, ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.safetensors_folder import SafetensorsFolder  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.model.diffusion_gemma import models  # noqa: E402


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    models.published().save_pretrained(folder / "source")
    files.import_model(folder / "source", folder / "imported", arguments_of)
    return folder


def test_there_and_back(imported, tmp_path):
    checkpoint = CheckpointFolder(imported / "imported" / "release")
    assert files.is_folder(imported / "source") and files.is_checkpoint(checkpoint)
    files.export_model(checkpoint, tmp_path / "exported")
    result = compare_tensors(SafetensorsFolder(imported / "source"), SafetensorsFolder(tmp_path / "exported"))
    assert result.identical and any("vision_tower" in name for name in result.same), result.text()
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["canvas_length"] == 6 and config["text_config"]["global_head_dim"] == 32


def test_arguments_describe_the_model(imported):
    args = CheckpointFolder(imported / "imported" / "release").common_state()["args"]
    assert mapping.full_layers(args) == [False, True] and args.window_size == (7, 0)
    assert (args.bdlm_block_size, args.bdlm_mask_token_id, args.padded_vocab_size) == (6, -1, 128)
    assert mapping.options_of(args).full_key_heads == 1


def test_a_model_with_biases_is_refused(imported, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((imported / "source" / "config.json").read_text())
    config["text_config"]["attention_bias"] = True
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes((imported / "source" / "model.safetensors").read_bytes())
    with pytest.raises(ConversionError, match="not supported: attention_bias True \\(it must be False\\)"):
        files.import_model(source, tmp_path / "imported", arguments_of)


def test_query_and_key_rows():
    """Two key heads of size 1 with two query heads each: q0 q1 k0 q2 q3 k1."""
    sizes = models.Sizes(1, 1, 1, 4, 2, 1, 1, 1)
    joined = LAYOUTS["qk"].join([torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11]])], sizes)
    assert joined.flatten().tolist() == [0, 1, 10, 2, 3, 11]
    assert [part.flatten().tolist() for part in LAYOUTS["qk"].split(joined, sizes)] == [[0, 1, 2, 3], [10, 11]]
