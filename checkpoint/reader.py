"""Opening a checkpoint, reading any block of any logical tensor, and checking every byte of it.

Nothing here unpickles anything: bytes are read at the offsets the manifest gives, compared with their
SHA-256, and only then seen as a tensor. Files that the manifest does not list are never opened.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.digests import Range, digests, opened, read_whole, sha256_of
from checkpoint.layout import MANIFEST, Box, CheckpointError, describe, document_name, is_companion, natural_key
from checkpoint.manifest import DOCUMENT_MOST, Manifest, SliceEntry, TensorEntry, read_manifest
from checkpoint.shards import as_integers, host_bytes, read_block, torch_dtype
from qeffect_lm.errors import shown


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

    def within(self, *keys: str) -> dict[str, Any]:
        """What the meta data hold under these keys, one within the other; {} unless there is an object. They are free JSON."""
        found: Any = self.meta
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

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
        for part in parts:  # before memory is taken for them
            with self._opened(part.file) as file:
                if part.offset + entry.nbytes(part) > os.fstat(file).st_size:
                    raise self._mismatch(name, part)
        out = _room(name, box, entry)
        exact = len(parts) == 1 and parts[0].box == box
        if not exact:
            self.check([(name, box)], workers=1)
        self.read_into(name, box.start, out)
        if exact and self.digest_of(out) != parts[0].sha256:
            raise self._mismatch(name, parts[0])
        return out

    def read_into(self, name: str, start: Sequence[int], out: torch.Tensor) -> None:
        """Copy the block at ``start``, of the shape of ``out``, into ``out``, in place and on any device, without
        comparing digests: :meth:`check` does that before. Bytes that lie side by side in the file go straight into a
        contiguous CPU tensor.

        Memory: ``PIECE`` bytes. Raises :class:`CheckpointError` for files that cannot be read, or end early.
        """
        entry = self.entry(name)
        box = self.box(name, start, tuple(out.shape))
        target = as_integers(out)
        for part in _touching(entry, box):
            common = part.box.intersection(box)
            if common is None:
                continue
            with self._opened(part.file) as file:
                place = target[common.within(box)]
                if not read_block(file, part.offset, part.shape, common.within(part.box), place):
                    raise self._mismatch(name, part)

    def digest_of(self, tensor: torch.Tensor) -> str:
        """The SHA-256 that a slice of these bytes has in this checkpoint."""
        return sha256_of(host_bytes(tensor.cpu()), self.manifest.piece)

    def document(self, rank: int, name: str) -> str | None:
        """The text that ``rank`` had saved under ``name``; None where it saved none. Raises as :meth:`read_document`."""
        file = document_name(rank, name)
        return self.read_document(file) if file in self.manifest.files else None

    def read_document(self, file: str) -> str:
        """The text of a document's file. Raises as :meth:`read_file`, and for a text of more than ``DOCUMENT_MOST`` bytes."""
        try:
            return unpacked(self.read_file(file), DOCUMENT_MOST).decode()
        except (ValueError, zlib.error) as error:
            raise CheckpointError(f"{self.path / file} is not a compressed text: {shown(str(error))}") from None

    def companions(self) -> dict[str, bytes]:
        """What travels with the model (configuration, tokenizer, licence), by name. Raises as :meth:`read_file`."""
        return {name: self.read_file(name) for name in sorted(self.manifest.files) if is_companion(name)}

    def read_file(self, file: str) -> bytes:
        """A file beside the shards, whole. Raises :class:`CheckpointError` unless its bytes match their SHA-256 and are at most
        ``DOCUMENT_MOST``."""
        try:
            content = read_whole(self.path / file, DOCUMENT_MOST)
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path / file}: {describe(error)}") from error
        if hashlib.sha256(content).hexdigest() != self.manifest.files[file].sha256:
            raise CheckpointError(f"{self.path / file} is damaged: its bytes do not match their SHA-256")
        return content

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

    def check(self, blocks: Iterable[tuple[str, Box]], workers: int | None = None) -> None:
        """Compare all slices that reading these blocks would touch with their SHA-256, each once, without keeping them.

        On ``workers`` threads (None: :func:`~checkpoint.digests.readers`). Raises :class:`CheckpointError` for the
        first that is not as it was written, in the order of ``blocks``.
        """
        parts: dict[tuple[str, int], tuple[str, Range, SliceEntry]] = {}
        for name, box in blocks:
            entry = self.entry(name)
            for part in _touching(entry, box):
                parts.setdefault((name, id(part)), (name, self.range_of(entry, part), part))
        found = digests(self.path, [one for _, one, _ in parts.values()], workers)
        for (name, _, part), digest in zip(parts.values(), found, strict=True):
            if isinstance(digest, OSError):
                raise CheckpointError(f"cannot open {self.path / part.file}: {describe(digest)}") from digest
            if digest != part.sha256:
                raise self._mismatch(name, part)

    def range_of(self, entry: TensorEntry, part: SliceEntry) -> Range:
        """Where the bytes of a slice are, and how its digest is made of them."""
        return Range(part.file, part.offset, entry.nbytes(part), self.manifest.piece)

    def verify(self) -> list[Problem]:
        """Read every byte and return all that differs from the manifest; [] when the checkpoint is sound. On one thread;
        :func:`checkpoint.verify.verify` takes several."""
        from checkpoint.verify import verify  # which is about what is defined here

        return verify(self, workers=1)

    def slices_in(self, file: str) -> list[tuple[str, TensorEntry, SliceEntry]]:
        """Name, tensor and slice of all that lies in ``file``, in order of offset."""
        held = [
            (name, entry, part)
            for name, entry in self.manifest.tensors.items()
            for part in entry.slices
            if part.file == file
        ]
        return sorted(held, key=lambda item: (item[2].offset, item[1].nbytes(item[2])))

    @contextmanager
    def _opened(self, file: str) -> Iterator[int]:
        try:
            with opened(self.path / file) as descriptor:
                yield descriptor
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


def unpacked(content: bytes, most: int) -> bytes:
    """What gzip has packed, in one member. Raises ValueError for more than ``most`` bytes (they are not unpacked), for
    a part, or for something after it; ``zlib.error`` for what gzip never made.
    """
    unpacker = zlib.decompressobj(wbits=31)  # a gzip header, its check sum and length
    text = unpacker.decompress(content, most + 1)
    if len(text) > most:
        raise ValueError(f"it unpacks to more than {most} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut short" if not unpacker.eof else "something follows it")
    return text


def _touching(entry: TensorEntry, box: Box) -> list[SliceEntry]:
    if box.volume == 0:
        return [part for part in entry.slices if part.box == box]
    return [part for part in entry.slices if part.box.intersection(box) is not None]


def _room(name: str, box: Box, entry: TensorEntry) -> torch.Tensor:
    try:
        return torch.empty(box.shape, dtype=torch_dtype(entry.dtype))
    except (RuntimeError, MemoryError):
        nbytes = box.volume * entry.itemsize
        raise CheckpointError(f"tensor {name!r} at {box} takes {nbytes} bytes of memory, which are not there") from None
