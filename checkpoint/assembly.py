"""What each rank's shard holds, and the logical tensors out of all ranks' slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.layout import Box, CheckpointError, natural_key, tiling_fault
from checkpoint.manifest import NAME_MOST, SliceEntry, TensorEntry
from checkpoint.shards import Segment, dtype_name
from qeffect_lm.errors import shown
from qeffect_lm.state import LogicalTensor


@dataclass(frozen=True)
class Written:
    """One slice as its writer reports it, with what it believes about the logical tensor."""

    name: str
    description: dict[str, Any]
    part: dict[str, Any]

    @property
    def box(self) -> Box:
        return Box(self.part["start"], self.part["shape"])


@dataclass(frozen=True)
class Report:
    """What a rank tells rank 0 after its shard is on disk; plain data, so that it travels by any means."""

    rank: int
    coords: dict[str, int]
    meta: dict[str, Any]
    files: list[tuple[str, int, str, int]]  # name, size, SHA-256, and of how many bytes that is
    written: list[Written]
    held: dict[str, dict[str, Any]]  # tensors this rank left to another, and its description of them


def owns(item: LogicalTensor, coords: Mapping[str, int]) -> bool:
    """Whether the rank at ``coords`` is the one that writes this piece."""
    return not item.copy and (item.per_rank or all(coords.get(axis, 0) == 0 for axis in item.replicated))


def check(item: LogicalTensor) -> None:
    """Raises :class:`CheckpointError` for a piece that cannot be part of its logical tensor."""
    if not item.name.isprintable() or not 0 < len(item.name) <= NAME_MOST:
        raise CheckpointError(
            f"tensor {shown(item.name)!r}: names have up to {NAME_MOST} characters, and each can be printed"
        )
    dtype_name(item.tensor.dtype)
    ranks = {len(item.global_shape), len(item.start), len(item.axes), item.tensor.dim()}
    if len(ranks) != 1:
        raise CheckpointError(f"tensor {item.name!r}: shape, start, axes and storage differ in dimensions")
    box = Box(tuple(item.start), tuple(item.tensor.shape))
    if not box.fits(item.global_shape):
        raise CheckpointError(
            f"tensor {item.name!r}: its piece {box} does not fit into the shape {list(item.global_shape)}"
        )


def description_of(item: LogicalTensor) -> dict[str, Any]:
    """What all ranks that hold some of a tensor have to agree on."""
    return {
        "shape": tuple(item.global_shape),
        "dtype": dtype_name(item.tensor.dtype),
        "role": item.role.value,
        "axes": tuple(item.axes),
        "per_rank": item.per_rank,
    }


def segments_of(own: Sequence[LogicalTensor]) -> list[Segment]:
    """Keys and places in the data part; a second piece of one logical tensor gets a numbered key."""
    segments: list[Segment] = []
    keys = {"__metadata__"}
    begin = 0
    for item in own:
        key, number = item.name, 1
        while key in keys:
            key, number = f"{item.name}#{number}", number + 1
        keys.add(key)
        dtype = dtype_name(item.tensor.dtype)
        segments.append(Segment(key, dtype, tuple(item.tensor.shape), begin))
        begin += segments[-1].nbytes
    return segments


def assemble(reports: Sequence[Report]) -> dict[str, TensorEntry]:
    """The logical tensors out of all ranks' slices. Raises :class:`CheckpointError` unless each is tiled
    once.
    """
    found: dict[str, list[tuple[int, Written]]] = {}
    for report in reports:
        for written in report.written:
            found.setdefault(written.name, []).append((report.rank, written))
    entries = {}
    for name in sorted(found, key=natural_key):
        slices = found[name]
        description = slices[0][1].description
        for rank, written in slices:
            _agree(name, slices[0][0], description, rank, written.description)
        labels = [f"rank {rank}'s slice" for rank, _ in slices]
        fault = tiling_fault(description["shape"], [written.box for _, written in slices], labels)
        if fault:
            raise CheckpointError(f"tensor {name!r} is not written exactly once: {fault}")
        parts = [SliceEntry(**written.part) for _, written in slices]
        entries[name] = TensorEntry(**description, slices=tuple(_with_elements(parts)))
    for report in reports:
        for name, description in report.held.items():
            if name not in found:
                raise CheckpointError(
                    f"tensor {name!r} is held by rank {report.rank} as a replica, but no rank owns it"
                )
            _agree(name, found[name][0][0], found[name][0][1].description, report.rank, description)
    return entries


def _agree(name: str, rank: int, first: Mapping[str, Any], other_rank: int, other: Mapping[str, Any]) -> None:
    for key, value in first.items():
        if other[key] != value:
            raise CheckpointError(
                f"tensor {name!r}: {key} is {value!r} on rank {rank} and {other[key]!r} on rank {other_rank}"
            )


def _with_elements(parts: list[SliceEntry]) -> list[SliceEntry]:
    """Pieces without elements say nothing, except that one of them keeps an empty tensor known."""
    solid = sorted((part for part in parts if part.box.volume), key=lambda part: part.start)
    return solid or parts[:1]
