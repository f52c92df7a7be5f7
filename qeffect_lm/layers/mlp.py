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
from qeffect_lm.layers.recompute import recomputed

# Hugging Face's names.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class GatedMLP(Layer):
    """``down(activation(gate) * up)``; ``gate_up`` holds gate's rows, then up's. With ``silu`` it is SwiGLU.

    ``selective``: of the norm before and the activation nothing is kept: I makes it again.
    """

    def __init__(
        self, name: str, gate_up: SplitLinear, down: SplitLinear, activation: str = "silu", *, selective: bool = False
    ) -> None:
        super().__init__(name)
        self.gate_up, self.down, self.activation, self.selective = gate_up, down, activation, selective

    @property
    def tail(self) -> SplitLinear:
        return self.down

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        if self._one_node(x, context, norm):
            from qeffect_lm.layers.fused import FusedMLP

            fused: torch.Tensor = FusedMLP.apply(x, self, norm, context, residual)
            return fused
        y = _two_products(self, self.gate_up, self._activated, x, context, norm)
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
    """``down(activation(up))``, as in GPT-2; ``selective`` as of :class:`GatedMLP`."""

    def __init__(
        self, name: str, up: SplitLinear, down: SplitLinear, activation: str = "gelu_new", *, selective: bool = False
    ) -> None:
        super().__init__(name)
        self.up, self.down, self.activation, self.selective = up, down, activation, selective

    @property
    def tail(self) -> SplitLinear:
        return self.down

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        y = _two_products(self, self.up, ACTIVATIONS[self.activation], x, context, norm)
        return x + y if residual else y


def _two_products(
    mlp: GatedMLP | PlainMLP,
    first: SplitLinear,
    activation: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    context: LayerContext,
    norm: Layer | None,
) -> torch.Tensor:
    """``down(activation(first(norm(x))))``, each part a node of its own."""

    def enter(x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return first(x, context) if norm is None else first(x, context, norm)

    def leave(hidden: torch.Tensor, context: LayerContext) -> torch.Tensor:
        made: torch.Tensor = mlp.down(activation(hidden), context)
        return made

    if not mlp.selective:
        return leave(enter(x, context), context)
    return recomputed(leave, recomputed(enter, x, context, [norm, first], first), context, [mlp.down], mlp.down)


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
