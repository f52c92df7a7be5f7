"""One run per folder: a second run in the same folder is refused while the first lives."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from qeffect_lm.errors import UsageError


@contextmanager
def holding(folder: Path, remedy: str = "wait for it, stop it, or choose another run.dir") -> Iterator[None]:
    """Hold ``folder``'s lock (the file ``.lock``, an advisory flock, gone with the process however it ends).

    A file system without locks gives none. Hold it on one rank. ``remedy`` ends the error.

    Raises:
        UsageError: another process holds it; its host and process id are named.
    """
    path = folder / ".lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
        except FileNotFoundError:  # the folder was removed just now
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "an unknown process"
                raise UsageError(f"{folder} is in use by another run ({holder}): {remedy}") from None
            except OSError:
                pass  # no locks on this file system
            if not _is(file, path):  # whoever held it removed the folder: this lock would keep nobody out
                continue
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield
            return


def _is(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
