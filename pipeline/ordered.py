"""Sums over ranks whose bits depend on the parts alone: ``((g0 + g1) + g2) + …`` for each element, in order of rank.

A library's all-reduce cuts a tensor into as many segments as there are ranks, and begins each segment's sum at another rank.
Of three ranks and more an element's bits then depend on where it lies, so on what else is reduced with it: how many stages and
chunks share a model, how long a rank's piece of the vocabulary is. Another schedule would train another model, and
tensor-parallel peers, whose pieces differ in length, would drift apart in what they all hold. So each rank sends every other
one its segment as it is, the owner adds what it got in order of rank, and all gather the sums: as many bytes as a ring's
all-reduce moves, and a buffer. Two ranks have one order only, and the library's all-reduce serves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import all_gather

BUCKET = 1 << 24
"""Elements summed at once, which bounds the buffer. It changes no bit."""


def buffer_of(ranks: int, longest: int) -> int:
    """Elements that :class:`OrderedSum` needs beside tensors of up to ``longest``."""
    return 0 if ranks <= 2 else (ranks + 1) * -(-min(longest, BUCKET) // ranks)


class OrderedSum:
    """Of one rank, along an axis or a line of a mesh with a process group for it.

    Args:
        longest: most elements of a tensor to be summed.
        like: has their dtype and device.
    """

    def __init__(self, mesh: Mesh, axis: str, longest: int, like: torch.Tensor) -> None:
        self._group, self._rank, self._ranks = mesh.group(axis), mesh.coord(axis), mesh.size(axis)
        self.buffer = like.new_zeros(buffer_of(self._ranks, longest))

    def sum_(self, values: torch.Tensor) -> None:
        """Add ``values`` (flat, contiguous) of all ranks, in place and in their dtype; the same bytes on all."""
        if self._ranks <= 2:
            dist.all_reduce(values, group=self._group)
            return
        for part in values.split(BUCKET):
            self._sum(part)

    def _sum(self, values: torch.Tensor) -> None:
        ranks, length = self._ranks, values.numel()
        piece = -(-length // ranks)
        sizes = [min(piece, max(0, length - rank * piece)) for rank in range(ranks)]
        here = sizes[self._rank]
        received, total = self.buffer[: ranks * here], self.buffer[ranks * piece : (ranks + 1) * piece]
        dist.all_to_all_single(received, values, [here] * ranks, sizes, group=self._group)
        added_(total[:here], received.view(ranks, here))
        gathered = self.buffer[: ranks * piece]
        all_gather(gathered, total, group=self._group)
        values.copy_(gathered[:length])


def added_(total: torch.Tensor, parts: torch.Tensor) -> None:
    """``parts`` ``[ranks, n]`` one after the other into ``total`` ``[n]``."""
    total.copy_(parts[0])
    for part in parts[1:].unbind():
        total.add_(part)
