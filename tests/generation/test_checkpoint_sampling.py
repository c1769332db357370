"""tools/generate.py on checkpoints of real runs: an overfitted text comes back, options are the checkpoint's, TP changes nothing."""

import dataclasses
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.bdlm.config import BDLMConfig, BDLMConfigError
from megatron.bdlm.generation.loading import block_rules
from megatron.bdlm.testing.distributed import run_distributed
from megatron.bdlm.testing.training_run import REPOSITORY, environment, launch

TEXT = [(7 * i * i + 3 * i + 5) % 61 for i in range(32)]
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 16 --qk-layernorm --swiglu --disable-bias-linear --seq-length 32 --max-position-embeddings 32 --bdlm-block-size 8 "
    "--micro-batch-size 16 --global-batch-size 16 --train-iters 70 --lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0 --eval-iters 0 --eval-interval 1000 --save-interval 70 --log-interval 35 --num-workers 0 --ckpt-format torch_dist --split 100,0,0"
).split()
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "62"]


def words(tokens):
    return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents that are all the same text."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text((json.dumps({"text": words(TEXT)}) + "\n") * 64)
    tool = [sys.executable, REPOSITORY / "tools" / "preprocess_data.py", "--input", folder / "text.jsonl", "--output-prefix", folder / "text"]
    subprocess.run([*map(str, tool), *TOKENIZER], check=True, capture_output=True, env=environment())
    return folder / "text"


@pytest.fixture(scope="module", params=["none", "next"])
def run(request, data, tmp_path_factory):
    """Label shift and checkpoint folder of a model overfitted to the text."""
    folder = tmp_path_factory.mktemp(f"run-{request.param}")
    flags = ["--data-path", str(data), "--data-cache-path", str(folder / "cache"), "--save", str(folder / "checkpoints")]
    launch(
        "pretrain_bdlm.py", [*MODEL, *TOKENIZER, *flags, "--bdlm-label-shift", request.param], processes=1, folder=folder
    )
    return request.param, folder / "checkpoints"


def generate(checkpoints, *flags, processes=1):
    command = [sys.executable, str(REPOSITORY / "tools" / "generate.py")]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        flags = [*flags, "--tensor-model-parallel-size", str(processes)]
    return subprocess.run([*command, "--load", str(checkpoints), *flags], capture_output=True, text=True, env=environment())


def check_loaded_model(folder):
    """In a process of its own (the engine keeps its state in module globals): loading, its refusals, and its logits."""
    from megatron.bdlm.platform import cpu

    cpu.adapt_engine(cpu.enable())
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron.bdlm.attention.core_attention import AttentionOptions, BlockDiffusionParams
    from megatron.bdlm.generation import loading
    from megatron.bdlm.generation.cache import KeyValueCache
    from megatron.bdlm.generation.rows import CLEAN, NOISY, SamplingParams, SamplingRows
    from megatron.bdlm.parallel.plan import SequencePlan

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    checkpoint, device = loading.find_checkpoint(folder), torch.device("cpu")
    saved = loading.saved_arguments(checkpoint)
    model = loading.load_model(checkpoint, saved, 1, device)
    rules = loading.block_rules(saved)

    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, 60, (32,), generator=generator)
    noisy = torch.where(torch.rand(32, generator=generator) < 0.5, rules.mask_token_id, clean)
    plan = SequencePlan.build(
        seq_length=32, block_size=8, context_parallel_size=1, block_parallel_size=1, rank=0, clean_attention=rules.clean_attention
    )
    params = BlockDiffusionParams.from_plan(plan, None, AttentionOptions(), device)
    ids = plan.take(torch.cat([noisy, clean]), 0)[None]
    cache = KeyValueCache(1)
    sampled = []
    for block in range(4):  # clean block b-1 and noisy block b, as the sampler runs them
        new = torch.arange(max(block - 1, 0) * 8, block * 8)
        here = torch.arange(block * 8, block * 8 + 8)
        kind = torch.tensor([[CLEAN] * len(new) + [NOISY] * 8], dtype=torch.int8)
        rows = SamplingRows(torch.cat([clean[new], noisy[here]])[None], torch.cat([new, here])[None], kind, torch.tensor([len(new)]))
        with torch.no_grad():
            sampled.append(model(rows.input_ids, rows.position_ids, SamplingParams.of(rows, rules, cache))[0])
        cache.advance(rows.clean_counts)
    with torch.no_grad():
        trained = model.model(ids, params.position_ids[None], packed_seq_params=params)[0]
    both = [torch.cat([x[:-8] for x in sampled]), torch.cat([x[-8:] for x in sampled])]
    difference = max((both[1] - trained[:32]).abs().max().item(), (both[0] - trained[32:56]).abs().max().item())

    saved.num_layers = 3
    try:
        loading.load_model(checkpoint, saved, 1, device)
    except loading.LoadError as error:
        return difference, str(error)


def continuations(output):
    """The tokens of every prompt with its continuation, out of what the tool prints."""
    return [[int(t) for t in text.split()] for text in re.findall(r"^--- prompt .*\n(.*)\n", output, re.M)]


def test_an_overfitted_text_comes_back_whatever_the_layout(run):
    shift, checkpoints = run
    prompts = [TEXT[:3], TEXT[:13], TEXT[:8]]
    flags = [flag for prompt in prompts for flag in ("--prompt", words(prompt))]
    for processes in (1, 2) if shift == "none" else (1,):
        result = generate(checkpoints, *flags, "--max-new-tokens", "19", "--steps", "4", processes=processes)
        assert result.returncode == 0, result.stderr[-3000:]
        assert f"label shift {shift}" in result.stderr
        assert continuations(result.stdout) == [TEXT[: len(p) + 19] for p in prompts]
        assert re.search(r"^57 tokens in .* tokens per forward; \d+ forwards of the model", result.stdout, re.M)


@pytest.mark.parametrize("run", ["next"], indirect=True)
def test_rows_against_the_cache_have_the_logits_of_training_and_wrong_tensors_are_named(run):
    ((difference, message),) = run_distributed(check_loaded_model, 1, str(run[1]))
    assert difference < 2e-5
    assert "tensors missing: decoder.layers" in message or "of another shape: decoder.layers" in message


def test_a_conflicting_option_is_refused_with_both_values():
    saved = SimpleNamespace(**{f.name: f.default for f in dataclasses.fields(BDLMConfig)}, bdlm_candidate_tokens=9)
    saved.bdlm_mask_token_id = 8
    assert block_rules(saved, {"bdlm_block_size": 32, "bdlm_label_shift": None}).block_size == 32
    with pytest.raises(BDLMConfigError, match="--bdlm-label-shift next: the checkpoint was written with none; .* legal value: none"):
        block_rules(saved, {"bdlm_label_shift": "next"})
    saved.bdlm_corruption = "uniform"
    with pytest.raises(BDLMConfigError, match="--bdlm-corruption uniform: the sampler fills masks"):
        block_rules(saved)


def test_a_folder_without_checkpoint_is_a_clear_error(tmp_path):
    result = generate(tmp_path, "--prompt", "1")
    assert result.returncode == 2
    assert f"error: --load {tmp_path}: no complete checkpoint in it" in result.stderr
