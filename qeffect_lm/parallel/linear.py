"""Tensor-parallel split linears: one linear cut over a process group, by output rows or by input columns.

A column-parallel linear followed by a row-parallel one needs one collective forward and one backward (Shoeybi et al. 2019,
"Megatron-LM"). With ``t`` the rank's place on the tp axis:

    column:  y_t = x @ w[rows_t].T + b[rows_t]             dx = sum over t of dy_t @ w[rows_t]      (in I)
    row:     y   = sum over t of x_t @ w[:, cols_t].T + b  dx_t = dy @ w[:, cols_t]                 (sum in F)

x, dx, y and dy outside are of this rank's tokens with sequence parallelism, else of all (:mod:`qeffect_lm.parallel.tensor`).
W needs no communication: each rank finishes the gradient of its own piece from what F and I gathered. Under FP8 a layer's three
roles are logical, one scale each for all pieces, so that every piece is quantised as the whole would be: the open amax slots
are max-reduced over tp before the commit that makes the scales. So tokens are gathered in FP8 (:class:`GatheringQuantiser`).
"""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.quantise import Format, Quantised, quantise, transposed
from qeffect_lm.fp8.recipes import DelayedScaling, Quantiser, Recipe
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.parallel.cuts import Cut, Even, length_of
from qeffect_lm.parallel.tensor import TensorParallel


class GatheringQuantiser:
    """Quantises this rank's tokens and gathers all ranks' in FP8: ``[tokens of this rank, …]`` → ``[tokens, features]``.

    The bytes are those of gathering first: an element's FP8 depends on it and on the scale, which all ranks share, alone. The
    slot gets the amax of this rank's tokens; merged over the ranks it is that of all.
    """

    def __init__(self, own: Quantiser, tp: TensorParallel, context: LayerContext, who: str) -> None:
        self._own, self._tp, self._context, self._who = own, tp, context, who

    def __call__(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        fmt: Format,
        /,
        *,
        columns: bool,
        columns_out: torch.Tensor | None = None,
        **outs: Any,
    ) -> Quantised:
        made = self._own(x, scale, fmt, columns=False, **outs)
        assert made.rows is not None
        rows = self._tp.gather(made.rows.view(torch.uint8), self._context, self._who).view(fmt.dtype)  # gloo has no FP8
        return Quantised(rows, transposed(rows, columns_out) if columns else None, made.scale_inv)


class _ParallelLinear(SplitLinear):
    """What both cuts share; ``in_features`` and ``out_features`` are this rank's."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if recipe is not None and not isinstance(recipe, DelayedScaling):
            raise UsageError(
                f"{name}: recipe {recipe.name} would give each tensor-parallel piece a scale of its own; use delayed scaling"
            )
        super().__init__(name, in_features, out_features, bias=bias, recipe=recipe, dtype=dtype)
        self.tp = tp

    def shaped(self, y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Where tokens are cut, an input and its product have different ones: ``[tokens, out]`` as it is."""
        return y if self.tp.sequence else super().shaped(y, shape)

    def gathered(
        self, x: torch.Tensor, quantiser: Quantiser, context: LayerContext
    ) -> tuple[torch.Tensor, Quantiser]:
        """All ranks' tokens instead of this one's ``x``, or a quantiser that gets them in FP8; where tokens are cut."""
        if not self.tp.sequence:
            return x, quantiser
        if self.recipe is None or context.phase is Phase.CALIBRATE:
            return self.tp.gather(x, context, self.name), quantiser
        return x, GatheringQuantiser(quantiser, self.tp, context, self.name)

    @staticmethod
    def _part(name: str, cut: Cut, tp: TensorParallel) -> int:
        try:
            return length_of(cut.pieces(tp.size, tp.rank))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        """What F and I of it always exchange, as the scope is told."""
        raise NotImplementedError


class ColumnParallelLinear(_ParallelLinear):
    """Output features cut: ``[tokens of this rank, in]`` → ``[tokens, out of this rank]``.

    Args:
        name: logical name, the same on all tp ranks.
        in_features, out_features: of the whole linear.
        cut: which outputs a rank holds; None: equal pieces.
        bias: cut like the output.
        recipe: None or delayed scaling.

    Raises:
        UsageError: the output features cannot be cut, or the recipe has no scale in common.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        cut: Cut | None = None,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        part = self._part(name, cut or Even(out_features), tp)
        super().__init__(name, in_features, part, tp=tp, bias=bias, recipe=recipe, dtype=dtype)

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        sequence = self.tp.sequence
        return {"F": (f"{self.name}.gather",) if sequence else (), "I": (f"{self.name}.{'scatter' if sequence else 'sum'}",)}

    def entered(self, x: torch.Tensor, quantiser: Quantiser, context: LayerContext) -> tuple[torch.Tensor, Quantiser]:
        return self.gathered(x, quantiser, context)

    def input_grad(
        self, dy: torch.Tensor, context: LayerContext, needs_dx: bool, quantiser: Quantiser = quantise
    ) -> torch.Tensor | None:
        dx = super().input_grad(dy, context, needs_dx, quantiser)
        return None if dx is None else self.tp.enter_grad(dx, context, self.name)


class RowParallelLinear(_ParallelLinear):
    """Input features cut: ``[tokens, in of this rank]`` → ``[tokens of this rank, out]``.

    The bias is whole on every rank and added after the sum. Its gradient is a part where tokens are cut, else equal on all
    ranks. Arguments and errors: as for :class:`ColumnParallelLinear`, with the input features.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        tp: TensorParallel,
        cut: Cut | None = None,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        part = self._part(name, cut or Even(in_features), tp)
        super().__init__(name, part, out_features, tp=tp, bias=bias, recipe=recipe, dtype=dtype)

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        sequence = self.tp.sequence
        return {"F": (f"{self.name}.{'scatter' if sequence else 'sum'}",), "I": (f"{self.name}.gather",) if sequence else ()}

    def product(
        self,
        x: torch.Tensor,
        context: LayerContext,
        quantiser: Quantiser = quantise,
        residual: torch.Tensor | None = None,
        columns_in_i: bool = False,
    ) -> torch.Tensor:
        y = super().product(x, context, quantiser, columns_in_i=columns_in_i)
        rerun = context.rerun if context.training else None
        if rerun is not None and not rerun.first and rerun.tail is self:
            return y[self.tp.tokens(y.shape[0])]  # zeros that nobody reads
        y = self.tp.leave(y, context, self.name)
        return y if residual is None else y.add_(residual)  # once, not on every rank

    def input_grad(
        self, dy: torch.Tensor, context: LayerContext, needs_dx: bool, quantiser: Quantiser = quantise
    ) -> torch.Tensor | None:
        dy, quantiser = self.gathered(dy, quantiser, context)
        return super().input_grad(dy, context, needs_dx, quantiser)
