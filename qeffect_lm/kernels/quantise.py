"""Quantise in one pass: read a matrix once, write FP8 in both layouts, its amax and the inverse scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import Format, Quantised
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.tile import SCALARS, emit, magnitude, merge_amax, store_inverse, tile_offsets


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _quantise_kernel(
    x, scale, rows, columns, amax, scale_inv, pitch, m, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    pid, factor = tl.program_id(0), tl.load(scale)
    row, column = tile_offsets(pid, k, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < k)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if AMAX:
        merge_amax(amax, magnitude(values, mask))
    emit(values, row, column, mask, factor, rows, columns, pitch, k, ROWS, COLUMNS, E5M2)
    store_inverse(pid, factor, scale_inv)


class Outputs:
    """Where a kernel that quantises a matrix of ``shape`` writes: new storages, or a caller's (a slot's).

    A layout that is not made, or an amax that nobody wants, gets some valid pointer that the kernel never touches.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        scale: torch.Tensor,
        fmt: Format,
        *,
        rows: bool,
        columns: bool,
        amax_out: torch.Tensor | None,
        rows_out: torch.Tensor | None = None,
        columns_out: torch.Tensor | None = None,
        scale_inv_out: torch.Tensor | None = None,
    ) -> None:
        m, k = shape
        self.rows = _storage(rows_out, (m, k), fmt, scale.device) if rows else None
        self.columns = _storage(columns_out, (k, m), fmt, scale.device, apart=True) if columns else None
        self.scale_inv = torch.empty((), device=scale.device) if scale_inv_out is None else scale_inv_out
        self.amax = amax_out
        self._scale, self._fmt, self._m = scale, fmt, m

    @property
    def pitch(self) -> int:
        """How far apart the rows of ``columns`` are, in elements: what the kernels take after the pointers."""
        return self._m if self.columns is None else self.columns.stride(0)

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """scale, rows, columns, amax, scale_inv: the kernels' arguments, in order."""
        absent = self.scale_inv
        rows = absent if self.rows is None else self.rows
        columns = absent if self.columns is None else self.columns
        return self._scale, rows, columns, absent if self.amax is None else self.amax, self.scale_inv

    def switches(self, tile: tables.Tile) -> dict[str, bool | int]:
        """The kernels' constants."""
        return {
            "ROWS": self.rows is not None,
            "COLUMNS": self.columns is not None,
            "AMAX": self.amax is not None,
            "E5M2": self._fmt.name == "E5M2",
            "TILE_M": tile.rows,
            "TILE_K": tile.columns,
            "num_warps": tile.warps,
        }

    def quantised(self) -> Quantised:
        return Quantised(self.rows, self.columns, self.scale_inv)


def _storage(
    given: torch.Tensor | None, shape: tuple[int, int], fmt: Format, device: torch.device, *, apart: bool = False
) -> torch.Tensor:
    """``apart``: the rows of a given storage may be part of something wider."""
    if given is None:
        return torch.empty(shape, dtype=fmt.dtype, device=device)
    dense = given.is_contiguous() or (apart and given.dim() == 2 and given.stride(1) == 1 and given.stride(0) >= shape[1])
    if tuple(given.shape) != shape or given.dtype != fmt.dtype or not dense:
        raise ValueError(f"{fmt.name} {list(shape)} needs a contiguous storage, not {given.dtype} {list(given.shape)}")
    return given


def quantise(x: torch.Tensor, outputs: Outputs) -> Quantised:
    """``x`` ``[m, k]`` → FP8; equal bytes to the reference in :mod:`qeffect_lm.fp8.quantise` (of a NaN, up to its sign)."""
    x = x.contiguous()
    m, k = x.shape
    tile = tables.tile("quantise", m, k)
    launched("quantise", x, *outputs.pointers())
    _quantise_kernel[tile.grid(m, k)](x, *outputs.pointers(), outputs.pitch, m, k, **outputs.switches(tile))
    return outputs.quantised()
