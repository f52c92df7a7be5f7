"""The trace of mode ``trace``: one JSON line per effect, read back by ``python -m tools.explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO


class TraceWriter:
    """Appends effects to a file; line-buffered, so that a killed process leaves whole lines."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (kept open)
        self._serial = 0

    def write(self, effect: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"n": self._serial, **effect}, default=str) + "\n")
        self._serial += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
