"""A decoder block run by Transformer Engine, beside the native one that owns its parameters.

The native block stays what it is: it names parameters and roles, holds main gradients and buffers, and runs where no FP8 kernel
of Transformer Engine should (calibration in high precision; generation, whose steps of one token fit no FP8 product). Training
and evaluation go through Transformer Engine's modules over the same parameters:

    LayerNormLinear (norm, qkv) → RoPE → DotProductAttention → Linear (out) → + x → LayerNormMLP (norm, gate_up, down) → + x

With tensor parallelism they have a rank's pieces, and exchanges stand around them: before a norm tokens are gathered, as they
are, and each rank normalises all of them; in I what comes out of the norm's backward, which is linear, is added.

``te.TransformerLayer`` would be one module, but cannot delay weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from qeffect_lm import kernels
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.mlp import GatedMLP
from qeffect_lm.layers.norm import RMSNorm
from qeffect_lm.layers.rope import apply_rope
from qeffect_lm.layers.te.modules import CoreAttention, Products, Setting, norm_linear, norm_mlp, plain_linear
from qeffect_lm.layers.te.recipe import BlockScaling
from qeffect_lm.layers.te.weight_grad import DelayedProduct
from qeffect_lm.parallel.borders import entered, left
from qeffect_lm.parallel.linear import ColumnParallelLinear, RowParallelLinear


class NativeBlock(Protocol):
    """The parts of :class:`models.decoder.DecoderBlock`."""

    name: str
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP
    attention_dropout: Any
    mlp_dropout: Any

    def __call__(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor: ...


class TELinear(SplitLinear):
    """A split linear whose W is a delayed product of Transformer Engine."""

    def weight_grad(self, context: LayerContext) -> None:
        scope = context.active_scope()
        delayed: DelayedProduct = scope.take_weight_grad(self.name)
        delayed.run(self.name, self.grad_view(), scope.write_grad(self.weight_name))


class TEColumnLinear(TELinear, ColumnParallelLinear):
    """A rank's rows of one."""


class TERowLinear(TELinear, RowParallelLinear):
    """A rank's columns of one."""


@dataclass(frozen=True)
class _Modules:
    """Hidden from ``nn.Module``: their parameters are the native block's."""

    qkv: Products
    core: CoreAttention
    out: Products
    mlp: Products

    @property
    def with_products(self) -> tuple[Products, ...]:
        return self.qkv, self.out, self.mlp


class TEBlock(Layer):
    """``[batch, sequence, hidden]`` (``[tokens of this rank, hidden]`` where tokens are cut) → same, by Transformer Engine once
    :meth:`connect` was called."""

    def __init__(self, native: Any) -> None:
        super().__init__(native.name)
        self.native: Any = native
        self._modules_of_te: _Modules | None = None

    def connect(self, setting: Setting) -> _Modules:
        """Build the modules over the bound parameters (on a GPU, main gradients given)."""
        native: NativeBlock = self.native
        attention, mlp = native.attention, native.mlp
        self._modules_of_te = _Modules(
            norm_linear(setting, native.attention_norm, attention.qkv),
            CoreAttention(setting, f"{attention.name}.core", attention.heads, attention.kv_heads, attention.head_dim),
            plain_linear(setting, attention.out),
            norm_mlp(setting, mlp.name, native.mlp_norm, mlp.gate_up, mlp.down),
        )
        return self._modules_of_te

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if context.phase is Phase.CALIBRATE or context.cache is not None:
            if isinstance(self.native.attention.qkv.recipe, BlockScaling):  # which exists in Transformer Engine only
                context = replace(context, phase=Phase.CALIBRATE)
            native: torch.Tensor = self.native(x, context)
            return native
        modules = self._modules_of_te
        if modules is None:
            raise RuntimeError(f"{self.name}: connect() comes before the first forward")
        attention, mlp, tp = self.native.attention, self.native.mlp, getattr(self.native.attention.qkv, "tp", None)
        batch, sequence = context.grid_of(x)
        projected = modules.qkv(entered(x, tp, context, attention.qkv.name), context)
        q, k, v = rotated_heads(attention, projected.view(batch, sequence, -1))
        attended = left(modules.out(modules.core(q, k, v, context), context), tp, context, attention.out.name)
        x = x + self.native.attention_dropout(attended, context)
        made = left(modules.mlp(entered(x, tp, context, mlp.gate_up.name), context), tp, context, mlp.down.name)
        return x + self.native.mlp_dropout(made, context)


def rotated_heads(attention: Attention, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fused projection → contiguous q ``[b, s, heads, d]`` and k, v ``[b, s, kv_heads, d]``, with RoPE.

    ``fused`` ``[b, s, kv_heads * (group + 2) * d]`` has the native order: per KV head its query heads, then k, then v.
    """
    batch, sequence, _ = fused.shape
    group, d = attention.heads // attention.kv_heads, attention.head_dim
    if sequence > attention.cos.shape[0]:
        raise ValueError(f"{attention.name}: position {sequence} is past the table of {attention.cos.shape[0]}")
    fused = fused.view(batch, sequence, attention.kv_heads, group + 2, d)
    cos, sin = attention.tables(0, sequence)
    if kernels.usable(fused):
        from qeffect_lm.layers.attention import RotatedHeads

        q, k, v = RotatedHeads.apply(fused, cos, sin)
        q, k, v = q.permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)
        return q.reshape(batch, sequence, attention.heads, d), k.contiguous(), v.contiguous()
    q = fused[:, :, :, :group].reshape(batch, sequence, attention.heads, d).transpose(1, 2)
    k, v = fused[:, :, :, group].transpose(1, 2), fused[:, :, :, group + 1]
    q, k = (apply_rope(heads, cos, sin).transpose(1, 2).contiguous() for heads in (q, k))
    return q, k, v.contiguous()
