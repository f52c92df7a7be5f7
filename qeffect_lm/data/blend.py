"""Several sources blended by weights: which source a sample comes from, and which of its samples, from the number alone.

Weights are decimals, taken exactly: as whole numbers ``w`` without common factor they make a period of ``sum(w)`` samples, in
which each source occurs exactly ``w`` times, as evenly as it can: its k-th occurrence wants the place ``(2 k + 1) / (2 w)`` of
the period, and the places are handed out in the order of these wishes (largest remainders first, equal ones in the order of the
sources). After n samples a source's share is off by ``1/2 + s/2`` samples at most, s the number of sources; after a whole
period by nothing.

A blend may change in the middle of a run, at a sample number, and every change is kept: a source that stays, or comes back,
goes on where it was, a new one begins at its first sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.errors import UsageError, shown

LONGEST_PERIOD = 1 << 20
LARGEST = 1 << 56  # sample number that a saved cursor may hold: computing with it stays within 64 bits
Numbers = npt.NDArray[np.int64]


def whole_weights(weights: Sequence[float | str | Fraction]) -> list[int]:
    """Weights as whole numbers in the same proportions, without common factor.

    Raises:
        UsageError: one is not above 0, or the proportions need a longer period than 2^20 samples.
    """
    exact = [_exact(weight) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = gcd(*whole)
    whole = [weight // common for weight in whole]
    if sum(whole) > LONGEST_PERIOD:
        raise UsageError(
            f"weights {list(map(str, weights))} come round after more than {LONGEST_PERIOD} samples: give them with fewer "
            "decimals"
        )
    return whole


def _exact(weight: float | str | Fraction) -> Fraction:
    if isinstance(weight, Fraction):
        made = weight
    else:
        try:
            size = float(weight)  # before the exact number, which for 1e999999999 would fill the memory
            made = Fraction(str(weight)) if math.isfinite(size) and size > 0 else Fraction(0)
        except ValueError:
            raise UsageError(f"weight {shown(repr(weight))} is no number") from None
    if made <= 0:
        raise UsageError(f"weight {shown(str(weight))}: each must be above 0, and finite; leave a source out instead")
    return made


@dataclass(frozen=True)
class Segment:
    """The blend from sample ``first`` on: each source's digest, weight and the number of its samples used before."""

    first: int
    sources: tuple[str, ...]
    weights: tuple[int, ...]
    offsets: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        rows = zip(self.sources, self.weights, self.offsets, strict=True)
        return {"first": self.first, "sources": [{"sha256": sha, "weight": w, "offset": at} for sha, w, at in rows]}

    @classmethod
    def from_json(cls, value: Any) -> Segment:
        try:
            rows = value["sources"]
            made = cls(
                value["first"],
                tuple(row["sha256"] for row in rows),
                tuple(row["weight"] for row in rows),
                tuple(row["offset"] for row in rows),
            )
            numbers = [made.first, *made.weights, *made.offsets]
            wrong = any(type(number) is not int or not 0 <= number <= LARGEST for number in numbers)
            wrong = wrong or not 0 < sum(made.weights) <= LONGEST_PERIOD
        except (KeyError, TypeError) as error:
            raise UsageError(f"the saved data cursor's blend is {shown(repr(value))}, which is none") from error
        if wrong or any(not isinstance(sha, str) for sha in made.sources) or 0 in made.weights:
            raise UsageError(f"the saved data cursor's blend is {shown(repr(value))}, which is none")
        return made


class Order:
    """Which source and which of its samples each number of a segment is."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        weights = np.array(segment.weights, dtype=np.int64)
        source = np.repeat(np.arange(len(weights)), weights)
        turn = np.concatenate([np.arange(weight, dtype=np.int64) for weight in segment.weights])
        wish = (2 * turn + 1) / (2 * weights[source])
        order = np.lexsort((source, wish))
        self._source, self._turn = source[order], turn[order]
        self._weights, self._offsets = weights, np.array(segment.offsets, dtype=np.int64)

    def __call__(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """(source, sample of the source) of each of ``numbers`` (any shape), which are at least the segment's first."""
        rounds, place = np.divmod(numbers - self.segment.first, len(self._source))
        source = self._source[place]
        return source, self._offsets[source] + rounds * self._weights[source] + self._turn[place]

    def used(self, number: int) -> dict[str, int]:
        """How many samples of each source come before sample ``number``."""
        rounds, place = divmod(number - self.segment.first, len(self._source))
        begun = np.bincount(self._source[:place], minlength=len(self._weights))
        counts = self._offsets + rounds * self._weights + begun
        return dict(zip(self.segment.sources, counts.tolist(), strict=True))


def continued(blends: Sequence[Segment], number: int, sources: Sequence[str], weights: Sequence[int]) -> Segment:
    """The blend of ``sources`` and ``weights`` from sample ``number`` on, after ``blends``: a source goes on where it was, also
    one that was out of the blend for a while."""
    used: dict[str, int] = {}
    for segment, end in zip(blends, [*(following.first for following in blends[1:]), number], strict=True):
        used |= Order(segment).used(end)
    return Segment(number, tuple(sources), tuple(weights), tuple(used.get(source, 0) for source in sources))
