"""The MLP: gated (SwiGLU and its kin, Shazeer 2020), or one product, an activation, one product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional

from qeffect_lm import kernels
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.norm import RMSNorm

# Hugging Face's names.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class GatedMLP(Layer):
    """``down(activation(gate) * up)``; ``gate_up`` holds gate's rows, then up's. With ``silu`` it is SwiGLU."""

    def __init__(self, name: str, gate_up: SplitLinear, down: SplitLinear, activation: str = "silu") -> None:
        super().__init__(name)
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        if self._one_node(x, context, norm):
            from qeffect_lm.layers.fused import FusedMLP

            fused: torch.Tensor = FusedMLP.apply(x, self, norm, context, residual)
            return fused
        hidden = self.gate_up(x, context) if norm is None else self.gate_up(x, context, norm)
        y = self.down(self._activated(hidden), context)
        return x + y if residual else y

    def _one_node(self, x: torch.Tensor, context: LayerContext, norm: Layer | None) -> bool:
        """Whether one node does it all: FP8 kernels, which have SwiGLU and RMSNorm in them."""
        if not kernels.usable(x) or self.activation != "silu" or not (norm is None or isinstance(norm, RMSNorm)):
            return False
        return all(part.fuses(x, context) and part.bias is None for part in (self.gate_up, self.down))

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.activation == "silu":
            made: torch.Tensor = _SwiGLU.apply(hidden)
            return made
        gate, up = hidden.chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate) * up


class PlainMLP(Layer):
    """``down(activation(up))``, as in GPT-2."""

    def __init__(self, name: str, up: SplitLinear, down: SplitLinear, activation: str = "gelu_new") -> None:
        super().__init__(name)
        self.up, self.down, self.activation = up, down, activation

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        y = self.down(ACTIVATIONS[self.activation](self.up(x, context, norm)), context)
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
