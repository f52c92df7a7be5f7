"""A folder that appears whole or not at all: written aside, synced, then renamed into place."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from checkpoint.fileops import FileOps, naming, remove_tree
from checkpoint.layout import CheckpointError, describe
from qeffect_lm.errors import UsageError

log = logging.getLogger(__name__)

PREFIX = ".tmp-convert-"


def staging(destination: Path) -> Path:
    """Where ``destination`` is written before it appears."""
    return destination.parent / f"{PREFIX}{destination.name}"


def check_destination(destination: Path, nbytes: int) -> None:
    """Whether ``nbytes`` can become ``destination``.

    Raises:
        UsageError: something is there already, or the file system has less room.
    """
    if destination.is_symlink() or (destination.exists() and not (destination.is_dir() and not any(destination.iterdir()))):
        raise UsageError(f"{destination} exists already; nothing is overwritten: name another folder, or move it away")
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
    ``.tmp-convert-…`` that the next conversion to the same place removes.

    Raises:
        CheckpointError: a file system operation failed; names path and cause.
        UsageError: ``destination`` exists.
    """
    check_destination(destination, 0)
    temporary = staging(destination)
    with naming("create", destination.parent):
        ops.mkdir(destination.parent, parents=True)
    try:
        with naming("create", temporary):
            if temporary.is_dir():
                log.warning("removing %s, which an interrupted conversion left", temporary)
                remove_tree(ops, temporary)
            ops.mkdir(temporary)
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


def _clear(temporary: Path, ops: FileOps) -> None:
    """What an exception left; that something cannot be removed must not hide why it came to this."""
    if temporary.is_dir():
        try:
            remove_tree(ops, temporary)
        except (OSError, CheckpointError) as error:
            log.warning("cannot remove %s, remove it by hand: %s", temporary, describe(error))
