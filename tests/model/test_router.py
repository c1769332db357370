"""Losses and statistics of the router against plain loops in float64, on one and on two ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.bdlm.model.router import BlockDiffusionRouter, expert_load, has_router_losses, router_loss_scale  # noqa: E402
from megatron.bdlm.testing.distributed import run_distributed  # noqa: E402

EXPERTS, TOPK, HIDDEN, ROWS, SAMPLES, Z = 4, 2, 8, 12, 2, 1e-3
KINDS = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
SCALE = 3.0


def _inputs():
    """Hidden states [s, b, h], router weight [E, h], classes [s, b, 3] (a sample counts 7 rows, the other 4 of them)."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, SAMPLES, HIDDEN, generator=generator)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator)
    clean, noisy = torch.zeros(2, ROWS, SAMPLES, dtype=torch.bool)
    noisy[:4], clean[4:11, 0], clean[5:9, 1] = True, True, True
    return hidden, weight, torch.stack([clean, clean, noisy], dim=-1)


def _config(kind, coefficient=1e-2):
    return TransformerConfig(
        num_layers=3, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOPK,
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient, moe_z_loss_coeff=Z, add_bias_linear=False,
        calculate_per_token_loss=True, use_cpu_initialization=True, moe_token_dispatcher_type="alltoall",
    )


def _router(kind):
    router = BlockDiffusionRouter(_config(kind), pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(2)
    router.weight.data = _inputs()[1]
    return router


def _loops(kind, counted):
    """The losses (without coefficients) and the gradient of their weighted sum: row by row, in float64."""
    hidden, weight, _ = _inputs()
    weight = weight.double().requires_grad_()
    groups = [[(s, b) for s in range(ROWS) for b in range(SAMPLES) if counted[s, b]]]
    if kind == "seq_aux_loss":
        groups = [[(s, b) for s, b in groups[0] if b == sample] for sample in range(SAMPLES)]
    balance = z = 0.0
    for group in groups:
        rows, mass = [0] * EXPERTS, [0.0] * EXPERTS
        for s, b in group:
            logits = [(weight[e] * hidden[s, b].double()).sum() for e in range(EXPERTS)]
            largest = sorted(range(EXPERTS), key=lambda e: -logits[e].item())[:TOPK]
            norm = sum(torch.exp(value) for value in logits)
            z = z + torch.log(norm) ** 2 / sum(map(len, groups))
            for e in range(EXPERTS):
                rows[e] += e in largest
                mass[e] = mass[e] + torch.exp(logits[e]) / norm
        balance = balance + EXPERTS / (TOPK * len(group) ** 2) * sum(n * p for n, p in zip(rows, mass)) / len(groups)
    (1e-2 * balance + Z * z).backward()
    return {KINDS[kind]: balance.item(), "z_loss": z.item()}, weight.grad


def _run(kind):
    """Router losses of this rank's part, their gradient, and rows by class and expert; all ranks share the rows out."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    hidden, _, classes = _inputs()
    part = slice(None) if ranks == 1 else [slice(0, 7), slice(7, None)][dist.get_rank()]
    router = _router(kind)
    MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), SCALE))
    get_moe_metrics_tracker().clear()
    expert_load.take(3, EXPERTS)
    probs, _ = router(hidden[part], classes[part])
    (probs * 0).sum().backward()
    logged = {name: get_moe_metrics_tracker().metrics[name].values.clone() for name in (KINDS[kind], "z_loss")}
    found = (logged, router.weight.grad, expert_load.take(3, EXPERTS))
    with torch.no_grad():  # the first pass of a recomputed layer counts nothing
        router(hidden[part], classes[part])
    assert expert_load.take(3, EXPERTS).sum() == 0
    parallel_state.destroy_model_parallel()
    return found


def _all_kinds():
    return {kind: _run(kind) for kind in KINDS}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def runs(request):
    return run_distributed(_all_kinds, request.param, timeout=120)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_loops(kind, runs):
    """Fault B8: only rows that count do, and sharing them out (7 and 5 rows a sample) changes nothing."""
    expected, gradient = _loops(kind, _inputs()[2][..., 0])
    for name, value in expected.items():
        by_layer = sum(run[kind][0][name] for run in runs)
        assert by_layer[0] == by_layer[2] == 0
        assert by_layer[1].item() == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(sum(run[kind][1] for run in runs).double(), SCALE * gradient, rtol=1e-4, atol=1e-7)


def test_rows_by_class_and_expert(runs):
    hidden, weight, classes = _inputs()
    chosen = torch.zeros(ROWS, SAMPLES, EXPERTS).scatter_(2, (hidden @ weight.t()).topk(TOPK, dim=-1).indices, 1.0)
    load = sum(run["aux_loss"][2] for run in runs)
    assert load[[0, 2]].sum() == 0
    for plane, name in ((1, "clean"), (2, "noisy")):
        assert torch.equal(load[1, plane - 1], chosen[classes[..., plane]].sum(0).double()), name
    assert load[1].sum() == TOPK * (7 + 4 + 4 + 4)


def _without_rows_and_with_bias():
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    hidden, _, classes = _inputs()
    router = _router("seq_aux_loss")
    probs, _ = router(hidden, torch.zeros_like(classes))
    (probs * 0).sum().backward()
    empty = router.weight.grad
    config = _config("none", 0.0)
    config.moe_router_enable_expert_bias, config.moe_router_score_function, config.moe_z_loss_coeff = True, "sigmoid", None
    biased = BlockDiffusionRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    biased.set_layer_number(1)
    _, routing_map = biased(hidden, classes)
    return empty, biased.local_tokens_per_expert, routing_map.view(ROWS, SAMPLES, EXPERTS), has_router_losses(config)


def test_a_part_without_counted_rows_and_the_bias_that_balances():
    """Zero gradients, no NaN; and the engine's bias update gets the counted rows (its own code fails on a padding mask)."""
    empty, counted, routing_map, losses = run_distributed(_without_rows_and_with_bias, 1, timeout=120)[0]
    assert torch.equal(empty, torch.zeros_like(empty))
    assert torch.equal(counted, routing_map[_inputs()[2][..., 0]].sum(0).float()) and counted.sum() == TOPK * 11
    assert not losses


@pytest.mark.parametrize(
    "kind, coefficient, z, losses",
    [("aux_loss", 0.01, None, True), ("aux_loss", 0.0, None, False), ("none", 0.01, None, False), ("none", 0.01, 1e-3, True),
     (["none", "seq_aux_loss"], [0.01, 0.01], None, True), (["aux_loss", "seq_aux_loss"], [0.0, 0.0], 0.0, False)],
)
def test_whether_there_are_router_losses(kind, coefficient, z, losses):
    config = _config("aux_loss")
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.moe_z_loss_coeff = kind, coefficient, z
    assert has_router_losses(config) is losses
    config.num_moe_experts = None
    assert not has_router_losses(config)


def test_gradients_of_router_losses_carry_the_loss_scale():
    """fp16: factor 2.5 and a loss scale of 1024."""
    config = _config("aux_loss")
    config.grad_scale_func = lambda loss: loss * 1024
    router_loss_scale.factor = 2.5
    assert router_loss_scale.function(config)().item() == 2.5 * 1024
    config.grad_scale_func = None
    assert math.isclose(router_loss_scale.function(config)().item(), 2.5)
    router_loss_scale.factor = 1.0
