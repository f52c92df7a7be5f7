"""Reading a run's folder (docs/logging.md): scales, timelines and events; its metrics by
:func:`~qeffect_lm.runtime.metrics.read_metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.actions import Action, Kind
from pipeline.plan import Plan
from pipeline.simulate import simulate
from qeffect_lm.app.watching import PLANS, SCALES, TIMELINES
from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.events import EVENTS
from qeffect_lm.runtime.step_lines import read_lines

Piece = tuple[Action, float, float]
"""An F, I or W, and when it began and ended, in milliseconds."""


@dataclass(frozen=True)
class ScaleLine:
    """All FP8 tensors at a step; every list has an entry for each of ``roles`` (docs/logging.md)."""

    step: int
    roles: list[str]
    fp8_max: list[float]
    amax: list[float]
    scale: list[float]
    windows: list[int]
    saturated: list[int]
    excess: list[float]
    underflow: list[float | None] | None = None


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, in order of time. Raises QEffectError where there are none or a line is damaged."""
    return read_lines(folder / EVENTS, "events")


def read_scales(folder: Path) -> list[ScaleLine]:
    """The lines of ``scales.jsonl``, none for a run without FP8 histories.

    Raises:
        QEffectError: the file is damaged.
    """
    path = folder / SCALES
    roles: dict[str, Any] = {}
    lines = []
    for record in read_lines(path, "scales") if path.exists() else []:
        roles = {key: record.get(key, roles.get(key)) for key in ("roles", "fp8_max")}
        try:
            lines.append(ScaleLine(**{**roles, **record}))
        except TypeError as error:
            raise QEffectError(f"{path}: the line of step {record.get('step')} is no line of scales: {error}") from error
    return lines


@dataclass(frozen=True)
class Timeline:
    """One step of the pipeline of the first replica: when each F, I and W of each rank ran, on one clock.

    ``measured`` and ``predicted`` hold one list per pipeline rank. ``predicted`` is the plan, run with this step's mean times
    of F, I and W of each chunk and the latency of a message that was measured at the start.
    """

    step: int
    plan: Plan
    measured: list[list[Piece]]
    predicted: list[list[Piece]]


def timeline_steps(folder: Path) -> list[int]:
    """The steps of ``timelines.jsonl``, in order. Raises QEffectError where the file is damaged."""
    return [step for record in _timelines(folder) if type(step := record.get("step")) is int]


def read_timelines(folder: Path, step: int | None = None) -> list[Timeline]:
    """The steps of ``timelines.jsonl``, or ``step`` alone: a plan of many ranks takes a while to simulate.

    Raises:
        QEffectError: a file is damaged, or a plan is missing.
    """
    path = folder / TIMELINES
    plans: dict[str, Plan] = {}
    found = []
    for record in _timelines(folder):
        if step not in (None, record.get("step")):
            continue
        try:
            name = record["plan"]
            if name not in plans:
                plans[name] = Plan.from_json((folder / PLANS / f"{name}.json").read_text())
            plan = plans[name]
            measured = [
                [(action, offset + times[2 * i], offset + times[2 * i + 1]) for i, action in enumerate(_compute(row))]
                for row, times, offset in zip(plan.actions, record["work_ms"], record["offsets_ms"], strict=True)
            ]
            found.append(Timeline(record["step"], plan, measured, predict(plan, measured, record["message_ms"])))
        except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
            raise QEffectError(f"{path}: the line of step {record.get('step')} cannot be read: {error}") from error
    return found


def _timelines(folder: Path) -> list[dict[str, Any]]:
    path = folder / TIMELINES
    return read_lines(path, "timelines") if path.exists() else []


def predict(plan: Plan, measured: Sequence[Sequence[Piece]], message_ms: float) -> list[list[Piece]]:
    """The plan against the clock, with the mean of each chunk's measured times, in milliseconds."""
    chunks = plan.placement.num_chunks
    times: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(chunks)] for kind in (Kind.F, Kind.I, Kind.W)}
    for row in measured:
        for action, begin, end in row:
            times[action.kind][action.key[0]].append(end - begin)
    t_f, t_i, t_w = ([sum(one) / len(one) if one else 0.0 for one in times[kind]] for kind in (Kind.F, Kind.I, Kind.W))
    clock = simulate(plan, t_f, t_i, t_w, message_ms)
    return [
        [(action, begin, end) for action, begin, end in zip(*row, strict=True) if action.is_compute]
        for row in zip(plan.actions, clock.start, clock.end, strict=True)
    ]


def _compute(row: Sequence[Action]) -> list[Action]:
    return [action for action in row if action.is_compute]
