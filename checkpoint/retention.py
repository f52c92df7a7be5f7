"""Which checkpoints of a folder are whole, which one to resume from, and which ones may go."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpoint.digests import read_whole
from checkpoint.fileops import FileOps, naming, remove_tree, write_file
from checkpoint.layout import (
    DELETING,
    LATEST,
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    checkpoint_dirs,
    describe,
    is_temporary,
    step_of,
)
from checkpoint.manifest import incomplete_because, unreadable_because
from qeffect_lm.contract.errors import ResumeError

log = logging.getLogger(__name__)

ATTEMPTS = 5  # of reading a folder whose checkpoints a run removes meanwhile


@dataclass(frozen=True)
class Found:
    """One ``step_…`` directory: ``fault`` is None when it is complete, else why it is not. ``unreadable``: nobody can tell
    (:func:`checkpoint.manifest.unreadable_because`)."""

    step: int
    path: Path
    fault: str | None
    unreadable: bool = False


def scan(root: Path) -> list[Found]:
    """Every ``step_…`` directory of ``root`` in numeric order. Other entries are nobody's business here."""
    found: list[Found] = []
    for _ in range(ATTEMPTS):
        found = [look_at(step, path) for step, path in checkpoint_dirs(root)]
        if all(one.fault is None or one.path.is_dir() for one in found):
            break  # else some went meanwhile, and others came
    return [one for one in found if one.fault is None or one.path.is_dir()]


def look_at(step: int, path: Path) -> Found:
    """One of them."""
    fault = incomplete_because(path)
    return Found(step, path, fault, fault is not None and unreadable_because(path) is not None)


def newest_complete(root: Path) -> Path | None:
    """The complete checkpoint with the highest number, or None."""
    for _ in range(ATTEMPTS):
        found = checkpoint_dirs(root)
        for _, path in reversed(found):
            if incomplete_because(path) is None:
                return path
        if all(path.is_dir() for _, path in found):
            break  # else a run that goes on removes the old ones, and there is a new one by now
    return None


def find_resumable(root: Path) -> Path | None:
    """The newest complete checkpoint by number; None when there is nothing to resume (no folder, nothing in
    it).

    ``latest`` is only a hint and not needed. Incomplete checkpoints newer than the answer are skipped with a
    warning, as is one that ``latest`` names and that is not there. One that may be whole and cannot be read, for want of
    rights, say, is not skipped: that is an error. A save or a removal that was interrupted leaves a ``.tmp-…``
    directory: it was never a checkpoint, so it does not stand in the way of a fresh start, but is warned about. Raises
    :class:`ResumeError` listing what is there when only partial checkpoints exist, or when ``latest`` names
    one that is gone: never a silent fresh start.
    """
    skipped: list[str] = []
    pointer = latest_name(root)
    found = list(reversed(checkpoint_dirs(root)))
    for step, path in found:
        fault = incomplete_because(path)
        if fault is None:
            for line in skipped:
                log.warning(
                    "skipping an incomplete checkpoint, resuming from step %d instead: %s", step, line
                )
            if pointer is not None and pointer not in {other.name for _, other in found}:
                log.warning("%s names %s, which is not there: resuming from step %d instead", root / LATEST, pointer, step)
            return path
        unknown = unreadable_because(path)
        if unknown is not None:
            raise ResumeError(
                f"{path} may be the newest checkpoint, and {unknown}. Make it readable, or move it away to resume from an "
                "older one"
            )
        skipped.append(f"{path.name}: {fault}")
    if skipped:
        listing = "".join(f"\n  {line}" for line in skipped)
        raise ResumeError(
            f"{root} holds no complete checkpoint, only partial ones:{listing}\n"
            "Restore one of them, or move them away to start afresh"
        )
    if pointer is not None:
        raise ResumeError(
            f"{root / LATEST} names {pointer}, which is not there, nor is any other checkpoint. "
            f"Bring it back, or remove {root / LATEST} to start afresh"
        )
    for path in temporaries(root):
        log.warning(
            "%s was left by an interrupted save and holds no checkpoint; nothing to resume from", path
        )
    return None


