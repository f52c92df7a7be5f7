"""How fast a device's products and attention are, looked up in what was measured of it by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

WORKS = "F", "I", "W"
AXES = "tokens", "out", "in"


@dataclass(frozen=True)
class Products:
    """Microseconds of F, I and W of a linear on a grid of (tokens, out, in); W adds into the main gradient.

    Between points of the grid the time is linear in each size; outside of it the nearest edge's rate holds.
    """

    axes: tuple[tuple[int, ...], ...]
    us: Mapping[str, Any]

    @staticmethod
    def of(table: Mapping[str, Any]) -> Products:
        return Products(tuple(tuple(table[axis]) for axis in AXES), {work: table[work] for work in WORKS})

    def seconds(self, work: str, tokens: float, out: float, inputs: float) -> float:
        """One product."""
        corners, scale = [], 1.0
        for axis, size in zip(self.axes, (tokens, out, inputs), strict=True):
            place, share, outside = _place(axis, size)
            corners.append(((place, 1 - share), (place + 1, share)))
            scale *= outside
        total = 0.0
        for corner in product(*corners):
            weight = prod(share for _, share in corner)
            if weight:
                a, b, c = (place for place, _ in corner)
                total += weight * self.us[work][a][b][c]
        return 1e-6 * scale * total


@dataclass(frozen=True)
class Rates:
    """TFLOP/s of F, I (and W) by one size; linear between those that were measured, the nearest beyond them."""

    sizes: tuple[int, ...]
    tflops: Mapping[str, Sequence[float]]

    @staticmethod
    def of(table: Mapping[str, Any], size: str) -> Rates:
        return Rates(tuple(table[size]), {work: table[work] for work in WORKS if work in table})

    def at(self, work: str, size: float) -> float:
        """FLOP/s."""
        place, share, _ = _place(self.sizes, size)
        values = self.tflops[work]
        return 1e12 * (values[place] if not share else (1 - share) * values[place] + share * values[place + 1])


def _place(axis: Sequence[int], size: float) -> tuple[int, float, float]:
    """(which interval, how far in it, how much larger than the axis reaches)."""
    inside = min(max(size, axis[0]), axis[-1])
    if len(axis) == 1:
        return 0, 0.0, size / inside
    place = max(i for i in range(len(axis) - 1) if axis[i] <= inside)
    return place, (inside - axis[place]) / (axis[place + 1] - axis[place]), size / inside
