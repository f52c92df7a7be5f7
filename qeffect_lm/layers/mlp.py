"""SwiGLU MLP (Shazeer 2020)."""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.norm import RMSNorm


class SwiGLU(Layer):
    """``down(silu(gate) * up)``; ``gate_up`` holds gate's rows, then up's."""

    def __init__(self, name: str, gate_up: SplitLinear, down: SplitLinear) -> None:
        super().__init__(name)
        self.gate_up, self.down = gate_up, down

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: RMSNorm | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        if kernels.usable(x) and all(part.fuses(x, context) and part.bias is None for part in (self.gate_up, self.down)):
            from qeffect_lm.layers.fused import FusedMLP

            fused: torch.Tensor = FusedMLP.apply(x, self, norm, context, residual)
            return fused
        hidden = self.gate_up(x, context) if norm is None else self.gate_up(x, context, norm)
        y = self.down(_SwiGLU.apply(hidden), context)
        return x + y if residual else y


class _SwiGLU(torch.autograd.Function):
    """Saves its input only; the activation is cheap to make again in I."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = dy * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat([d_gate, dy * silu], dim=-1)
