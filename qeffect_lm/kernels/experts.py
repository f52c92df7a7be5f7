"""What stands between the products of groups (:mod:`qeffect_lm.layers.moe`): SwiGLU times the router's weight and the way back,
the amax of each group, and the sum of a token's rows. Each reads its operands once and writes once.

A row's numbers do not depend on where it lies, nor on the tile that took it. Rows of padding are not read; what is made of them
is zeros. Sums have one order; only amax is merged by atomics, whose order changes no maximum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.fp8.grouped import Groups
from qeffect_lm.kernels import launched
from qeffect_lm.kernels.swiglu import load_pair, sigmoid_of
from qeffect_lm.kernels.tables import Tile
from qeffect_lm.kernels.tile import magnitude, merge_amax, tile_offsets

# A row's part of a tile is a warp's, in loads of 16 bytes a thread.
FORWARD, AMAX, ADDED = Tile(16, 256, 8), Tile(8, 1024, 8), Tile(4, 512, 4)
BACKWARD = Tile(4, 256, 4)  # its programs walk over whole rows, so many columns at a time
_NO_ROW = tl.constexpr(-(2**31))  # below the bits of EMPTY: leaves any slot as it is


@triton.jit
def _groups_of(group_of_row, row, m, count):
    """The group of each row; of padding, and of rows that are not there, ``count``."""
    return tl.load(group_of_row + row, mask=row < m, other=count).to(tl.int32)


@triton.jit
def _merge_groups(amax, bits, group, count):
    """Max-merge ``bits`` (the largest :func:`magnitude` of each row) into the slots of the rows' groups.

    Sorted rows make a program's groups consecutive, mostly one: one atomic each, not one a row.
    """
    first, last = tl.min(group), tl.max(tl.where(group < count, group, -1))
    for g in range(first, last + 1):
        merge_amax(amax + g, tl.where(group == g, bits, _NO_ROW))


@triton.jit
def _rounded(values, like):
    """To the dtype of what ``like`` points to, and back to float32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward_kernel(
    hidden, row_weights, group_of_row, out, amax, m, f, count,
    MERGE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    row, column = tile_offsets(tl.program_id(0), f, TILE_M, TILE_K)
    group = _groups_of(group_of_row, row, m, count)
    columns = (column < f)[None, :]
    mask = (group < count)[:, None] & columns
    gate, up = load_pair(hidden, row, column, mask, f)
    weight = tl.load(row_weights + row, mask=group < count, other=0.0)
    values = gate * sigmoid_of(gate) * up * weight[:, None]
    if MERGE:
        _merge_groups(amax, tl.max(magnitude(_rounded(values, out), mask), axis=1), group, count)
    at = row.to(tl.int64)[:, None] * f + column[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=(row < m)[:, None] & columns)


@triton.jit
def _backward_kernel(
    hidden, row_weights, d_weighted, group_of_row, d_hidden, of_rows, amax, m, f, count,
    MERGE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    group = _groups_of(group_of_row, row, m, count)
    weight = tl.load(row_weights + row, mask=group < count, other=0.0)[:, None]
    at = row.to(tl.int64)[:, None] * f
    total = tl.zeros((TILE_M, TILE_K), tl.float32)
    bits = tl.zeros((TILE_M,), tl.int32)
    for begin in range(0, f, TILE_K):
        column = begin + tl.arange(0, TILE_K)
        columns = (column < f)[None, :]
        mask = (group < count)[:, None] & columns
        gate, up = load_pair(hidden, row, column, mask, f)
        grad = tl.load(d_weighted + at + column[None, :], mask=mask, other=0.0).to(tl.float32)
        sigmoid = sigmoid_of(gate)
        silu = gate * sigmoid
        total += grad * (silu * up)
        d_activation = grad * weight
        d_gate = d_activation * up * (sigmoid + silu * (1 - sigmoid))
        d_up = d_activation * silu
        if MERGE:
            larger = tl.maximum(magnitude(_rounded(d_gate, hidden), mask), magnitude(_rounded(d_up, hidden), mask))
            bits = tl.maximum(bits, tl.max(larger, axis=1))
        here = d_hidden + 2 * at + column[None, :]
        there = (row < m)[:, None] & columns
        tl.store(here, d_gate.to(hidden.dtype.element_ty), mask=there)
        tl.store(here + f, d_up.to(hidden.dtype.element_ty), mask=there)
    tl.store(of_rows + row, tl.sum(total, axis=1), mask=row < m)
    if MERGE:
        _merge_groups(amax, bits, group, count)


@triton.jit
def _amax_kernel(x, group_of_row, amax, m, k, count, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    row, column = tile_offsets(tl.program_id(0), k, TILE_M, TILE_K)
    group = _groups_of(group_of_row, row, m, count)
    mask = (group < count)[:, None] & (column < k)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0.0).to(tl.float32)
    _merge_groups(amax, tl.max(magnitude(values, mask), axis=1), group, count)


@triton.jit
def _added_kernel(rows, places, out, m, k, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    token, column = tile_offsets(tl.program_id(0), k, TILE_M, TILE_K)
    inside = token < m
    mask = inside[:, None] & (column < k)[None, :]
    total = tl.zeros((TILE_M, TILE_K), tl.float32)
    for part in tl.static_range(PARTS):
        place = tl.load(places + token * PARTS + part, mask=inside, other=0)
        values = tl.load(rows + place[:, None] * k + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if part == 0:  # not added to zero, which would make a zero of -0
            total = values
        else:
            total += values
    tl.store(out + token.to(tl.int64)[:, None] * k + column[None, :], total.to(out.dtype.element_ty), mask=mask)


def _slots(groups: Groups) -> torch.Tensor:
    return torch.full((groups.count,), EMPTY, device=groups.offsets.device)


def _cut(tile: Tile) -> dict[str, int]:
    return {"TILE_M": tile.rows, "TILE_K": tile.columns, "num_warps": tile.warps}


def forward(
    hidden: torch.Tensor, row_weights: torch.Tensor, groups: Groups, *, amax: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``hidden`` ``[rows, 2 f]``, gate's columns, then up's, and float32 ``row_weights`` ``[rows, 1]`` →
    ``silu(gate) * up * weight`` ``[rows, f]``, made in float32, rounded once to ``hidden``'s dtype; with ``amax`` the
    :func:`amax_of_groups` of that, ``[groups]`` float32."""
    hidden, row_weights = hidden.contiguous(), row_weights.contiguous()
    m, f = hidden.shape[0], hidden.shape[1] // 2
    out = torch.empty(m, f, dtype=hidden.dtype, device=hidden.device)
    slots = _slots(groups) if amax else None
    launched("experts_forward", hidden, row_weights, groups.of_row, out, slots)
    _forward_kernel[FORWARD.grid(m, f)](
        hidden, row_weights, groups.of_row, out, row_weights if slots is None else slots, m, f, groups.count,
        MERGE=amax, **_cut(FORWARD),
    )  # fmt: skip
    return out, slots


def backward(
    hidden: torch.Tensor, row_weights: torch.Tensor, d_weighted: torch.Tensor, groups: Groups, *, amax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradient ``d_weighted`` ``[rows, f]`` of :func:`forward`'s result → that of ``hidden`` ``[rows, 2 f]``, in its dtype,
    that of the rows' weights, float32 ``[rows]``, and with ``amax`` the first one's :func:`amax_of_groups`."""
    hidden, row_weights, d_weighted = hidden.contiguous(), row_weights.contiguous(), d_weighted.contiguous()
    m, f = d_weighted.shape
    d_hidden, of_rows = torch.empty_like(hidden), torch.empty(m, dtype=torch.float32, device=hidden.device)
    slots = _slots(groups) if amax else None
    launched("experts_backward", hidden, row_weights, d_weighted, groups.of_row, d_hidden, of_rows, slots)
    _backward_kernel[(triton.cdiv(m, BACKWARD.rows),)](
        hidden, row_weights, d_weighted, groups.of_row, d_hidden, of_rows, of_rows if slots is None else slots,
        m, f, groups.count, MERGE=amax, **_cut(BACKWARD),
    )  # fmt: skip
    return d_hidden, of_rows, slots


def amax_of_groups(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """:func:`qeffect_lm.fp8.grouped.amax_of_groups`, in one pass over ``x`` ``[rows, k]``."""
    x = x.contiguous()
    m, k = x.shape
    slots = _slots(groups)
    launched("amax_of_groups", x, groups.of_row, slots)
    _amax_kernel[AMAX.grid(m, k)](x, groups.of_row, slots, m, k, groups.count, **_cut(AMAX))
    return slots


def added(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """:func:`qeffect_lm.layers.moe.added`: rows ``[rows, k]`` at ``places`` ``[tokens, parts]`` int64 → ``[tokens, k]``."""
    rows, places = rows.contiguous(), places.contiguous()
    (m, parts), k = places.shape, rows.shape[1]
    out = torch.empty(m, k, dtype=rows.dtype, device=rows.device)
    launched("experts_added", rows, places, out)
    _added_kernel[ADDED.grid(m, k)](rows, places, out, m, k, PARTS=parts, **_cut(ADDED))
    return out
