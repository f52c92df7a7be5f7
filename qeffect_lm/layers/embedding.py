"""Token embedding, a scatter producer, and learned positions: finished in I, straight into their main gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import nn

from qeffect_lm.layers.base import DirectGradLayer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.rope import positions_of

if TYPE_CHECKING:
    from qeffect_lm.parallel.context import ContextParallel


class Embedding(DirectGradLayer):
    """``[...]`` int64 token ids → ``[..., hidden]``."""

    def __init__(self, name: str, vocab_size: int, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self.weight = nn.Parameter(torch.zeros(vocab_size, hidden, dtype=dtype))

    def forward(self, tokens: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if context.anchor is None:
            return functional.embedding(tokens, self.weight.detach())
        return _Embedding.apply(context.anchor, tokens, self, context)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tokens: torch.Tensor, layer: Embedding, context: LayerContext
    ) -> torch.Tensor:
        ctx.tokens, ctx.layer, ctx.context = tokens, layer, context
        return functional.embedding(tokens, layer.weight.detach())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        layer: Embedding = ctx.layer
        if ctx.context.training and layer.weight.requires_grad:
            beta = ctx.context.active_scope().write_grad(layer.weight_name)
            scatter_(layer.grad_view(), ctx.tokens.reshape(-1), dy.reshape(-1, dy.shape[-1]), beta)
        return torch.zeros_like(ctx.context.anchor), None, None, None


class LearnedPositions(DirectGradLayer):
    """``x + weight[positions]``: ``[batch, sequence, hidden]`` → same, as in GPT-2. A sequence starts at position 0, or where a
    cache says; with several documents in it each does.

    Where tokens are cut over ranks (``context.grid``) x is ``[tokens, hidden]``, what comes after ``before`` ranks' tokens, and
    the gradient is those tokens' part. ``cp``: sequences are cut over its ranks, and this one has its tokens' positions.
    """

    documents = True

    def __init__(
        self,
        name: str,
        positions: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        before: int = 0,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(name)
        self.before, self.cp = before, cp
        self.weight = nn.Parameter(torch.zeros(positions, hidden, dtype=dtype))

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        sequence = context.grid_of(x)[1] * (1 if self.cp is None else self.cp.size)
        if sequence > self.weight.shape[0]:
            raise ValueError(f"{self.name}: position {sequence} is past the table of {self.weight.shape[0]}")
        if context.cache is not None:
            return x + self.weight.detach()[context.cache.positions]
        added: torch.Tensor = _Positions.apply(x, self, context)
        return added

    def places(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor | None:
        """The row of each token, of x's shape but for the features; None: rows 0, 1, … of every sequence."""
        if context.grid is None and context.starts is None and self.cp is None:
            return None
        batch, sequence = context.grid_of(x)
        at = torch.arange(sequence, device=x.device) if self.cp is None else self.cp.positions(sequence, x.device)
        found = at.repeat(batch, 1) if context.starts is None else positions_of(context.starts, at)
        if context.grid is None:
            return found
        return found.reshape(-1)[self.before * x.shape[0] : (self.before + 1) * x.shape[0]]


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: LearnedPositions, context: LayerContext) -> torch.Tensor:
        ctx.layer, ctx.context = layer, context
        weight = layer.weight.detach()
        places = layer.places(x, context)
        return x + (weight[: x.shape[1]] if places is None else weight[places])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        layer: LearnedPositions = ctx.layer
        if ctx.context.training and layer.weight.requires_grad:
            beta = ctx.context.active_scope().write_grad(layer.weight_name)
            view, rows, places = layer.grad_view(), dy.shape[1], layer.places(dy, ctx.context)
            if places is not None:
                scatter_(view, places.reshape(-1), dy.reshape(-1, dy.shape[-1]), beta)
                return dy, None, None
            total = dy.to(torch.promote_types(dy.dtype, torch.float32)).sum(dim=0)
            if not beta:
                view[rows:].zero_()  # positions that no sequence reaches
            view[:rows].copy_(total + view[:rows] if beta else total)
        return dy, None, None


def scatter_(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, beta: int) -> None:
    """Add ``values`` ``[tokens, hidden]`` to their rows of ``out`` ``[vocab, hidden]``; ``beta`` 0: what was there is gone.

    Into bfloat16 by way of float32: a row that many tokens share would otherwise be rounded for each of them.
    """
    total = torch.zeros_like(out, dtype=torch.float32) if out.dtype is torch.bfloat16 else out
    if total is out and not beta:
        out.zero_()  # a scatter touches some rows only
    total.index_add_(0, rows, values.to(total.dtype))
    if total is not out:
        out.copy_(total.add_(out) if beta else total)
