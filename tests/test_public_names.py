"""Names that others build on: flags, metrics, exports. Changing one is a reviewed line here."""

import dataclasses
import inspect
from pathlib import Path

import torch

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.bdlm.attention.functional import block_diffusion_attention  # noqa: E402
from megatron.bdlm.config import RECIPES, BDLMConfig  # noqa: E402
from megatron.bdlm.data.noise import corrupt  # noqa: E402
from megatron.bdlm.drafter.options import DrafterOptions  # noqa: E402
from megatron.bdlm.objective.loss import block_diffusion_loss, select_rows  # noqa: E402
from megatron.bdlm.objective.targets import build_targets  # noqa: E402
from megatron.bdlm.parallel import state  # noqa: E402
from megatron.bdlm.parallel.exchange import TRANSPORTS, traffic  # noqa: E402
from megatron.bdlm.parallel.plan import SequencePlan  # noqa: E402
from megatron.bdlm.platform.ranges import RANGES  # noqa: E402
from megatron.bdlm.testing.oracle import dense_block_diffusion_attention  # noqa: E402
from megatron.bdlm.training.expert_load import load_metrics  # noqa: E402
from tools.flags_reference import GROUPS, TARGET, flag_of, reference  # noqa: E402

FLAGS = """
--bdlm-recipe --bdlm-block-size --bdlm-block-size-schedule --bdlm-clean-attention --bdlm-noisy-attention --bdlm-views
--bdlm-tail-policy --bdlm-rope-parameters --bdlm-mask-token-id --bdlm-keep-mask-logit --bdlm-corruption --bdlm-noise-schedule
--bdlm-noise-eps --bdlm-noise-level-per --bdlm-noise-draw --bdlm-t-min --bdlm-t-max --bdlm-force-one-corrupted
--bdlm-noise-seed --bdlm-loss-weight --bdlm-loss-denominator --bdlm-label-shift --bdlm-diffusion-loss-weight
--bdlm-clean-loss-weight --bdlm-cross-entropy-chunk --block-parallel-size --bdlm-strategy --bdlm-transport
--bdlm-diffusion-gemma --bdlm-self-conditioning --bdlm-freeze-router --bdlm-clean-loss-tokens
--bdlm-ranks-per-node --bp-grad-dtype --bdlm-attention-kernel --bdlm-diagonal-kernel --bdlm-noisy-rows --bdlm-full-last-layer
--bdlm-router-rows
--bdlm-json-log --bdlm-keep-checkpoints
""".split()

FINETUNE_AND_DRY_RUN_FLAGS = "--bdlm-sft-packing --bdlm-sft-too-long --dry-run --dry-run-world-size --dry-run-gpu --dry-run-json".split()

DFLASH_FLAGS = """
--dflash-target --dflash-data --dflash-features --dflash-init --dflash-version --dflash-layers --dflash-layer-ids --dflash-block-size
--dflash-mask-token-id --dflash-sliding-window --dflash-conv-kernel-size --dflash-conv-group-size --dflash-selector-rank
--dflash-selector-top-k --dflash-anchors --dflash-anchor-mode --dflash-anchors-per --dflash-loss --dflash-gamma --dflash-dpace-alpha
--dflash-dpace-variant --dflash-lk-loss --dflash-selector-weight --dflash-chunk --dflash-held-out --dflash-transport --dflash-movement
--block-parallel-size
""".split()

METRICS = {
    "lm loss", "diffusion loss per supervised token", "diffusion loss per masked token", "masked cross entropy", "nelbo",
    "masked fraction", "supervised tokens", "parts without supervised tokens",
} | {f"nelbo t 0.{b}-{'1.0' if b == 9 else f'0.{b + 1}'}" for b in range(10)}


LOAD_METRICS = {"expert load clean", "expert load noisy", "idle experts clean", "idle experts noisy"}

LOGGED = (METRICS - {name for name in METRICS if name.startswith("nelbo t ")}) | {
    "ppl bound", "clean tokens/s", "processed rows/s", "peak memory GiB", "learning-rate", "batch-size", "grad-norm", "loss-scale",
}
"""What TensorBoard and W&B show of every logged iteration, beside the NELBO by noise level (where a batch has the level)."""

