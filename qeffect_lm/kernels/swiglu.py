"""SwiGLU (Shazeer 2020) into and out of FP8: ``silu(gate) * up`` quantised for ``down``, d(gate_up) for ``gate_up``.

W of ``down`` needs the activation once more, transposed. The backward kernel, which makes the activation anyway, writes that
copy, so that no microbatch keeps it between F and I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import E4M3, Quantised
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.tile import SCALARS, emit, magnitude, merge_amax, store_inverse, tile_offsets


@dataclass(frozen=True)
class Activation:
    """The transposed activation that the backward kernel makes: FP8 E4M3 ``columns`` ``[f, m]``, quantised with ``scale``,
    0-dim float32 and F's own copy: the live scale may have moved on."""

    columns: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def like(cls, x: torch.Tensor, scale: torch.Tensor) -> Activation:
        """A new one for ``x`` ``[m, 2 f]``."""
        return cls(torch.empty(x.shape[1] // 2, x.shape[0], dtype=E4M3.dtype, device=x.device), scale)


@triton.jit
def load_pair(x, row, column, mask, f):
    """gate and up of a tile, float32; ``x`` ``[m, 2 f]`` holds gate's columns, then up's."""
    at = row.to(tl.int64)[:, None] * (2 * f) + column[None, :]
    gate = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return gate, tl.load(x + at + f, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sigmoid_of(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))  # log2 of e; fewer instructions than exp


@triton.jit(do_not_specialize_on_alignment=[*SCALARS, "kept"])
def _swiglu_quantise_kernel(
    x, kept, scale, rows, columns, amax, scale_inv, pitch, m, f,
    KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = load_pair(x, row, column, mask, f)
    values = (gate * sigmoid_of(gate) * up).to(x.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, magnitude(values, mask))
    emit(values, row, column, mask, factor, rows, columns, pitch, f, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)
    if KEEP:
        if pid == 0:
            tl.store(kept, factor)


@triton.jit(do_not_specialize_on_alignment=[*SCALARS, "kept"])
def _swiglu_backward_kernel(
    x, dy, kept, activation, scale, rows, columns, amax, scale_inv, pitch, m, f,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, f, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < f)[None, :]
    gate, up = load_pair(x, row, column, mask, f)
    grad = tl.load(dy + row.to(tl.int64)[:, None] * f + column[None, :], mask=mask, other=0.0).to(tl.float32)
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    d_gate = (grad * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype.element_ty).to(tl.float32)
    d_up = (grad * silu).to(x.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, tl.maximum(magnitude(d_gate, mask), magnitude(d_up, mask)))
    emit(d_gate, row, column, mask, factor, rows, columns, pitch, 2 * f, ROWS, COLUMNS, E5M2)
    emit(d_up, row, column + f, mask, factor, rows, columns, pitch, 2 * f, ROWS, COLUMNS, E5M2)
    if ACTIVATION:  # as the forward kernel makes it, bit for bit
        values = (silu * up).to(x.dtype.element_ty).to(tl.float32)
        emit(values, row, column, mask, tl.load(kept), activation, activation, m, f, False, True, False)
    store_inverse(pid, factor, scale_inv)


def quantise(x: torch.Tensor, outputs: Outputs, kept: torch.Tensor | None = None) -> Quantised:
    """``x`` ``[m, 2 f]`` → ``silu(gate) * up`` ``[m, f]``, rounded once to ``x``'s dtype, in FP8. ``kept``, 0-dim float32,
    takes a copy of the scale."""
    m, f = x.shape[0], x.shape[1] // 2
    tile = tables.tile("swiglu", m, f)
    launched("swiglu_quantise", x, kept, *outputs.pointers())
    _swiglu_quantise_kernel[tile.grid(m, f)](
        x.contiguous(), outputs.scale_inv if kept is None else kept, *outputs.pointers(), outputs.pitch, m, f,
        KEEP=kept is not None, **outputs.switches(tile),
    )  # fmt: skip
    return outputs.quantised()


def backward_quantise(
    x: torch.Tensor, dy: torch.Tensor, outputs: Outputs, activation: Activation | None = None
) -> Quantised:
    """The activation's gradient ``dy`` ``[m, f]`` → that of ``x`` ``[m, 2 f]``, rounded to ``x``'s dtype, in FP8;
    ``activation`` is filled beside it."""
    m, f = dy.shape
    tile = tables.tile("swiglu_backward", m, f)
    beside = (outputs.scale_inv, outputs.scale_inv) if activation is None else (activation.scale, activation.columns)
    launched("swiglu_backward", x, dy, *beside, *outputs.pointers())
    _swiglu_backward_kernel[tile.grid(m, f)](
        x, dy.contiguous(), *beside, *outputs.pointers(), outputs.pitch, m, f,
        ACTIVATION=activation is not None, **outputs.switches(tile),
    )  # fmt: skip
    return outputs.quantised()
