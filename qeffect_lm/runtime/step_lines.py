"""Files of one line of JSON per step, which survive crashes and resumes: metrics.jsonl, scales.jsonl, timelines.jsonl.

Such a file always holds lines of increasing steps, none twice. A run that is killed at step 8 and resumed from a checkpoint of
step 5 runs 6 to 8 again; the first 6 to 8 are then not dropped but moved to ``<file>.superseded-1`` (``-2`` for the next time,
and so on) before the new ones are written. A line torn by a kill goes there too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from qeffect_lm.errors import QEffectError


def step_of(line: bytes) -> int | None:
    """The step of a line; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


class StepLines:
    """Appends lines to such a file; each is with the operating system when :meth:`append` returns.

    Args:
        resume_step: the step a resumed run continues after: the file keeps the lines up to it, whatever lies behind is
            superseded. None means a fresh run: anything in the file belongs to another run and is superseded.
        what: the file's content, for errors.
        step_of: the step of a line that is there already; None for one that is not a line of this file.

    ``notices`` says in one sentence each what was moved and where.

    Raises QEffectError when the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resume_step: int | None = None,
        what: str = "lines",
        step_of: Callable[[bytes], int | None] = step_of,
    ) -> None:
        self.path = Path(path)
        self.notices: list[str] = []
        self._what, self._step_of = what, step_of
        self._last_step: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_over(resume_step)
            # Unbuffered: a line is one write call, and a kill -9 right after it loses nothing.
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise QEffectError(f"cannot write {what} to {self.path}: {error.strerror}") from error

    def append(self, step: int, text: str) -> None:
        """Add the line of ``step``. Raises ValueError when it is not beyond the last one, QEffectError on I/O errors."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"{self._what} of step {step} follow those of step {self._last_step}")
        line = memoryview(text.encode() + b"\n")
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            # A full disk may have taken half of the line; the next one must not be glued to it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise QEffectError(f"cannot write {self._what} to {self.path}: {error.strerror}") from error
        self._last_step = step

    def append_record(self, step: int, **values: Any) -> None:
        """The line ``{"step": step, **values}``, as compact as JSON allows; errors as :meth:`append`."""
        self.append(step, json.dumps({"step": step, **values}, allow_nan=False, separators=(",", ":")))

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> StepLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self, resume_step: int | None) -> None:
        """Split what an earlier run left into lines to keep and lines to move away."""
        if not self.path.exists():
            return
        keep: list[bytes] = []
        moved: list[bytes] = []
        torn = 0
        for line in self.path.read_bytes().split(b"\n"):
            if not line:
                continue
            step = self._step_of(line)
            torn += step is None
            if step is None or resume_step is None or step > resume_step:
                moved.append(line)
            elif self._last_step is not None and step <= self._last_step:
                moved.append(line)  # out of order: written by two runs at once
            else:
                keep.append(line)
                self._last_step = step
        content = _joined(keep)
        if moved:
            target = self._supersede(_joined(moved))
            what = f"{len(moved)} line{'s' * (len(moved) > 1)}" + (f" ({torn} of them torn)" if torn else "")
            since = "an earlier run" if resume_step is None else f"steps after {resume_step}"
            self.notices.append(f"{what} of {since} moved from {self.path.name} to {target}")
        if moved or content != self.path.read_bytes():
            write_atomically(self.path, content)

    def _supersede(self, content: bytes) -> Path:
        """Save lines under the next free name, durably, before they leave the main file."""
        number = 1
        while True:
            target = self.path.with_name(f"{self.path.name}.superseded-{number}")
            try:
                with open(target, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                return target
            except FileExistsError:
                number += 1


def read_lines(path: str | os.PathLike[str], what: str) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, in order; a torn last line (the run was killed, or still writes) is left out.

    Raises QEffectError when the file cannot be read or another line is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise QEffectError(f"cannot read {what} from {os.fspath(path)}: {error.strerror}") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):
            raise QEffectError(f"{os.fspath(path)}, line {number} is no record of {what}")
    return records


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step: a crash leaves the old file or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
