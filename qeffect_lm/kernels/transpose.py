"""Transpose FP8: rows that other ranks quantised → the columns that W reads.

Two rows are turned as one matrix of 16-bit numbers, each a byte of both, so two neighbours of a column: numbers as wide as BF16
go through shared memory 16 bytes at a time (``ldmatrix``), as in the quantising kernels. Bytes by themselves would go one by
one, as they do where Triton 3.6 quantises float32, whose transposed copy is wrong (:func:`qeffect_lm.kernels.quantises`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched
from qeffect_lm.kernels.tables import Tile
from qeffect_lm.kernels.tile import tile_offsets

# Pairs of rows by features, of eight tried on an H200 the fastest for few tokens: columns leave in runs of 128 bytes. There it
# moves 3.2 to 3.5 TB/s, where a copy moves 3.3 to 4.0.
TILE = Tile(64, 128, 8)


@triton.jit
def _transpose_kernel(rows, columns, pitch, m, k, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """``rows`` are bytes, ``columns`` 16-bit numbers; ``pitch`` counts bytes and is even, like m."""
    pair, column = tile_offsets(tl.program_id(0), k, TILE_M, TILE_K)
    mask = (pair < m // 2)[:, None] & (column < k)[None, :]
    at = rows + pair.to(tl.int64)[:, None] * 2 * k + column[None, :]
    first = tl.load(at, mask=mask, other=0).to(tl.uint16)
    second = tl.load(at + k, mask=mask, other=0).to(tl.uint16)
    both = (first | (second << 8)).to(tl.int16, bitcast=True)
    to = columns + column.to(tl.int64)[:, None] * (pitch // 2) + pair[None, :]
    tl.store(to, tl.trans(both), mask=tl.trans(mask))


def takes(rows: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether rows come in pairs, and each row of ``columns`` ``[k, m]`` begins at an even byte."""
    even = rows.shape[0] % 2 == 0 and columns.stride(0) % 2 == 0 and columns.storage_offset() % 2 == 0
    return even and rows.is_contiguous() and columns.stride(1) == 1


def transpose(rows: torch.Tensor, columns: torch.Tensor) -> None:
    """FP8 ``rows`` ``[m, k]`` into ``columns`` ``[k, m]``, whose rows may be part of something wider; :func:`takes` both."""
    m, k = rows.shape
    launched("transpose", rows, columns)
    _transpose_kernel[TILE.grid(m // 2, k)](
        rows.view(torch.uint8), columns.view(torch.int16), columns.stride(0), m, k,
        TILE_M=TILE.rows, TILE_K=TILE.columns, num_warps=TILE.warps,
    )  # fmt: skip
