"""Attention of a rank's tokens to the whole row, whose keys and values lie on all ranks of the axis cp.

Interface and layout are those of :class:`~qeffect_lm.layers.sdpa.AttentionLibrary`: the fused projection of the rank's tokens,
rotated. On a GPU the kernels are those of :mod:`qeffect_lm.kernels.document_attention`; elsewhere torch's attention with
explicit masks, whose forward the backward runs again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional

from qeffect_lm import kernels
from qeffect_lm.parallel.context import ContextParallel

if TYPE_CHECKING:
    from qeffect_lm.kernels.document_attention import Queries
    from qeffect_lm.layers.context import LayerContext


class ContextAttention:
    """Of one layer in one microbatch.

    Args:
        who: the layer's name, which exchanges are told by.
        context: the microbatch's; exchanges belong to the action that runs.
        window: a token sees itself and so many tokens less one before it; None: all before it.
    """

    def __init__(self, cp: ContextParallel, who: str, context: LayerContext, window: int | None = None) -> None:
        self._cp, self._who, self._context, self._window = cp, who, context, window
        self._gathered: torch.Tensor | None = None  # by a forward that I runs again, for the backward right after it

    def takes(self, qkv: torch.Tensor) -> bool:
        """Any: nobody else knows the other ranks."""
        return True

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, tokens here, kv_heads, group + 2, head_dim]`` → y ``[batch, tokens here, kv_heads, group, head_dim]`` and,
        of the kernels, the rows' statistics."""
        qkv = qkv.contiguous()
        q, kv = qkv[:, :, :, :-2], self._whole(qkv)
        if self._context.scope is not None and self._context.scope.kind == "I":
            self._gathered = kv
        if self._by_kernels(q):
            from qeffect_lm.kernels import document_attention

            return document_attention.forward(q, kv, self._starts(q), self._queries(q), self._window)
        parts = [self._attend(q[:, mine], kv[:, :end], mask) for mine, end, mask in self._runs(q)]
        return torch.cat(parts, dim=1), q.new_empty(0)

    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """d(qkv), the same bytes every time; ``y`` and ``lse`` are what :meth:`forward` gave, ``dy`` has y's shape."""
        qkv = qkv.contiguous()
        q, kv = qkv[:, :, :, :-2], self._whole(qkv)
        dqkv = torch.empty_like(qkv)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        dq = dqkv[:, :, :, :-2]
        if self._by_kernels(q):
            from qeffect_lm.kernels import document_attention

            dkv = torch.empty_like(kv, dtype=wide)
            how = self._starts(q), self._queries(q), self._window
            document_attention.backward(q, kv, *how, y, lse, dy, dq, dkv)
        else:
            dkv = torch.zeros_like(kv, dtype=wide)
            for mine, end, mask in self._runs(q):
                leaves = [part.detach().requires_grad_() for part in (q[:, mine], kv[:, :end])]
                with torch.enable_grad():
                    again = self._attend(leaves[0], leaves[1], mask)
                grads = torch.autograd.grad(again, leaves, dy[:, mine])
                dq[:, mine].copy_(grads[0])
                dkv[:, :end].add_(grads[1])
        dqkv[:, :, :, -2:].copy_(self._cp.part_of_sum(dkv, self._context, self._who))
        return dqkv

    # ---- parts -------------------------------------------------------------------------------------------------

    def _whole(self, qkv: torch.Tensor) -> torch.Tensor:
        """k and v of the row, ``[batch, row, kv_heads, 2, head_dim]``."""
        found, self._gathered = self._gathered, None
        return self._cp.whole(qkv[:, :, :, -2:], self._context, self._who) if found is None else found

    @staticmethod
    def _by_kernels(q: torch.Tensor) -> bool:
        if not kernels.usable(q):
            return False
        from qeffect_lm.kernels import document_attention

        return document_attention.takes(q)

    def _starts(self, q: torch.Tensor) -> torch.Tensor:
        """int32 ``[batch, tokens here]``."""
        if self._context.starts is not None:
            return self._context.starts
        return torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)

    def _queries(self, q: torch.Tensor) -> Queries:
        from qeffect_lm.kernels.document_attention import Queries

        first, second = self._cp.runs(q.shape[1] * self._cp.size)
        half = q.shape[1] // 2
        return Queries(half, first.start, second.start - half)

    def _runs(self, q: torch.Tensor) -> list[tuple[slice, int, torch.Tensor]]:
        """Of each run of queries here: which they are, the end of the keys that they see, and of these who sees which
        (``[1 or batch, 1, queries, keys]``)."""
        half, made, starts = q.shape[1] // 2, [], self._context.starts
        for number, run in enumerate(self._cp.runs(q.shape[1] * self._cp.size)):
            mine = slice(number * half, (number + 1) * half)
            place = torch.arange(run.start, run.stop, device=q.device)[:, None]
            key = torch.arange(run.stop, device=q.device)[None]
            mask = key <= place
            if self._window is not None:
                mask = mask & (key > place - self._window)
            mask = mask[None, None]
            if starts is not None:
                mask = mask & (key >= starts[:, None, mine, None])
            made.append((mine, run.stop, mask))
        return made

    @staticmethod
    def _attend(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """q ``[batch, queries, kv_heads, group, head_dim]`` to kv ``[batch, keys, kv_heads, 2, head_dim]``, in q's shape."""
        group = q.shape[3]
        heads = q.permute(0, 2, 3, 1, 4).flatten(1, 2)
        k, v = (part.transpose(1, 2).repeat_interleave(group, dim=1) for part in kv.unbind(3))
        y = functional.scaled_dot_product_attention(heads, k, v, attn_mask=mask)
        return y.unflatten(1, q.shape[2:4]).permute(0, 3, 1, 2, 4)
