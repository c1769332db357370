"""The engine's top-k router, whose losses and statistics read chosen rows only and do not depend on the layout.

The engine counts every row of a rank: padding, replicas and, in a doubled sequence, noisy and clean rows alike; and it
takes the number of router rows for the divisor of the loss. Here a row says whether it counts (`row_classes`), and

    balancing loss of a micro-batch = c_b * (E / (k T^2)) * sum_e n_e P_e       (Switch Transformer, arXiv 2101.03961)
    z loss of a micro-batch         = c_z / T * sum over counted rows of logsumexp(logits)^2      (ST-MoE, arXiv 2202.08906)

E experts, k experts a row, T counted rows, n_e counted rows that chose expert e, P_e the sum of their probabilities of
e; all over the ranks that share the micro-batch. `seq_aux_loss` takes each sample alone and averages them. E = 4, k = 1,
T = 8 rows spread evenly with P_e = 2: c_b * 4 / 64 * 4 * 2 * 2 = c_b, the least value.

The training loss adds the mean of both over the micro-batches of all data-parallel ranks. The engine divides every
gradient by N, the counted tokens of the global batch, so the gradients of router losses are multiplied by

    N / (micro-batches * data-parallel size)            times the loss scale of fp16

(`router_loss_scale`); N is known before the step, for it is a matter of data.

Shapes: s local rows, b samples, E experts.
"""

from typing import Callable, Optional

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.bdlm.attention.core_attention import COUNTED_PLANE, LOAD_PLANES

BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Kinds of --moe-router-load-balancing-type that are honoured, and the names under which the engine logs them."""


class RouterLossScale:
    """Factor of the gradients of router losses; the training step sets it before the first micro-batch."""

    def __init__(self) -> None:
        self.factor = 1.0

    def function(self, config) -> Callable[[], Tensor]:
        """For `config.moe_grad_scale_func`: the factor, times the loss scale where there is one."""
        def scale() -> Tensor:
            one = torch.ones(1, device=torch.cuda.current_device())
            return self.factor * (one if config.grad_scale_func is None else config.grad_scale_func(one))

        return scale


class ExpertLoad:
    """Rows by layer, class and expert since the last `take`; classes: clean, noisy."""

    def __init__(self) -> None:
        self._rows: Optional[Tensor] = None

    def add(self, layer: int, layers: int, rows: Tensor) -> None:
        """Add [2, E] rows of a layer (from 0)."""
        if self._rows is None:
            self._rows = torch.zeros(layers, *rows.shape, dtype=torch.float64, device=rows.device)
        self._rows[layer] += rows

    def take(self, layers: int, experts: int) -> Tensor:
        """[layers, 2, E] of this process, which are then forgotten."""
        rows, self._rows = self._rows, None
        if rows is None:  # a pipeline stage without experts
            return torch.zeros(layers, len(LOAD_PLANES), experts, dtype=torch.float64, device=torch.cuda.current_device())
        return rows


router_loss_scale = RouterLossScale()
expert_load = ExpertLoad()


def has_router_losses(config) -> bool:
    """Whether a loss reads the router, so that the divisor of the loss must be known before the step."""
    if config.num_moe_experts is None:
        return False
    kinds, coefficients = (
        given if isinstance(given, list) else [given] for given in (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    )
    balancing = any(kind in BALANCING_LOSSES and coefficient for kind, coefficient in zip(kinds, coefficients))
    return balancing or bool(config.moe_z_loss_coeff)


def has_router_statistics(config) -> bool:
    """Whether training depends on which rows the routers count: a loss of theirs, or the bias that balances experts."""
    return has_router_losses(config) or (config.num_moe_experts is not None and config.moe_router_enable_expert_bias)


class BlockDiffusionRouter(TopKRouter):
    """`TopKRouter` with the losses of the module docstring.

    What the engine calls `padding_mask` carries row classes here: bool [s, b, 3] (see `row_classes` of the sequence
    parameters), None where nothing is learnt (generation).
    """

    def routing(self, logits: Tensor, padding_mask: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Logits [s, b, E] -> probabilities and map, [s*b, E]; called by the engine's `forward`."""
        shape, config = logits.shape, self.config
        logits = logits.view(-1, shape[-1])
        probs, routing_map = topk_routing_with_score_function(
            logits, self.topk, use_pre_softmax=config.moe_router_pre_softmax, num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk, scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function, expert_bias=self.expert_bias, fused=config.moe_router_fusion,
            router_replay=self.router_replay,
        )
        # recomputation runs the forward twice, the first time without gradients
        if padding_mask is not None and self.training and torch.is_grad_enabled():
            classes = padding_mask.reshape(-1, padding_mask.size(-1))
            if has_router_losses(config):
                losses = self._losses(logits.view(shape), padding_mask[..., COUNTED_PLANE])
                probs = MoEAuxLossAutoScaler.apply(probs, losses)
            self._count(routing_map, classes)
        return probs, routing_map

    def _losses(self, logits: Tensor, counted: Tensor) -> Tensor:
        """This rank's part of the router losses of a micro-batch, out of logits [s, b, E] and counted rows [s, b]."""
        samples, experts = logits.shape[1:]
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, experts), self.topk, self.score_function, padding_mask=~counted.reshape(-1)
        )
        load = chosen.view(logits.shape).sum(0, dtype=torch.float32)  # [b, E], here
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(load, group=self.tp_cp_group)
        scores = scores.view(logits.shape).sum(0)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for kind, name in BALANCING_LOSSES.items():
            coefficient = self.get_aux_loss_coeff(kind)
            if coefficient:
                parts = samples if kind == "seq_aux_loss" else 1
                loss = balancing_loss(scores.view(parts, -1, experts).sum(1), load.view(parts, -1, experts).sum(1), self.topk)
                self._record(name, loss)
                total = total + coefficient * loss
        if self.config.moe_z_loss_coeff:
            squares = torch.logsumexp(logits.float(), dim=-1).square() * counted
            loss = squares.sum() / (load.sum() / self.topk).clamp(min=1)
            self._record("z_loss", loss)
            total = total + self.config.moe_z_loss_coeff * loss
        return total

    def _record(self, name: str, loss: Tensor) -> None:
        """For the engine's log: parts are summed over the ranks of the micro-batch and averaged over the others."""
        get_moe_metrics_tracker().record(name, loss, self.layer_number, self.config.num_layers, reduce_group=self.tp_cp_group)

    @torch.no_grad()
    def _count(self, routing_map: Tensor, classes: Tensor) -> None:
        """Rows by expert: for the bias that balances experts [E], and for the log."""
        if self.enable_expert_bias:
            self.local_tokens_per_expert += (routing_map & classes[:, COUNTED_PLANE, None]).sum(0)
        rows = classes[:, LOAD_PLANES].float().t() @ routing_map.float()
        expert_load.add(self.layer_number - 1, self.config.num_layers, rows)


def balancing_loss(scores: Tensor, load: Tensor, topk: int) -> Tensor:
    """This rank's part of E / (k T^2) * sum_e n_e P_e, averaged over g groups of rows; a group without rows gives 0.

    Args:
        scores: [g, E], sums of this rank's probabilities P_e.
        load: [g, E], rows n_e of all ranks.
        topk: k.
    """
    rows = (load.sum(-1) / topk).clamp(min=1)
    return (load.size(-1) / topk * (scores * load).sum(-1) / rows.square()).mean()
