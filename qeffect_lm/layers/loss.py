"""Cross-entropy with one divisor: sums over a microbatch divided by the step's DP-global token count."""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext


class CrossEntropyLoss(Layer):
    """``sum(mask * (logsumexp(logits) - logits[target])) / divisor`` → 0-dim; logits ``[batch, sequence, vocab]``.

    Computed in float32 or wider. Every microbatch is divided by the same number, so uneven counts of valid tokens add up to the
    mean over the whole step.
    """

    def forward(self, logits: torch.Tensor, context: LayerContext) -> torch.Tensor:
        assert context.targets is not None and context.loss_mask is not None and context.divisor is not None
        node = _CrossEntropyKernels if kernels.usable(logits) else _CrossEntropy
        return node.apply(logits, context.targets, context.loss_mask, context.divisor, context.row_losses)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor,
        divisor: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        wide = flat if flat.dtype == torch.float64 else flat.float()
        index = targets.reshape(-1, 1)
        lse = torch.logsumexp(wide, dim=-1)
        weight = mask.reshape(-1).to(wide.dtype)
        ctx.save_for_backward(logits, index, weight, lse, divisor)
        losses = (lse - wide.gather(1, index).squeeze(1)) * weight
        tell_rows(losses, rows)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        logits, index, weight, lse, divisor = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        wide = flat if flat.dtype == torch.float64 else flat.float()
        grad = (wide - lse[:, None]).exp_()
        grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
        grad.mul_((weight * (dloss / divisor))[:, None])
        return grad.to(logits.dtype).view_as(logits), None, None, None, None


class _CrossEntropyKernels(torch.autograd.Function):
    """No copy of the logits: the gradient is written over them, so one forward serves one executed backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor,
        divisor: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        from qeffect_lm.kernels import loss

        flat = logits.reshape(-1, logits.shape[-1]).contiguous()
        losses, lse = loss.forward(flat, targets.reshape(-1), mask.reshape(-1))
        ctx.save_for_backward(flat, targets.reshape(-1), mask.reshape(-1), lse, divisor)
        ctx.shape = logits.shape
        tell_rows(losses, rows)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:  # type: ignore[override]
        from qeffect_lm.kernels import loss

        logits, targets, mask, lse, divisor = ctx.saved_tensors
        return loss.backward_(logits, targets, mask, lse, dloss, divisor).view(ctx.shape), None, None, None, None


def tell_rows(losses: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Each row's sum of ``losses`` ``[tokens]`` into ``rows`` ``[batch]``; reads only, so the loss keeps its bits."""
    if rows is not None:
        rows.copy_(losses.view(rows.shape[0], -1).sum(1))
