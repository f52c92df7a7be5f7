"""A folder that appears whole or not at all: written aside, synced, then renamed into place."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from checkpoint.fileops import FileOps, naming, remove_tree
from checkpoint.layout import CheckpointError, describe
from qeffect_lm.errors import UsageError

log = logging.getLogger(__name__)

PREFIX = ".tmp-convert-"


def staging(destination: Path) -> Path:
    """Where ``destination`` is written before it appears."""
    return destination.parent / f"{PREFIX}{destination.name}"


def check_destination(destination: Path, nbytes: int, source: Path | None = None) -> None:
    """Whether ``nbytes`` can become ``destination``.

    Args:
        source: a folder that stays as it is, so that nothing may be written into it.

    Raises:
        UsageError: something is there already, it is in the source, or the file system has less room.
        CheckpointError: it cannot be looked at.
    """
    with naming("look at", destination):
        if destination.name in ("", ".."):
            raise UsageError(f"{destination} is no name for a new folder: name one")
        if destination.is_symlink() or (destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))):
            raise UsageError(f"{destination} exists already; nothing is overwritten: name another folder, or move it away")
        if source is not None and destination.resolve().is_relative_to(source.resolve()):
            raise UsageError(f"{destination} lies inside of {source}, which is read: name a folder outside")
        above = destination.parent
        while not above.exists():
            above = above.parent
        if not above.is_dir():
            raise UsageError(f"{above} is no folder: {destination} cannot be made in it")
        left = staging(destination)
        reclaimed = sum(path.stat().st_size for path in left.rglob("*") if path.is_file()) if left.is_dir() else 0
        free = shutil.disk_usage(above).free + reclaimed
    if free < nbytes:
        raise UsageError(f"{destination} needs {nbytes:,} bytes, and only {free:,} are free there")


def publish(destination: Path, write: Callable[[Path], None], ops: FileOps) -> None:
    """Have ``write(folder)`` fill a temporary folder (and sync its files), then rename that to ``destination``.

    Whatever ends it early leaves no ``destination``; an exception leaves nothing at all, a killed process a folder
    ``.tmp-convert-…`` that the next conversion to the same place removes. A lock on that folder, which ends with the process,
    keeps two from writing to one place.

    Raises:
        CheckpointError: a file system operation failed; names path and cause.
        UsageError: ``destination`` exists, or another conversion is writing it.
    """
    check_destination(destination, 0)
    temporary = staging(destination)
    with naming("create", destination.parent):
        ops.mkdir(destination.parent, parents=True)
    with ExitStack() as held:
        try:
            _begin(temporary, ops, held)
        except _Busy as error:
            raise UsageError(f"another conversion is writing {destination}: wait for it, or name another folder") from error
        try:
            write(temporary)
            with naming("sync", temporary):
                for folder in (temporary, *sorted(path for path in temporary.rglob("*") if path.is_dir())):
                    ops.fsync_dir(folder)
            with naming("rename into place", temporary):
                ops.rename(temporary, destination)
        except BaseException:
            _clear(temporary, ops)
            raise
    with naming("sync", destination.parent):
        ops.fsync_dir(destination.parent)


class _Busy(Exception):
    """Another process has the lock."""


def _begin(temporary: Path, ops: FileOps, held: ExitStack) -> None:
    """Make the temporary folder and lock it as long as ``held`` is open; the parent's lock makes that one step."""
    with naming("create", temporary), ExitStack() as briefly:
        _lock(temporary.parent, briefly, wait=True)
        if temporary.is_dir():
            with ExitStack() as other:
                _lock(temporary, other, wait=False)
                log.warning("removing %s, which an interrupted conversion left", temporary)
                remove_tree(ops, temporary)
        ops.mkdir(temporary)
        _lock(temporary, held, wait=False)


def _lock(folder: Path, held: ExitStack, wait: bool) -> None:
    """Lock a folder until ``held`` is closed; where the file system has no locks, nothing happens.

    Raises:
        _Busy: another process has it, and ``wait`` is false.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _Busy from None
    except OSError as error:
        log.debug("no lock on %s: %s", folder, describe(error))


def _clear(temporary: Path, ops: FileOps) -> None:
    """What an exception left; that something cannot be removed must not hide why it came to this."""
    if temporary.is_dir():
        try:
            remove_tree(ops, temporary)
        except (OSError, CheckpointError) as error:
            log.warning("cannot remove %s, remove it by hand: %s", temporary, describe(error))
