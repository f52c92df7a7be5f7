"""What the quantising kernels share: a tile of float32 values → FP8 in both layouts, and its amax into a slot."""

from __future__ import annotations

import triton
import triton.language as tl

# Scalars lie anywhere in the timeline's tensors: without this each alignment would be a kernel of its own.
SCALARS = ["scale", "amax", "scale_inv"]


@triton.jit
def tile_offsets(pid, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Row and column numbers of tile ``pid``; neighbours share rows, so that norms find their inputs in cache."""
    across = tl.cdiv(k, TILE_K)
    row = (pid // across) * TILE_M + tl.arange(0, TILE_M)
    column = (pid % across) * TILE_K + tl.arange(0, TILE_K)
    return row, column


@triton.jit
def magnitude(values, mask):
    """The bits of ``|values|``, 0 outside ``mask``: as integers they order as the numbers do.

    An infinity is above all finite numbers and a NaN above that (its bits have a full exponent and a fraction).
    """
    return tl.where(mask, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def merge_amax(amax, bits):
    """Max-merge the largest of ``bits`` (:func:`magnitude`) into the float32 slot ``amax``, as an integer maximum.

    A NaN wins and stays visible. An EMPTY slot holds -1.0, whose sign bit makes a negative integer: any report replaces it.
    A maximum does not depend on order, so the atomics leave nothing to chance.
    """
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(bits), sem="relaxed")


@triton.jit
def cast(values, E5M2: tl.constexpr):
    """Float32 → FP8, to nearest even, saturating (PTX ``cvt.rn.satfinite``): infinities become the largest value, NaN stays."""
    if E5M2:
        return values.to(tl.float8e5)
    else:
        return values.to(tl.float8e4nv)


@triton.jit
def emit(
    values, row, column, mask, factor, rows, columns, pitch, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of the matrix ``[m, width]`` with the scale ``factor``: rows to ``rows``, transposed to ``columns``.

    The rows of ``columns`` are ``pitch`` elements apart: m, or more where they are part of something wider.
    """
    q = cast(values * factor, E5M2)
    if ROWS:
        tl.store(rows + row.to(tl.int64)[:, None] * width + column[None, :], q, mask=mask)
    if COLUMNS:
        tl.store(columns + column.to(tl.int64)[:, None] * pitch + row[None, :], tl.trans(q), mask=tl.trans(mask))


@triton.jit
def store_inverse(pid, factor, scale_inv):
    """The first program writes 1 / scale, correctly rounded."""
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, factor))
