"""Products of groups (grouped GEMM): rows sorted by group, a weight for each group, one call whatever the groups' sizes.

    F, I   y[rows of g]  = x[rows of g] @ w[g].T
    W      dw[g]         = dy[rows of g].T @ x[rows of g]      straight into the main gradients

Where a group begins is read on the device, so that shapes are static and a captured graph serves every routing. On a GPU these
are the kernels of :mod:`qeffect_lm.kernels.grouped`. The reference is a loop over the groups, each the product that a linear
makes of its rows; to a capture it is one operation. A group without rows takes no part: its gradient is zeroed by the step's
first writer and left alone by later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qeffect_lm import kernels
from qeffect_lm.contract.ledger import Scope
from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.gemm import accumulate_mm
from qeffect_lm.fp8.quantise import Format, dequantise, scale_of_amax
from qeffect_lm.fp8.recipes import FORMATS, DelayedScaling, Recipe


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group.

    Attributes:
        offsets: ``[groups + 1]`` int32; group g has the rows from ``offsets[g]`` to ``offsets[g + 1]``. Rows behind the last
            group's are padding: they take part in nothing, and what a product leaves there means nothing.
        of_row: ``[rows]`` int64, the group of each row; of padding the number of groups.
    """

    offsets: torch.Tensor
    of_row: torch.Tensor

    @property
    def count(self) -> int:
        return self.offsets.shape[0] - 1

    @classmethod
    def one(cls, rows: int, device: torch.device) -> Groups:
        """All rows as one group."""
        offsets = torch.arange(2, dtype=torch.int32, device=device) * rows
        return cls(offsets, torch.zeros(rows, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class Matrices:
    """A matrix for each group, of one shape, dtype and stride, lying anywhere.

    ``table`` is what kernels find them by: their addresses, ``[groups]`` int64 on the device; None where none run.
    """

    tensors: tuple[torch.Tensor, ...]
    table: torch.Tensor | None = None

    @property
    def t(self) -> Matrices:
        """Their transposes."""
        return Matrices(tuple(tensor.t() for tensor in self.tensors), self.table)


@dataclass(frozen=True)
class Rows:
    """Rows of groups: as they are, or in FP8.

    Attributes:
        rows: ``[rows, features]``; None where W alone needs them and reads ``columns``.
        scale_inv: of FP8 the inverse scale of each group, ``[groups]`` float32.
        columns: of FP8 on a GPU the transposed copy that W reads, ``[features, places]`` (:func:`places_of`).
    """

    rows: torch.Tensor | None
    scale_inv: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """``rows``, which are there."""
        assert self.rows is not None
        return self.rows

    def for_weight_grad(self) -> Rows:
        """What W needs of it."""
        return self if self.columns is None else Rows(None, self.scale_inv, self.columns)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.rows, self.scale_inv, self.columns) if tensor is not None]


@dataclass(frozen=True)
class Scales:
    """What each group's rows are multiplied with, and the inverse of it, correctly rounded; ``[groups]`` float32."""

    scale: torch.Tensor
    scale_inv: torch.Tensor

    @classmethod
    def of(cls, scale: torch.Tensor) -> Scales:
        return cls(scale, scale.reciprocal())


@dataclass(frozen=True)
class RoleRows:
    """Where the groups' roles lie in the timeline's tensors: what kernels find their scales by.

    Attributes:
        rows: as the host has it, with which every use is compared: a timeline has its own order.
        table: the same on the device, ``[groups]`` int64.
    """

    rows: tuple[int, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, timeline: ScaleTimeline, roles: Sequence[str]) -> RoleRows:
        """(Not inside a capture: it copies from the host.)"""
        rows = tuple(timeline.index[role] for role in roles)
        return cls(rows, torch.tensor(rows, dtype=torch.int64, device=timeline.scale.device))


@dataclass(frozen=True)
class GroupPlace:
    """Storages of one microbatch's W operand, a part of those of several (:mod:`qeffect_lm.layers.joined`).

    Attributes:
        stored: FP8, columns ``[features, places]`` that lie any distance apart where kernels make W's products, else rows
            ``[places, features]``; as many places as there could ever be rows for.
        scale_inv: ``[groups]`` float32.
        offsets: ``[groups + 1]`` int32; both operands of a linear leave the same there.
    """

    stored: torch.Tensor
    scale_inv: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class Members:
    """Which rows of joined operands are whose: of each microbatch in turn, sorted by group.

    Attributes:
        offsets: ``[members, groups + 1]`` int32, as those of :class:`Groups`, from the member's first row.
        places: of each member.
    """

    offsets: torch.Tensor
    places: int

    @property
    def count(self) -> int:
        return self.offsets.shape[1] - 1


