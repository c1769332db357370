"""The expected embedding, streamed, against the dense formula (test 14 of the model)."""

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.objective.soft_embedding import soft_embedding
from megatron.bdlm.testing.distributed import run_distributed

ROWS, HIDDEN, VOCABULARY, PADDED = 25, 16, 97, 128


def _inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, HIDDEN, generator=generator) * 3, torch.randn(PADDED, HIDDEN, generator=generator)


def _dense(hidden, weight, softcap):
    logits = (hidden @ weight[:VOCABULARY].t()).double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.softmax(-1) @ weight[:VOCABULARY].double()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk, columns", [(10, 10), (25, 97), (7, 200)])
def test_streamed_is_dense(softcap, chunk, columns):
    hidden, weight = _inputs()
    found = soft_embedding(hidden, weight, softcap=softcap, vocab_size=VOCABULARY, chunk=chunk, columns=columns)
    assert (found - _dense(hidden, weight, softcap)).abs().max() < 1e-6 * weight.abs().max() * 4


def _sliced():
    hidden, weight = _inputs()
    slices = weight.chunk(dist.get_world_size())
    return soft_embedding(
        hidden, slices[dist.get_rank()], softcap=5.0, vocab_size=VOCABULARY, tp_group=dist.group.WORLD, chunk=10, columns=10
    )


def test_two_slices_of_the_vocabulary():
    hidden, weight = _inputs()
    for found in run_distributed(_sliced, 2):
        torch.testing.assert_close(found, _dense(hidden, weight, 5.0).float(), rtol=0, atol=4e-6)


def test_no_rows():
    assert soft_embedding(torch.zeros(0, HIDDEN), _inputs()[1]).shape == (0, HIDDEN)
