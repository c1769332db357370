"""Statistics, one noised sample as text, and the picture."""

import math

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.bdlm.config import BDLMConfig
from megatron.bdlm.data import inspection
from megatron.bdlm.data.documents import DataError
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "d")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for length in (4, 8, 12):
        builder.add_document(np.arange(length) % 2, [length])
    builder.finalize(f"{path}.idx")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerSource("NullTokenizer", vocab_size=10))


def test_statistics(prefix):
    found = inspection.statistics(prefix)
    assert (found.documents, found.tokens, found.distinct) == (3, 24, 2)
    assert (found.length_quantiles["least"], found.length_quantiles["median"], found.length_quantiles["most"]) == (
        4,
        8,
        12,
    )
    assert found.entropy == pytest.approx(math.log(2))
    assert found.frequent == [(0, 0.5), (1, 0.5)]


def test_a_noised_sample_shows_blocks_and_corrupted_tokens(prefix, tokenizer):
    config = BDLMConfig(bdlm_block_size=4, bdlm_mask_token_id=10, bdlm_t_min=1.0)
    sample = inspection.training_sample(prefix, tokenizer, 0, 12, seed=1)
    noised = inspection.noised_sample(sample, config, 1, 11)
    decode = inspection.decoder(tokenizer)
    text = inspection.render(sample, noised, decode, colour=False)
    assert text.count("|1.00|") == 3 and text.count("[") == 12  # t = 1: everything is corrupted
    coloured = inspection.render(sample, noised, decode, colour=True)
    assert coloured.count(inspection.CORRUPTED) == 12
    assert decode(10) == "<10>" and decode(3) == "3"


def test_separate_documents_restart_blocks(prefix, tokenizer):
    config = BDLMConfig(bdlm_block_size=16, bdlm_mask_token_id=10)
    sample = inspection.training_sample(prefix, tokenizer, 0, 24, seed=1, separate_documents=True)
    assert len(inspection.noised_sample(sample, config, 1, 11).block_starts) == 3


def test_a_sample_that_the_data_do_not_have_is_refused(prefix, tokenizer):
    with pytest.raises(DataError, match="--sample 2: .* gives 2 samples of 12 tokens"):
        inspection.training_sample(prefix, tokenizer, 2, 12, seed=1)


def test_plot_is_a_png(prefix, tmp_path):
    levels = inspection.block_levels(range(3), 64, BDLMConfig(bdlm_block_size=16), seed=1)
    assert levels.shape == (12,) and 0 < levels.min() and levels.max() <= 1
    inspection.plot(prefix, tmp_path / "sub" / "a.png", levels)
    inspection.plot(prefix, tmp_path / "b.png")
    assert (tmp_path / "sub" / "a.png").read_bytes()[:4] == b"\x89PNG" == (tmp_path / "b.png").read_bytes()[:4]
