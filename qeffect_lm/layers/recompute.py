"""Activation recompute (Chen et al. 2016): a piece of F keeps its input only, and runs once more in I, before its backward.

    F   out = piece(x)        nothing of it is kept but x; leases are opened without their x operand
    I   piece(x) once more    the same scales, masks and weights: the same bits; leases get their x operand
        its backward          dx, gradients of cheap parameters, dY into the leases
    W                         reads the leases, as ever

The second run reports no amax and retains nothing anew, so scales, histories, leases and weight versions are those of a run
without it. A piece whose last linear is its ``tail`` does not run that one's product again: nobody reads its value.

``full``: a decoder layer is one piece; its input is all that a microbatch keeps of it between F and I. ``selective``: each of a
layer's products is a piece with what comes right before it (norm; rotation and attention; activation), so that everything but
products runs again: what is kept are the layer's input, the projection and the first product of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qeffect_lm.layers.base import Deferred, autograd_parameters
from qeffect_lm.layers.context import LayerContext, Rerun

Piece = Callable[[torch.Tensor, LayerContext], torch.Tensor]


def recomputed(
    piece: Piece,
    x: torch.Tensor,
    context: LayerContext,
    modules: Iterable[nn.Module | None],
    tail: Deferred | None = None,
) -> torch.Tensor:
    """``piece(x, context)``, with its activations made again in I. Outside of training, plainly that.

    Args:
        piece: a function of ``x``, which it does not write, and the context alone; its layers are all in ``modules``.
        modules: whose parameters autograd differentiates in the piece.
        tail: its last linear, if all that follows the product are sums and dropout.
    """
    if not context.training or context.rerun is not None or not torch.is_grad_enabled():
        return piece(x, context)
    cheap = [parameter for module in modules if module is not None for _, parameter in autograd_parameters(module)]
    out: torch.Tensor = _Recomputed.apply(piece, tail, context, x, *cheap)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, piece: Piece, tail: Deferred | None, context: LayerContext, x: torch.Tensor, *cheap: torch.Tensor
    ) -> torch.Tensor:
        rerun = Rerun(tail)
        out = piece(x, replace(context, rerun=rerun))
        ctx.save_for_backward(x)
        ctx.piece, ctx.context, ctx.rerun, ctx.cheap = piece, context, rerun, cheap
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        context = replace(ctx.context, rerun=replace(ctx.rerun, first=False))  # of the action that runs now
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = ctx.piece(leaf, context)
        grads = torch.autograd.grad(out, [leaf, *ctx.cheap], dy, allow_unused=True)
        return None, None, None, *grads
