"""Products of groups (:mod:`qeffect_lm.fp8.grouped`): plain tiled kernels that read on the device where a group begins.

F and I have a program for every tile of rows that there could be: of ``r`` rows in ``g`` groups at most ``r / TILE_M + g``
tiles are begun, and a program finds its group by walking over the offsets; those that are left over end at once. W has a
program for every tile of every group's gradient, which walks over the group's rows in their order. So each element is summed
by one program in one order: results repeat bit for bit, and a row's do not depend on where it lies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.grouped import Groups, Matrices, Rows
from qeffect_lm.fp8.quantise import Format
from qeffect_lm.kernels import launched
from qeffect_lm.kernels.tables import DEFAULT_TILE
from qeffect_lm.kernels.tile import cast, tile_offsets

TILE_M, TILE_N, TILE_K = 64, 128, 64  # rows, outputs, summed features; float32 takes narrower ones


@triton.jit
def _group_of(offsets, count, tile, TILE_M: tl.constexpr):
    """Group of the ``tile``-th tile of rows (-1: there are fewer), its first row and the end of its group."""
    group = -1
    row = 0
    end = 0
    begun = 0
    for g in range(count):
        first, last = tl.load(offsets + g), tl.load(offsets + g + 1)
        tiles = tl.cdiv(last - first, TILE_M)
        here = (tile >= begun) & (tile < begun + tiles)
        group = tl.where(here, g, group)
        row = tl.where(here, first + (tile - begun) * TILE_M, row)
        end = tl.where(here, last, end)
        begun += tiles
    return group, row, end


@triton.jit
def _dot(a, b, total, FP8: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif FP8 and not FAST:
        return tl.dot(a, b, total, max_num_imprecise_acc=0)
    else:
        return tl.dot(a, b, total)


@triton.jit
def _scale_inv(x_scale_inv, table, group):
    """Product of the inverse scales of a group's rows and of its weight."""
    weight = tl.load(table + group).to(tl.pointer_type(tl.float32))
    return tl.load(x_scale_inv + group) * tl.load(weight)


