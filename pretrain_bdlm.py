"""Pretrain a block diffusion language model, in the shape of Megatron's pretrain scripts.

    torchrun --nproc-per-node 2 pretrain_bdlm.py --context-parallel-size 2 --block-parallel-size 2 ...

Every stock flag of Megatron is taken, plus the `bdlm` group (`--help`). `--seq-length` is the
clean length L; `--global-batch-size` counts clean samples.
"""

from megatron.bdlm.platform import cpu

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

from functools import partial  # noqa: E402

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402

from megatron.bdlm.data.pretraining import build_pretraining_datasets  # noqa: E402
from megatron.bdlm.training import run, step  # noqa: E402

cpu.adapt_engine(ON_CPU)


def get_batch(data_iterator, model):
    """The next micro-batch as this rank's rows: ids [b, s], sequence parameters, scored rows."""
    return step.next_batch(data_iterator, model)


def loss_func(batch: step.Batch, nll: torch.Tensor):
    """(sum, count, metrics) of the scored rows' negative log-likelihoods `nll` [n]."""
    return step.batch_loss(batch, nll)


def forward_step(data_iterator, model):
    """One micro-batch through this pipeline stage."""
    batch = get_batch(data_iterator, model)
    output = model(batch.input_ids, batch.position_ids, **batch.model_inputs)
    return output, partial(loss_func, batch)


def train_valid_test_datasets_provider(sample_counts, vp_stage=None):
    """Train, validation and test datasets; every rank reads its own samples."""
    return build_pretraining_datasets(get_args(), sample_counts)


train_valid_test_datasets_provider.is_distributed = True

if __name__ == "__main__":
    with run.reported():
        container = run.prepare()
        pretrain(container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
        run.finish()
