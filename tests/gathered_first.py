"""Tensor-parallel linears that gather tokens before they quantise them: the reference of those that gather FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect_lm.fp8.quantise import quantise
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.parallel.linear import GatheringQuantiser, _ParallelLinear


def gather_first(patch: pytest.MonkeyPatch) -> None:
    """All tokens in the layers' dtype to every rank, which quantises all of them; a norm is of each rank's own."""

    def gathered(self: Any, x: torch.Tensor, quantiser: Any, context: LayerContext) -> tuple[torch.Tensor, Any]:
        if self.tp.sequence:
            if quantiser is not quantise:
                from qeffect_lm.kernels import norm

                x, quantiser.rstd = norm.forward(x.contiguous(), quantiser._rms.weight, quantiser._rms.eps)
            x, quantiser = self.tp.gather(x, context, self.name), quantise
        return x, quantiser

    patch.setattr(_ParallelLinear, "gathered", gathered)


def scale_apart(patch: pytest.MonkeyPatch) -> None:
    """A control: the ranks' scales differ, so their bytes mean different things."""
    original = GatheringQuantiser.__call__

    def call(self: Any, x: torch.Tensor, scale: torch.Tensor, *arguments: Any, **outs: Any) -> Any:
        return original(self, x, scale * 2 if self._tp.rank else scale, *arguments, **outs)

    patch.setattr(GatheringQuantiser, "__call__", call)
