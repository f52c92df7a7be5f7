"""Quantisers that first apply what stands between two linears, and the MLP as one autograd node (GPU kernels only).

A quantiser is given to :meth:`~qeffect_lm.layers.linear.SplitLinear.product` or ``input_grad``, which read the scale and report
the amax of their role as ever: only the kernel differs. What such a kernel hands over is rounded to the layers' dtype first, so
that the FP8 bytes are those of the separate layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from qeffect_lm.fp8.quantise import Format, Quantised, quantise
from qeffect_lm.kernels import norm, swiglu
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.layers.context import LayerContext

if TYPE_CHECKING:
    from qeffect_lm.layers.mlp import SwiGLU
    from qeffect_lm.layers.norm import RMSNorm


class NormQuantiser:
    """RMSNorm of ``x`` ``[m, k]``, quantised. ``rstd`` (float32 ``[m]``) is there once it was called."""

    rstd: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(
        self, x: torch.Tensor, scale: torch.Tensor, fmt: Format, /, *, columns: bool, amax_out: torch.Tensor | None
    ) -> Quantised:
        x = x.contiguous()
        self.rstd = norm.inverse_rms(x, self._eps)
        outputs = Outputs(x.shape, scale, fmt, rows=True, columns=columns, amax_out=amax_out)
        return norm.quantise(x, self._weight, self.rstd, outputs)


def swiglu_quantiser(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, /, *, columns: bool, amax_out: torch.Tensor | None
) -> Quantised:
    """``silu(gate) * up`` of ``x`` ``[m, 2 f]``, quantised ``[m, f]``."""
    m, double = x.shape
    return swiglu.quantise(x, Outputs((m, double // 2), scale, fmt, rows=True, columns=columns, amax_out=amax_out))


class SwiGLUBackwardQuantiser:
    """The activation's gradient ``[m, f]`` → that of its input ``[m, 2 f]``, quantised."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __call__(
        self, dy: torch.Tensor, scale: torch.Tensor, fmt: Format, /, *, columns: bool, amax_out: torch.Tensor | None
    ) -> Quantised:
        outputs = Outputs(self._x.shape, scale, fmt, rows=True, columns=columns, amax_out=amax_out)
        return swiglu.backward_quantise(self._x, dy, outputs)


class FusedMLP(torch.autograd.Function):
    """``down(swiglu(gate_up(norm(x))))``, with or without norm, with or without ``x +`` before it, as one node.

    Saves ``x``, the norm's statistics and gate_up's output; the activation and d(gate_up) exist in FP8 only. Backward runs
    I of ``down`` and of ``gate_up`` in that order, as two nodes would.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        mlp: SwiGLU,
        rms: RMSNorm | None,
        context: LayerContext,
        residual: bool,
    ) -> torch.Tensor:
        flat = x.reshape(-1, mlp.gate_up.in_features)
        rstd = None
        if weight is None or rms is None:
            hidden = mlp.gate_up.product(flat, context, quantise)
        else:
            quantiser = NormQuantiser(weight, rms.eps)
            hidden = mlp.gate_up.product(flat, context, quantiser)
            rstd = quantiser.rstd
        y = mlp.down.product(hidden, context, swiglu_quantiser)
        ctx.save_for_backward(flat, weight, rstd, hidden)
        ctx.mlp, ctx.context, ctx.shape, ctx.residual = mlp, context, x.shape, residual
        if residual:
            y.add_(flat)
        return y.view(*x.shape[:-1], mlp.down.out_features)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, weight, rstd, hidden = ctx.saved_tensors
        mlp, context = ctx.mlp, ctx.context
        dy = dy.reshape(-1, mlp.down.out_features)
        d_act = mlp.down.input_grad(dy, context, True)
        dx = mlp.gate_up.input_grad(d_act, context, any(ctx.needs_input_grad[:2]), SwiGLUBackwardQuantiser(hidden))
        dweight = None
        if rstd is not None and dx is not None:
            dx, dweight = norm.backward(flat, weight, rstd, dx, dy if ctx.residual else None)
        elif dx is not None and ctx.residual:
            dx = dx + dy
        return (None if dx is None else dx.view(ctx.shape)), dweight, None, None, None, None
