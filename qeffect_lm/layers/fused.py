"""Quantisers that first apply what stands between two linears, and attention and MLP as one autograd node each (GPU only).

A quantiser is given to :meth:`~qeffect_lm.layers.linear.SplitLinear.product` or ``input_grad``, which read the scale and report
the amax of their role as ever: only the kernel differs. What such a kernel hands over is rounded to the layers' dtype first, so
that the FP8 bytes are those of the separate layers. The residual is added by the last product itself, and its gradient inside
the norm's backward kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from qeffect_lm.fp8.quantise import Format, Quantised, quantise
from qeffect_lm.fp8.recipes import Quantiser
from qeffect_lm.kernels import norm, rope, swiglu
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.layers import sdpa
from qeffect_lm.layers.context import LayerContext

if TYPE_CHECKING:
    from qeffect_lm.layers.attention import Attention
    from qeffect_lm.layers.linear import SplitLinear
    from qeffect_lm.layers.mlp import GatedMLP
    from qeffect_lm.layers.norm import RMSNorm


class NormQuantiser:
    """RMSNorm of ``x`` ``[m, k]``, quantised. ``rstd`` (float32 ``[m]``) is there once it was called."""

    rstd: torch.Tensor

    def __init__(self, rms: RMSNorm) -> None:
        self._rms = rms

    def __call__(self, x: torch.Tensor, scale: torch.Tensor, fmt: Format, /, **outs: Any) -> Quantised:
        outputs = Outputs(x.shape, scale, fmt, rows=True, **outs)
        made, self.rstd = norm.forward_quantise(x.contiguous(), self._rms.weight, self._rms.eps, outputs)
        return made


class SwiGLUQuantiser:
    """``silu(gate) * up`` of ``x`` ``[m, 2 f]``, quantised ``[m, f]``. Once it was called, ``scale`` is a copy of the scale
    that it was quantised with."""

    scale: torch.Tensor

    def __call__(self, x: torch.Tensor, scale: torch.Tensor, fmt: Format, /, **outs: Any) -> Quantised:
        m, double = x.shape
        self.scale = torch.empty_like(scale)
        return swiglu.quantise(x, Outputs((m, double // 2), scale, fmt, rows=True, **outs), self.scale)


class SwiGLUBackwardQuantiser:
    """The activation's gradient ``[m, f]`` → that of its input ``[m, 2 f]``, quantised; ``activation`` is filled beside it."""

    def __init__(self, x: torch.Tensor, activation: swiglu.Activation | None) -> None:
        self._x, self._activation = x, activation

    def __call__(self, dy: torch.Tensor, scale: torch.Tensor, fmt: Format, /, **outs: Any) -> Quantised:
        outputs = Outputs(self._x.shape, scale, fmt, rows=True, **outs)
        return swiglu.backward_quantise(self._x, dy, outputs, self._activation)


