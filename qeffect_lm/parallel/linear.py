"""Tensor-parallel split linears: one linear cut over a process group, by output rows or by input columns.

A column-parallel linear followed by a row-parallel one needs one all-reduce forward and one backward (Shoeybi
et al. 2019, "Megatron-LM"). With ``t`` the rank's place on the tp axis:

    column:  y_t = x @ w[rows_t].T + b[rows_t]        dx = sum over t of dy_t @ w[rows_t]     (reduced in I)
    row:     y   = sum over t of x_t @ w[:, cols_t].T + b      dx_t = dy @ w[:, cols_t]       (reduced in F)

W needs no communication: each rank finishes the gradient of its own piece. Under FP8 a layer's three roles
are logical, one scale each for all pieces, so that every piece is quantised as the whole would be: the open
amax slots are max-reduced over tp before the commit that makes the scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.quantise import quantise
from qeffect_lm.fp8.recipes import CurrentScaling, Quantiser, Recipe
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.optim.flat import ParamSpec
from qeffect_lm.state import LogicalTensor, Role


@dataclass(frozen=True)
class Cut:
    """Which piece of a logical parameter a rank holds, in :class:`~qeffect_lm.state.LogicalTensor`'s
    terms."""

    axes: tuple[str | None, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece, a view of the whole tensor."""
        if tuple(whole.shape) != self.global_shape:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} is cut as one of {self.global_shape}")
        for dimension, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dimension, start, length)
        return whole

    def param_spec(self, name: str, *, decay: bool, trainable: bool = True) -> ParamSpec:
        """The parameter for the flat storage."""
        return ParamSpec(name, self.shape, decay, self.axes, self.global_shape, self.start, trainable)

    def logical(self, name: str, piece: torch.Tensor, role: Role) -> LogicalTensor:
        """``piece`` as this rank's part of the logical tensor ``name``."""
        replicated = tuple(axis for axis in ("dp", "tp") if axis not in self.axes)
        return LogicalTensor(name, piece, role, self.global_shape, self.start, self.axes, replicated)


class _ParallelLinear(SplitLinear):
    """What both cuts share. ``in_features`` and ``out_features`` are this rank's, ``global_shape`` the whole
    weight's."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup | None,
        cut: int,
        bias: bool,
        recipe: Recipe | None,
        dtype: torch.dtype,
    ) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.size > 1 and isinstance(recipe, CurrentScaling):
            raise UsageError(
                f"{name}: current scaling would give each tensor-parallel piece a scale of its own; use delayed scaling"
            )
        self.global_shape = (out_features, in_features)
        shape = list(self.global_shape)
        if shape[cut] % self.size:
            side = ("output", "input")[cut]
            raise UsageError(f"{name}: {shape[cut]} {side} features cannot be cut into {self.size} equal pieces (tp)")
        shape[cut] //= self.size
        super().__init__(name, shape[1], shape[0], bias=bias, recipe=recipe, dtype=dtype)
        self._group, self._cut = group, cut

    def cuts(self) -> dict[str, Cut]:
        """Parameter name → its piece: the weight, and the bias where there is one."""

        def piece(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Cut:
            start = tuple(self.rank * n if axis else 0 for axis, n in zip(axes, shape, strict=True))
            whole = tuple(self.size * n if axis else n for axis, n in zip(axes, shape, strict=True))
            return Cut(axes, whole, start, shape)

        axes: tuple[str | None, ...] = ("tp", None) if self._cut == 0 else (None, "tp")
        cuts = {self.weight_name: piece(axes, tuple(self.weight.shape))}
        if self.bias is not None:
            cuts[f"{self.name}.bias"] = piece(axes[:1], tuple(self.bias.shape))
        return cuts

    def _reduced(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over tp, in place and in the tensor's dtype; all ranks get the same bytes."""
        if self._group is not None:
            dist.all_reduce(partial, group=self._group)
        return partial


class ColumnParallelLinear(_ParallelLinear):
    """Output features cut: ``[..., in]`` (equal on all tp ranks) → ``[..., out / tp]``.

    Args:
        name: logical name, the same on all tp ranks.
        in_features, out_features: of the whole linear.
        group: the tp process group; None: not cut.
        bias: cut like the output.
        recipe: None or delayed scaling.

    Raises:
        UsageError: the output features do not divide by tp, or the recipe is current scaling with tp above 1.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup | None = None,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name, in_features, out_features, group=group, cut=0, bias=bias, recipe=recipe, dtype=dtype)

    def input_grad(
        self, dy: torch.Tensor, context: LayerContext, needs_dx: bool, quantiser: Quantiser = quantise
    ) -> torch.Tensor | None:
        dx = super().input_grad(dy, context, needs_dx, quantiser)
        return None if dx is None else self._reduced(dx)


class RowParallelLinear(_ParallelLinear):
    """Input features cut: ``[..., in / tp]`` → ``[..., out]``, equal on all tp ranks.

    The bias is whole on every rank and added once, after the sum; its gradient is equal on all of them.
    Arguments and errors: as for :class:`ColumnParallelLinear`, with the input features.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        group: dist.ProcessGroup | None = None,
        bias: bool = False,
        recipe: Recipe | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name, in_features, out_features, group=group, cut=1, bias=bias, recipe=recipe, dtype=dtype)

    def product(
        self,
        x: torch.Tensor,
        context: LayerContext,
        quantiser: Quantiser = quantise,
        residual: torch.Tensor | None = None,
        columns_in_i: bool = False,
    ) -> torch.Tensor:
        y = self._reduced(super().product(x, context, quantiser, columns_in_i=columns_in_i))
        return y if residual is None else y.add_(residual)  # once, not on every rank
