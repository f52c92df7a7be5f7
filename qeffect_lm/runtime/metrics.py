"""One line of JSON per training step: ``metrics.jsonl``, which survives crashes and resumes as
:class:`~qeffect_lm.runtime.step_lines.StepLines` do.

Every line is JSON in the strict sense. JSON has no NaN and no infinity, so such a value is written as null,
and a field ``nonfinite`` maps its key to ``"nan"``, ``"inf"`` or ``"-inf"``; :func:`read_metrics` puts the
value back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.step_lines import StepLines

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


class MetricsWriter(StepLines):
    """Appends records to a metrics file; each is with the operating system when :meth:`write` returns.

    ``resume_step`` and ``notices``: as of :class:`~qeffect_lm.runtime.step_lines.StepLines`.

    Raises QEffectError when the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        super().__init__(path, resume_step, "metrics", _step_of)

    def write(self, metrics: StepMetrics) -> None:
        """Append one record. Raises ValueError when its step is not beyond the last one, QEffectError on I/O
        errors."""
        self.append(metrics.step, metrics.to_json())

    def __enter__(self) -> MetricsWriter:
        return self


def _step_of(line: bytes) -> int | None:
    try:
        return StepMetrics.from_json(line).step
    except ValueError:
        return None
