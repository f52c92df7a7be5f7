"""SHA-256 of tensors' bytes, in memory and in files, on several threads.

One SHA-256 is one thread's work, and a disk can be faster than that. So what is longer than ``PIECE`` is hashed in
pieces, side by side, and its digest is the SHA-256 of theirs, one after the other; what is not longer has its plain
SHA-256. The lengths come from the manifest, so that no bytes of another length have the same meaning.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIECE = 8 << 20  # bytes; part of the format
READ = 1 << 20  # bytes read and hashed at a time: what was just copied is still in the core's cache
TASK = 32 << 20  # bytes that one task reads, or as little more as its last range takes
MOST = 256  # ranges of one task


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def writers() -> int:
    """Threads that hash while a shard is written. Four keep up with 6 GB/s, and the other ranks need theirs."""
    return min(4, cpus())


def readers() -> int:
    """Threads that read and hash: they wait for the disk half of the time."""
    return max(4, min(16, 2 * cpus()))


def pieces(nbytes: int, piece: int = PIECE) -> list[tuple[int, int]]:
    """Begin and length of each piece; one empty piece for nothing."""
    return [(at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)] or [(0, 0)]


def combined(digests: Sequence[bytes]) -> str:
    """The digest (hex) of what has pieces of these digests."""
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()


def sha256_of(data: memoryview, piece: int = PIECE) -> str:
    """Digest (hex) of bytes in memory."""
    parts = [data[at : at + n] for at, n in pieces(len(data), piece)]
    if len(parts) == 1:
        return hashlib.sha256(parts[0]).hexdigest()
    with ThreadPoolExecutor(writers()) as pool:
        return combined([digest.digest() for digest in pool.map(hashlib.sha256, parts)])


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file with. Nothing else is opened: a link may lead out of the checkpoint, a pipe
    never ends.

    Files are read by ``pread`` and never mapped: what is cut short while somebody reads it then ends early, and does
    not kill the process with SIGBUS. Raises ``OSError``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link, and none is followed", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_whole(path: Path, most: int) -> bytes:
    """All bytes of a regular file. Raises ``OSError``, also for one of more than ``most`` bytes."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        content = bytearray(size)
        return bytes(memoryview(content)[: fill(descriptor, 0, memoryview(content))])


def fill(descriptor: int, offset: int, view: memoryview) -> int:
    """Read into the whole of ``view``; returns how many bytes there were, fewer where the file ends."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


@dataclass(frozen=True)
class Range:
    """Bytes of a file that have one digest, and how long its pieces are."""

    file: str
    offset: int
    nbytes: int
    piece: int


Found = str | OSError | None  # the digest (hex), why there is none, or None where the file ends before


def digests(directory: Path, ranges: Sequence[Range], workers: int | None = None) -> list[Found]:
    """The digest of each range; neighbours are read together, long ones in pieces, on ``workers`` threads (None:
    :func:`readers`).

    Memory: ``READ`` bytes per thread.
    """
    ends = {name: _size(directory / name) for name in {one.file for one in ranges}}
    found: list[dict[int, bytes | OSError | None]] = [{} for _ in ranges]
    wanted = []
    for index, one in enumerate(ranges):
        end = ends[one.file]
        if isinstance(end, OSError):
            found[index][0] = end
        elif one.offset + one.nbytes > end:  # whatever length somebody claims: no work is listed for what is not there
            found[index][0] = None
        else:
            parts = enumerate(pieces(one.nbytes, one.piece))
            wanted += [(one.file, one.offset + at, length, index, number) for number, (at, length) in parts]
    wanted.sort()
    reader = _Reader(directory)

    def work(task: Sequence[tuple[str, int, int, int, int]]) -> None:
        for (_, _, _, index, number), digest in zip(task, reader.read(task), strict=True):
            found[index][number] = digest

    tasks = list(_tasks(wanted))
    threads = min(workers or readers(), len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, tasks))
    return [_joined(parts) for parts in found]


def _size(path: Path) -> int | OSError:
    try:
        with opened(path) as descriptor:
            return os.fstat(descriptor).st_size
    except OSError as error:
        return error


def _joined(parts: dict[int, bytes | OSError | None]) -> Found:
    good = []
    for number in range(len(parts)):
        part = parts[number]
        if not isinstance(part, bytes):
            return part
        good.append(part)
    return combined(good)


class _Reader:
    """Reads and hashes on any thread, each with a buffer of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._local = threading.local()

    def read(self, task: Sequence[tuple[str, int, int, int, int]]) -> list[bytes | OSError | None]:
        """Digests of ranges of one file."""
        try:
            with opened(self._directory / task[0][0]) as descriptor:
                return [self._hash(descriptor, offset, length) for _, offset, length, _, _ in task]
        except OSError as error:
            return [error] * len(task)

    def _hash(self, descriptor: int, offset: int, length: int) -> bytes | None:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(READ))
        digest = hashlib.sha256()
        end = offset + length
        while offset < end:
            view = self._local.buffer[: min(READ, end - offset)]
            if fill(descriptor, offset, view) != len(view):
                return None
            digest.update(view)
            offset += len(view)
        return digest.digest()


def _tasks(wanted: Sequence[tuple[str, int, int, int, int]]) -> Iterator[list[tuple[str, int, int, int, int]]]:
    """Neighbours of one file together, so that thousands of small slices do not open it as often."""
    task: list[tuple[str, int, int, int, int]] = []
    size = 0
    for one in wanted:
        if task and (one[0] != task[0][0] or size >= TASK or len(task) >= MOST):
            yield task
            task, size = [], 0
        task.append(one)
        size += one[2]
    if task:
        yield task
