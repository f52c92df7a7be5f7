"""Values over steps, thinned out to what can be seen: a page of 100,000 steps is as large as one of 1,000."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BUCKETS = 2000  # of all runs over each other; of each the smallest and the largest value stay
FEWEST, MOST = 100, 600  # of one run: a screen has no more columns
SMOOTH_FROM = 30  # values; a mean of fewer hides more than it shows
KNOTS = 300  # of the map from steps to another axis
MOST_BAD = 100  # marks of values that are not finite


def number(value: object) -> float | None:
    """A number of a file as float, NaN and infinity too; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def short(value: float, digits: int = 5) -> float | int | None:
    """Rounded for the page; None for what JSON cannot say."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def buckets(runs: int) -> int:
    """How many buckets each of ``runs`` runs gets."""
    return max(FEWEST, min(MOST, BUCKETS // max(1, runs)))


def thin(steps: Sequence[int], values: Sequence[float], count: int) -> list[int]:
    """Places of the values to keep, at most ``2 * count``: of each of ``count`` equal spans of steps the extremes.

    Args:
        steps: in increasing order.
        values: finite.
    """
    if len(steps) <= 2 * count:
        return list(range(len(steps)))
    where = np.asarray(steps, np.float64)
    values_, kept = np.asarray(values), {0, len(steps) - 1}
    edges = np.searchsorted(where, np.linspace(where[0], where[-1], count + 1)[1:-1])
    for part in np.split(np.arange(len(steps)), edges):
        if len(part):
            kept.update((int(part[values_[part].argmin()]), int(part[values_[part].argmax()])))
    return sorted(kept)


def moving_mean(values: Sequence[float], window: int) -> npt.NDArray[np.float64]:
    """The centred mean of ``window`` (odd) values, of fewer at the ends; as long as ``values``."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))
    places, half = np.arange(len(values)), window // 2
    low, high = np.maximum(0, places - half), np.minimum(len(values), places + half + 1)
    means: npt.NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means


def window_of(count: int) -> int:
    """Of ``count`` values: two in a hundred, odd, at least 5."""
    return max(5, count // 50 | 1)


def line(points: Sequence[tuple[int, float]], count: int, *, smooth: bool = False) -> dict[str, Any]:
    """A curve for the page: steps ``s``, values ``v``; ``bad`` what is not finite as [step, text], ``bads`` how many of them.

    With ``smooth`` also ``ms``, ``mv`` (the moving mean) and ``window``, of enough values.
    """
    good = [(step, value) for step, value in points if math.isfinite(value)]
    bad = [(step, str(value)) for step, value in points if not math.isfinite(value)]
    steps, values = [step for step, _ in good], [value for _, value in good]
    kept = thin(steps, values, count)
    made: dict[str, Any] = {"s": [steps[n] for n in kept], "v": [short(values[n]) for n in kept], "n": len(points)}
    if bad:
        made |= {"bad": evenly(bad, MOST_BAD), "bads": len(bad)}
    if smooth and len(good) >= SMOOTH_FROM:
        window = window_of(len(good))
        means = moving_mean(values, window)
        places = sorted({round(n) for n in np.linspace(0, len(good) - 1, min(len(good), count))})
        made |= {"ms": [steps[n] for n in places], "mv": [short(float(means[n])) for n in places], "window": window}
    return made


def knots(values: Sequence[Any], count: int = KNOTS) -> list[Any]:
    """At most ``count`` of the values, evenly, the ends among them: lines are drawn between them."""
    return [values[n] for n in sorted({round(n) for n in np.linspace(0, len(values) - 1, min(len(values), count))})]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly over their order, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]
