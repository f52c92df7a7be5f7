"""Borders of products that know nothing of ranks: the exchanges around a column- or row-parallel piece, as autograd nodes.

The native linears exchange by themselves (:mod:`qeffect_lm.parallel.linear`). Around a library's module, which has a rank's
piece of the weights and computes as if it were alone, stand these two.
"""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.parallel.tensor import TensorParallel


def entered(x: torch.Tensor, tp: TensorParallel | None, context: LayerContext, who: str) -> torch.Tensor:
    """Into the column-parallel ``who``: with sequence parallelism ``[tokens of this rank, features]`` → ``[batch, sequence,
    features]`` of all of them; I adds the ranks' gradients. Without ``tp`` nothing happens."""
    if tp is None:
        return x
    made: torch.Tensor = _Enter.apply(x, tp, context, who)
    return made.view(*context.grid_of(x), -1) if tp.sequence else made


def left(y: torch.Tensor, tp: TensorParallel | None, context: LayerContext, who: str) -> torch.Tensor:
    """Out of the row-parallel ``who``: ``[batch, sequence, features]``, a part of a sum → the sum; with sequence parallelism
    of this rank's tokens, ``[tokens, features]``."""
    if tp is None:
        return y
    made: torch.Tensor = _Leave.apply(y.reshape(-1, y.shape[-1]) if tp.sequence else y, tp, context, who)
    return made


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel, context: LayerContext, who: str) -> torch.Tensor:
        ctx.about = tp, context, who
        made = tp.enter(x, context, who)
        return made.view_as(made) if made is x else made

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        tp, context, who = ctx.about
        return tp.enter_grad(dx.contiguous(), context, who), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tp: TensorParallel, context: LayerContext, who: str) -> torch.Tensor:
        ctx.about = tp, context, who
        scattered = tp.sequence and kernels.on_gpu(y)  # else the sum is made in place, where the module's tape may look again
        return tp.leave(y if scattered else y.clone(), context, who)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        tp, context, who = ctx.about
        return tp.leave_grad(dy.contiguous(), context, who), None, None, None
