"""What routers did in a step, as metrics (docs/moe.md)."""

from __future__ import annotations

import torch

from qeffect_lm.layers.router import STATISTICS
from qeffect_lm.runtime.metrics import Value


def routing_metrics(routing: torch.Tensor | None) -> dict[str, Value]:
    """``routing`` ``[layers, 2 + experts]`` of a step's result (a host synchronisation); nothing without experts.

    Returns:
        ``aux_loss`` and ``z_loss``, means over layers before their coefficients; ``expert_load_max`` and ``expert_load_min``,
        of all layers the largest and the smallest part of an expert, 1 where tokens are spread evenly; ``experts_idle``, the
        experts of all layers without any token.
    """
    if routing is None:
        return {}
    rows = routing.cpu()
    rows = rows[rows[:, STATISTICS:].sum(dim=1) > 0]  # a layer without experts has none
    if not len(rows):
        return {}
    counts = rows[:, STATISTICS:]
    load = counts * counts.shape[1] / counts.sum(dim=1, keepdim=True)
    return {
        "aux_loss": float(rows[:, 0].mean()),
        "z_loss": float(rows[:, 1].mean()),
        "expert_load_max": float(load.max()),
        "expert_load_min": float(load.min()),
        "experts_idle": int((counts == 0).sum()),
    }
