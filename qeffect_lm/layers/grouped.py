"""Linears of a group of experts: every expert's weight is a linear's of its own, their products are made together.

    F:  y  = x  @ w[e].T     for the rows of each expert e, sorted by expert
    I:  dx = dy @ w[e]
    W:  dw[e] = dy.T @ x     over e's rows; straight into its main gradient

To checkpoints, weight caches, scales and optimizers an expert's weight is like any other (:class:`ExpertLinear`); a microbatch
has one lease for the group. Under delayed scaling each expert has a scale for its rows, since the rows of two experts come from
weights that have nothing to do with each other. No work here depends on an expert's number of rows. Of an idle one the amax
slots stay EMPTY, and the gradient is zeroed by the step's first writer and not touched by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.grouped import (
    Groups,
    Matrices,
    RoleRows,
    Rows,
    Scales,
    accumulate_grouped_mm,
    accumulate_joined_mm,
    addresses,
    amax_of_groups,
    group_scales,
    grouped_mm,
    merge_amax,
    quantise_groups,
    roles_of_groups,
)
from qeffect_lm.fp8.recipes import FORMATS, DelayedScaling
from qeffect_lm.layers.base import Deferred
from qeffect_lm.layers.context import LayerContext, Phase, Rerun
from qeffect_lm.layers.linear import SplitLinear

if TYPE_CHECKING:
    from qeffect_lm.layers.joined import JoinedGroups

_TABLES = ("weight", "rows", "columns", "scale_inv", "grad")
_KINDS = ("input", "grad_output")  # what of groups has a scale for each group


class ExpertLinear(SplitLinear):
    """The weight of one expert, with cache, roles and main gradient of its own; :class:`GroupedLinear` makes its products.

    ``share``: the part of all rows that an expert gets on average.
    """

    share: float = 1.0

    @property
    def defers(self) -> bool:
        return False

    @property
    def joins(self) -> bool:
        return False  # the group's does


@dataclass(frozen=True)
class GroupOperands:
    """What W needs: x and dY ``[rows, features]`` in stored precision, and which rows are whose: the splits of this microbatch,
    on the device (None: they lie with the operands, in a place among other microbatches'). F leaves dY to I, and x too where I
    makes it again."""

    groups: Groups | None
    x: Rows | None = None
    dy: Rows | None = None

    def tensors(self) -> list[torch.Tensor]:
        held = [tensor for rows in (self.x, self.dy) if rows is not None for tensor in rows.tensors()]
        return held if self.groups is None else [*held, self.groups.offsets]


class GroupedLinear(Deferred):
    """The same linear of all experts, over rows sorted by expert.

    Args:
        name: of the leases.
        experts: their linears, of one shape and recipe. (They are modules of somebody else.)
        most_rows: how many rows a microbatch of so many tokens could ever have here; None: one a token.
    """

    def __init__(
        self, name: str, experts: Sequence[ExpertLinear], most_rows: Callable[[int], int] | None = None
    ) -> None:
        super().__init__(name)
        self.experts = tuple(experts)
        self.most_rows = most_rows or (lambda tokens: tokens)
        self.recipe = experts[0].recipe
        self.in_features, self.out_features = experts[0].in_features, experts[0].out_features
        for table in _TABLES:
            self.register_buffer(f"{table}_table", None, persistent=False)
        for kind in _KINDS:
            self.register_buffer(f"{kind}_roles_table", None, persistent=False)
        self._role_rows: dict[str, tuple[int, ...]] = {}  # kind → what its table says

    @property
    def defers(self) -> bool:
        trained = [expert.weight.requires_grad for expert in self.experts]
        if any(trained) and not all(trained):
            frozen = self.experts[trained.index(False)].weight_name
            raise UsageError(
                f"{frozen} is frozen and other experts' are not: freeze the weights of all experts of a layer or of none"
            )
        return trained[0]

    @property
    def joins(self) -> bool:
        return self.recipe is not None and self.recipe.scales_first and self.defers

    @property
    def names(self) -> list[str]:
        return [expert.name for expert in self.experts]

    # ---- F -----------------------------------------------------------------------------------------------------

    def product(
        self, x: torch.Tensor, groups: Groups, context: LayerContext, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """F on ``[rows, in]`` → ``[rows, out]``, and the lease in TRAIN.

        ``amax``: :func:`amax_of_groups` of ``x``, where its maker knows it; None: found here, if it is wanted.
        """
        rerun = context.rerun if context.training else None
        again = rerun is not None and not rerun.first
        if self._in_fp8(context):
            assert self.recipe is not None
            if again:
                scales: Scales = rerun.scales[self.name]  # type: ignore[union-attr]
            else:
                scales = self._scales("input", x, groups, context, amax)
            if rerun is not None and not again:
                rerun.scales[self.name] = scales
            kept, unread = context.training and self.defers and (rerun is None or again), again and self._ends(rerun)
            into = context.group_place_of(self.name, "input") if kept else None
            operand = quantise_groups(x, scales, FORMATS["input"], groups, rows=not unread, columns=kept, into=into)
        else:
            self._observe("input", x, groups, amax)
            operand = Rows(x)
        if context.training and self.defers:
            if again:
                self._fill(context, x=operand)
            else:
                x_operand = None if rerun is not None else operand.for_weight_grad()
                own = None if self._joined(context) else groups
                context.active_scope().retain(self.name, GroupOperands(own, x_operand))
        if again and self._ends(rerun):
            return x.new_zeros(x.shape[0], self.out_features)  # stands for a product whose value nobody reads
        return self._multiply(operand, "rows", groups, context, x.dtype)

    # ---- I -----------------------------------------------------------------------------------------------------

    def input_grad(
        self, dy: torch.Tensor, groups: Groups, context: LayerContext, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """I on ``[rows, out]`` → dx ``[rows, in]``, and dY into the lease; ``amax`` as for :meth:`product`, of ``dy``."""
        if self._in_fp8(context):
            scales = self._scales("grad_output", dy, groups, context, amax)
            kept = context.training and self.defers
            into = context.group_place_of(self.name, "grad_output") if kept else None
            operand = quantise_groups(dy, scales, FORMATS["grad_output"], groups, columns=kept, into=into)
        else:
            self._observe("grad_output", dy, groups, amax)
            operand = Rows(dy)
        if context.training and self.defers:
            context.active_scope().input_grad_done(self.name)
            self._fill(context, dy=operand)
        return self._multiply(operand, "columns", groups, context, dy.dtype)

    # ---- W -----------------------------------------------------------------------------------------------------

    def weight_grad(self, context: LayerContext) -> None:
        scope = context.active_scope()
        operands: GroupOperands = scope.take_weight_grad(self.name)
        assert operands.x is not None and operands.dy is not None
        grads = self._matrices("grad", [expert.grad_view() for expert in self.experts])
        names = [expert.weight_name for expert in self.experts]
        shared = self._joined(context)
        if shared is None:
            assert operands.groups is not None
            (beta,) = {scope.write_grad(name) for name in names}
            accumulate_grouped_mm(grads, operands.dy, operands.x, operands.groups, beta)
        elif scope.joint is None or not scope.joint.members:
            for name in names:
                scope.leave_grad(name)
        else:
            both = shared.first(scope.joint.members)
            (beta,) = {scope.write_joined_grad(name) for name in names}
            accumulate_joined_mm(grads, both.dy, both.x, both.members, beta)

    def _joined(self, context: LayerContext) -> JoinedGroups | None:
        """The operands of the microbatches whose W is one product with this one's."""
        return None if context.joined is None else context.joined.groups(self.name)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _in_fp8(self, context: LayerContext) -> bool:
        return self.recipe is not None and context.phase is not Phase.CALIBRATE

    def _scales(
        self, kind: str, x: torch.Tensor, groups: Groups, context: LayerContext, amax: torch.Tensor | None
    ) -> Scales:
        assert self.recipe is not None
        scope = context.active_scope() if context.training else None
        table = getattr(self, f"{kind}_roles_table")
        rows = None if table is None else RoleRows(self._role_rows[kind], table)
        amax = amax_of_groups(x, groups) if amax is None else amax
        return group_scales(self.recipe, self.names, kind, amax, scope, rows)

    def _observe(self, kind: str, x: torch.Tensor, groups: Groups, amax: torch.Tensor | None) -> None:
        """Calibration: what of this would be in FP8 has its amax recorded."""
        if self.recipe is None:
            return
        merge_amax(self.recipe, self.names, kind, amax_of_groups(x, groups) if amax is None else amax)
        if kind == "input":
            for expert in self.experts:
                self.recipe.observe(expert.name, "weight", expert.weight.bfloat16())

    def _fill(self, context: LayerContext, **rows: Rows) -> None:
        """x or dY into the lease that F opened."""
        scope = context.active_scope()
        handle = scope.ledger.leases.handle(scope.chunk, scope.microbatch, self.name)
        handle.payload = replace(handle.payload, **{name: operand.for_weight_grad() for name, operand in rows.items()})

    def _ends(self, rerun: Rerun | None) -> bool:
        """Whether nobody reads this product when F runs again."""
        return rerun is not None and rerun.tail is self

    def _multiply(
        self, operand: Rows, layout: str, groups: Groups, context: LayerContext, dtype: torch.dtype
    ) -> torch.Tensor:
        """Times the weights as they lie (``rows``), or their transposes (``columns``)."""
        if operand.scale_inv is None:
            weights = self._matrices("weight", [expert.weight.detach() for expert in self.experts])
            return grouped_mm(operand, weights if layout == "rows" else weights.t, groups, dtype)
        cached = [expert._cached(layout, context) for expert in self.experts]
        weights = self._matrices(layout, [getattr(one, layout) for one in cached])
        scales = self._matrices("scale_inv", [one.scale_inv for one in cached])
        return grouped_mm(
            operand, weights, groups, dtype, weight_scale_inv=scales, fast_accumulation=layout == "rows"
        )

    def _matrices(self, table: str, tensors: Sequence[torch.Tensor]) -> Matrices:
        return Matrices(tuple(tensors), getattr(self, f"{table}_table"))

    def bind(self) -> None:
        """Make the tables that kernels read: of addresses, and of the roles' rows in the timeline."""
        made: dict[str, list[Any]] = {
            "weight": [expert.weight for expert in self.experts],
            "grad": [expert.main_grad for expert in self.experts],
        }
        cached = [expert.cached for expert in self.experts]
        for layout in ("rows", "columns", "scale_inv"):
            made[layout] = [getattr(one, layout, None) for one in cached]
        for table, tensors in made.items():
            there = all(tensor is not None for tensor in tensors)
            setattr(self, f"{table}_table", addresses(tensors) if there else None)
        if isinstance(self.recipe, DelayedScaling):
            for kind in _KINDS:
                found = RoleRows.of(self.recipe.timeline, roles_of_groups(self.names, kind))
                self._role_rows[kind] = found.rows
                setattr(self, f"{kind}_roles_table", found.table)
