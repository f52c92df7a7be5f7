"""Every operation that changes the disk, in one small object.

Writer and retention go through it, so that a test can make any single write, fsync, rename or unlink fail,
stall or stop, in any order, without patching modules.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from checkpoint.layout import CheckpointError, describe


class FileOps:
    """The real thing, for POSIX file systems. Each method raises ``OSError`` and nothing else."""

    def mkdir(self, path: Path, parents: bool = False) -> None:
        path.mkdir(parents=parents, exist_ok=parents)

    def create(self, path: Path) -> BinaryIO:
        """Open a file for writing from its beginning, without a buffer of Python's own."""
        return open(path, "wb", buffering=0)

    def reopen(self, path: Path) -> BinaryIO:
        """Open a file that is there for more writing; what it holds stays."""
        return open(path, "r+b", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> int:
        """Write some of ``data``; returns how many bytes, possibly fewer than given."""
        return file.write(data)

    def direct(self, file: BinaryIO, wanted: bool) -> bool:
        """Whether later writes go past the page cache, as ``wanted``; never where the file system does not do that."""
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:  # then the bytes go the ordinary way; if that does not work either, the write says so
            return False
        return wanted

    def fsync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable; a file system that cannot sync directories is taken as it
        is.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file or an empty directory at ``target``."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


@contextmanager
def naming(action: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside into a :class:`CheckpointError` that says what failed, where and why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {describe(error)}") from error


def write_all(ops: FileOps, file: BinaryIO, data: memoryview) -> None:
    """Write the whole of ``data``; a full disk may take a part first and fail on the rest."""
    while len(data):
        written = ops.write(file, data)
        if written <= 0:
            raise OSError(errno.EIO, "the file system accepted no bytes")
        data = data[written:]


def write_file(ops: FileOps, path: Path, content: bytes) -> None:
    """A small file, written whole and fsynced. Raises :class:`CheckpointError`."""
    with naming("write", path):
        file = ops.create(path)
        try:
            write_all(ops, file, memoryview(content))
            ops.fsync(file)
        finally:
            file.close()


def remove_tree(ops: FileOps, path: Path) -> None:
    """Remove a directory with all it holds; links are removed, never followed. Raises ``OSError``."""
    with os.scandir(path) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for child in children:
        if child.is_dir(follow_symlinks=False):
            remove_tree(ops, Path(child.path))
        else:
            ops.unlink(Path(child.path))
    ops.rmdir(path)
