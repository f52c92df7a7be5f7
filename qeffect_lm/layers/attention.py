"""Causal self-attention with grouped queries (Ainslie et al. 2023).

The fused ``qkv`` weight has grouped rows, per KV head: its query heads, then k, then v (Megatron's order), so that a
tensor-parallel slice of heads is a contiguous slice of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.layers import sdpa
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.norm import RMSNorm
from qeffect_lm.layers.rope import apply_rope, rope_tables

if TYPE_CHECKING:
    from qeffect_lm.kernels.cudnn_attention import CudnnAttention


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far in generation, per layer name; ``[batch, kv_heads, seen, head_dim]``."""

    entries: dict[str, tuple[torch.Tensor, torch.Tensor]]
    seen: int = 0

    def extend(self, name: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if name in self.entries:
            past_k, past_v = self.entries[name]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.entries[name] = (k, v)
        return k, v


class Attention(Layer):
    """``[batch, sequence, hidden]`` → same; ``qkv`` and ``out`` are split linears given by the caller."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        name: str,
        qkv: SplitLinear,
        out: SplitLinear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_positions: int,
        rope_theta: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name)
        self.qkv, self.out = qkv, out
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        cos, sin = rope_tables(max_positions, head_dim, rope_theta, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.library: CudnnAttention | None = None  # a GPU's attention, bound at assembly (bind_attention)

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: RMSNorm | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        start = 0 if context.cache is None else context.cache.seen
        if start + x.shape[1] > self.cos.shape[0]:
            raise ValueError(f"{self.name}: position {start + x.shape[1]} is past the table of {self.cos.shape[0]}")
        if context.cache is None and all(part.fuses(x, context) and part.bias is None for part in (self.qkv, self.out)):
            from qeffect_lm.layers.fused import FusedAttention

            fused: torch.Tensor = FusedAttention.apply(x, self, norm, context, residual)
            return fused
        y = self._separate(x, context, norm, start)
        return x + y if residual else y

    def _separate(self, x: torch.Tensor, context: LayerContext, norm: RMSNorm | None, start: int) -> torch.Tensor:
        """Each part a node of its own."""
        batch, sequence, _ = x.shape
        group = self.heads // self.kv_heads
        fused = self.qkv(x, context, norm).view(batch, sequence, self.kv_heads, group + 2, self.head_dim)
        if kernels.usable(fused) and context.cache is None:
            cos, sin = self.cos[:sequence], self.sin[:sequence]
            if self.library is not None and self.library.takes(fused):
                y = _RotatedAttention.apply(fused, cos, sin, self.library)
            else:
                y = sdpa.attend(*RotatedHeads.apply(fused, cos, sin))
            return self.out(y.reshape(batch, sequence, self.heads * self.head_dim), context)
        q = fused[:, :, :, :group].reshape(batch, sequence, self.heads, self.head_dim).transpose(1, 2)
        k = fused[:, :, :, group].transpose(1, 2)
        v = fused[:, :, :, group + 1].transpose(1, 2)
        cos, sin = self.cos[start : start + sequence], self.sin[start : start + sequence]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if context.cache is not None:
            k, v = context.cache.extend(self.name, k, v)
        y = self._attend(q, self._repeat(k, group), self._repeat(v, group), causal=start == 0)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, self.heads * self.head_dim), context)

    @staticmethod
    def _repeat(x: torch.Tensor, group: int) -> torch.Tensor:
        """One KV head serves ``group`` query heads: ``[b, kv, s, d]`` → ``[b, kv * group, s, d]``."""
        if group == 1:
            return x
        batch, kv_heads, sequence, head_dim = x.shape
        wide = x[:, :, None].expand(batch, kv_heads, group, sequence, head_dim)
        return wide.reshape(batch, kv_heads * group, sequence, head_dim)

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        mask = None
        if not causal and q.shape[2] > 1:  # later tokens of a cached sequence, several at a time
            past = k.shape[2] - q.shape[2]
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and q.shape[2] > 1)


class RotatedHeads(torch.autograd.Function):
    """The fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]``, rotated in place → views of q, k and v.

    q is ``[batch, kv_heads, group, sequence, head_dim]``, k and v ``[batch, kv_heads, sequence, head_dim]``. Nothing of the
    projection's own node is overwritten: it saves its input, not its output.
    """

    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from qeffect_lm.kernels import rope

        ctx.save_for_backward(cos, sin)
        turned = fused.detach()
        rope.rotate_(turned, cos, sin)
        return rope.heads(turned)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        from qeffect_lm.kernels import rope

        cos, sin = ctx.saved_tensors
        return rope.gather(dq, dk, dv, cos, sin), None, None


class _RotatedAttention(torch.autograd.Function):
    """The fused projection, rotated in place, and the library's attention: ``[batch, sequence, kv_heads, group, head_dim]``."""

    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, library: CudnnAttention) -> torch.Tensor:
        from qeffect_lm.kernels import rope

        turned = fused.detach()
        rope.rotate_(turned, cos, sin)
        y, lse = library.forward(turned)
        ctx.save_for_backward(turned, y, lse, cos, sin)
        ctx.library = library
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        from qeffect_lm.kernels import rope

        turned, y, lse, cos, sin = ctx.saved_tensors
        return rope.gather(*rope.heads(ctx.library.backward(turned, y, lse, dy)), cos, sin), None, None, None


def bind_attention(module: nn.Module, library: CudnnAttention | None) -> None:
    """Give every attention of ``module`` the cuDNN of its device (assembly does, for layers on a GPU)."""
    for layer in module.modules():
        if isinstance(layer, Attention):
            layer.library = library
