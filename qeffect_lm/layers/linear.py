"""The split linear: F, I and W as three GEMMs, on FP8 operands where a recipe says so.

    F:  y  = x  @ w.T      x, w quantised along ``in``
    I:  dx = dy @ w        dy, w quantised along ``out``
    W:  dw = dy.T @ x      both quantised along ``tokens``; straight into the main gradient

The three products of a linear under FP8 are those of Micikevicius et al. 2022; splitting I from W is Zero Bubble's
(Qi et al. 2023). Backward of the autograd node computes dx only and hands W's operands to the lease.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.fp8.gemm import accumulate_mm, accumulate_scaled_mm, mm, scaled_mm
from qeffect_lm.fp8.quantise import Quantised, quantise
from qeffect_lm.fp8.recipes import Quantiser, Recipe
from qeffect_lm.layers.base import Layer, SplitLayer
from qeffect_lm.layers.context import LayerContext, Phase, Rerun
from qeffect_lm.layers.norm import RMSNorm

if TYPE_CHECKING:
    from qeffect_lm.contract.leases import WeightGradHandle
    from qeffect_lm.kernels.cublaslt import CublasLt


@dataclass(frozen=True)
class WeightGradOperands:
    """What W needs and nothing else: x and dY in stored precision, ``[features, tokens]``, with their inverse scales. F leaves
    dY to I, and x too where I makes it again."""

    x: torch.Tensor | None
    x_scale_inv: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dy_scale_inv: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.x, self.x_scale_inv, self.dy, self.dy_scale_inv) if t is not None]


class SplitLinear(SplitLayer):
    """``y = x @ weight.T + bias`` over the last dimension.

    Args:
        name: logical name.
        recipe: an FP8 recipe, or None for the weight's own dtype.
        bias: finished in I by autograd, like any cheap parameter.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name)
        self.in_features, self.out_features, self.recipe = in_features, out_features, recipe
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None
        self.cached: Quantised | None = None  # the weight cache's storages, bound at assembly
        self.library: CublasLt | None = None  # a GPU's products, bound at assembly (bind_products)

    @property
    def joins(self) -> bool:
        """Whether W of several microbatches can be one product: their operands are in FP8 with one scale."""
        return self.recipe is not None and self.recipe.scales_first and self.weight.requires_grad

    def forward(self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None) -> torch.Tensor:
        """``[..., in]`` → ``[..., out]``. ``norm`` comes before the product; the kernel that quantises applies an RMSNorm."""
        if norm is None:
            y: torch.Tensor = _SplitLinear.apply(x, self, context)
        elif isinstance(norm, RMSNorm) and self.fuses(x, context):
            y = _NormedLinear.apply(x, norm, self, context)
        else:
            y = _SplitLinear.apply(norm(x, context), self, context)
        return y if self.bias is None else y + self.bias

    def fuses(self, x: torch.Tensor, context: LayerContext) -> bool:
        """Whether what comes right before this linear can be part of the kernel that quantises its input."""
        scaled = self.recipe is not None and self.recipe.scales_first and context.phase is not Phase.CALIBRATE
        return scaled and kernels.quantises(x)

    # ---- F -----------------------------------------------------------------------------------------------------

    def entered(self, x: torch.Tensor, quantiser: Quantiser, context: LayerContext) -> tuple[torch.Tensor, Quantiser]:
        """What the product takes instead of ``x`` ``[tokens, in]``, and what makes it FP8; of a linear that is cut over ranks
        either gets the other ranks' tokens (:mod:`qeffect_lm.parallel.linear`)."""
        return x, quantiser

    def shaped(self, y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The product ``[tokens, out]`` in the shape of its input."""
        return y.view(*shape[:-1], y.shape[-1])

    def product(
        self,
        x: torch.Tensor,
        context: LayerContext,
        quantiser: Quantiser = quantise,
        residual: torch.Tensor | None = None,
        columns_in_i: bool = False,
    ) -> torch.Tensor:
        """F on ``[tokens, in]``: the GEMM, and the lease in TRAIN. ``quantiser`` makes the FP8 input of ``x``; ``residual``
        ``[tokens, out]`` is added before the rounding of an FP8 product. With ``columns_in_i`` x's transposed copy, unless it
        has a place of its own, is made in I by the caller (:meth:`give_columns`)."""
        x, quantiser = self.entered(x, quantiser, context)
        rerun = context.rerun if context.training else None
        if self.recipe is None or context.phase is Phase.CALIBRATE:
            if self.recipe is not None:
                self.recipe.observe(self.name, "input", x)
                self.recipe.observe(self.name, "weight", self.weight.bfloat16())
            self._retain(x, context)
            if rerun is not None and not rerun.first and rerun.tail is self:
                return self._nothing(x, x.dtype)
            y = mm(x, self.weight, library=self.library)
            return y if residual is None else y + residual
        if rerun is None or rerun.first:
            q = self._quantised(x, context, quantiser, columns_in_i)
        else:
            q = self._quantised_again(x, context, rerun, quantiser, columns_in_i)
        assert q.rows is not None
        if rerun is not None and not rerun.first and rerun.tail is self:
            return self._nothing(q.rows, x.dtype)
        weight = self._cached("rows", context)
        assert weight.rows is not None
        return scaled_mm(
            q.rows, q.scale_inv, weight.rows, weight.scale_inv, x.dtype,
            residual=residual, library=self.library, fast_accumulation=True,
        )  # fmt: skip

    def _retains(self, context: LayerContext) -> bool:
        return context.training and self.weight.requires_grad

    def _retain(self, x: torch.Tensor, context: LayerContext) -> None:
        """x into the lease, without FP8; where F runs again only then."""
        if not self._retains(context):
            return
        rerun = context.rerun
        if rerun is not None and not rerun.first:
            self.give_columns(context, context.owned(x).t())
        else:
            held = None if rerun is not None else context.owned(x).t()
            context.active_scope().retain(self.name, WeightGradOperands(held))

    def _quantised(
        self, x: torch.Tensor, context: LayerContext, quantiser: Quantiser, columns_in_i: bool
    ) -> Quantised:
        """x in FP8, reported and retained. Columns that have a place of their own are made now, whoever wants them later."""
        assert self.recipe is not None
        retains, rerun = self._retains(context), context.rerun if context.training else None
        into = context.place_of(self.name, "input") if retains else None
        columns = retains and not ((columns_in_i or rerun is not None) and into is None)
        if rerun is not None:
            rerun.scales[self.name] = self.recipe.held_scale(self.name, "input")
        scope = context.scope if context.training else None
        q = self.recipe.operand(self.name, "input", x, scope, columns=columns, quantiser=quantiser, into=into)
        if retains:
            context.active_scope().retain(self.name, WeightGradOperands(q.columns, q.scale_inv))
        return q

    def _quantised_again(
        self, x: torch.Tensor, context: LayerContext, rerun: Rerun, quantiser: Quantiser, columns_in_i: bool
    ) -> Quantised:
        """The same FP8 in I, with F's scale: nothing is reported or retained anew, the lease gets what F left out."""
        assert self.recipe is not None
        columns = self.lacks_columns(context) and not columns_in_i
        scale = rerun.scales[self.name]
        q = self.recipe.operand(self.name, "input", x, None, columns=columns, quantiser=quantiser, scale=scale)
        if columns:
            assert q.columns is not None
            self.give_columns(context, q.columns)
        return q

    def _nothing(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Stands for a product whose value nobody reads."""
        return operand.new_zeros(operand.shape[0], self.out_features, dtype=dtype)

    # ---- I -----------------------------------------------------------------------------------------------------

    def input_grad(
        self, dy: torch.Tensor, context: LayerContext, needs_dx: bool, quantiser: Quantiser = quantise
    ) -> torch.Tensor | None:
        """I on ``[tokens, out]``: dx, and dY into the lease. ``quantiser`` makes the FP8 output gradient of ``dy``."""
        retains = context.training and self.weight.requires_grad
        if self.recipe is None or context.phase is Phase.CALIBRATE:
            if self.recipe is not None:
                self.recipe.observe(self.name, "grad_output", dy)
            if retains:
                self._hand_over(context, dy=context.owned(dy).t())
            return mm(dy, self.weight.t(), library=self.library) if needs_dx else None
        scope = context.active_scope()
        into = context.place_of(self.name, "grad_output") if retains else None
        q = self.recipe.operand(self.name, "grad_output", dy, scope, columns=retains, quantiser=quantiser, into=into)
        if retains:
            self._hand_over(context, dy=q.columns, dy_scale_inv=q.scale_inv)
        if not needs_dx:
            return None
        weight = self._cached("columns", context)
        assert q.rows is not None and weight.columns is not None
        return scaled_mm(q.rows, q.scale_inv, weight.columns, weight.scale_inv, dy.dtype, library=self.library)

    def _hand_over(self, context: LayerContext, **dy: Any) -> None:
        operands = context.active_scope().input_grad_done(self.name)
        self._handle(context).payload = replace(operands, **dy)

    def _handle(self, context: LayerContext) -> WeightGradHandle:
        scope = context.active_scope()
        return scope.ledger.leases.handle(scope.chunk, scope.microbatch, self.name)

    def lacks_columns(self, context: LayerContext) -> bool:
        """In I: whether W still waits for x's transposed copy."""
        return context.training and self.weight.requires_grad and self._handle(context).payload.x is None

    def give_columns(self, context: LayerContext, columns: torch.Tensor) -> None:
        """x's transposed copy ``[in, tokens]``, quantised with F's scale."""
        handle = self._handle(context)
        handle.payload = replace(handle.payload, x=columns)

    # ---- W -----------------------------------------------------------------------------------------------------

    def weight_grad(self, context: LayerContext) -> None:
        scope = context.active_scope()
        operands: WeightGradOperands = scope.take_weight_grad(self.name)
        shared = None if context.joined is None else context.joined.linear(self.name)
        if shared is None:
            self._accumulate(operands, scope.write_grad(self.weight_name))
        elif scope.joint is None or not scope.joint.members:
            scope.leave_grad(self.weight_name)
        else:
            self._accumulate(shared.first(scope.joint.members), scope.write_joined_grad(self.weight_name))

    def _accumulate(self, operands: WeightGradOperands, beta: int) -> None:
        out = self.grad_view()
        assert operands.x is not None and operands.dy is not None
        x, dy = operands.x, operands.dy
        if operands.x_scale_inv is None:
            accumulate_mm(out, dy, x, beta, library=self.library)
        else:
            assert operands.dy_scale_inv is not None
            scales = operands.dy_scale_inv, operands.x_scale_inv
            accumulate_scaled_mm(out, dy, scales[0], x, scales[1], beta, library=self.library)

    def _cached(self, layout: str, context: LayerContext) -> Quantised:
        if self.cached is None:
            raise RuntimeError(f"{self.name}: no weight cache was bound")
        if context.scope is not None:
            context.scope.read_weight(self.weight_name, layout)
        return self.cached


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SplitLinear, context: LayerContext) -> torch.Tensor:
        ctx.layer, ctx.context, ctx.shape = layer, context, x.shape
        return layer.shaped(layer.product(x.reshape(-1, layer.in_features), context), x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        layer: SplitLinear = ctx.layer
        dx = layer.input_grad(dy.reshape(-1, layer.out_features), ctx.context, ctx.needs_input_grad[0])
        return (None if dx is None else dx.view(ctx.shape)), None, None


class _NormedLinear(torch.autograd.Function):
    """RMSNorm and the product in one node: the norm's output exists in FP8 only. Saves its input and the norm's statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: RMSNorm, layer: SplitLinear, context: LayerContext) -> torch.Tensor:
        from qeffect_lm.layers.fused import NormQuantiser

        quantiser = NormQuantiser(norm)
        flat = x.reshape(-1, layer.in_features)
        y = layer.shaped(layer.product(flat, context, quantiser), x.shape)
        ctx.save_for_backward(flat, quantiser.rstd)
        ctx.norm, ctx.layer, ctx.context, ctx.shape = norm, layer, context, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:  # type: ignore[override]
        layer: SplitLinear = ctx.layer
        d_normed = layer.input_grad(dy.reshape(-1, layer.out_features), ctx.context, True)
        assert d_normed is not None
        dx = ctx.norm.input_grad(*ctx.saved_tensors, d_normed, ctx.context)
        return dx.view(ctx.shape), None, None, None


def bind_products(module: nn.Module, library: CublasLt) -> None:
    """Give every linear of ``module`` the products of its device (assembly does, for layers on a GPU)."""
    for layer in module.modules():
        if isinstance(layer, SplitLinear):
            layer.library = library
