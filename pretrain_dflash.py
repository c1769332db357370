"""Train a DFlash or DFlash2 drafter for a frozen target, in the shape of Megatron's pretrain scripts.

    torchrun --nproc-per-node 4 pretrain_dflash.py --context-parallel-size 4 --block-parallel-size 4 \
        --dflash-target TARGET --dflash-data SAMPLES --dflash-features FEATURES --dflash-mask-token-id 16 ...

Every stock flag of Megatron is taken, plus the `dflash` group (`--help`). The model's shape comes from the target's
config.json and sequences from the samples folder. docs/drafters.md says how samples and features are made.
"""

from megatron.bdlm.platform import cpu

ON_CPU = cpu.enable()  # before the engine is imported; nothing where CUDA is available

from functools import partial  # noqa: E402

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402

from megatron.bdlm.drafter import training  # noqa: E402
from megatron.bdlm.training import run  # noqa: E402

cpu.adapt_engine(ON_CPU)


def get_batch(data_iterator, model):
    """The next micro-batch: this rank's draft rows, its context features, labels."""
    return training.next_batch(data_iterator, model)


def loss_func(batch, model, hidden):
    """(sum, count, metrics) of the draft rows' hidden states."""
    return training.batch_loss(batch, model, hidden)


def forward_step(data_iterator, model):
    """One micro-batch through the drafter."""
    batch = get_batch(data_iterator, model)
    return training.forward(batch, model), partial(loss_func, batch, model)


def train_valid_test_datasets_provider(sample_counts, vp_stage=None):
    """Train and validation samples; every rank reads its own."""
    return training.build_datasets(get_args(), sample_counts)


train_valid_test_datasets_provider.is_distributed = True

if __name__ == "__main__":
    with run.reported():
        container = training.prepare()
        run.repair(get_args())
        run.protect()
        pretrain(container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
        run.finish()
