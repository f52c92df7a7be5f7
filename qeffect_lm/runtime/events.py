"""``events.jsonl`` in a run's folder: one line of JSON for everything that happens once, in order of time.

Starts and ends of processes, saves, evaluations, skipped steps, warnings. Unlike the files of steps it is never cut: a run that
was killed and resumed shows both lives. docs/logging.md has the kinds and their keys.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qeffect_lm.errors import QEffectError

EVENTS = "events.jsonl"


class EventLog:
    """Appends to a run's events; any thread may. ``listeners`` are told of each event after it is written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder) / EVENTS
        self._lock = threading.Lock()
        self.listeners: list[Callable[[Mapping[str, Any]], object]] = []

    def add(self, event: str, step: int, **values: Any) -> None:
        """One event at ``step`` (completed steps); values that are None are left out, numbers that are not finite become text.

        Raises QEffectError when the file cannot be written.
        """
        told = {key: _plain(value) for key, value in values.items() if value is not None}
        record = {"event": event, "step": step, "time": round(time.time(), 3), **told}
        try:
            with self._lock:
                append_line(self._path, json.dumps(record, allow_nan=False))
        except OSError as error:
            raise QEffectError(f"cannot write events to {self._path}: {error.strerror}") from error
        for listener in self.listeners:
            listener(record)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file; the part of one that a full disk once left at its end goes."""
    with open(path, "ab+") as file:
        end = file.tell()
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.truncate(os.pread(file.fileno(), end, 0).rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
