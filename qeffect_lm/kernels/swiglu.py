"""SwiGLU (Shazeer 2020) into and out of FP8: ``silu(gate) * up`` quantised for ``down``, d(gate_up) for ``gate_up``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import Quantised
from qeffect_lm.kernels import launched
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.tile import SCALARS, emit, store_inverse, tile_offsets, tiles


@triton.jit
def _load_pair(x, row, column, mask, f):
    """gate and up of a tile, float32; ``x`` ``[m, 2 f]`` holds gate's columns, then up's."""
    at = row.to(tl.int64)[:, None] * (2 * f) + column[None, :]
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return gate, tl.load(x + at + f, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _swiglu_quantise_kernel(
    x, scale, rows, columns, amax, scale_inv, m, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = _load_pair(x, row, column, mask, f)
    values = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty).to(tl.float32)
    emit(values, row, column, mask, scale, rows, columns, amax, m, f, ROWS, COLUMNS, AMAX, E5M2)
    store_inverse(pid, scale, scale_inv)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _swiglu_backward_kernel(
    x, dy, scale, rows, columns, amax, scale_inv, m, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = _load_pair(x, row, column, mask, f)
    grad = tl.load(dy + row.to(tl.int64)[:, None] * f + column[None, :], mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = (grad * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype.element_ty).to(tl.float32)
    emit(d_gate, row, column, mask, scale, rows, columns, amax, m, 2 * f, ROWS, COLUMNS, AMAX, E5M2)
    d_up = (grad * silu).to(x.dtype.element_ty).to(tl.float32)
    emit(d_up, row, column + f, mask, scale, rows, columns, amax, m, 2 * f, ROWS, COLUMNS, AMAX, E5M2)
    store_inverse(pid, scale, scale_inv)


def quantise(x: torch.Tensor, outputs: Outputs) -> Quantised:
    """``x`` ``[m, 2 f]`` → ``silu(gate) * up`` ``[m, f]``, rounded once to ``x``'s dtype, in FP8."""
    m, f = x.shape[0], x.shape[1] // 2
    launched("swiglu_quantise", x, *outputs.pointers())
    _swiglu_quantise_kernel[tiles(m, f)](x.contiguous(), *outputs.pointers(), m, f, **outputs.switches())
    return outputs.quantised()


def backward_quantise(x: torch.Tensor, dy: torch.Tensor, outputs: Outputs) -> Quantised:
    """The activation's gradient ``dy`` ``[m, f]`` → that of ``x`` ``[m, 2 f]``, rounded to ``x``'s dtype, in FP8."""
    m, f = dy.shape
    launched("swiglu_backward", x, dy, *outputs.pointers())
    _swiglu_backward_kernel[tiles(m, f)](x, dy.contiguous(), *outputs.pointers(), m, f, **outputs.switches())
    return outputs.quantised()