def resolve(path: Path) -> Path:
    """A checkpoint directory from itself, from the folder above it (by ``latest``, else the newest complete), or from a run's
    folder that holds ``checkpoints``.

    Raises :class:`CheckpointError` when there is none, or none that can be looked at.
    """
    with naming("look at", path):
        return _resolved(path)


def root_of(path: Path) -> Path:
    """The folder of checkpoints: ``path`` itself, or that of a run's folder."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() and latest_name(path) is None else path


def _resolved(path: Path) -> Path:
    if (path / MANIFEST).exists() or step_of(path.name) is not None:
        return path
    path = root_of(path)
    pointer = latest_name(path)
    if pointer is not None and incomplete_because(path / pointer) is None:
        return path / pointer
    newest = newest_complete(path)
    if newest is None:
        what = "does not exist" if not path.exists() else "is no checkpoint and holds no complete one"
        raise CheckpointError(f"{path} {what}")
    return newest


def latest_name(root: Path) -> str | None:
    """What the file ``latest`` says, or None when it is missing or does not name a checkpoint."""
    try:
        name = read_whole(root / LATEST, 4096).decode(errors="replace").strip()
    except OSError:
        return None
    return name if step_of(name) is not None else None


def write_latest(root: Path, name: str, ops: FileOps) -> None:
    """Point ``latest`` at ``name`` atomically and durably. Raises :class:`CheckpointError`; then it is
    unchanged.
    """
    staged = root / (TEMPORARY + LATEST)
    write_file(ops, staged, f"{name}\n".encode())
    with naming("update", root / LATEST):
        ops.rename(staged, root / LATEST)
        ops.fsync_dir(root)


def temporaries(root: Path) -> list[Path]:
    """Leftovers of interrupted saves and removals in ``root``."""
    try:
        return sorted(path for path in root.iterdir() if is_temporary(path.name) and _own_directory(path))
    except OSError:
        return []


def sweep(root: Path, ops: FileOps) -> None:
    """Remove those leftovers; what cannot be removed is warned about and stays.

    The rename that a removal begins with is made durable before its files go: were it lost in a power cut, and the
    removal of some of them not, half a checkpoint would be back under its old name.
    """
    paths = temporaries(root)
    try:
        if any(path.name.startswith(DELETING) for path in paths):
            ops.fsync_dir(root)
    except OSError as error:
        log.warning("cannot remove what was put aside in %s before its names are durable: %s", root, describe(error))
        return
    _remove(paths, ops)


def retain(root: Path, keep: int, just_saved: Path, ops: FileOps) -> None:
    """Remove complete checkpoints beyond the ``keep`` newest (0: keep all), in numeric order, oldest first.

    ``just_saved`` always stays. Incomplete, foreign and linked directories are never touched. A removal first
    renames the directory, so that one that is interrupted leaves no half checkpoint. Failures are warnings:
    the new checkpoint is safe by now, and a run does not end because an old one would not go.
    """
    try:
        for path in _beyond(root, keep):
            if path != just_saved:
                ops.rename(path, root / (DELETING + path.name))
    except (OSError, CheckpointError) as error:
        log.warning("cannot remove old checkpoints in %s: %s", root, describe(error))
    sweep(root, ops)


def _beyond(root: Path, keep: int) -> list[Path]:
    if keep <= 0:
        return []
    complete = [found.path for found in scan(root) if found.fault is None and _own_directory(found.path)]
    return complete[:-keep]


def _own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(paths: Iterable[Path], ops: FileOps) -> None:
    for path in paths:
        try:
            remove_tree(ops, path)
        except OSError as error:
            log.warning("cannot remove %s, remove it by hand: %s", path, describe(error))
