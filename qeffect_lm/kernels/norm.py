"""RMSNorm (Zhang and Sennrich 2019): row statistics, forward alone or with the quantisation of its consumer, backward.

The fused forward is two launches: statistics, one program per row, then the quantising kernel, which normalises each tile on
its way (``x`` comes from the cache by then). Or one, for shapes that the table of configurations names: a program then holds
the whole hidden size of a few tokens, and the transposed copy leaves in runs as short as that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import Quantised
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.tile import SCALARS, emit, magnitude, merge_amax, store_inverse, tile_offsets

# The weight's gradient is summed in two stages of fixed order: this many runs of consecutive rows (or what the table of
# configurations says for a shape), then the runs.
RUNS = 256
_COLUMNS = 32  # of one program of the second stage


@triton.jit
def _norm_rows_kernel(x, weight, y, rstd, k, eps, FORWARD: tl.constexpr, BLOCK: tl.constexpr):
    """Statistics of one row; with ``FORWARD`` its output too."""
    at = tl.program_id(0).to(tl.int64) * k + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < k
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=0) / k + eps))
    tl.store(rstd + tl.program_id(0), r)
    if FORWARD:
        w = tl.load(weight + tl.arange(0, BLOCK), mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at, (values * r * w).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _norm_quantise_kernel(
    x, weight, rstd, scale, rows, columns, amax, scale_inv, pitch, m, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, k, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < k)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0.0).to(tl.float32)
    r = tl.load(rstd + row, mask=row < m, other=0.0)
    w = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
    normed = (values * r[:, None] * w[None, :]).to(x.dtype.element_ty).to(tl.float32)  # what the unfused layer would hand over
    if AMAX:
        merge_amax(amax, magnitude(normed, mask))
    emit(normed, row, column, mask, factor, rows, columns, pitch, k, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _norm_whole_rows_kernel(
    x, weight, rstd, scale, rows, columns, amax, scale_inv, pitch, m, k, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics, norm and quantise of ``TILE_M`` whole rows."""
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = pid * TILE_M + tl.arange(0, TILE_M), tl.arange(0, BLOCK)
    mask = (row < m)[:, None] & (column < k)[None, :]
    raw = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0.0)
    wide = raw.to(tl.float32)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=1) / k + eps))
    tl.store(rstd + row, r, mask=row < m)
    w = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
    normed = (raw.to(tl.float32) * r[:, None] * w[None, :]).to(x.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, magnitude(normed, mask))
    emit(normed, row, column, mask, factor, rows, columns, pitch, k, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)


@triton.jit
def _backward_inputs(x, dy, residual, at, mask, RESIDUAL: tl.constexpr):
    values = tl.load(x + at, mask=mask, other=0.0)
    grad = tl.load(dy + at, mask=mask, other=0.0)
    return values, grad, tl.load(residual + at, mask=mask, other=0.0) if RESIDUAL else grad


