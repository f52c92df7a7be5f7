"""Every byte of a checkpoint against its manifest, on several threads.

A shard is its header and its slices, one after the other without gaps, and each has its digest: so a file is read once,
in pieces, in any order, and what is wrong has a name. (In format 1 the file's digest is of all of it, and it is read
twice.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from checkpoint.digests import Found, Range, digests, fill, opened
from checkpoint.layout import MANIFEST, CheckpointError, describe, is_document
from checkpoint.manifest import SliceEntry, TensorEntry, read_manifest
from checkpoint.reader import Checkpoint, Problem
from checkpoint.shards import Segment

Held = Sequence[tuple[str, TensorEntry, SliceEntry]]


def verify(checkpoint: Checkpoint, workers: int | None = None) -> list[Problem]:
    """All that differs from the manifest; [] when the checkpoint is sound.

    Args:
        workers: threads; None: as many as keep this process's CPUs and the disk busy (:func:`~checkpoint.digests.readers`).
    """
    files = sorted(checkpoint.manifest.files)
    held = {name: checkpoint.slices_in(name) for name in files}
    ranges = [one for name in files for one in (_front(checkpoint, name), *_slices(checkpoint, held[name]))]
    found = dict(zip(ranges, digests(checkpoint.path, ranges, workers), strict=True))
    problems = _of_manifest(checkpoint)
    for name in files:
        problems += _of_file(checkpoint, name, held[name], found)
    return problems


def total_bytes(checkpoints: Sequence[Checkpoint]) -> int:
    """Bytes of all their files."""
    return sum(entry.size for one in checkpoints for entry in one.manifest.files.values())


def _front(checkpoint: Checkpoint, name: str) -> Range:
    """What the digest of a file is made of: a shard's header, or the whole of a document."""
    hashed = checkpoint.manifest.hashed(name)
    return Range(name, 0, hashed, max(1, hashed))


def _slices(checkpoint: Checkpoint, held: Held) -> list[Range]:
    return [checkpoint.range_of(entry, part) for _, entry, part in held]


def _of_manifest(checkpoint: Checkpoint) -> list[Problem]:
    """Whether the manifest on disk is still the one that was opened."""
    try:
        if read_manifest(checkpoint.path).to_bytes() != checkpoint.manifest.to_bytes():
            return [Problem(MANIFEST, None, "was replaced since the checkpoint was opened")]
    except CheckpointError as error:
        return [Problem(MANIFEST, None, str(error))]
    return []


def _of_file(checkpoint: Checkpoint, name: str, held: Held, found: dict[Range, Found]) -> list[Problem]:
    """What is wrong with one file."""
    expected = checkpoint.manifest.files[name]
    front = found[_front(checkpoint, name)]
    first, last = (held[0][0], held[-1][0]) if held else (None, None)
    try:
        with opened(checkpoint.path / name) as file:
            size = os.fstat(file).st_size
            problems = _of_slices(checkpoint, name, held, found, size)
            if size == expected.size and front == expected.sha256 and not problems:
                return []
            if not problems and size == expected.size:
                problems = _of_header(file, name, held)
    except FileNotFoundError:
        return [Problem(name, first, "the file is missing")]
    except OSError as error:
        return [Problem(name, first, f"cannot be read: {describe(error)}")]
    twin = next((other for other in checkpoint.manifest.files if other != name and _is(checkpoint, name, other, size)), None)
    if twin is not None:
        problems.insert(0, Problem(name, first, f"the file holds the bytes of {twin}"))
    elif size != expected.size:
        where = last if size > expected.size else (problems[0].tensor if problems else first)
        problems.insert(0, Problem(name, where, f"has {size} bytes instead of {expected.size}"))
    return problems


def _of_slices(checkpoint: Checkpoint, name: str, held: Held, found: dict[Range, Found], size: int) -> list[Problem]:
    problems = []
    for (tensor, _, part), one in zip(held, _slices(checkpoint, held), strict=True):
        digest = found[one]
        if isinstance(digest, OSError):
            raise digest
        if one.offset + one.nbytes > size:
            problems.append(Problem(name, tensor, f"its slice {part.box} is cut off"))
        elif digest != part.sha256:
            problems.append(Problem(name, tensor, f"the bytes of its slice {part.box} do not match their SHA-256"))
    return problems


def _of_header(file: int, name: str, held: Held) -> list[Problem]:
    """All slices are sound, so the damage is before the first: say whose header entry is gone."""
    if not held:
        return [Problem(name, None, "the file is damaged")]
    data = held[0][2].offset
    head = bytearray(data)
    fill(file, 0, memoryview(head))
    for tensor, entry, part in held:
        segment = Segment(part.key, entry.dtype, part.shape, part.offset - data)
        if segment.header_entry not in head:
            return [Problem(name, tensor, "its entry in the file's header is damaged")]
    return [Problem(name, held[0][0], "the file's header, before its first tensor, is damaged")]


def _is(checkpoint: Checkpoint, name: str, other: str, size: int) -> bool:
    """Whether the file ``name`` is, by its size and its beginning, the file ``other``."""
    if size != checkpoint.manifest.files[other].size or is_document(name) != is_document(other):
        return False
    hashed = checkpoint.manifest.hashed(other)
    return digests(checkpoint.path, [Range(name, 0, hashed, max(1, hashed))], 1) == [checkpoint.manifest.files[other].sha256]
