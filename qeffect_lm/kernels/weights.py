"""The weight refresh: all weights of a rank in two launches, masters → BF16 → FP8 in both layouts, and the amax.

One launch per weight would leave the GPU idle between small ones. The kernel finds its weight through a table of addresses on
the device, so masters, caches, scales and slots must stay where they are (they do: the register knows them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched
from qeffect_lm.kernels.tables import DEFAULT_TILE
from qeffect_lm.kernels.tile import emit, magnitude, merge_amax, store_inverse, tile_offsets

EMPTY = tl.constexpr(-1.0)
_FIELDS = tl.constexpr(9)  # per weight: master, rows, columns, scale, amax, scale_inv, m, k, first tile


@triton.jit
def _address(table, weight, field: tl.constexpr):
    return tl.load(table + weight * _FIELDS + field)


@triton.jit
def _empty_slots_kernel(table, count, BLOCK: tl.constexpr):
    """A refresh replaces what an earlier one in this window reported."""
    weight = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(table + weight * _FIELDS + 4, mask=weight < count, other=0).to(tl.pointer_type(tl.float32))
    tl.store(slot, EMPTY, mask=weight < count)


@triton.jit
def _refresh_kernel(table, weight_of_tile, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    weight = tl.load(weight_of_tile + tl.program_id(0))
    master = _address(table, weight, 0).to(tl.pointer_type(tl.float32))
    rows = _address(table, weight, 1).to(tl.pointer_type(tl.float8e4nv))
    columns = _address(table, weight, 2).to(tl.pointer_type(tl.float8e4nv))
    scale = _address(table, weight, 3).to(tl.pointer_type(tl.float32))
    amax = _address(table, weight, 4).to(tl.pointer_type(tl.float32))
    scale_inv = _address(table, weight, 5).to(tl.pointer_type(tl.float32))
    m = _address(table, weight, 6).to(tl.int32)
    k = _address(table, weight, 7).to(tl.int32)
    if ALIGNED:  # what a launch would tell about its arguments and a table cannot: accesses may be 16 bytes wide
        master, rows, columns = tl.multiple_of(master, 16), tl.multiple_of(rows, 16), tl.multiple_of(columns, 16)
        m, k = tl.multiple_of(m, 16), tl.multiple_of(k, 16)
    pid = tl.program_id(0) - _address(table, weight, 8).to(tl.int32)
    row, column = tile_offsets(pid, k, TILE_M, TILE_K)
    mask = (row < m)[:, None] & (column < k)[None, :]
    wide = tl.load(master + row.to(tl.int64)[:, None] * k + column[None, :], mask=mask, other=0.0)
    values = wide.to(tl.bfloat16).to(tl.float32)
    factor = tl.load(scale)
    merge_amax(amax, magnitude(values, mask))
    emit(values, row, column, mask, factor, rows, columns, m, k, True, True, False)
    store_inverse(pid, factor, scale_inv)


@dataclass(frozen=True)
class Weight:
    """One weight's storages: master ``[out, in]`` float32, E4M3 rows and columns, and three 0-dim float32."""

    master: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor
    scale_inv: torch.Tensor

    def addresses(self) -> tuple[int, ...]:
        tensors = (self.master, self.rows, self.columns, self.scale, self.amax, self.scale_inv)
        return tuple(tensor.data_ptr() for tensor in tensors)


class WeightRefresh:
    """Quantises ``weights`` whenever :meth:`run` is called; safe to capture."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        device = weights[0].master.device
        fields: list[tuple[int, ...]] = []
        tile_owner: list[int] = []
        for number, weight in enumerate(weights):
            if weight.master.dtype is not torch.float32 or not weight.master.is_contiguous():
                raise ValueError("the weight refresh reads contiguous float32 masters")
            m, k = weight.master.shape
            fields.append((*weight.addresses(), m, k, len(tile_owner)))
            tile_owner += [number] * DEFAULT_TILE.grid(m, k)[0]
        self.addresses = [weight.addresses() for weight in weights]
        self._aligned = all(value % 16 == 0 for field in fields for value in (*field[:3], *field[6:8]))
        self.table = torch.tensor(fields, dtype=torch.int64, device=device)
        self.tile_owner = torch.tensor(tile_owner, dtype=torch.int32, device=device)

    def run(self) -> None:
        count, tiles = len(self.addresses), self.tile_owner.numel()
        launched("weight_refresh", self.table, self.tile_owner)
        _empty_slots_kernel[(triton.cdiv(count, 128),)](self.table, count, BLOCK=128)
        _refresh_kernel[(tiles,)](
            self.table, self.tile_owner, ALIGNED=self._aligned,
            TILE_M=DEFAULT_TILE.rows, TILE_K=DEFAULT_TILE.columns, num_warps=DEFAULT_TILE.warps,
        )  # fmt: skip
