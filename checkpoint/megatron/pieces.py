"""A tensor in pieces over several files: what one process would have held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkpoint.layout import Box, tiling_fault
from checkpoint.megatron.guard import Ref
from checkpoint.shards import as_integers, torch_dtype
from qeffect_lm.errors import UsageError


@dataclass(frozen=True)
class Pieces:
    """``shape`` and dtype of the whole, and where each block of it is.

    Raises :class:`UsageError` (by :meth:`checked`) unless the blocks tile it exactly once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[Box, Ref], ...]

    def checked(self) -> Pieces:
        for box, ref in self.parts:
            if ref.dtype != self.dtype:
                raise UsageError(f"{self.name}: a piece at {box} is {ref.dtype}, the tensor {self.dtype}")
            if box.shape != ref.shape:
                raise UsageError(f"{self.name}: the piece at {box} has the shape {list(ref.shape)}")
        fault = tiling_fault(self.shape, [box for box, _ in self.parts])
        if fault:
            raise UsageError(f"{self.name} is not there exactly once: {fault}")
        return self

    def read(self, rows: int | None = None) -> torch.Tensor:
        """The whole, or its first ``rows`` rows, as a new CPU tensor."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        wanted = Box((0,) * len(shape), shape)
        if len(self.parts) == 1 and self.parts[0][0] == wanted:
            return self.parts[0][1].read()
        out = torch.empty(shape, dtype=torch_dtype(self.dtype))
        for box, ref in self.parts:
            common = box.intersection(wanted) if shape else box
            if common is not None:
                as_integers(out)[common.within(wanted)] = as_integers(ref.read())[common.within(box)]
        return out

    def layer(self, index: int, name: str) -> Pieces:
        """One entry of a tensor whose first dimension is the layers'."""
        parts = []
        for box, ref in self.parts:
            if box.start[0] <= index < box.start[0] + box.shape[0]:
                row = ref.rows(index - box.start[0], 1)
                ref_shape, ref_stride = row.shape[1:], row.stride[1:]
                flat = Ref(row.path, row.offset, row.dtype, ref_shape, ref_stride)
                parts.append((Box(box.start[1:], box.shape[1:]), flat))
        return Pieces(name, self.shape[1:], self.dtype, tuple(parts))


def stacked(name: str, halves: Sequence[Pieces]) -> Pieces:
    """Tensors below each other."""
    parts: list[tuple[Box, Ref]] = []
    rows = 0
    for half in halves:
        parts += [(Box((box.start[0] + rows, *box.start[1:]), box.shape), ref) for box, ref in half.parts]
        rows += half.shape[0]
    return Pieces(name, (rows, *halves[0].shape[1:]), halves[0].dtype, tuple(parts))
