"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016); their parameters are cheap: finished in I."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.layers.base import DirectGradLayer, Layer
from qeffect_lm.layers.context import LayerContext


class RMSNorm(DirectGradLayer):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; statistics in float32 or wider.

    The weight's gradient, a sum over tokens in float32 or wider, is added to the main gradient as it is: no rounding to the
    weight's dtype stands in between.
    """

    def __init__(self, name: str, size: int, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        node = _RMSNormKernels if kernels.usable(x) else _RMSNorm
        return node.apply(x, self, context)

    def grad_place(self, context: LayerContext) -> tuple[torch.Tensor, int] | None:
        """The main gradient and its beta for the running I, which writes it; None where the weight gets no gradient."""
        if not context.training or not self.weight.requires_grad:
            return None
        return self.grad_view(), context.active_scope().write_grad(self.weight_name)

    def input_grad(
        self,
        x: torch.Tensor,
        rstd: torch.Tensor,
        dy: torch.Tensor,
        context: LayerContext,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """I by the kernels, on ``[tokens, size]``: dx, with ``residual`` (a gradient of ``x`` from elsewhere) added to it."""
        from qeffect_lm.kernels import norm

        return norm.backward(x, self.weight, rstd, dy, residual, self.grad_place(context))


class LayerNorm(Layer):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension; statistics in float32 or wider.

    Torch's own operator and gradients. No kernel that quantises has it in it: a linear's input is made first.
    """

    def __init__(self, name: str, size: int, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: RMSNorm, context: LayerContext) -> torch.Tensor:
        wide = _wide(x)
        rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
        ctx.save_for_backward(x, rstd)
        ctx.norm, ctx.context = norm, context
        return (wide * rstd * norm.weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        x, rstd = ctx.saved_tensors
        normed = _wide(x) * rstd
        wide_dy = _wide(dy)
        place = ctx.norm.grad_place(ctx.context)
        if place is not None:
            out, beta = place
            dweight = (wide_dy * normed).reshape(-1, x.shape[-1]).sum(dim=0)
            out.add_(dweight) if beta else out.copy_(dweight)
        scaled = wide_dy * ctx.norm.weight
        dx = ((scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)) * rstd).to(x.dtype)
        return dx, None, None


class _RMSNormKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: RMSNorm, context: LayerContext) -> torch.Tensor:
        from qeffect_lm.kernels import norm as kernel

        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, rstd = kernel.forward(flat, norm.weight, norm.eps)
        ctx.save_for_backward(flat, rstd)
        ctx.norm, ctx.context = norm, context
        return y.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        dx = ctx.norm.input_grad(*ctx.saved_tensors, dy.reshape(-1, dy.shape[-1]), ctx.context)
        return dx.view_as(dy), None, None