@triton.jit
def _product_kernel(
    x, table, like, x_scale_inv, scale_table, out, offsets, count, n, k, stride_n, stride_k,
    FP8: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, TILE_N)
    pid = tl.program_id(0)
    group, first, end = _group_of(offsets, count, pid // across, TILE_M)
    if group >= 0:
        weight = tl.load(table + group).to(tl.pointer_type(like.dtype.element_ty))  # like: one of the weights
        row = first + tl.arange(0, TILE_M)
        column = (pid % across) * TILE_N + tl.arange(0, TILE_N)
        rows, columns = (row < end)[:, None], (column < n)[None, :]
        at = row.to(tl.int64)[:, None] * k
        beside = column.to(tl.int64)[None, :] * stride_n
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for begin in range(0, k, TILE_K):
            feature = begin + tl.arange(0, TILE_K)
            inside = feature < k
            a = tl.load(x + at + feature[None, :], mask=rows & inside[None, :], other=0.0)
            b = tl.load(weight + beside + feature[:, None] * stride_k, mask=columns & inside[:, None], other=0.0)
            total = _dot(a, b, total, FP8, FAST, WIDE)
        if FP8:
            total *= _scale_inv(x_scale_inv, scale_table, group)
        tl.store(out + row.to(tl.int64)[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=rows & columns)


@triton.jit
def _accumulate_kernel(
    table, dy, x, dy_scale_inv, x_scale_inv, offsets, n, k,
    BETA: tl.constexpr, NARROW: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(n, TILE_N), tl.cdiv(k, TILE_K)
    pid = tl.program_id(0)
    group, tile = pid // (down * across), pid % (down * across)
    output = (tile // across) * TILE_N + tl.arange(0, TILE_N)
    feature = (tile % across) * TILE_K + tl.arange(0, TILE_K)
    outputs, features = output < n, feature < k
    first, last = tl.load(offsets + group), tl.load(offsets + group + 1)
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    for begin in range(first, last, TILE_M):
        row = begin + tl.arange(0, TILE_M)
        inside = row < last
        at = row.to(tl.int64)
        a = tl.load(dy + at[None, :] * n + output[:, None], mask=outputs[:, None] & inside[None, :], other=0.0)
        b = tl.load(x + at[:, None] * k + feature[None, :], mask=inside[:, None] & features[None, :], other=0.0)
        total = _dot(a, b, total, FP8, False, WIDE)
    if FP8:
        total *= tl.load(dy_scale_inv + group) * tl.load(x_scale_inv + group)
    if NARROW:
        out = tl.load(table + group).to(tl.pointer_type(tl.bfloat16))
    else:
        out = tl.load(table + group).to(tl.pointer_type(tl.float32))
    place = out + output.to(tl.int64)[:, None] * k + feature[None, :]
    mask = outputs[:, None] & features[None, :]
    if BETA == 0:
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
    elif last > first:
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (total + before).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantise_kernel(
    x, scale, group_of_row, out, m, k, count, E5M2: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    row, column = tile_offsets(tl.program_id(0), k, TILE_M, TILE_K)
    inside = row < m
    mask = inside[:, None] & (column < k)[None, :]
    group = tl.load(group_of_row + row, mask=inside, other=count)
    factor = tl.load(scale + group, mask=group < count, other=0.0)  # of padding: zeros
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, cast(values * factor[:, None], E5M2), mask=mask)


def quantise(x: torch.Tensor, scale: torch.Tensor, fmt: Format, group_of_row: torch.Tensor) -> torch.Tensor:
    """``x`` ``[m, k]`` in FP8, each row with its group's scale; the reference's bytes (of a NaN, up to its sign)."""
    x = x.contiguous()
    m, k = x.shape
    out = torch.empty(m, k, dtype=fmt.dtype, device=x.device)
    launched("grouped_quantise", x, scale, group_of_row, out)
    _quantise_kernel[DEFAULT_TILE.grid(m, k)](
        x, scale, group_of_row, out, m, k, scale.numel(),
        E5M2=fmt.name == "E5M2", TILE_M=DEFAULT_TILE.rows, TILE_K=DEFAULT_TILE.columns, num_warps=DEFAULT_TILE.warps,
    )  # fmt: skip
    return out


def product(
    x: Rows,
    weights: Matrices,
    groups: Groups,
    dtype: torch.dtype,
    weight_scale_inv: Matrices | None,
    fast_accumulation: bool,
) -> torch.Tensor:
    """:func:`qeffect_lm.fp8.grouped.grouped_mm`."""
    rows = x.rows.contiguous()
    m, (n, k), (stride_n, stride_k) = rows.shape[0], weights.tensors[0].shape, weights.tensors[0].stride()
    out = torch.empty(m, n, dtype=dtype, device=rows.device)
    table, fp8 = _bound(weights), x.scale_inv is not None
    scales = _bound(weight_scale_inv) if weight_scale_inv is not None else table
    narrow = weight_scale_inv.tensors if weight_scale_inv is not None else ()
    launched("grouped_product", out, *x.tensors(), table, scales, groups.offsets, *weights.tensors, *narrow, fast_accumulation)
    wide = _wide(rows, dtype)
    tile_m, tile_n, tile_k = _tiles(wide, n)
    grid = ((-(-m // tile_m) + groups.count - 1) * -(-n // tile_n),)
    _product_kernel[grid](
        rows, table, weights.tensors[0], groups.offsets if x.scale_inv is None else x.scale_inv, scales, out,
        groups.offsets, groups.count, n, k, stride_n, stride_k,
        FP8=fp8, FAST=fast_accumulation, WIDE=wide, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, num_warps=4,
    )  # fmt: skip
    return out


def accumulate(outs: Matrices, dy: Rows, x: Rows, groups: Groups, beta: int) -> None:
    """:func:`qeffect_lm.fp8.grouped.accumulate_grouped_mm`."""
    n, k = outs.tensors[0].shape
    table, fp8, narrow = _bound(outs), x.scale_inv is not None, outs.tensors[0].dtype is torch.bfloat16
    launched("grouped_accumulate", table, *dy.tensors(), *x.tensors(), groups.offsets, *outs.tensors, beta)
    wide = _wide(x.rows, dy.rows.dtype)
    tile_m, tile_n, tile_k = _tiles(wide, n)
    none = groups.offsets
    grid = (groups.count * -(-n // tile_n) * -(-k // tile_k),)
    _accumulate_kernel[grid](
        table, dy.rows.contiguous(), x.rows.contiguous(), none if dy.scale_inv is None else dy.scale_inv,
        none if x.scale_inv is None else x.scale_inv, groups.offsets, n, k,
        BETA=beta, NARROW=narrow, FP8=fp8, WIDE=wide, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, num_warps=4,
    )  # fmt: skip


def _wide(rows: torch.Tensor, other: torch.dtype) -> bool:
    """Whether products are those of float32 values: of float32 rows, of a router's, and wherever Triton interprets, which
    knows no bfloat16 product."""
    return not rows.is_cuda or torch.float32 in (rows.dtype, other)


def _tiles(wide: bool, n: int) -> tuple[int, int, int]:
    if wide:
        return 32, 16 if n <= 16 else 64, 32  # a router has few outputs
    return TILE_M, TILE_N, TILE_K


def _bound(matrices: Matrices) -> torch.Tensor:
    if matrices.table is None:
        raise RuntimeError("no tables were bound for this GPU: call layers.grouped.bind_groups(module)")
    return matrices.table
