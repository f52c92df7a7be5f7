"""The mesh: which rank is where on the axes {pp, dp, ep, tp}, and the process groups along them.

Ranks are laid out with tp fastest, then ep, dp, and pp slowest, so that tensor-parallel peers are neighbours. Groups are
passed to layers and engine explicitly; nothing looks one up globally.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch.distributed as dist

from qeffect_lm.errors import UsageError

AXES = ("pp", "dp", "ep", "tp")  # slowest first


class Mesh:
    """Sizes and this rank's coordinates on each axis.

    Args:
        sizes: axis → size; an absent axis has size 1.
        rank: this process's global rank.

    Raises:
        UsageError: an unknown axis, a size below 1, or a rank outside the mesh.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0) -> None:
        unknown = set(sizes) - set(AXES)
        if unknown:
            raise UsageError(f"unknown mesh axis {sorted(unknown)[0]!r}: the axes are {', '.join(AXES)}")
        self.sizes = {axis: int(sizes.get(axis, 1)) for axis in AXES}
        for axis, size in self.sizes.items():
            if size < 1:
                raise UsageError(f"mesh axis {axis} has size {size}; it must be at least 1")
        self.world = 1
        for size in self.sizes.values():
            self.world *= size
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is outside a mesh of {self.world} ranks ({self.sizes})")
        self.rank = rank
        self._coords = self.coords_of(rank)
        self._groups: dict[str, dist.ProcessGroup] = {}

    def coords_of(self, rank: int) -> dict[str, int]:
        coords = {}
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self.sizes[axis])
        return coords

    def rank_at(self, **coords: int) -> int:
        """The global rank at coordinates; an axis not named keeps this rank's."""
        rank = 0
        for axis in AXES:
            rank = rank * self.sizes[axis] + coords.get(axis, self._coords[axis])
        return rank

    def coord(self, axis: str) -> int:
        return self._coords[axis]

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    @property
    def coords(self) -> dict[str, int]:
        return dict(self._coords)

    def peers(self, axis: str) -> list[int]:
        """Global ranks along ``axis`` through this rank, in order of coordinate."""
        return [self.rank_at(**{axis: i}) for i in range(self.sizes[axis])]

    def create_groups(self) -> None:
        """Make one process group per axis line longer than 1; collective over all ranks, in one fixed order."""
        for axis in AXES:
            if self.sizes[axis] == 1:
                continue
            others = [other for other in AXES if other != axis]
            for fixed in product(*(range(self.sizes[other]) for other in others)):
                coords = dict(zip(others, fixed, strict=True))
                ranks = [self.rank_at(**coords, **{axis: i}) for i in range(self.sizes[axis])]
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    self._groups[axis] = group

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along ``axis`` through this rank; None when the axis has size 1."""
        return self._groups.get(axis)
