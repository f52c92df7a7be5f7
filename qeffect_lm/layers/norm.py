"""RMSNorm (Zhang and Sennrich 2019); its weight is a cheap parameter, finished in I."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext


class RMSNorm(Layer):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension; statistics in float32 or wider."""

    def __init__(self, name: str, size: int, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        node = _RMSNormKernels if kernels.usable(x) else _RMSNorm
        return node.apply(x, self.weight, self.eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _wide(x)
        rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        normed = _wide(x) * rstd
        wide_dy = _wide(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            scaled = wide_dy * weight
            dx = ((scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)) * rstd).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = (wide_dy * normed).reshape(-1, x.shape[-1]).sum(dim=0).to(weight.dtype)
        return dx, dw, None


class _RMSNormKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from qeffect_lm.kernels import norm

        flat = x.reshape(-1, x.shape[-1])
        y, rstd = norm.forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, rstd)
        return y.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        from qeffect_lm.kernels import norm

        flat, weight, rstd = ctx.saved_tensors
        dx, dw = norm.backward(flat, weight, rstd, dy.reshape(-1, dy.shape[-1]))
        return dx.view_as(dy), dw, None
