"""Fine-tuning on conversations: the same losses on one process and with CSBP; prompts stay out of the noisy stream."""

import json

import pytest

from megatron.bdlm.data.tokenizer_training import byte_tokenizer, save_tokenizer
from megatron.bdlm.testing.topologies import TOY_MODEL, TOY_TRAINING
from megatron.bdlm.testing.training_run import RunFailure, launch

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
SCRIPT = "finetune_bdlm.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    save_tokenizer(byte_tokenizer(("<|user|>", "<|assistant|>")), folder / "tokenizer", TEMPLATE)
    with open(folder / "data.jsonl", "w") as stream:
        for i in range(40):
            word = "abcdefgh"[i % 8]
            turns = [
                message
                for turn in range(1 + i % 3)
                for message in (
                    {"role": "user", "content": f"say {word} {turn}"},
                    {"role": "assistant", "content": f"{word} " * (2 + (i + turn) % 5)},
                )
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return [
        "--data-path", str(folder / "data.jsonl"), "--split", "80,10,10", "--num-workers", "0",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer"),
    ]


def _flags(data, *extra):
    return [*TOY_MODEL, *TOY_TRAINING, *data, "--train-iters", "4", *extra]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    return launch(SCRIPT, _flags(data), processes=1, folder=tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("extra", [("--context-parallel-size", "2"), ("--bdlm-noisy-rows", "all")], ids=" ".join)
def test_losses_agree(extra, data, alone, tmp_path):
    """CSBP on two processes, and all blocks in the noisy stream: the losses of one process."""
    run = launch(SCRIPT, _flags(data, *extra), processes=2 if "--context-parallel-size" in extra else 1, folder=tmp_path)
    for name in ("lm loss", "grad-norm", "supervised tokens"):
        assert sorted(alone.scalars[name]) == [1, 2, 3, 4]
        for step, value in alone.scalars[name].items():
            assert abs(run.scalars[name][step] - value) <= 1e-5 * value, (name, step)


def test_only_answers_are_supervised(alone):
    supervised, rows = alone.scalars["supervised tokens"][1], 4 * 128
    assert 0 < supervised < 0.8 * rows


def test_pretraining_refuses_a_tail_policy(tmp_path):
    with pytest.raises(RunFailure, match="--bdlm-tail-policy pad: .* A legal value: ragged"):
        from megatron.bdlm.testing.topologies import toy_flags

        launch("pretrain_bdlm.py", toy_flags(1, "--bdlm-tail-policy", "pad"), processes=1, folder=tmp_path)
