"""One line of JSON per training step: ``metrics.jsonl``, which survives crashes and resumes.

The file always holds one line per logged step in increasing order, none twice. A run that is killed at step
8 and resumed from a checkpoint of step 5 runs 6 to 8 again; the first 6 to 8 are then not dropped but moved
to ``metrics.jsonl.superseded-1`` (``-2`` for the next time, and so on) before the new ones are written. A
line torn by a kill goes there too.

Every line is JSON in the strict sense. JSON has no NaN and no infinity, so such a value is written as null,
and a field ``nonfinite`` maps its key to ``"nan"``, ``"inf"`` or ``"-inf"``; :func:`read_metrics` puts the
value back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from qeffect_lm.errors import QEffectError

Value = float | int | str | bool | None | list[float] | list[int]


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step (or an evaluation before the first one, ``step=0``) reports.

    ``loss`` is in nats per token, ``lr`` the rate the step used, ``tokens`` the cumulative count over all
    ranks, ``tokens_per_second`` over all ranks, ``step_ms`` milliseconds of wall time, ``scale_epoch`` the
    epoch of the FP8 scales the step read (None without FP8), ``skipped`` true when a non-finite value made
    it change nothing, ``eval_loss`` the held-out loss in nats per token where one was measured after this
    step. None means not measured. ``extra`` holds further values under names of their own: scalars, and lists
    of finite numbers with one entry per pipeline rank.

    Raises ValueError when a name in ``extra`` is one of the fields.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: int
    tokens_per_second: float | None
    step_ms: float | None
    scale_epoch: int | None = None
    skipped: bool = False
    eval_loss: float | None = None
    extra: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(set(self.extra) & {*_FIELDS, "extra", "nonfinite"})
        if taken:
            raise ValueError(
                f"extra metrics may not be called {', '.join(taken)}: the record has such a field"
            )

    def as_dict(self) -> dict[str, Value]:
        """All values by name, ``extra`` merged in; ``eval_loss`` only where it was measured."""
        values: dict[str, Value] = {name: getattr(self, name) for name in _FIELDS}
        if self.eval_loss is None:
            del values["eval_loss"]
        return {**values, **self.extra}

    def to_json(self) -> str:
        """One line of strict JSON, without the newline."""
        values = self.as_dict()
        bad = {
            key: value
            for key, value in values.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        record: dict[str, Any] = {key: None if key in bad else value for key, value in values.items()}
        if bad:
            record["nonfinite"] = {key: str(float(value)) for key, value in bad.items()}
        return json.dumps(record, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> StepMetrics:
        """The record of one line. Raises ValueError when the line is not one."""
        try:
            record = json.loads(line)
        except RecursionError:
            raise ValueError("thousands of brackets, not a metrics record") from None
        nonfinite = record.pop("nonfinite", {}) if isinstance(record, dict) else None
        if not isinstance(nonfinite, dict) or type(record.get("step")) is not int:
            raise ValueError(f"not a metrics record: {line[:200]!r}")
        for key, text in nonfinite.items():
            if text not in ("nan", "inf", "-inf"):
                raise ValueError(f"not a metrics record: {key!r} is not finite, but {text!r}")
            record[key] = float(text)
        known = {key: record.pop(key) for key in _FIELDS if key in record}
        required = {
            "loss": None,
            "grad_norm": None,
            "lr": None,
            "tokens": 0,
            "tokens_per_second": None,
            "step_ms": None,
        }
        return StepMetrics(**(required | known), extra=record)


_FIELDS = tuple(item.name for item in fields(StepMetrics) if item.name != "extra")


def read_metrics(path: str | os.PathLike[str]) -> list[StepMetrics]:
    """All records of a metrics file, in order; a torn last line (the run was killed, or still writes) is
    left out.

    Raises QEffectError when the file does not exist or another line is not a record.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise QEffectError(f"cannot read metrics from {os.fspath(path)}: {error.strerror}") from error
    records: list[StepMetrics] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(StepMetrics.from_json(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise QEffectError(f"{os.fspath(path)}, line {number} is not a metrics record") from error
    return records


class MetricsWriter:
    """Appends records to a metrics file; each is with the operating system when :meth:`write` returns.

    ``resume_step`` is the step a resumed run continues after: the file keeps the lines up to it, whatever
    lies behind is superseded. None means a fresh run: anything in the file belongs to another run and is
    superseded. ``notices`` says in one sentence each what was moved and where.

    Raises QEffectError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.notices: list[str] = []
        self._last_step: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_over(resume_step)
            # Unbuffered: a line is one write call, and a kill -9 right after it loses nothing.
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise QEffectError(f"cannot write metrics to {self.path}: {error.strerror}") from error

    def write(self, metrics: StepMetrics) -> None:
        """Append one record. Raises ValueError when its step is not beyond the last one, QEffectError on I/O
        errors."""
        if self._last_step is not None and metrics.step <= self._last_step:
            raise ValueError(f"metrics of step {metrics.step} follow those of step {self._last_step}")
        line = memoryview(metrics.to_json().encode() + b"\n")
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            # A full disk may have taken half of the line; the next one must not be glued to it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise QEffectError(f"cannot write metrics to {self.path}: {error.strerror}") from error
        self._last_step = metrics.step

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
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
            step = _step_of(line)
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
            _write_atomically(self.path, content)

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


def _step_of(line: bytes) -> int | None:
    try:
        return StepMetrics.from_json(line).step
    except ValueError:
        return None


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _write_atomically(path: Path, content: bytes) -> None:
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