SPACINGS = 128, 64, 32, 16
"""What each group's columns may begin at a multiple of: a line of a GPU's cache, or parts of one, down to as many FP8 values as
one load takes. On an H200 W of groups that begin anywhere in a line takes up to a half longer."""


def places_of(rows: int, groups: int) -> int:
    """Places of ``rows`` rows of as many ``groups``, whatever their sizes: enough for the zeros behind each group's. Of 64 rows
    a group and more these are a quarter at most."""
    spacing = next((wide for wide in SPACINGS if 4 * wide * groups <= rows), SPACINGS[-1])
    return needed(rows, groups, spacing)


def spacing_of(places: int, groups: int) -> int:
    """What the groups begin at multiples of, in columns of as many places as :func:`places_of` gives."""
    return next((wide for wide in SPACINGS if 5 * wide * groups <= places), SPACINGS[-1])


def needed(rows: int, groups: int, spacing: int) -> int:
    """Places that groups of ``rows`` rows in all, however dealt, may take."""
    return -(-rows // spacing) * spacing + groups * spacing


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The table of :class:`Matrices`; they must stay where they are (not inside a capture: it copies from the host)."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)


def by_group(numbers: torch.Tensor, count: int) -> tuple[Groups, torch.Tensor, torch.Tensor]:
    """Sort rows by their groups' ``numbers``, ``[rows]`` int64 below ``count``, stably.

    Returns:
        The groups; which of the rows each sorted one was, and the inverse, where each row went, ``[rows]`` int64.
    """
    if kernels.usable(numbers.new_empty(0, dtype=torch.float32)):  # it takes integers, wherever kernels run
        from qeffect_lm.kernels import routing

        offsets, of_row, order, inverse = routing.by_group(numbers, count)
        return Groups(offsets, of_row), order, inverse
    of_row, order = torch.sort(numbers, stable=True)
    bounds = torch.arange(count + 1, device=numbers.device)
    offsets = torch.searchsorted(of_row, bounds, out_int32=True)
    return Groups(offsets, of_row), order, torch.sort(order).indices


# ---- scales ----------------------------------------------------------------------------------------------------


def amax_of_groups(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``max |x|`` of each group's rows, ``[groups]`` float32; EMPTY where a group has none. A NaN wins."""
    if kernels.usable(x):
        from qeffect_lm.kernels import experts

        return experts.amax_of_groups(x.detach(), groups)
    rows = x.detach().abs().amax(dim=1).float()
    others = groups.of_row != torch.arange(groups.count, device=x.device)[:, None]
    return rows.expand(groups.count, -1).masked_fill(others, EMPTY).amax(dim=1)


def group_scales(
    recipe: Recipe,
    layers: Sequence[str],
    kind: str,
    amax: torch.Tensor,
    scope: Scope | None,
    rows: RoleRows | None = None,
) -> Scales:
    """The scales that the groups' rows are quantised with; ``layers`` names each group's linear.

    Delayed scaling reports the groups' amax, and takes its history's scale; a group that has never had an amax takes the one
    of these very rows, until its first is rolled in. That is decided on the device: to the host every group reports, and the
    slot of one without rows stays EMPTY.

    Args:
        kind: ``input`` or ``grad_output``.
        amax: :func:`amax_of_groups`.
        scope: None where nothing may be recorded (evaluation).
        rows: of the roles, for the kernel, which needs them under delayed scaling.

    Raises:
        RuntimeError: ``rows`` are missing on a GPU, or are not those of the recipe's timeline.
    """
    fmt, by_kernel = FORMATS[kind], kernels.usable(amax)
    if by_kernel:
        from qeffect_lm.kernels import scales
    if not isinstance(recipe, DelayedScaling):
        margin = getattr(recipe, "margin", 0)
        return scales.current(amax, fmt, margin) if by_kernel else Scales.of(scale_of_amax(amax, fmt, margin))
    timeline, roles = recipe.timeline, roles_of_groups(layers, kind)
    if scope is not None:
        for role in roles:
            scope.read_scale(role)
            scope.report_amax(role)
    if by_kernel:
        return scales.held(amax, fmt, timeline, _table_of(rows, timeline, roles), merge=scope is not None)
    if scope is not None:
        merge_amax(recipe, layers, kind, amax)
    held = torch.stack([timeline.scale_of(role) for role in roles])
    seen = torch.stack([timeline.history_of(role) for role in roles]).amax(dim=1) > 0
    return Scales.of(torch.where(seen, held, scale_of_amax(amax, fmt, timeline.margin)))


def roles_of_groups(layers: Sequence[str], kind: str) -> list[str]:
    """The role of each group's rows."""
    return [f"{layer}.{kind}" for layer in layers]


def _table_of(rows: RoleRows | None, timeline: ScaleTimeline, roles: Sequence[str]) -> torch.Tensor:
    if rows is None:
        raise RuntimeError(f"the row of {roles[0]!r} was not bound for this GPU: call layers.moe.bind_experts(module)")
    found = tuple(timeline.index.get(role) for role in roles)
    if rows.rows != found or rows.table.device != timeline.scale.device:
        raise RuntimeError(
            f"{roles[0]!r} and its group were bound to rows of another timeline: call layers.moe.bind_experts(module) again"
        )
    return rows.table


def merge_amax(recipe: Recipe, layers: Sequence[str], kind: str, amax: torch.Tensor) -> None:
    """Max-merge ``amax`` ``[groups]`` into the roles' open slots; EMPTY leaves a slot as it is."""
    if isinstance(recipe, DelayedScaling):
        slots = [recipe.timeline.slot_of(role) for role in roles_of_groups(layers, kind)]
        torch._foreach_maximum_(slots, list(amax.unbind()))


def quantise_groups(
    x: torch.Tensor,
    scales: Scales,
    fmt: Format,
    groups: Groups,
    *,
    rows: bool = True,
    columns: bool = False,
    into: GroupPlace | None = None,
) -> Rows:
    """``saturate(x * scale of its group)`` ``[rows, features]``, with the scales' inverses as they are given.

    Args:
        rows, columns: which layouts to make. Without a GPU there are no columns, and always rows: W reads those.
        into: storages for what W reads, with ``columns``; else they are new ones.
    """
    if kernels.quantises(x):
        from qeffect_lm.kernels import grouped

        return grouped.quantise(x, scales, fmt, groups, rows=rows, columns=columns, into=into)
    of_row = groups.of_row.clamp(max=groups.count - 1)  # padding takes the last one's
    q = (x.float() * scales.scale[of_row][:, None]).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    made = Rows(q, scales.scale_inv, _columns(q, groups, into) if columns and kernels.usable(x) else None)
    return made if into is None else _placed(made, groups, into)


def _placed(made: Rows, groups: Groups, into: GroupPlace) -> Rows:
    """What W reads of it moved to its place."""
    assert made.scale_inv is not None
    into.scale_inv.copy_(made.scale_inv)
    into.offsets.copy_(groups.offsets)
    source = made.whole if made.columns is None else made.columns
    kept = into.stored[: source.shape[0]] if made.columns is None else into.stored[:, : source.shape[1]]
    kept.view(torch.uint8).copy_(source.view(torch.uint8))
    return Rows(kept, into.scale_inv) if made.columns is None else Rows(made.rows, into.scale_inv, into.stored)


def _columns(q: torch.Tensor, groups: Groups, into: GroupPlace | None) -> torch.Tensor:
    """The transposed copy by places of FP8 rows ``[rows, features]``, zeros between groups."""
    places = places_of(q.shape[0], groups.count) if into is None else into.stored.shape[1]
    spacing = spacing_of(places, groups.count)
    sizes = -(-groups.offsets.diff() // spacing) * spacing
    shift = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]) - groups.offsets
    place = torch.arange(q.shape[0], device=q.device) + shift[groups.of_row]
    behind = groups.of_row == groups.count
    bytes_ = q.view(torch.uint8).masked_fill(behind[:, None], 0)
    made = torch.zeros(places, q.shape[1], dtype=torch.uint8, device=q.device).index_copy_(0, place, bytes_)
    return made.t().contiguous().view(q.dtype)


# ---- products --------------------------------------------------------------------------------------------------


def grouped_mm(
    x: Rows,
    weights: Matrices,
    groups: Groups,
    dtype: torch.dtype,
    *,
    weight_scale_inv: Matrices | None = None,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``x`` ``[rows, k]`` times its group's ``w.T``, ``w`` ``[n, k]`` → ``[rows, n]`` in ``dtype``, summed in float32 or wider.

    FP8 operands come with their inverse scales (0-dim float32 each of ``weight_scale_inv``); FP8 weights are contiguous.
    """
    if _by_kernels(x):
        from qeffect_lm.kernels import grouped

        return grouped.product(x, weights, groups, dtype, weight_scale_inv, fast_accumulation)
    scales = [] if weight_scale_inv is None else list(weight_scale_inv.tensors)
    made: torch.Tensor = torch.ops.qeffect_lm.grouped_mm(
        x.whole, x.scale_inv, list(weights.tensors), scales, groups.offsets, dtype
    )
    return made


def accumulate_grouped_mm(outs: Matrices, dy: Rows, x: Rows, groups: Groups, beta: int) -> None:
    """``out[g] = beta * out[g] + dy[rows of g].T @ x[rows of g]``; ``outs`` ``[n, k]``, ``dy`` ``[rows, n]``, ``x``
    ``[rows, k]``.

    Of a group without rows ``out`` becomes zero with ``beta`` 0, and is not touched with 1. FP8 operands on a GPU come with
    ``columns``.
    """
    if _by_kernels(x):
        from qeffect_lm.kernels import grouped

        grouped.accumulate(outs, dy, x, groups, beta)
        return
    scales = [None if rows.scale_inv is None else rows.scale_inv[None] for rows in (dy, x)]
    torch.ops.qeffect_lm.accumulate_grouped_mm(
        dy.whole[None], scales[0], x.whole[None], scales[1], groups.offsets[None], list(outs.tensors), beta
    )


def accumulate_joined_mm(outs: Matrices, dy: Rows, x: Rows, members: Members, beta: int) -> None:
    """:func:`accumulate_grouped_mm` of several microbatches' rows, one after the other, as one product: ``outs`` are read and
    written once.

    Operands in FP8 lie in places side by side, ``scale_inv`` ``[members, groups]``; columns ``[features, members * places]`` or
    rows ``[members * places, features]``. A member's rows count by its own scales. A group that no member has rows of is one
    without rows.
    """
    if _by_kernels(x):
        from qeffect_lm.kernels import grouped

        grouped.accumulate(outs, dy, x, members, beta)
        return
    apart = [rows.whole.view(-1, members.places, rows.whole.shape[1]) for rows in (dy, x)]
    torch.ops.qeffect_lm.accumulate_grouped_mm(
        apart[0], dy.scale_inv, apart[1], x.scale_inv, members.offsets, list(outs.tensors), beta
    )


def _by_kernels(x: Rows) -> bool:
    return kernels.usable(x.whole if x.scale_inv is None else x.scale_inv)


def _spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    bounds = [int(bound) for bound in offsets.unbind()]
    return list(zip(bounds, bounds[1:], strict=False))


def _wide(rows: torch.Tensor, scale_inv: torch.Tensor | None) -> torch.Tensor:
    return rows if scale_inv is None else dequantise(rows, scale_inv)


def _one(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _grouped_mm(
    x: torch.Tensor,
    x_scale_inv: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    weight_scale_invs: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(x.shape[0], weights[0].shape[0], dtype=dtype, device=x.device)
    for group, (first, last) in enumerate(_spans(offsets)):
        if first == last:
            continue
        a, w = x[first:last], weights[group]
        if x_scale_inv is not None:
            a, w = dequantise(a, x_scale_inv[group]), dequantise(w, weight_scale_invs[group])
        elif a.dtype != dtype:  # a router's, whose product is not rounded to a narrow dtype
            a, w = a.to(dtype), w.to(dtype)
        out[first:last].copy_(torch.mm(a, w.t()))
    return out


def _accumulate_grouped_mm(
    dy: torch.Tensor,
    dy_scale_inv: torch.Tensor | None,
    x: torch.Tensor,
    x_scale_inv: torch.Tensor | None,
    offsets: torch.Tensor,
    outs: Sequence[torch.Tensor],
    beta: int,
) -> None:
    """Operands of members: ``dy`` and ``x`` ``[members, rows, features]``, scales ``[members, groups]``, ``offsets``
    ``[members, groups + 1]``. A group's rows of all of them, one after the other, are one product."""
    spans = [_spans(row) for row in offsets]
    for group, out in enumerate(outs):
        having = [(member, *span[group]) for member, span in enumerate(spans) if span[group][0] < span[group][1]]
        if not having:
            if beta == 0:
                out.zero_()
            continue
        a, b = (
            _one([_wide(rows[j, first:last], None if inv is None else inv[j, group]) for j, first, last in having])
            for rows, inv in ((dy, dy_scale_inv), (x, x_scale_inv))
        )
        accumulate_mm(out, a.t(), b.t(), beta)


# Operations of their own, because a loop over the groups reads their sizes on the host, which no capture may see.
torch.library.define(
    "qeffect_lm::grouped_mm",
    "(Tensor x, Tensor? x_scale_inv, Tensor[] weights, Tensor[] weight_scale_invs, Tensor offsets, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "qeffect_lm::accumulate_grouped_mm",
    "(Tensor dy, Tensor? dy_scale_inv, Tensor x, Tensor? x_scale_inv, Tensor offsets, Tensor(a!)[] outs, int beta) -> ()",
)
torch.library.impl("qeffect_lm::grouped_mm", "CompositeExplicitAutograd", _grouped_mm)
torch.library.impl("qeffect_lm::accumulate_grouped_mm", "CompositeExplicitAutograd", _accumulate_grouped_mm)


@torch.library.impl("qeffect_lm::grouped_mm", "Meta")
def _grouped_shape(
    x: torch.Tensor,
    x_scale_inv: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    weight_scale_invs: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0], dtype=dtype)


@torch.library.impl("qeffect_lm::accumulate_grouped_mm", "Meta")
def _accumulated(*arguments: object) -> None:
    """Without data there is nothing to add."""