class RotaryBackwardQuantiser:
    """dq, with the dk and dv given here → d(qkv) ``[tokens, qkv features]``, rotated back and quantised."""

    def __init__(self, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._rest = dk, dv, cos, sin

    def __call__(self, dq: torch.Tensor, scale: torch.Tensor, fmt: Format, /, **outs: Any) -> Quantised:
        batch, kv_heads, group, sequence, head_dim = dq.shape
        shape = batch * sequence, kv_heads * (group + 2) * head_dim
        outputs = Outputs(shape, scale, fmt, rows=True, **outs)
        return rope.backward_quantise(dq, *self._rest, outputs)


def _first_quantiser(rms: RMSNorm | None) -> Quantiser:
    return quantise if rms is None else NormQuantiser(rms)


def _statistics(quantiser: Quantiser) -> torch.Tensor | None:
    return quantiser.rstd if isinstance(quantiser, NormQuantiser) else None


def _held_scale(linear: SplitLinear) -> torch.Tensor | None:
    assert linear.recipe is not None
    return linear.recipe.held_scale(linear.name, "input")


def _make_columns(
    linear: SplitLinear, x: torch.Tensor, quantiser: Quantiser, scale: torch.Tensor | None, context: LayerContext
) -> None:
    """In I, where W of ``linear`` still waits for it: x's transposed copy, quantised with F's scale."""
    if linear.lacks_columns(context):
        assert linear.recipe is not None
        x, quantiser = linear.entered(x, quantiser, context)
        made = linear.recipe.operand(linear.name, "input", x, None, quantiser=quantiser, scale=scale)
        assert made.columns is not None
        linear.give_columns(context, made.columns)


def _input_grad(
    rms: RMSNorm | None,
    x: torch.Tensor,
    rstd: torch.Tensor | None,
    dx: torch.Tensor | None,
    residual: torch.Tensor | None,
    context: LayerContext,
) -> torch.Tensor:
    """The way back through the norm, if there is one, and past the residual."""
    assert dx is not None
    if rms is not None and rstd is not None:
        return rms.input_grad(x, rstd, dx, context, residual)
    return dx if residual is None else dx + residual


class FusedMLP(torch.autograd.Function):
    """``down(swiglu(gate_up(norm(x))))``, with or without norm, with or without ``x +`` before it, as one node.

    Saves ``x``, the norm's statistics and gate_up's output; the activation and d(gate_up) exist in FP8 only, and the transposed
    activation that W of ``down`` reads is made in I (:mod:`qeffect_lm.kernels.swiglu`). Backward runs I of ``down`` and of
    ``gate_up`` in that order, as two nodes would. A ``selective`` one makes the transposed norm output in I, too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mlp: GatedMLP, rms: RMSNorm | None, context: LayerContext, residual: bool
    ) -> torch.Tensor:
        flat = x.reshape(-1, mlp.gate_up.in_features).contiguous()
        quantiser = _first_quantiser(rms)
        hidden = mlp.gate_up.product(flat, context, quantiser, columns_in_i=mlp.selective)
        activation = SwiGLUQuantiser()
        y = mlp.down.product(hidden, context, activation, flat if residual else None, columns_in_i=True)
        scale = _held_scale(mlp.gate_up) if mlp.selective else None
        ctx.save_for_backward(flat, _statistics(quantiser), hidden, activation.scale, scale)
        ctx.mlp, ctx.rms, ctx.context, ctx.shape, ctx.residual = mlp, rms, context, x.shape, residual
        return y.view(*x.shape[:-1], mlp.down.out_features)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, rstd, hidden, scale, first_scale = ctx.saved_tensors
        mlp, context = ctx.mlp, ctx.context
        dy = dy.reshape(-1, mlp.down.out_features)
        d_act = mlp.down.input_grad(dy, context, True)
        activation = swiglu.Activation.like(hidden, scale) if mlp.down.lacks_columns(context) else None
        dx = mlp.gate_up.input_grad(d_act, context, True, SwiGLUBackwardQuantiser(hidden, activation))
        if activation is not None:
            mlp.down.give_columns(context, activation.columns)
        if mlp.selective:
            _make_columns(mlp.gate_up, flat, _first_quantiser(ctx.rms), first_scale, context)
        dx = _input_grad(ctx.rms, flat, rstd, dx, dy if ctx.residual else None, context)
        return dx.view(ctx.shape), None, None, None, None


class FusedAttention(torch.autograd.Function):
    """``out(attend(rope(qkv(norm(x)))))``, with or without norm, with or without ``x +`` before it, as one node.

    Saves ``x``, the norm's statistics, the projection with q and k rotated where they lie, attention's result and its row
    statistics; d(qkv) exists in FP8 only. Backward runs I of ``out`` and of ``qkv`` in that order, as two nodes would. A
    ``selective`` one keeps neither the result nor the statistics nor W's operands: attention and norm run again in I.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, attention: Attention, rms: RMSNorm | None, context: LayerContext, residual: bool
    ) -> torch.Tensor:
        batch, sequence = context.grid_of(x)
        flat = x.reshape(-1, attention.qkv.in_features).contiguous()
        quantiser = _first_quantiser(rms)
        selective = attention.selective
        fused = attention.qkv.product(flat, context, quantiser, columns_in_i=selective)
        fused = fused.view(batch, sequence, attention.kv_heads, attention.heads // attention.kv_heads + 2, attention.head_dim)
        cos, sin = attention.training_tables(sequence, context)
        rope.rotate_(fused, cos, sin)
        y, saved = sdpa.forward(fused, attention.library_of(context))
        rest = flat if residual else None
        result = attention.out.product(y.reshape(batch * sequence, -1), context, residual=rest, columns_in_i=selective)
        scales = [_held_scale(part) for part in (attention.qkv, attention.out)] if selective else [None, None]
        kept = () if selective else (y, *saved.tensors)
        ctx.save_for_backward(flat, _statistics(quantiser), fused, cos, sin, *scales, *kept)
        ctx.attention, ctx.rms, ctx.context, ctx.residual = attention, rms, context, residual
        ctx.shape, ctx.saved = x.shape, replace(saved, tensors=())  # autograd keeps the tensors
        return result.view(*x.shape[:-1], attention.out.out_features)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, rstd, fused, cos, sin, qkv_scale, out_scale, *kept = ctx.saved_tensors
        attention, context = ctx.attention, ctx.context
        library = attention.library_of(context)
        dy = dy.reshape(-1, attention.out.out_features)
        d_y = attention.out.input_grad(dy, context, True)
        if attention.selective:
            y, saved = sdpa.forward(fused, library)
            _make_columns(attention.out, y.reshape(-1, attention.out.in_features), quantise, out_scale, context)
        else:
            y, saved = kept[0], replace(ctx.saved, tensors=tuple(kept[1:]))
        dq, dk, dv = sdpa.backward(d_y.view(y.shape), fused, y, saved, library)
        dx = attention.qkv.input_grad(dq, context, True, RotaryBackwardQuantiser(dk, dv, cos, sin))
        if attention.selective:
            _make_columns(attention.qkv, flat, _first_quantiser(ctx.rms), qkv_scale, context)
        dx = _input_grad(ctx.rms, flat, rstd, dx, dy if ctx.residual else None, context)
        return dx.view(ctx.shape), None, None, None, None
