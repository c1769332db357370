"""Exported folders as models of the sampler: the library's own logits, a cache that changes nothing, clear refusals."""

import json

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.generation import huggingface  # noqa: E402
from megatron.bdlm.generation.cache import KeyValueCache  # noqa: E402
from megatron.bdlm.generation.policy import SamplingOptions  # noqa: E402
from megatron.bdlm.generation.rows import CLEAN, SamplingParams, SamplingRows  # noqa: E402
from megatron.bdlm.generation.sampler import sample  # noqa: E402
from tests.checkpoint.tiny import LENGTH, MODELS, logits, make_model, save_model  # noqa: E402

OPTIONS = dict(
    block_size=4, mask_token_id=99, label_shift="none", clean_attention="block-causal", noisy_attention="bidirectional",
    keep_mask_logit=False, candidate_tokens=100, corruption="absorbing",
)
DEVICE = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Write a model of `tests.checkpoint.tiny` as an export would be, with these block options."""

    def write(name, **options):
        save_model(tmp_path, name, dtype=torch.float64, tokenizer=True)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | OPTIONS | options))
        return tmp_path

    return write


@pytest.mark.parametrize("name", MODELS)
def test_clean_rows_have_the_logits_of_the_library(name, folder):
    """Token-causal clean rows are the autoregressive model, windows and rotary scaling included."""
    path = folder(name, clean_attention="token-causal")
    tokens = torch.randint(99, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(LENGTH).expand(2, -1)
    rows = SamplingRows(tokens, positions, torch.full((2, LENGTH), CLEAN, dtype=torch.int8), torch.tensor([LENGTH] * 2))
    params = SamplingParams.of(rows, huggingface.block_rules(path), KeyValueCache(2))
    with torch.no_grad():
        found = huggingface.load_model(path, DEVICE)(tokens, positions, params)
    expected = logits(make_model(name, torch.float64), tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shift", ["none", "next"])
@pytest.mark.parametrize("name", ["llama", "mistral, window 7"])
def test_the_cache_changes_nothing(name, shift, folder):
    path = folder(name, label_shift=shift)
    model, rules, options = huggingface.load_model(path, DEVICE), huggingface.block_rules(path), SamplingOptions(max_new_tokens=13)
    prompts = [[5, 6, 7, 8, 9, 10], [11]]
    cached, plain = (sample(model, prompts, rules, options, use_cache=use) for use in (True, False))
    assert cached.sequences == plain.sequences and len(cached.sequences[1].tokens) == 13
    assert cached.statistics.clean_rows < plain.statistics.clean_rows


def test_a_folder_that_is_no_export_is_refused(folder, tmp_path):
    with pytest.raises(huggingface.FolderError, match="no config.json in it; a legal value is a folder of"):
        huggingface.block_rules(tmp_path)
    path = folder("llama", block_size="four")
    with pytest.raises(huggingface.FolderError, match="no valid block_size; it is no export"):
        huggingface.block_rules(path)


def test_a_model_that_never_saw_masks_is_refused(folder):
    with pytest.raises(huggingface.FolderError, match="config.json says corruption uniform; the sampler fills masks"):
        huggingface.block_rules(folder("llama", corruption="uniform"))


def test_missing_tensors_are_named(folder):
    """Fault E4."""
    path = folder("llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(huggingface.FolderError, match="missing_keys: model.layers.2.input_layernorm.weight, model.layers.2"):
        huggingface.load_model(path, DEVICE)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    save_model(tmp_path, "llama")
    with pytest.raises(huggingface.FolderError, match="transformers finds no tokenizer in it"):
        huggingface.load_tokenizer(tmp_path)
