"""Every byte of a checkpoint against its manifest, on several threads (hashing releases the interpreter's lock).

A shard is its header and its slices, one after the other without gaps. So it need not be hashed as one long stream: the header
is compared with the one that its slices must have, the slices' digests are made side by side, and when all of that holds every
byte is the one that was written. Only where it does not hold is the file read again, in order, to say what is wrong
(:meth:`~checkpoint.reader.Checkpoint.verify_file`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint.layout import is_document
from checkpoint.reader import Checkpoint, Problem
from checkpoint.shards import Segment, header, range_sha256

Ranges = list[tuple[int, int, str]]  # offset, bytes, SHA-256 (hex)
AT_ONCE = 64 << 20  # bytes that one task reads, or as little more as its last slice takes
MOST = 256  # slices of one task


def verify(checkpoint: Checkpoint, workers: int | None = None) -> list[Problem]:
    """All that differs from the manifest; [] when the checkpoint is sound.

    Args:
        workers: threads; None: one for each of this process's CPUs.
    """
    problems = checkpoint.verify_manifest()
    wanted = {name: _ranges(checkpoint, name) for name in sorted(checkpoint.manifest.files)}
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        tasks = {
            name: [pool.submit(_hold, checkpoint.path / name, one) for one in _tasks(ranges)]
            for name, ranges in wanted.items()
            if ranges is not None
        }
        for name in wanted:
            if name not in tasks or not all([task.result() for task in tasks[name]]):
                problems += checkpoint.verify_file(name)
    return problems


def _ranges(checkpoint: Checkpoint, name: str) -> Ranges | None:
    """What covers a file exactly; None where it is not made of slices alone, or not there as a whole."""
    entry = checkpoint.manifest.files[name]
    if is_document(name):
        return [(0, entry.size, entry.sha256)] if _size(checkpoint.path / name) == entry.size else None
    held = checkpoint.slices_in(name)
    if not held or _size(checkpoint.path / name) != entry.size:
        return None
    start = at = held[0][2].offset
    ranges: Ranges = []
    segments = []
    for tensor, part in ((tensor, part) for _, tensor, part in held):
        segments.append(Segment(part.key, tensor.dtype, part.shape, part.offset - start))
        if part.offset != at:
            return None
        at += segments[-1].nbytes
        ranges.append((part.offset, segments[-1].nbytes, part.sha256))
    if at != entry.size or not _begins(checkpoint.path / name, header(segments), start):
        return None
    return ranges


def _begins(path: Path, expected: bytes, length: int) -> bool:
    """Whether the file's first ``length`` bytes are the expected ones."""
    if len(expected) != length:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(length) == expected
    except OSError:
        return False


def _tasks(ranges: Ranges) -> Iterator[Ranges]:
    """Neighbours together, so that thousands of small slices do not open the file as often."""
    task: Ranges = []
    size = 0
    for one in ranges:
        task.append(one)
        size += one[1]
        if size >= AT_ONCE or len(task) >= MOST:
            yield task
            task, size = [], 0
    if task:
        yield task


def _hold(path: Path, ranges: Ranges) -> bool:
    """Whether all of these bytes have their digests."""
    try:
        with open(path, "rb") as file:
            return all(range_sha256(file, offset, nbytes) == sha256 for offset, nbytes, sha256 in ranges)
    except OSError:
        return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def total_bytes(checkpoints: Sequence[Checkpoint]) -> int:
    """Bytes of all their files."""
    return sum(entry.size for one in checkpoints for entry in one.manifest.files.values())
