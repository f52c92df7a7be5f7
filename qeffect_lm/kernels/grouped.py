"""Products of groups (:mod:`qeffect_lm.fp8.grouped`): tiled kernels that read on the device where a group begins.

F and I have a program for every tile of rows that there could be: of ``r`` rows in ``g`` groups at most ``r / TILE_M + g``
tiles are begun; a program finds its group in the offsets, and those that are left over end at once. W has a program for every
tile of every group's gradient, which walks over the group's rows in their order. So each element is summed by one program in
one order: results repeat bit for bit, and a row's do not depend on where it lies.

Hopper multiplies FP8 only where both operands are contiguous along the summed dimension. For F and I they are; for W that
dimension is the rows, so it reads transposed copies, ``columns`` ``[features, places]``, in which each group begins at a
multiple of 16 to 128 (:func:`~qeffect_lm.fp8.grouped.spacing_of`): loads are 16 bytes wide whatever the routing, where rows are
many those of a tile's row are one line of the cache, and a group's sum does not depend on where it lies.

    places    0 ............ | 16 .............. | 48 .... | 64
    rows      0 1 2 3 4 0 0  | 5 6 7 ... 24 0 0  | 25 26 0 |         groups of 5, 20 and 2 rows; 0: zeros between them

The columns of several microbatches, *members*, may lie side by side, each in places of its own: then W walks over a group's
rows of one member after the other, and the gradient is read and written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.grouped import (
    GroupPlace,
    Groups,
    Matrices,
    Members,
    Rows,
    Scales,
    needed,
    places_of,
    spacing_of,
)
from qeffect_lm.fp8.quantise import Format
from qeffect_lm.kernels import launched
from qeffect_lm.kernels.tables import Tile
from qeffect_lm.kernels.tile import cast

QUANTISE = Tile(32, 128, 4)
STRIP = 4  # tiles of a matrix that one program quantises: finding its rows' groups takes as long as one
SUPER = tl.constexpr(8)  # tiles of rows that go through the columns together, while those are in the L2 cache


@dataclass(frozen=True)
class _Tiles:
    """Of the result (rows, columns), of the summed dimension at a time; warps and pipeline stages."""

    rows: int
    columns: int
    summed: int
    warps: int = 4
    stages: int = 3

    def options(self) -> dict[str, int]:
        return {
            "TILE_M": self.rows, "TILE_N": self.columns, "TILE_K": self.summed,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


# The fastest of those tried on an H200 over groups of 512 to 2048 rows. Without fast accumulation a tile has two sums, that of
# the tensor cores and the one it is moved to every 128 features (as in the DeepSeek-V3 report, 3.3.2): more columns would not
# fit in registers.
_FAST = _Tiles(128, 256, 128, warps=8)
_FP8 = _Tiles(128, 128, 128)
_FP8_W = _Tiles(64, 64, 128)  # of few rows W is the traffic of its gradient, which more programs hide better
_FP8_W_LONG, _LONG = _Tiles(64, 128, 128), 2048  # rows a group
_BF16 = _Tiles(128, 256, 64, warps=8)
_ROUTER = _Tiles(64, 16, 128)  # of few columns, summed in float32: programs enough are all that counts
_BF16_W = _Tiles(128, 128, 64)


@triton.jit
def _spans(offsets, count, m, COUNT: tl.constexpr):
    """Numbers of groups, their first rows and ends; group ``count`` is the padding behind them, up to row ``m``."""
    g = tl.arange(0, COUNT)
    first = tl.load(offsets + g, mask=g <= count, other=0)
    last = tl.load(offsets + g + 1, mask=g < count, other=0)
    return g, first, tl.where(g == count, m, last)


@triton.jit
def _group_of(offsets, count, tile, COUNT: tl.constexpr, TILE_M: tl.constexpr):
    """Group of the ``tile``-th tile of rows (-1: there are fewer), its first row and the end of its group."""
    g, first, last = _spans(offsets, count, 0, COUNT)
    tiles = tl.where(g < count, (last - first + TILE_M - 1) // TILE_M, 0)
    begun = tl.cumsum(tiles, 0) - tiles
    here = (tile >= begun) & (tile < begun + tiles)
    group = tl.sum(tl.where(here, g + 1, 0), 0) - 1
    row = tl.sum(tl.where(here, first + (tile - begun) * TILE_M, 0), 0)
    return group, row, tl.sum(tl.where(here, last, 0), 0)


@triton.jit
def _starts(g, first, last, count, SPACING: tl.constexpr):
    """First places of groups; of the padding, and of what is behind it: the end of all groups' places."""
    padded = tl.where(g < count, (last - first + SPACING - 1) // SPACING * SPACING, 0)
    return tl.cumsum(padded, 0) - padded


@triton.jit
def _tile_of(program, down, across):
    """Row and column of a program's tile, :data:`SUPER` rows at a time."""
    whole = SUPER * across
    begin = program // whole * SUPER
    size = tl.minimum(down - begin, SUPER)
    return begin + program % whole % size, program % whole // size


@triton.jit
def _dot(a, b, total, FP8: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr, TILE_K: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif FP8 and not FAST:
        return tl.dot(a, b, total, max_num_imprecise_acc=TILE_K)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _pointer(table, group, like, ALIGNED: tl.constexpr):
    """Where a group's matrix begins; ``like``: one of them. A launch tells the compiler its arguments' alignment, a table does
    not: without it every access would be an element's."""
    pointer = tl.load(table + group).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _scale_inv(x_scale_inv, table, group):
    """Product of the inverse scales of a group's rows and of its weight."""
    weight = tl.load(table + group).to(tl.pointer_type(tl.float32))
    return tl.load(x_scale_inv + group) * tl.load(weight)


@triton.jit
def _product_kernel(
    x, table, like, x_scale_inv, scale_table, out, offsets, count, down, n, k, stride_n, stride_k,
    FP8: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile, strip = _tile_of(tl.program_id(0), down, tl.cdiv(n, TILE_N))
    group, first, end = _group_of(offsets, count, tile, COUNT, TILE_M)
    if group >= 0:
        weight = _pointer(table, group, like, ALIGNED)
        row, column = first + tl.arange(0, TILE_M), strip * TILE_N + tl.arange(0, TILE_N)
        feature = tl.arange(0, TILE_K)
        # What is past the end repeats the last row, and column where features are contiguous: fewer masks.
        a_at = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * k + feature[None, :]
        beside = tl.minimum(column, n - 1) if INNER else column
        b_at = weight + beside.to(tl.int64)[None, :] * stride_n + feature.to(tl.int64)[:, None] * stride_k
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for begin in range(0, k, TILE_K):
            inside = feature < k - begin
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            if INNER:
                b = tl.load(b_at, mask=inside[:, None], other=0.0)
            else:
                b = tl.load(b_at, mask=inside[:, None] & (column < n)[None, :], other=0.0)
            if PARTS:  # out of the tensor cores' sum, which cuts off what it adds, into one that rounds
                total += tl.dot(a, b)
            else:
                total = _dot(a, b, total, FP8, FAST, WIDE, TILE_K)
            a_at += TILE_K
            b_at += TILE_K * stride_k
        if FP8:
            total *= _scale_inv(x_scale_inv, scale_table, group)
        mask = (row < end)[:, None] & (column < n)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place_of(table, group, like, output, feature, n, k, ALIGNED: tl.constexpr):
    """Where a tile of a group's gradient lies, and what of it is inside."""
    out = _pointer(table, group, like, ALIGNED)
    return out + output.to(tl.int64)[:, None] * k + feature[None, :], (output < n)[:, None] & (feature < k)[None, :]


@triton.jit
def _add(place, mask, some, total, BETA: tl.constexpr):
    """A tile into its place; ``some``: whether the group has rows."""
    if BETA == 0:
        tl.store(place, total.to(place.dtype.element_ty), mask=mask)
    else:  # not loaded ahead of the products: on an H200 that was slower by a tenth, of the registers it takes
        held = tl.load(place, mask=mask & some, other=0.0).to(tl.float32)
        tl.store(place, (total + held).to(place.dtype.element_ty), mask=mask & some)


@triton.jit
def _tile_of_gradient(n, k, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """This program's group, its outputs and features."""
    down, across = tl.cdiv(n, TILE_M), tl.cdiv(k, TILE_N)
    tile, strip = _tile_of(tl.program_id(0) % (down * across), down, across)
    group = tl.program_id(0) // (down * across)
    return group, tile * TILE_M + tl.arange(0, TILE_M), strip * TILE_N + tl.arange(0, TILE_N)


@triton.jit
def _member(j, group, dy_scale_inv, x_scale_inv, offsets, count, COUNT: tl.constexpr, SPACING: tl.constexpr):
    """Of a member's rows of a group their number, their first place, and the product of their inverse scales."""
    g, first, last = _spans(offsets + j * (count + 1), count, 0, COUNT)
    rows = tl.sum(tl.where(g == group, last - first, 0), 0)
    start = tl.sum(tl.where(g == group, _starts(g, first, last, count, SPACING), 0), 0)
    start = start // SPACING * SPACING  # so the compiler knows, too
    return rows, start, tl.load(dy_scale_inv + j * count + group) * tl.load(x_scale_inv + j * count + group)


@triton.jit
def _accumulate_columns_kernel(
    table, like, dy, x, dy_scale_inv, x_scale_inv, offsets, count, n, k, pitch, places,
    BETA: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr, SPACING: tl.constexpr,
    MEMBERS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """FP8: ``dy`` ``[n, pitch]`` and ``x`` ``[k, pitch]``, ``places`` of each member one after the other.

    One loop over the rows of all members: what is loaded ahead is, over a member's end too. Members' scales may differ, of a
    group that has had no amax yet; a sum is in units of the largest of those with rows, so that none overflows, and equal ones
    change no bit.
    """
    group, output, feature = _tile_of_gradient(n, k, TILE_M, TILE_N)
    some, steps, unit = 0, 0, 0.0
    for j in tl.static_range(MEMBERS):
        rows, start, scale = _member(j, group, dy_scale_inv, x_scale_inv, offsets, count, COUNT, SPACING)
        some += rows
        steps += (rows + TILE_K - 1) // TILE_K
        unit = tl.where(rows > 0, tl.maximum(unit, scale), unit)
    at, mask = _place_of(table, group, like, output, feature, n, k, ALIGNED)
    place = tl.arange(0, TILE_K)
    a_at = dy + tl.minimum(output, n - 1).to(tl.int64)[:, None] * pitch + place[None, :]
    b_at = x + tl.minimum(feature, k - 1).to(tl.int64)[None, :] * pitch + place[:, None]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(0, steps):
        begin, end, factor, before = 0, 0, 1.0, 0
        for j in tl.static_range(MEMBERS):  # of them nothing but selects is left in the loop
            rows, start, scale = _member(j, group, dy_scale_inv, x_scale_inv, offsets, count, COUNT, SPACING)
            here, done = step >= before, (step - before) * TILE_K
            begin = tl.where(here, j * places + start + done, begin)
            end = tl.where(here, (rows + SPACING - 1) // SPACING * SPACING - done, end)  # zeros up to here
            factor = tl.where(here, tl.where(scale == unit, 1.0, scale / unit), factor)
            before += (rows + TILE_K - 1) // TILE_K
        inside = place < end
        a = tl.load(a_at + begin, mask=inside[None, :], other=0.0)
        b = tl.load(b_at + begin, mask=inside[:, None], other=0.0)
        # Out of the tensor cores' sum every TILE_K places. Left to do so (_dot), Triton reads a product's sum before it waits
        # for the product, and the assembler then has every one wait.
        if WIDE:
            part = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(a, b)
        total += part * factor
    total *= unit
    _add(at, mask, some > 0, total, BETA)


@triton.jit
def _accumulate_rows_kernel(
    table, like, dy, x, offsets, n, k,
    BETA: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """16 bits and more: ``dy`` ``[rows, n]`` and ``x`` ``[rows, k]``, as they lie."""
    group, output, feature = _tile_of_gradient(n, k, TILE_M, TILE_N)
    first, last = tl.load(offsets + group), tl.load(offsets + group + 1)
    at, mask = _place_of(table, group, like, output, feature, n, k, ALIGNED)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for begin in range(first, last, TILE_K):
        row = begin + tl.arange(0, TILE_K)
        inside = row < last
        row = row.to(tl.int64)
        a = tl.load(dy + row[None, :] * n + output[:, None], mask=(output < n)[:, None] & inside[None, :], other=0.0)
        b = tl.load(x + row[:, None] * k + feature[None, :], mask=inside[:, None] & (feature < k)[None, :], other=0.0)
        total = _dot(a, b, total, False, False, WIDE, TILE_K)
    _add(at, mask, last > first, total, BETA)


@triton.jit
def _quantise_kernel(
    x, scale, scale_inv, rows, columns, kept_scale_inv, kept_offsets, offsets, count, m, k, places, pitch,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEEP: tl.constexpr, E5M2: tl.constexpr, COUNT: tl.constexpr,
    SPACING: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """By places, ``STRIP`` tiles of features a program; what lies between groups becomes zeros in ``columns`` and is nowhere in
    ``rows``. ``KEEP``: inverse scales and offsets are copied."""
    strips = tl.cdiv(k, TILE_K * STRIP)
    place = tl.program_id(0) // strips * TILE_M + tl.arange(0, TILE_M)
    g, first, last = _spans(offsets, count, m, COUNT)
    if KEEP:
        if tl.program_id(0) == 0:
            tl.store(kept_offsets + g, first, mask=g <= count)
            tl.store(kept_scale_inv + g, tl.load(scale_inv + g, mask=g < count, other=0.0), mask=g < count)
    start = _starts(g, first, last, count, SPACING)
    begun = (place[:, None] >= start[None, :]) & (g > 0)[None, :] & (g <= count)[None, :]
    group = tl.sum(begun.to(tl.int32), 1)
    own = g[None, :] == group[:, None]
    row = place + tl.sum(tl.where(own, (first - start)[None, :], 0), 1)
    inside = row < tl.sum(tl.where(own, last[None, :], 0), 1)
    real = inside & (group < count)
    factor = tl.load(scale + group, mask=group < count, other=0.0)
    begin = tl.program_id(0) % strips * STRIP * TILE_K
    for tile in range(STRIP):
        column = begin + tile * TILE_K + tl.arange(0, TILE_K)
        features = (column < k)[None, :]
        at = row.to(tl.int64)[:, None] * k + column[None, :]
        values = tl.load(x + at, mask=real[:, None] & features, other=0.0).to(tl.float32)
        q = cast(values * factor[:, None], E5M2)
        if ROWS:
            tl.store(rows + at, q, mask=inside[:, None] & features)
        if COLUMNS:
            mask = (column < k)[:, None] & (place < places)[None, :]
            tl.store(columns + column.to(tl.int64)[:, None] * pitch + place[None, :], tl.trans(q), mask=mask)


def quantise(
    x: torch.Tensor,
    scales: Scales,
    fmt: Format,
    groups: Groups,
    *,
    rows: bool,
    columns: bool,
    into: GroupPlace | None = None,
) -> Rows:
    """:func:`qeffect_lm.fp8.grouped.quantise_groups`; the reference's bytes (of a NaN, up to its sign)."""
    x, scale, scale_inv = x.contiguous(), scales.scale, scales.scale_inv
    (m, k), count = x.shape, groups.count
    spacing = spacing_of(places_of(m, count) if into is None else into.stored.shape[1], count)
    places = needed(m, count, spacing)
    made = torch.empty(m, k, dtype=fmt.dtype, device=x.device) if rows else None
    turned, kept = None, (scale_inv, groups.offsets)
    if into is not None:
        if places > into.stored.shape[1]:
            raise RuntimeError(f"{m} rows take {places} places, and there are {into.stored.shape[1]}")
        turned, kept = into.stored, (into.scale_inv, into.offsets)
    elif columns:
        turned = torch.empty(k, places, dtype=fmt.dtype, device=x.device)
    outs = [scale if out is None else out for out in (made, turned)]  # what is not made is never touched
    launched("grouped_quantise", x, scale, scale_inv, *outs, *kept, groups.offsets)
    tile = QUANTISE
    _quantise_kernel[(-(-places // tile.rows) * -(-k // (tile.columns * STRIP)),)](
        x, scale, scale_inv, *outs, *kept, groups.offsets, count, m, k, places,
        places if turned is None else turned.stride(0),
        ROWS=rows, COLUMNS=turned is not None, KEEP=into is not None, E5M2=fmt.name == "E5M2", COUNT=_count(count),
        SPACING=spacing, TILE_M=tile.rows, TILE_K=tile.columns, STRIP=STRIP, num_warps=tile.warps,
    )  # fmt: skip
    return Rows(made, scale_inv if into is None else into.scale_inv, turned)


def product(
    x: Rows,
    weights: Matrices,
    groups: Groups,
    dtype: torch.dtype,
    weight_scale_inv: Matrices | None,
    fast_accumulation: bool,
) -> torch.Tensor:
    """:func:`qeffect_lm.fp8.grouped.grouped_mm`."""
    rows = x.whole.contiguous()
    m, (n, k), (stride_n, stride_k) = rows.shape[0], weights.tensors[0].shape, weights.tensors[0].stride()
    out = torch.empty(m, n, dtype=dtype, device=rows.device)
    table, fp8 = _bound(weights), x.scale_inv is not None
    scales = _bound(weight_scale_inv) if weight_scale_inv is not None else table
    narrow = weight_scale_inv.tensors if weight_scale_inv is not None else ()
    launched("grouped_product", out, *x.tensors(), table, scales, groups.offsets, *weights.tensors, *narrow, fast_accumulation)
    parts = rows.is_cuda and dtype is torch.float32 and rows.dtype is weights.tensors[0].dtype is torch.bfloat16
    wide = not parts and _wide(rows, dtype)
    tiles = _narrow(n, k) if wide else _ROUTER if parts else (_FAST if fast_accumulation else _FP8) if fp8 else _BF16
    down = -(-m // tiles.rows) + groups.count - 1
    _product_kernel[(down * -(-n // tiles.columns),)](
        rows, table, weights.tensors[0], groups.offsets if x.scale_inv is None else x.scale_inv, scales, out,
        groups.offsets, groups.count, down, n, k, stride_n, stride_k,
        FP8=fp8, FAST=fast_accumulation, WIDE=wide, ALIGNED=_aligned(weights), INNER=stride_k == 1, COUNT=_count(groups.count),
        PARTS=parts, **tiles.options(),
    )  # fmt: skip
    return out


def accumulate(outs: Matrices, dy: Rows, x: Rows, groups: Groups | Members, beta: int) -> None:
    """:func:`qeffect_lm.fp8.grouped.accumulate_grouped_mm`; of members :func:`~qeffect_lm.fp8.grouped.accumulate_joined_mm`."""
    n, k = outs.tensors[0].shape
    table, offsets, count = _bound(outs), groups.offsets, groups.count
    launched("grouped_accumulate", table, *dy.tensors(), *x.tensors(), offsets, *outs.tensors, beta)
    how: dict[str, Any] = {"BETA": beta, "ALIGNED": _aligned(outs)}
    if x.scale_inv is None:
        wide = _wide(x.whole, dy.whole.dtype)
        tiles = _narrow_w(n) if wide else _BF16_W
        _accumulate_rows_kernel[_gradient_grid(count, n, k, tiles)](
            table, outs.tensors[0], dy.whole.contiguous(), x.whole.contiguous(), offsets, n, k,
            WIDE=wide, **how, **tiles.options(),
        )  # fmt: skip
        return
    if dy.columns is None or x.columns is None:
        raise RuntimeError("W of FP8 groups reads columns: call quantise_groups(..., columns=True)")
    members, places = (offsets.shape[0], groups.places) if isinstance(groups, Members) else (1, x.columns.shape[1])
    pitch, wide = x.columns.stride(0), not x.columns.is_cuda
    assert dy.columns.stride(0) == pitch and dy.columns.shape[1] == members * places
    tiles = _narrow_w(n) if wide else _FP8_W_LONG if members * places >= count * _LONG else _FP8_W  # they change no bit
    _accumulate_columns_kernel[_gradient_grid(count, n, k, tiles)](
        table, outs.tensors[0], dy.columns, x.columns, dy.scale_inv, x.scale_inv, offsets, count, n, k, pitch, places,
        WIDE=wide, COUNT=_count(count), SPACING=spacing_of(places, count), MEMBERS=members, **how, **tiles.options(),
    )  # fmt: skip


def _gradient_grid(count: int, n: int, k: int, tiles: _Tiles) -> tuple[int]:
    return (count * -(-n // tiles.rows) * -(-k // tiles.columns),)


def _wide(rows: torch.Tensor, other: torch.dtype) -> bool:
    """Whether products are those of float32 values: of float32 rows, or of others, into float32; and wherever Triton
    interprets, which knows no bfloat16 product."""
    return not rows.is_cuda or torch.float32 in (rows.dtype, other)


def _narrow(n: int, k: int) -> _Tiles:
    """Of float32 values; a router has few outputs, ``n`` of which its F sums many features, and ``k`` of which its I sums."""
    return _Tiles(32, 16, 64) if n <= 16 else _Tiles(64, 64, 16) if k <= 64 else _Tiles(32, 64, 32)


def _narrow_w(n: int) -> _Tiles:
    """The same of W: few rows of the gradient, summed over many tokens."""
    return _Tiles(16, 32, 64) if n <= 16 else _Tiles(32, 64, 32)


def _count(groups: int) -> int:
    """A power of two above the number of groups: they and the padding."""
    return 1 << groups.bit_length()


def _aligned(matrices: Matrices) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in matrices.tensors)


def _bound(matrices: Matrices) -> torch.Tensor:
    if matrices.table is None:
        raise RuntimeError("no tables were bound for this GPU: call layers.grouped.bind_groups(module)")
    return matrices.table
