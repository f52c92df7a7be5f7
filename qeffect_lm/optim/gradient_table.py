"""Where every main gradient lies, as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from qeffect_lm.optim.buckets import BucketPlan
from qeffect_lm.optim.flat import Entry, ParamSpec


def gradient_table(
    entries: Mapping[str, Entry], tied: Iterable[ParamSpec], dtype: torch.dtype, buckets: BucketPlan | None = None
) -> str:
    """One line for each main gradient of a rank: where in the flat buffer (bytes from its start; the first element), how long,
    which chunk's work completes it, and the buckets that it is reduced in (only with shared optimizer state).

    Args:
        entries: of the flat storage; frozen parameters have no gradient.
        tied: tied weights, each with a buffer of its own.
    """
    rows = [["byte", "element", "bytes", "chunk", *(["bucket"] if buckets else []), "gradient", "shape"]]
    total = 0
    for name, entry in entries.items():
        if entry.segment == "frozen":
            continue
        size = entry.numel * dtype.itemsize
        total += size
        chunk = str(entry.spec.group) if entry.spec.group >= 0 else "tied"
        place = [f"{entry.offset * dtype.itemsize:,}", f"{entry.offset:,}", f"{size:,}", chunk]
        rows.append([*place, *([_buckets(name, buckets)] if buckets else []), name, _shape(entry.spec)])
    end = len(rows)
    for spec in tied:
        if spec.trainable:
            size = spec.numel * dtype.itemsize
            total += size
            place = ["0", "0", f"{size:,}", str(spec.group), *(["-"] if buckets else [])]
            rows.append([*place, f"{spec.name} (added to {spec.tied_to})", _shape(spec)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    if end < len(rows):
        text.insert(end, "in buffers of their own:")
    return "\n".join([*text, f"{len(rows) - 1} main gradients, {total:,} bytes in {str(dtype).removeprefix('torch.')}"])


def _aligned(row: list[str], widths: list[int]) -> Iterable[str]:
    """Numbers to the right, the name and the shape behind them to the left."""
    for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield f"{cell:<{width}}" if place >= len(row) - 2 else f"{cell:>{width}}"


def _buckets(name: str, plan: BucketPlan) -> str:
    found = [number for number, bucket in enumerate(plan.buckets) if bucket.trainable and name in bucket.names]
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _shape(spec: ParamSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"
