"""Causal self-attention with grouped queries (Ainslie et al. 2023).

The fused ``qkv`` weight has grouped rows, per KV head: its query heads, then k, then v (Megatron's order), so that a
tensor-parallel slice of heads is a contiguous slice of rows.
"""

from __future__ import annotations

from itertools import groupby
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
from qeffect_lm.layers.recompute import recomputed
from qeffect_lm.layers.rope import Rope, apply_rope, identity_tables, positions_of

if TYPE_CHECKING:
    from qeffect_lm.layers.sdpa import AttentionLibrary
    from qeffect_lm.parallel.context import ContextParallel


class Attention(Layer):
    """``[batch, sequence, hidden]`` → same; ``qkv`` and ``out`` are split linears given by the caller.

    Args:
        max_positions: length of the tables, the longest sequence; in training every sequence is so long.
        rope: rotation of q and k; None: positions are the embedding's business.
        window: a token sees itself and so many tokens less one before it; None: all before it.
        q_norm, k_norm: RMSNorm over ``head_dim`` of every head, before the rotation.
        selective: of the norm before, the rotation and the attention nothing is kept: I makes it again.
        cp: sequences are cut over its ranks, and this one has a part of each; None: whole sequences.
    """

    caches = True
    documents = True
    cos: torch.Tensor
    sin: torch.Tensor
    cos_ends: torch.Tensor | None
    sin_ends: torch.Tensor | None

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
        rope: Rope | None,
        window: int | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        selective: bool = False,
        cp: ContextParallel | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name)
        self.qkv, self.out, self.selective, self.cp = qkv, out, selective, cp
        self.q_norm, self.k_norm = q_norm, k_norm
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rope, self.window, self._regime = rope, window, 0 if rope is None else rope.regime(max_positions)
        if rope is None:
            cos, sin = identity_tables(max_positions, head_dim, dtype)
        else:
            cos, sin = rope.tables(range(max_positions), max_positions, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("cos_ends", None, persistent=False)
        self.register_buffer("sin_ends", None, persistent=False)
        self.library: AttentionLibrary | None = None  # a GPU's attention, bound at assembly (bind_attention)

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        """What F and I of it itself always exchange, as the scope is told."""
        if self.cp is None:
            return {}
        return {"F": (f"{self.name}.gather",), "I": (f"{self.name}.gather", f"{self.name}.scatter")}

    def row(self, sequence: int) -> int:
        """Tokens of the whole row of which ``sequence`` are here."""
        return sequence if self.cp is None else sequence * self.cp.size

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        sequence = self.row(context.grid_of(x)[1])
        if sequence > self.cos.shape[0]:
            raise ValueError(f"{self.name}: position {sequence} is past the table of {self.cos.shape[0]}")
        if self._one_node(x, context, norm):
            from qeffect_lm.layers.fused import FusedAttention

            fused: torch.Tensor = FusedAttention.apply(x, self, norm, context, residual)
            return fused
        y = self._separate(x, context, norm)
        return x + y if residual else y

    def _one_node(self, x: torch.Tensor, context: LayerContext, norm: Layer | None) -> bool:
        """Whether one node does it all: FP8 kernels with nothing in between that they do not have."""
        plain = context.cache is None and self.q_norm is None and not self._windowed(self.row(context.grid_of(x)[1]))
        parts = self.qkv, self.out
        plain = plain and (norm is None or isinstance(norm, RMSNorm)) and all(part.bias is None for part in parts)
        return plain and all(part.fuses(x, context) for part in parts)

    def _windowed(self, total: int) -> bool:
        """Whether the window hides anything from ``total`` tokens."""
        return self.window is not None and total > self.window

    def library_of(self, context: LayerContext) -> AttentionLibrary | None:
        """Whose attention kernels run: those that know the other ranks, or keep documents apart, where there are any."""
        if self.cp is not None:
            from qeffect_lm.parallel.context_attention import ContextAttention

            return ContextAttention(self.cp, self.name, context, self.window)
        if context.starts is None:
            return self.library
        from qeffect_lm.kernels.document_attention import DocumentAttention

        return DocumentAttention(context.starts, self.window)

    def training_tables(self, sequence: int, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the tokens here of whole rows: ``[sequence, head_dim // 2]``, or with documents, whose positions count
        from their first token, ``[batch * sequence, head_dim // 2]``. Frequencies are those of rows as long as the tables."""
        places = None if self.cp is None else self.cp.positions(sequence, self.cos.device)
        if context.starts is not None:
            at = positions_of(context.starts, places).reshape(-1)
            return self.cos[at], self.sin[at]
        cos, sin = self.tables(0, self.row(sequence))
        return (cos, sin) if places is None else (cos[places], sin[places])

    def tables(self, start: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``sequence`` tokens from position ``start`` on; frequencies are those of all tokens so far."""
        total = start + sequence
        if self.rope is None or self.rope.regime(total) == self._regime:
            return self.cos[start:total], self.sin[start:total]
        cos, sin = self.rope.tables(range(start, total), total, self.cos.dtype)
        return cos.to(self.cos.device), sin.to(self.cos.device)

    def step_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of tokens at ``positions`` ``[rows, count]``, each ``[rows, 1, count, head_dim // 2]``; frequencies are
        those of all tokens up to each."""
        cos, sin = self.ends()
        return cos[positions][:, None], sin[positions][:, None]

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row p of cos and sin with the frequencies of a sequence that ends there. Made at the first call, before a capture,
        where these are not the tables themselves."""
        size = self.cos.shape[0]
        if self.rope is None or self.rope.regime(1) == self.rope.regime(size) == self._regime:
            return self.cos, self.sin
        if self.cos_ends is None or self.sin_ends is None:
            rope, made = self.rope, []
            for _, places in groupby(range(size), lambda position: rope.regime(position + 1)):
                same = list(places)
                made.append(rope.tables(range(same[0], same[-1] + 1), same[-1] + 1, self.cos.dtype))
            cos, sin = (torch.cat(parts).to(self.cos.device) for parts in zip(*made, strict=True))
            self.cos_ends, self.sin_ends = cos, sin
        return self.cos_ends, self.sin_ends

    def normed(self, fused: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """The fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]`` with q and k normalised."""
        if self.q_norm is None or self.k_norm is None:
            return fused
        q, k, v = fused.split([fused.shape[3] - 2, 1, 1], dim=3)
        return torch.cat([self.q_norm(q, context), self.k_norm(k, context), v], dim=3)

    def _separate(self, x: torch.Tensor, context: LayerContext, norm: Layer | None) -> torch.Tensor:
        """Each part a node of its own."""
        if not self.selective:
            return self._attended(self.qkv(x, context, norm), context)

        def project(x: torch.Tensor, context: LayerContext) -> torch.Tensor:
            return self.qkv(x, context, norm)

        def attend(projected: torch.Tensor, context: LayerContext) -> torch.Tensor:
            return self._attended(projected, context)

        projected = recomputed(project, x, context, [norm, self.qkv], self.qkv)
        return recomputed(attend, projected, context, [self.q_norm, self.k_norm, self.out], self.out)

    def _attended(self, projected: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """What follows the projection."""
        batch, sequence = context.grid_of(projected)
        group = self.heads // self.kv_heads
        fused = self.normed(projected.view(batch, sequence, self.kv_heads, group + 2, self.head_dim), context)
        cache = context.cache
        documents = context.starts is not None
        if self.cp is not None and not kernels.usable(fused):
            y = self._attended_to_others(fused, context)
            return self.out(y.reshape(batch, sequence, self.heads * self.head_dim), context)
        if kernels.usable(fused) and cache is None and (documents or self.cp is not None or not self._windowed(sequence)):
            cos, sin = self.training_tables(sequence, context)
            if self.selective and self.q_norm is None:
                fused = fused.clone()  # rotated in place below, and needed once more as it is
            library = self.library_of(context)
            if library is not None and library.takes(fused):
                y = _RotatedAttention.apply(fused, cos, sin, library)
            else:
                y = sdpa.attend(*RotatedHeads.apply(fused, cos, sin))
            return self.out(y.reshape(batch, sequence, self.heads * self.head_dim), context)
        q = fused[:, :, :, :group].reshape(batch, sequence, self.heads, self.head_dim).transpose(1, 2)
        k = fused[:, :, :, group].transpose(1, 2)
        v = fused[:, :, :, group + 1].transpose(1, 2)
        if cache is None or cache.fresh:
            cos, sin = self.training_tables(sequence, context)
            if documents:
                cos, sin = (table.view(batch, 1, sequence, -1) for table in (cos, sin))
            q, k = self._rotated(q, k, cos, sin)
            if cache is not None:
                cache.extend(self.name, k, v)
            y = self._attend(q, self._repeat(k, group), self._repeat(v, group), context.starts)
        else:
            q, k = self._rotated(q, k, *self.step_tables(cache.positions))
            y = self._attend_cached(q, *cache.extend(self.name, k, v), cache.mask(self.window))
        return self.out(y.transpose(1, 2).reshape(batch, sequence, self.heads * self.head_dim), context)

    def _attended_to_others(self, fused: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Tokens of a part of each row, without kernels: ``[batch, sequence, kv_heads, group, head_dim]``."""
        batch, sequence, *_ = fused.shape
        if self.rope is not None:
            cos, sin = (table.view(-1, sequence, 1, 1, table.shape[-1]) for table in self.training_tables(sequence, context))
            fused = torch.cat([apply_rope(fused[:, :, :, :-1], cos, sin), fused[:, :, :, -1:]], dim=3)
        library = self.library_of(context)
        assert library is not None
        y: torch.Tensor = _LibraryAttention.apply(fused, library)
        return y

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (q, k) if self.rope is None else (apply_rope(q, cos, sin), apply_rope(k, cos, sin))

    @staticmethod
    def _repeat(x: torch.Tensor, group: int) -> torch.Tensor:
        """One KV head serves ``group`` query heads: ``[b, kv, s, d]`` → ``[b, kv * group, s, d]``."""
        if group == 1:
            return x
        batch, kv_heads, sequence, head_dim = x.shape
        wide = x[:, :, None].expand(batch, kv_heads, group, sequence, head_dim)
        return wide.reshape(batch, kv_heads * group, sequence, head_dim)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        sequence = q.shape[2]
        if not self._windowed(sequence) and starts is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=sequence > 1)
        query = torch.arange(sequence, device=q.device)[:, None]
        key = torch.arange(sequence, device=q.device)[None]
        mask = key <= query
        if self.window is not None:
            mask = mask & (key > query - self.window)
        if starts is not None:
            mask = mask & (key >= starts[:, None, :, None])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _attend_cached(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The queries of a KV head are rows of one matrix: no copy of the cache for each of them."""
        batch, _, sequence, _ = q.shape
        group = self.heads // self.kv_heads
        rows = q.reshape(batch, self.kv_heads, group * sequence, self.head_dim)
        mask = mask if sequence == 1 else mask.repeat(1, 1, group, 1)
        return functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(q.shape)


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


class _LibraryAttention(torch.autograd.Function):
    """The library's attention of the fused projection, rotated before: ``[batch, sequence, kv_heads, group, head_dim]``."""

    @staticmethod
    def forward(ctx: Any, fused: torch.Tensor, library: AttentionLibrary) -> torch.Tensor:
        y, lse = library.forward(fused.detach())
        ctx.save_for_backward(fused, y, lse)
        ctx.library = library
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.library.backward(*ctx.saved_tensors, dy), None


class _RotatedAttention(torch.autograd.Function):
    """The fused projection, rotated in place, and the library's attention: ``[batch, sequence, kv_heads, group, head_dim]``."""

    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, library: AttentionLibrary
    ) -> torch.Tensor:
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


def bind_attention(module: nn.Module, library: AttentionLibrary | None) -> None:
    """Give every attention of ``module`` the cuDNN of its device (assembly does, for layers on a GPU)."""
    for layer in module.modules():
        if isinstance(layer, Attention):
            layer.library = library


def bind_step_tables(module: nn.Module) -> None:
    """Before a capture of steps: give every attention of ``module`` its tables of single positions, equal ones once."""
    made: dict[object, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    for layer in module.modules():
        if isinstance(layer, Attention):
            key = layer.rope, layer.cos.shape[0], layer.cos.dtype
            if key not in made:
                layer.ends()
                made[key] = layer.cos_ends, layer.sin_ends
            layer.cos_ends, layer.sin_ends = made[key]
