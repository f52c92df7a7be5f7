"""Initial weights, keyed on (seed, parameter name): the same on every layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qeffect_lm.layers.dropout import host_key


@torch.no_grad()
def initialise_(parameters: Mapping[str, tuple[torch.Tensor, float | None]], seed: int) -> None:
    """Fill each master in place: normal with the given standard deviation, zeros for 0, ones for None.

    Drawn in float32 on the CPU, so the values do not depend on device or dtype.
    """
    for name, (master, std) in parameters.items():
        if std is None:
            master.fill_(1.0)
            continue
        if std == 0:
            master.zero_()
            continue
        generator = torch.Generator().manual_seed(host_key("init", seed, name))
        master.copy_(torch.randn(master.shape, generator=generator) * std)
