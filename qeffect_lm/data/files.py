"""Durable file writes and file digests for the data package.

A file appears under its final name only when it is complete and on disk: write to a temporary name in the
same folder, fsync, rename, fsync the folder. What was there before survives any failure.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qeffect_lm.errors import QEffectError

_BLOCK = 1 << 20


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turns an operating system error while writing ``path`` into a :class:`QEffectError` that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise QEffectError(
            f"cannot write {path}: {reason}; check the free space and the permissions"
        ) from error


def temporary_name(path: Path) -> Path:
    """A hidden name beside ``path``, distinct per process."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def fsync_directory(path: Path) -> None:
    """Makes renames and removals inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Writes ``parts``, one after the other, to ``path``, whole or not at all; raises :class:`QEffectError` when it cannot."""
    temporary = temporary_name(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sha256_of_files(paths: Iterable[Path]) -> str:
    """SHA-256 (hex) of the files' bytes one after the other, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