VALIDATION_METRICS = {"lm loss validation", "nelbo validation", "masked cross entropy validation"}


def test_flags():
    assert sorted(flag_of(field) for field in dataclasses.fields(BDLMConfig)) == sorted(FLAGS)
    others = [group for group in GROUPS if group not in (BDLMConfig, DrafterOptions)]
    assert sorted(flag_of(field) for group in others for field in dataclasses.fields(group)) == sorted(FINETUNE_AND_DRY_RUN_FLAGS)


def test_drafter_flags():
    assert sorted(flag_of(field) for field in dataclasses.fields(DrafterOptions)) == sorted(DFLASH_FLAGS)


def test_flags_reference_is_current():
    assert TARGET.read_text() == reference(), "run python tools/flags_reference.py"


def test_recipes():
    assert {"bd3lm", "sdar", "fast-dllm-v2", "llada2-sft", "nemotron-joint", "i-dlm", "diffusion-gemma"} <= set(RECIPES)
    for name, values in RECIPES.items():
        BDLMConfig(**{**values, "bdlm_recipe": name}).validate()


def test_metric_names():
    import numpy as np

    config = BDLMConfig(bdlm_block_size=4, bdlm_mask_token_id=9)
    tokens, eligible = np.arange(8), np.ones(8, bool)
    noised = corrupt(tokens, eligible, config)
    rows = select_rows([build_targets(tokens, eligible, noised, None, config)], np.arange(16))
    _, _, metrics = block_diffusion_loss(torch.ones(len(rows.index)), rows, config)
    assert set(metrics) == METRICS


def test_metric_names_of_experts():
    assert set(load_metrics(torch.ones(1, 2, 4))) == LOAD_METRICS


def test_operations_page_lists_every_logged_name_and_range():
    page = (Path(__file__).resolve().parents[1] / "docs" / "operations.md").read_text()
    several = {name for name in METRICS if name.startswith("nelbo t ")} - {"nelbo t 0.0-0.1", "nelbo t 0.9-1.0"}  # `first` .. `last`
    assert not {name for name in (METRICS | LOGGED | LOAD_METRICS | VALIDATION_METRICS) - several if f"`{name}`" not in page}
    assert all(f"| `{name}` | {meaning} |" in page for name, meaning in RANGES.items())


def test_ranges():
    assert set(RANGES) == {
        "bdlm/step", "bdlm/batch", "bdlm/data", "bdlm/noise", "bdlm/plan", "bdlm/targets", "bdlm/attention", "bdlm/attention backward",
        "bdlm/exchange", "bdlm/exchange wait", "bdlm/tiles", "bdlm/tiles backward", "bdlm/cross entropy", "bdlm/cross entropy backward",
        "bdlm/loss", "bdlm/reduction", "bdlm/optimizer",
    }


def test_transports():
    assert TRANSPORTS == ("auto", "direct", "hierarchical", "ring", "allgather")
    assert {"sent", "received"} <= set(traffic()["forward"]) and {"sent", "received"} <= set(traffic()["backward"])


def test_signatures():
    plan = inspect.signature(SequencePlan.build).parameters
    assert {
        "seq_length", "block_size", "context_parallel_size", "block_parallel_size", "rank", "views", "documents",
        "clean_attention", "strategy", "block_origin", "target_blocks",
    } <= set(plan)
    attention = list(inspect.signature(block_diffusion_attention).parameters)
    assert attention[:9] == ["q", "k", "v", "plan", "group", "transport", "kernel", "softmax_scale", "window"]
    assert list(inspect.signature(corrupt).parameters)[:6] == ["tokens", "eligible", "config", "seed", "sample_index", "epoch"]
    assert callable(dense_block_diffusion_attention)
    for name in ("get_block_parallel_group", "get_block_parallel_world_size", "get_block_parallel_rank"):
        assert not inspect.signature(getattr(state, name)).parameters


def test_plan_attributes():
    plan = SequencePlan.build(seq_length=32, block_size=4, context_parallel_size=2, block_parallel_size=2, rank=1)
    assert plan.rows.dtype == plan.position_ids.dtype == torch.int64 and plan.is_clean.dtype == torch.bool
    assert len(plan.rows) == len(plan.position_ids) == len(plan.is_clean)
