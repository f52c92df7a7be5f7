"""How long ranks take to exchange: NVLink within a node, the network between nodes, and which axes lie where.

Ranks are numbered as the mesh numbers them (:mod:`qeffect_lm.parallel.mesh`), nodes are filled in that order, and every GPU has
a network adapter of its own. A collective over several nodes is bound by the network: of its ranks on one node each sends a
share through its own adapter. Nothing here knows of congestion, or of other collectives at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, log2, prod

from qeffect_lm.parallel.mesh import AXES, axes_of


@dataclass(frozen=True)
class Line:
    """Ranks that exchange with each other: ``size`` in all, on ``nodes`` nodes, at least ``beside`` of them on each."""

    size: int
    nodes: int = 1
    beside: int = 1


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s, one way and a GPU; latencies in µs (the constants of ``devices.json``)."""

    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int
    launch_us: float
    link_hop_us: float
    network_hop_us: float

    def line(self, sizes: Mapping[str, int], axis: str) -> Line:
        """Of a layout's axis, or of a line of axes."""
        return _line(tuple(sizes[one] for one in AXES), axes_of(axis), self.gpus_per_node)

    # ---- exchanges; bytes are those of the whole: gathered, summed, or sent by a rank ------------------------------

    def gather(self, line: Line, size: float) -> float:
        """Seconds of an all-gather whose result has ``size`` bytes, or of a reduce-scatter of as many."""
        if line.size == 1:
            return 0.0
        return 1e-6 * (self.launch_us + self._hops(line)) + size * (line.size - 1) / line.size / self._bandwidth(line)

    def all_reduce(self, line: Line, size: float) -> float:
        """A reduce-scatter and an all-gather in one launch."""
        return 0.0 if line.size == 1 else 2 * self.gather(line, size) - 1e-6 * self.launch_us

    def all_to_all(self, line: Line, size: float) -> float:
        """Every rank sends each (itself too) an equal part of ``size`` bytes."""
        if line.size == 1:
            return 0.0
        inside = size * (line.beside - 1) / line.size / (1e9 * self.link_gb_s)
        across = size * (line.size - line.beside) / line.size / (1e9 * self.network_gb_s)
        return 1e-6 * (self.launch_us + self._hop(line)) + max(inside, across)

    def message(self, size: float, inside: bool) -> float:
        """From one rank to another."""
        return 1e-6 * self.launch_us + size / (1e9 * (self.link_gb_s if inside else self.network_gb_s))

    def _hop(self, line: Line) -> float:
        return self.link_hop_us if line.nodes == 1 else self.network_hop_us

    def _hops(self, line: Line) -> float:
        return self.link_hop_us * (line.beside - 1) + self.network_hop_us * ceil(log2(line.nodes))

    def _bandwidth(self, line: Line) -> float:
        across = self.network_gb_s * line.beside
        return 1e9 * (self.link_gb_s if line.nodes == 1 else min(self.link_gb_s, across))


@cache
def _line(sizes: tuple[int, ...], axes: tuple[str, ...], gpus_per_node: int) -> Line:
    """Through rank 0; the others of a kind lie the same where nodes are filled evenly."""
    places = range(len(AXES))
    stride = [prod(sizes[place + 1 :]) for place in places]
    nodes: dict[int, int] = {}
    for at in product(*(range(sizes[place]) if AXES[place] in axes else range(1) for place in places)):
        node = sum(one * step for one, step in zip(at, stride, strict=True)) // gpus_per_node
        nodes[node] = nodes.get(node, 0) + 1
    return Line(sum(nodes.values()), len(nodes), min(nodes.values()))
