"""Opening a checkpoint, reading any block of any logical tensor, and checking every byte of it.

Nothing here unpickles anything: bytes are read at the offsets the manifest gives, compared with their
SHA-256, and only then seen as a tensor. Files that the manifest does not list are never opened.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpoint.layout import MANIFEST, Box, CheckpointError, describe, document_name, natural_key
from checkpoint.manifest import Manifest, SliceEntry, TensorEntry, read_manifest
from checkpoint.shards import Segment, as_integers, chunks, range_sha256, read_segment, torch_dtype


@dataclass(frozen=True)
class Problem:
    """Something on disk that is not as it was written: the file, the tensor at the damage, what is wrong."""

    file: str
    tensor: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.file}: " + (f"tensor {self.tensor!r}: " if self.tensor else "") + self.message


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint directory. Tensors are read on demand; the manifest is in memory."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        return self.manifest.meta

    def rank_meta(self, rank: int) -> dict[str, Any]:
        """What ``rank`` alone had saved. Raises :class:`CheckpointError` for a rank that took no part."""
        for entry in self.manifest.ranks:
            if entry.rank == rank:
                return entry.meta
        written_by = len(self.manifest.ranks)
        raise CheckpointError(f"{self.path} was written by {written_by} ranks, none of them is rank {rank}")

    def names(self) -> list[str]:
        """All logical tensors, ``layers.2`` before ``layers.10``."""
        return sorted(self.manifest.tensors, key=natural_key)

    def entry(self, name: str) -> TensorEntry:
        """Shape, dtype, role, slices of a tensor. Raises :class:`CheckpointError` with the nearest name."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            near = difflib.get_close_matches(name, self.manifest.tensors, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise CheckpointError(f"{self.path} has no tensor {name!r}{hint}") from None

    def read(
        self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A block of a logical tensor as a new CPU tensor, put together from whatever slices hold it.

        ``start`` is the first index per dimension (default: zeros), ``shape`` the extent (default: the rest).
        Each slice touched is read whole and must match its SHA-256; else :class:`CheckpointError` names file
        and tensor.
        """
        entry = self.entry(name)
        box = self.box(name, start, shape)
        parts = _touching(entry, box)
        if len(parts) == 1 and parts[0].box == box:
            return self._read_slice(name, entry, parts[0])
        out = torch.empty(box.shape, dtype=torch_dtype(entry.dtype))
        for part in parts:
            common = part.box.intersection(box)
            if common is not None:
                piece = as_integers(self._read_slice(name, entry, part))
                as_integers(out)[common.within(box)] = piece[common.within(part.box)]
        return out

    def document(self, rank: int, name: str) -> str | None:
        """The text that ``rank`` had saved under ``name``; None where it saved none. Raises as :meth:`read_document`."""
        file = document_name(rank, name)
        return self.read_document(file) if file in self.manifest.files else None

    def read_document(self, file: str) -> str:
        """The text of a document's file. Raises :class:`CheckpointError` unless its bytes match their SHA-256."""
        with self._open(file) as handle:
            content = handle.read()
        if hashlib.sha256(content).hexdigest() != self.manifest.files[file].sha256:
            raise CheckpointError(f"{self.path / file} is damaged: its bytes do not match their SHA-256")
        return gzip.decompress(content).decode()

    def box(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Box:
        """The block that :meth:`read` returns. Raises :class:`CheckpointError` when it is not inside the
        tensor.
        """
        whole = self.entry(name).shape
        first = (0,) * len(whole) if start is None else tuple(start)
        if len(first) != len(whole):
            raise CheckpointError(f"tensor {name!r} has {len(whole)} dimensions, not those of {list(first)}")
        if shape is None:
            shape = tuple(size - a for a, size in zip(first, whole, strict=True))
        if len(first) != len(shape) or not Box(first, tuple(shape)).fits(whole):
            raise CheckpointError(
                f"tensor {name!r} has the shape {list(whole)}; start {list(first)} with extent {list(shape)} "
                "lies outside"
            )
        return Box(first, tuple(shape))

    def check(self, name: str, box: Box) -> None:
        """Compare the slices that :meth:`read` would touch with their SHA-256, without keeping them."""
        entry = self.entry(name)
        for part in _touching(entry, box):
            with self._open(part.file) as file:
                if range_sha256(file, part.offset, _nbytes(entry, part)) != part.sha256:
                    raise self._mismatch(name, part)

    def verify(self) -> list[Problem]:
        """Read every byte and return all that differs from the manifest; [] when the checkpoint is sound. On one thread;
        :func:`checkpoint.verify.verify` takes several."""
        problems = self.verify_manifest()
        for name in sorted(self.manifest.files):
            problems += self.verify_file(name)
        return problems

    def verify_manifest(self) -> list[Problem]:
        """Whether the manifest on disk is still the one that was opened."""
        problems = []
        try:
            if read_manifest(self.path).to_bytes() != self.manifest.to_bytes():
                problems.append(Problem(MANIFEST, None, "was replaced since the checkpoint was opened"))
        except CheckpointError as error:
            problems.append(Problem(MANIFEST, None, str(error)))
        return problems

    def verify_file(self, name: str) -> list[Problem]:
        """What is wrong with one file."""
        expected = self.manifest.files[name]
        held = self.slices_in(name)
        first, last = (held[0][0], held[-1][0]) if held else (None, None)
        try:
            with open(self.path / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest = range_sha256(file, 0, size)
                if size == expected.size and digest == expected.sha256:
                    return []
                problems = _damaged_slices(file, name, held, size)
                if not problems and size == expected.size:
                    problems = _damaged_header(file, name, held)
        except FileNotFoundError:
            return [Problem(name, first, "the file is missing")]
        except OSError as error:
            return [Problem(name, first, f"cannot be read: {describe(error)}")]
        twin = next((other for other, e in self.manifest.files.items() if e.sha256 == digest), None)
        if twin is not None:
            problems.insert(0, Problem(name, first, f"the file holds the bytes of {twin}"))
        elif size != expected.size:
            where = last if size > expected.size else (problems[0].tensor if problems else first)
            problems.insert(0, Problem(name, where, f"has {size} bytes instead of {expected.size}"))
        return problems

    def slices_in(self, file: str) -> list[tuple[str, TensorEntry, SliceEntry]]:
        """Name, tensor and slice of all that lies in ``file``, in order of offset."""
        held = [
            (name, entry, part)
            for name, entry in self.manifest.tensors.items()
            for part in entry.slices
            if part.file == file
        ]
        return sorted(held, key=lambda item: (item[2].offset, _nbytes(item[1], item[2])))

    def _read_slice(self, name: str, entry: TensorEntry, part: SliceEntry) -> torch.Tensor:
        with self._open(part.file) as file:
            try:
                tensor = read_segment(file, part.offset, entry.dtype, part.shape, part.sha256)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read tensor {name!r} in {self.path / part.file}: {describe(error)}"
                ) from error
        if tensor is None:
            raise self._mismatch(name, part)
        return tensor

    def _open(self, file: str) -> BinaryIO:
        try:
            return open(self.path / file, "rb")
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path / file}: {describe(error)}") from error

    def _mismatch(self, name: str, part: SliceEntry) -> CheckpointError:
        return CheckpointError(
            f"{self.path / part.file} is damaged: the bytes of tensor {name!r} at {part.box} do not match "
            "their SHA-256"
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``step_…`` directory. Raises :class:`CheckpointError` when its manifest is missing, damaged or
    newer.
    """
    path = Path(path)
    return Checkpoint(path, read_manifest(path))


def verify_checkpoint(path: Path) -> list[Problem]:
    """As :meth:`Checkpoint.verify`, with a manifest that cannot be read reported as a problem too."""
    try:
        return open_checkpoint(path).verify()
    except CheckpointError as error:
        return [Problem(MANIFEST, None, str(error))]


def _touching(entry: TensorEntry, box: Box) -> list[SliceEntry]:
    if box.volume == 0:
        return [part for part in entry.slices if part.box == box]
    return [part for part in entry.slices if part.box.intersection(box) is not None]


def _nbytes(entry: TensorEntry, part: SliceEntry) -> int:
    return math.prod(part.shape) * entry.itemsize


def _damaged_slices(
    file: BinaryIO, file_name: str, held: Sequence[tuple[str, TensorEntry, SliceEntry]], size: int
) -> list[Problem]:
    problems = []
    for name, entry, part in held:
        nbytes = _nbytes(entry, part)
        if part.offset + nbytes > size:
            problems.append(Problem(file_name, name, f"its slice {part.box} is cut off"))
        elif range_sha256(file, part.offset, nbytes) != part.sha256:
            problems.append(
                Problem(file_name, name, f"the bytes of its slice {part.box} do not match their SHA-256")
            )
    return problems


def _damaged_header(
    file: BinaryIO, file_name: str, held: Sequence[tuple[str, TensorEntry, SliceEntry]]
) -> list[Problem]:
    """All slices are sound, so the damage is before the first: say whose header entry is gone."""
    if not held:
        return [Problem(file_name, None, "the file is damaged")]
    data = held[0][2].offset
    head = b"".join(chunks(file, 0, data))
    for name, entry, part in held:
        segment = Segment(part.key, entry.dtype, part.shape, part.offset - data)
        if segment.header_entry not in head:
            return [Problem(file_name, name, "its entry in the file's header is damaged")]
    return [Problem(file_name, held[0][0], "the file's header, before its first tensor, is damaged")]