@triton.jit
def _norm_backward_kernel(
    x, weight, rstd, dy, residual, dx, partial, m, k,
    STEPS: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of ``STEPS * ROWS`` consecutive rows, ``ROWS`` at a time: dx of each, and the run's part of the weight's gradient.

    The next rows are on their way while the present ones wait for the sum over their columns.
    """
    run = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < k
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    row = run * (STEPS * ROWS) + tl.arange(0, ROWS)
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    mask = (row < m)[:, None] & inside[None, :]
    values, raw, rest = _backward_inputs(x, dy, residual, at, mask, RESIDUAL)
    for step in range(STEPS):
        r = tl.load(rstd + row, mask=row < m, other=0.0)[:, None]
        normed, grad, added = values.to(tl.float32) * r, raw.to(tl.float32), rest.to(tl.float32)
        here, valid = dx + at, mask
        row += ROWS
        at += ROWS * k
        mask = (row < m)[:, None] & inside[None, :]
        if step + 1 < STEPS:
            values, raw, rest = _backward_inputs(x, dy, residual, at, mask, RESIDUAL)
        if WEIGHT:
            part += grad * normed
        scaled = grad * w[None, :]
        out = (scaled - normed * (tl.sum(scaled * normed, axis=1) / k)[:, None]) * r
        if RESIDUAL:
            out += added
        tl.store(here, out.to(dx.dtype.element_ty), mask=valid)
    if WEIGHT:
        tl.store(partial + run.to(tl.int64) * k + column, tl.sum(part, axis=0), mask=inside)


@triton.jit
def _norm_dweight_kernel(partial, dweight, runs, k, BETA: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """``COLUMNS`` columns of the weight's gradient: the sum of the runs' parts, by a tree."""
    column, run = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RUNS)
    mask = column < k
    parts = tl.load(partial + run[:, None] * k + column[None, :], mask=(run < runs)[:, None] & mask[None, :], other=0.0)
    total = tl.sum(parts, axis=0)
    if BETA:
        total += tl.load(dweight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask=mask)


def _block(k: int) -> dict[str, int]:
    """A whole row per program, 8 to 16 values per thread."""
    block = triton.next_power_of_2(k)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` ``[m, k]`` → y in its dtype, and 1 / rms of each row (float32 ``[m]``)."""
    x = x.contiguous()
    y, rstd = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    launched("norm", x, weight, y, rstd, eps)
    _norm_rows_kernel[(x.shape[0],)](x, weight, y, rstd, x.shape[1], eps, FORWARD=True, **_block(x.shape[1]))
    return y, rstd


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms of each row of ``x`` ``[m, k]``: float32 ``[m]``."""
    rstd = torch.empty(x.shape[0], device=x.device)
    launched("inverse_rms", x, rstd, eps)
    _norm_rows_kernel[(x.shape[0],)](x, x, x, rstd, x.shape[1], eps, FORWARD=False, **_block(x.shape[1]))
    return rstd


def quantise(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, outputs: Outputs) -> Quantised:
    """The norm's output, rounded to ``x``'s dtype as :func:`forward` does, straight to FP8."""
    m, k = x.shape
    tile = tables.tile("norm", m, k)
    launched("norm_quantise", x, weight, rstd, *outputs.pointers())
    _norm_quantise_kernel[tile.grid(m, k)](x, weight, rstd, *outputs.pointers(), outputs.pitch, m, k, **outputs.switches(tile))
    return outputs.quantised()


def forward_quantise(x: torch.Tensor, weight: torch.Tensor, eps: float, outputs: Outputs) -> tuple[Quantised, torch.Tensor]:
    """``x`` ``[m, k]`` → its norm in FP8, and 1 / rms of each row: by :func:`inverse_rms` and :func:`quantise`, or at once."""
    m, k = x.shape
    cut = tables.norm_rows(m, k)
    if cut is None:
        rstd = inverse_rms(x, eps)
        return quantise(x, weight, rstd, outputs), rstd
    rstd = torch.empty(m, device=x.device)
    switches = {name: value for name, value in outputs.switches(cut).items() if name != "TILE_K"}
    launched("norm_whole_rows", x, weight, rstd, *outputs.pointers(), eps)
    _norm_whole_rows_kernel[(triton.cdiv(m, cut.rows),)](
        x, weight, rstd, *outputs.pointers(), outputs.pitch, m, k, eps, BLOCK=triton.next_power_of_2(k), **switches
    )
    return outputs.quantised(), rstd


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    residual: torch.Tensor | None = None,
    dweight: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """dx ``[m, k]`` in ``x``'s dtype; ``residual`` (a gradient of ``x`` from elsewhere) is added to it before it is rounded.

    ``dweight``: float32 or bfloat16 ``[k]`` and its beta: ``beta * out + gradient`` is written there, rounded once (beta 0:
    whatever was there is gone).
    Sums are in float32 in a fixed order, without atomics: the same bytes at every run, on any GPU.
    """
    m, k = x.shape
    block = triton.next_power_of_2(k)
    cut = tables.norm_runs(m, k, RUNS, block)
    dx = torch.empty_like(x)
    partial = dx if dweight is None else torch.empty(cut.runs, k, device=x.device)
    out, beta = (None, 0) if dweight is None else dweight
    launched("norm_backward", x, weight, rstd, dy, residual, dx, partial, out, beta)
    _norm_backward_kernel[(cut.runs,)](
        x, weight, rstd, dy.contiguous(), dx if residual is None else residual.contiguous(), dx, partial, m, k,
        STEPS=triton.cdiv(m, cut.runs * cut.rows), ROWS=cut.rows, RESIDUAL=residual is not None, WEIGHT=out is not None,
        BLOCK=block, num_warps=cut.warps,
    )  # fmt: skip
    if out is not None:
        padded = triton.next_power_of_2(cut.runs)
        _norm_dweight_kernel[(triton.cdiv(k, _COLUMNS),)](partial, out, cut.runs, k, BETA=beta, RUNS=padded, COLUMNS=_COLUMNS)
    return dx
