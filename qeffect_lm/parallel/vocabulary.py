"""Embedding and cross-entropy over a vocabulary that is cut over tensor-parallel ranks (Shoeybi et al. 2019).

Every rank holds some rows of the table and of the head. The embedding's result is the sum over the ranks, of which one has the
token's row and the others zeros, so it is exact. The loss needs two numbers a token of every rank, the log of its part's sum of
exponentials and the target's logit where it has it: one gather; all ranks then add them in one order and have the same loss.
The gradient of the logits is local.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.layers.base import DirectGradLayer, Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.embedding import scatter_
from qeffect_lm.layers.loss import tell_rows
from qeffect_lm.parallel.cuts import Vocabulary
from qeffect_lm.parallel.tensor import TensorParallel


class ParallelEmbedding(DirectGradLayer):
    """``[batch, sequence]`` int64 token ids → ``[tokens of this rank, hidden]``; ``[batch, sequence, hidden]`` without sequence
    parallelism."""

    def __init__(
        self, name: str, vocab_size: int, hidden: int, *, tp: TensorParallel, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(name)
        (piece,) = Vocabulary(vocab_size).pieces(tp.size, tp.rank)
        self.tp, self.first = tp, piece.start
        self.weight = nn.Parameter(torch.zeros(piece.length, hidden, dtype=dtype))

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        sequence = self.tp.sequence
        return {"F": (f"{self.name}.{'scatter' if sequence else 'sum'}",), "I": (f"{self.name}.gather",) if sequence else ()}

    def forward(self, tokens: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if context.anchor is None:
            return self.looked_up(tokens, context)
        found: torch.Tensor = _ParallelEmbedding.apply(context.anchor, tokens, self, context)
        return found

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the table here, ``[tokens]``, and whether each token has one (of others row 0)."""
        return local_rows(tokens, self.first, self.weight.shape[0])

    def looked_up(self, tokens: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """F."""
        rows, here = self.rows(tokens)
        found = functional.embedding(rows, self.weight.detach()) * here[:, None].to(self.weight.dtype)
        found = self.tp.leave(found, context, self.name)
        return found if self.tp.sequence else found.view(*tokens.shape, -1)


class _ParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tokens: torch.Tensor, layer: ParallelEmbedding, context: LayerContext
    ) -> torch.Tensor:
        ctx.tokens, ctx.layer, ctx.context = tokens, layer, context
        return layer.looked_up(tokens, context)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        layer, context = ctx.layer, ctx.context
        dy = layer.tp.leave_grad(dy.reshape(-1, dy.shape[-1]), context, layer.name)
        if context.training and layer.weight.requires_grad:
            beta = context.active_scope().write_grad(layer.weight_name)
            rows, here = layer.rows(ctx.tokens)
            scatter_(layer.grad_view(), rows, dy * here[:, None].to(dy.dtype), beta)
        return torch.zeros_like(context.anchor), None, None, None


def local_rows(tokens: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of token ids the rows ``[n]`` of a part ``first … first + count`` of the vocabulary, and whether each is in it."""
    rows = tokens.reshape(-1) - first
    here = (rows >= 0) & (rows < count)
    return rows * here, here


class ParallelCrossEntropy(Layer):
    """As :class:`~qeffect_lm.layers.loss.CrossEntropyLoss`, of logits ``[tokens, part of the vocabulary]``; the same bytes on
    all ranks."""

    def __init__(self, name: str, vocab_size: int, *, tp: TensorParallel) -> None:
        super().__init__(name)
        (piece,) = Vocabulary(vocab_size).pieces(tp.size, tp.rank)
        self.tp, self.first = tp, piece.start

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        return {"F": (f"{self.name}.gather",), "I": ()}

    def forward(self, logits: torch.Tensor, context: LayerContext) -> torch.Tensor:
        assert context.targets is not None and context.loss_mask is not None and context.divisor is not None
        loss: torch.Tensor = _ParallelCrossEntropy.apply(logits, self, context)
        return loss


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, layer: ParallelCrossEntropy, context: LayerContext) -> torch.Tensor:
        assert context.targets is not None and context.loss_mask is not None and context.divisor is not None
        flat = logits.reshape(-1, logits.shape[-1])
        index, here = local_rows(context.targets, layer.first, flat.shape[1])
        mask = context.loss_mask.reshape(-1)
        lse = _lse(flat, index, mask)
        hit = flat.gather(1, index[:, None]).squeeze(1).to(lse.dtype) * here.to(lse.dtype)
        parts = layer.tp.gather(torch.stack([lse, hit])[None], context, layer.name)
        lse, hit = torch.logsumexp(parts[:, 0], dim=0), parts[:, 1].sum(dim=0)
        losses = (lse - hit) * mask.to(lse.dtype)
        ctx.save_for_backward(logits, index, here, mask, lse, context.divisor)
        tell_rows(losses, context.row_losses)
        return losses.sum() / context.divisor

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        logits, index, here, mask, lse, divisor = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        if kernels.usable(flat):
            from qeffect_lm.kernels import loss

            targets = torch.where(here, index, -1)  # the kernel compares: no column is it
            return loss.backward_(flat.contiguous(), targets, mask, lse, dloss, divisor).view_as(logits), None, None
        wide = flat if flat.dtype == torch.float64 else flat.float()
        grad = (wide - lse[:, None]).exp_()
        grad.scatter_add_(1, index[:, None], -here[:, None].to(grad.dtype))
        grad.mul_((mask.to(grad.dtype) * (dloss / divisor))[:, None])
        return grad.to(logits.dtype).view_as(logits), None, None


def _lse(flat: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log of the sum of exponentials of each row, in float32 or wider."""
    if kernels.usable(flat):
        from qeffect_lm.kernels import loss

        return loss.forward(flat.contiguous(), index, mask)[1]
    return torch.logsumexp(flat if flat.dtype == torch.float64 else flat.float(), dim=-1)
