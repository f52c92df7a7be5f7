"""Causal self-attention with grouped queries (Ainslie et al. 2023).

The fused ``qkv`` weight has grouped rows, per KV head: its query heads, then k, then v (Megatron's order), so that a
tensor-parallel slice of heads is a contiguous slice of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.rope import apply_rope, rope_tables


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

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        batch, sequence, _ = x.shape
        start = 0 if context.cache is None else context.cache.seen
        if start + sequence > self.cos.shape[0]:
            raise ValueError(f"{self.name}: position {start + sequence} is past the table of {self.cos.shape[0]}")
        group = self.heads // self.kv_heads
        fused = self.qkv(x, context).view(batch, sequence, self.kv_heads, group + 2, self.head_dim)
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
