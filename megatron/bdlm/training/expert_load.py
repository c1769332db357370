"""How evenly a global batch was spread over the experts: what the log says of clean and of noisy rows."""

import torch

from megatron.bdlm.attention.core_attention import LOAD_PLANES

LOAD_METRICS = ("expert load clean", "expert load noisy", "idle experts clean", "idle experts noisy")
"""Names of `load_metrics`."""


def load_metrics(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metrics out of the rows that each expert got, [layers, 2, E]: classes clean and noisy.

    `expert load`: rows of the busiest expert over the mean, averaged over layers: 1 is even, E/k (all rows choose the
    same k experts) the worst. `idle experts`: share of experts without a row, averaged likewise. Layers without a row of
    the class are left out (dense ones; the last one may compute noisy rows only). Four experts with 6, 2, 0, 0 rows:
    load 3, idle 0.5.
    """
    loads, idle = {}, {}
    for name, by_layer in zip(("clean", "noisy"), rows.unbind(1), strict=True):
        taken = by_layer[by_layer.sum(-1) > 0]
        load = taken.amax(-1) / taken.mean(-1) if len(taken) else taken.new_zeros(1)
        loads[f"expert load {name}"] = load.mean().float().view(1)
        idle[f"idle experts {name}"] = (taken == 0).float().mean().view(1) if len(taken) else load.float()
    return loads | idle
