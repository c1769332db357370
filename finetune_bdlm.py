"""Fine-tune a block diffusion language model on conversations, in the shape of Megatron's scripts.

    torchrun --nproc-per-node 2 finetune_bdlm.py --data-path conversations.jsonl --context-parallel-size 2 ...

JSON lines with `messages`, `prompt`/`completion`, or token ids with a mask (docs/data.md); only what the
assistant says is supervised. Start from a checkpoint with `--load DIR --finetune`, or `--pretrained-checkpoint DIR`.
Everything but the data is `pretrain_bdlm.py`.
"""

from pretrain_bdlm import forward_step  # first: it readies the platform before the engine is imported

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain

from megatron.bdlm.data.sft import FinetuneOptions, build_finetuning_datasets
from megatron.bdlm.training import run


def train_valid_test_datasets_provider(sample_counts, vp_stage=None):
    """Train, validation and test datasets; every rank reads its own samples."""
    return build_finetuning_datasets(get_args(), sample_counts)


train_valid_test_datasets_provider.is_distributed = True

if __name__ == "__main__":
    with run.reported():
        container = run.prepare(FinetuneOptions)
        pretrain(container, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
        run.finish()
