"""SwiGLU (Shazeer 2020) into and out of FP8: ``silu(gate) * up`` quantised for ``down``, d(gate_up) for ``gate_up``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import Quantised
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.tile import SCALARS, emit, magnitude, merge_amax, store_inverse, tile_offsets


@triton.jit
def _load_pair(x, row, column, mask, f):
    """gate and up of a tile, float32; ``x`` ``[m, 2 f]`` holds gate's columns, then up's."""
    at = row.to(tl.int64)[:, None] * (2 * f) + column[None, :]
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return gate, tl.load(x + at + f, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))  # log2 of e; fewer instructions than exp


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _swiglu_quantise_kernel(
    x, scale, rows, columns, amax, scale_inv, pitch, m, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = _load_pair(x, row, column, mask, f)
    values = (gate * _sigmoid(gate) * up).to(x.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, magnitude(values, mask))
    emit(values, row, column, mask, factor, rows, columns, pitch, f, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _swiglu_backward_kernel(
    x, dy, scale, rows, columns, amax, scale_inv, pitch, m, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = _load_pair(x, row, column, mask, f)
    grad = tl.load(dy + row.to(tl.int64)[:, None] * f + column[None, :], mask=mask, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    d_gate = (grad * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype.element_ty).to(tl.float32)
    d_up = (grad * silu).to(x.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, tl.maximum(magnitude(d_gate, mask), magnitude(d_up, mask)))
    emit(d_gate, row, column, mask, factor, rows, columns, pitch, 2 * f, ROWS, COLUMNS, E5M2)
    emit(d_up, row, column + f, mask, factor, rows, columns, pitch, 2 * f, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)


def quantise(x: torch.Tensor, outputs: Outputs) -> Quantised:
    """``x`` ``[m, 2 f]`` → ``silu(gate) * up`` ``[m, f]``, rounded once to ``x``'s dtype, in FP8."""
    m, f = x.shape[0], x.shape[1] // 2
    tile = tables.tile("swiglu", m, f)
    launched("swiglu_quantise", x, *outputs.pointers())
    _swiglu_quantise_kernel[tile.grid(m, f)](x.contiguous(), *outputs.pointers(), outputs.pitch, m, f, **outputs.switches(tile))
    return outputs.quantised()


def backward_quantise(x: torch.Tensor, dy: torch.Tensor, outputs: Outputs) -> Quantised:
    """The activation's gradient ``dy`` ``[m, f]`` → that of ``x`` ``[m, 2 f]``, rounded to ``x``'s dtype, in FP8."""
    m, f = dy.shape
    tile = tables.tile("swiglu_backward", m, f)
    launched("swiglu_backward", x, dy, *outputs.pointers())
    _swiglu_backward_kernel[tile.grid(m, f)](
        x, dy.contiguous(), *outputs.pointers(), outputs.pitch, m, f, **outputs.switches(tile)
    )
    return outputs.quantised()
