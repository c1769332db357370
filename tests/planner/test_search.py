"""Layouts are legal, predictions obey arithmetic that can be done by hand, refusals name flag, value and a legal value."""

import json
import time

import pytest

from megatron.bdlm.planner.costs import attention_area, predict
from megatron.bdlm.planner.hardware import GPUS
from megatron.bdlm.planner.models import KNOWN, PlannerError, from_config, from_flags
from megatron.bdlm.planner.published import compare
from megatron.bdlm.planner.search import exact_balance, flags, layouts, search
from megatron.bdlm.planner.work import Layout, Machine, Workload

H200 = GPUS["h200"]


def test_every_layout_is_legal_and_none_comes_twice():
    model, workload = KNOWN["26b-a4b"], Workload(65536, 32, 8)
    found = list(layouts(model, Machine(H200, 16), workload))
    assert len(found) == len(set(found)) > 100
    for layout in found:
        assert layout.tp * layout.pp * layout.cp * layout.dp == 16
        assert layout.cp % layout.bp == 0 and (layout.cp * layout.dp) % layout.ep == 0
        assert model.least_key_heads % layout.tp == 0 and model.layers % layout.pp == 0
        assert workload.length % (2 * layout.cp) == 0 and workload.global_batch % layout.dp == 0
    assert {layout.strategy for layout in found} == {"csbp", "cp", "hybrid", "bp"}


def test_blocks_fewer_than_ranks_leave_hybrid():
    found = list(layouts(KNOWN["8b"], Machine(H200, 8), Workload(4096, 2048, 1)))
    assert {layout.bp for layout in found if layout.cp == 8} == {1, 2}


def test_a_million_tokens_and_4096_gpus_in_seconds():
    start = time.process_time()
    ranked = search(KNOWN["14b"], Machine(H200, 4096), Workload(1048576, 32, 512))
    assert ranked.fitting > 0 and time.process_time() - start < 10
    steps = [prediction.step_seconds for prediction in ranked.predictions[: ranked.fitting]]
    assert steps == sorted(steps)


def test_flops_and_traffic_by_hand():
    model, workload = KNOWN["14b"], Workload(262144, 32, 1, gradient_item=2)
    found = predict(model, Machine(H200, 8), workload, Layout(cp=8, bp=1, strategy="cp", transport="ring"))
    area = 262144 * (262144 + 32)  # both streams
    assert found.flops["attention"] == pytest.approx(14 * area * 40 * 128 * 39.5 / 8)  # of the last layer, noisy rows
    assert found.bytes["attention"] / 2**30 == pytest.approx(210.0)


def test_experts_by_hand():
    """Qwen3-30B-A3B, 2048 wide, 8 of 128 experts of width 768 in 48 layers; 16 ranks, one sample of 8192 tokens each."""
    model, machine, workload = KNOWN["30b-a3b"], Machine(H200, 16), Workload(8192, 32, 16)
    alone, shared, split = (
        predict(model, machine, workload, Layout(**layout)) for layout in (dict(dp=16), dict(dp=16, ep=8), dict(tp=2, dp=8, ep=8))
    )
    experts, rows = 48 * 128 * 3 * 2048 * 768, 2 * 8192
    assert alone.memory["parameters"] - shared.memory["parameters"] == pytest.approx(2 * experts * 7 / 8)
    assert alone.memory["optimizer"] == pytest.approx(shared.memory["optimizer"]), "sharded over all ranks in both"
    assert alone.bytes["experts"] == 0 and shared.bytes["tensor parallel"] == 0
    assert shared.bytes["experts"] == pytest.approx(48 * 4 * 8 * rows * 2048 * 2 * 7 / 8)
    assert split.bytes["tensor parallel"] == pytest.approx(2 * 48 * (5 + 4 * 8) * rows * 2048 * 2 / 2)
    dense = model.parameters - experts
    assert shared.bytes["gradients and parameters"] == pytest.approx(6 * (dense * 15 / 16 + experts / 8 * 8 / 16))


@pytest.mark.parametrize("window", [None, 16])
def test_area_is_the_plans(window):
    from megatron.bdlm.parallel.plan import SequencePlan

    area = sum(attention_area(Workload(512, 8, 1), window))
    assert area == pytest.approx(SequencePlan.build(512, 8).program(window).area, rel=0.0 if window is None else 0.05)


def test_memory_falls_with_sharding():
    machine, workload = Machine(H200, 16), Workload(65536, 32, 16)
    alone, split = (predict(KNOWN["8b"], machine, workload, Layout(cp=cp, bp=cp, dp=16 // cp)) for cp in (1, 8))
    assert split.memory["activations"] == pytest.approx(alone.memory["activations"] / 8)
    assert split.memory["optimizer"] == alone.memory["optimizer"]


def test_published_traffic_is_met_and_no_speedup_is_overstated():
    for row in compare():
        if row.published.traffic:
            assert row.predicted == pytest.approx(row.published.traffic, rel=0.01)
        else:
            assert all(0.99 <= value <= row.published.speedup for value in row.predicted)


def test_flags_name_the_layout():
    text = flags(Workload(4096, 8, 4, views=2), Layout(tp=2, cp=4, bp=2, strategy="hybrid", recompute=True))
    for part in ("--tensor-model-parallel-size 2 --sequence-parallel", "--block-parallel-size 2", "--bdlm-views 2", "--recompute-granularity full"):
        assert part in text


def test_models_from_config_and_flags(tmp_path):
    values = dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=6, intermediate_size=128, vocab_size=100,
        head_dim=16, layer_types=["sliding_attention"] * 4 + ["full_attention"] * 2, sliding_window=32,
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = from_config(tmp_path)
    assert [(kind.count, kind.window) for kind in model.kinds] == [(2, None), (4, 32)]
    text = "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 128"
    again = from_flags([*text.split(), "--kv-channels", "16", "--vocab-size", "100", "--swiglu", "--untie-embeddings-and-output-weights"])
    assert again.parameters == model.parameters


def test_published_sizes_of_known_models():
    for name, billions in (("3b", 3.1), ("8b", 8.2), ("14b", 14.8), ("26b-a4b", 25.2), ("30b-a3b", 30.5)):
        assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: from_config(folder), "--model .*: no config.json there"),
        (lambda folder: from_flags(["--num-layers", "2"]), "--hidden-size: missing"),
        (lambda folder: search(KNOWN["8b"], Machine(H200, 4), Workload(4099, 4, 3)), "--gpus 4 .*no legal layout.*A legal value"),
    ],
)
def test_refusals(call, message, tmp_path):
    with pytest.raises(PlannerError, match=message):
        call(tmp_path)


def test_no_exact_balance_for_very_large_groups():
    assert exact_balance(Workload(1048576, 32, 1), Layout(cp=512, bp=512)) is None
