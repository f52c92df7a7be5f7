"""The mesh: which rank is where on the axes {pp, dp, ep, cp, tp}, and the process groups along them.

Ranks are laid out with tp fastest, then cp, ep, dp, and pp slowest, so that tensor-parallel peers are neighbours. Groups are
passed to layers and engine explicitly; nothing looks one up globally.

Some work is shared over several axes at once. Such a *line* has a name of its own, coordinates that count its last axis
fastest, and a group: wherever an axis is asked for, a line may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import product

import torch.distributed as dist

from qeffect_lm.errors import UsageError

AXES = ("pp", "dp", "ep", "cp", "tp")  # slowest first
LINES = {
    "samples": ("dp", "ep"),  # who trains on samples of its own
    "data": ("dp", "ep", "cp"),  # who adds losses up: each has tokens of its own
    "replicas": ("dp", "cp"),  # who holds the same parameters, experts included
    "tokens": ("cp", "tp"),  # who shares the tokens of one microbatch
    "experts": ("ep", "tp"),  # who shares the experts of a layer
    "peers": ("ep", "cp", "tp"),  # with whom F and I exchange
}


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
        """This rank's, along an axis or a line."""
        place = 0
        for one in axes_of(axis):
            place = place * self.sizes[one] + self._coords[one]
        return place

    def size(self, axis: str) -> int:
        """Ranks along an axis or a line."""
        return math.prod(self.sizes[one] for one in axes_of(axis))

    @property
    def coords(self) -> dict[str, int]:
        return dict(self._coords)

    def peers(self, axis: str) -> list[int]:
        """Global ranks along an axis or a line through this rank, in order of coordinate."""
        return [self.rank_at(**place) for place in self._places(axes_of(axis))]

    def _places(self, axes: Sequence[str]) -> list[dict[str, int]]:
        """All coordinates on some axes, the last fastest."""
        return [dict(zip(axes, place, strict=True)) for place in product(*(range(self.sizes[one]) for one in axes))]

    def create_groups(self, timeout: float | None = None) -> None:
        """Make the process groups of all axes and lines of more than one rank; collective over all ranks, in one fixed order.
        A line that is one axis, since its others have one rank, has that one's group.

        ``timeout``: seconds after which a collective of theirs gives a peer up; None: torch's default, whatever the default
        group's is.
        """
        limit = None if timeout is None else timedelta(seconds=timeout)
        for axis in (*AXES, *LINES):
            long = self._long(axis)
            if len(long) == 1 and axis in LINES:
                self._groups[axis] = self._groups[long[0]]
            elif long:
                same = next((line for line in LINES if line in self._groups and self._long(line) == long), None)
                self._groups[axis] = self._groups[same] if same is not None else self._made(axis, limit)

    def _long(self, line: str) -> tuple[str, ...]:
        return tuple(one for one in axes_of(line) if self.sizes[one] > 1)

    def _made(self, axis: str, limit: timedelta | None) -> dist.ProcessGroup:
        """A new group along every line of this kind; this rank's."""
        mine, along = None, self._places(axes_of(axis))
        for fixed in self._places([other for other in AXES if other not in axes_of(axis)]):
            ranks = [self.rank_at(**fixed, **place) for place in along]
            group = dist.new_group(ranks, timeout=limit)
            if self.rank in ranks:
                mine = group
        assert mine is not None
        return mine

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along an axis or a line through this rank; None where that is this rank alone."""
        return self._groups.get(axis)

    def others(self, axis: str) -> list[int]:
        """Global ranks of :meth:`peers` but this one."""
        return [rank for rank in self.peers(axis) if rank != self.rank]


def axes_of(axis: str) -> tuple[str, ...]:
    """The axes of a line, slowest first; of an axis itself."""
    return LINES.get(axis, (axis,))
