"""A run's folder as the report needs it: what is there, what is lacking, what is damaged."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from qeffect_lm.app.run_folder import ScaleLine, Timeline, read_events, read_scales, read_timelines, timeline_steps
from qeffect_lm.config_yaml import parse_yaml
from qeffect_lm.errors import QEffectError, UsageError, shown
from qeffect_lm.runtime.events import EVENTS
from qeffect_lm.runtime.metrics import StepMetrics, read_metrics

METRICS = "metrics.jsonl"
MOST_KEYS, MOST_CONFIGS, MOST_BYTES = 2000, 60, 1 << 20  # of a configuration, of a run, of a configuration's file
LARGEST_STEP = 2**53  # what a page can count to

T = TypeVar("T")


@dataclass
class Run:
    """``lacks`` says for a part of the report (``events``, ``scales``, …) why the run has nothing to show there."""

    folder: Path
    label: str
    metrics: list[StepMetrics] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    scales: list[ScaleLine] = field(default_factory=list)
    timeline: Timeline | None = None
    timeline_steps: list[int] = field(default_factory=list)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)  # file → key → value as text
    lacks: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)

    def part(self, name: str, file: str, read: Callable[[], T], nothing: T, absent: str) -> T:
        """What ``read`` gives; where that is nothing or fails, ``lacks`` says so."""
        try:
            found = read()
        except QEffectError as error:
            self.lacks[name] = f"{file} cannot be read: {error}"
            self.damaged.append(str(error))
            return nothing
        if not found:
            self.lacks[name] = absent
        return found


def read_runs(folders: Sequence[Path], step: int | None) -> list[Run]:
    """The runs, each once, with labels that tell them apart, and the timeline of ``step`` (None: the last one).

    Raises:
        UsageError: a folder is no run's, its metrics are damaged, or no run has a timeline of ``step``.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    runs = [_read(folder, label, step) for folder, label in zip(unique, _labels(unique), strict=True)]
    if step is not None and not any(step in run.timeline_steps for run in runs):
        steps = sorted({one for run in runs for one in run.timeline_steps}, key=lambda one: abs(one - step))[:5]
        known = f"the nearest are {', '.join(map(str, sorted(steps)))}" if steps else "none was recorded"
        raise UsageError(f"--step {step}: there is no timeline of it; {known}")
    return runs


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last names of the paths, as many as tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders)):
        labels = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(labels)) == len(labels):
            return labels
    return [str(folder) for folder in folders]


def _read(folder: Path, label: str, step: int | None) -> Run:
    if not folder.is_dir():
        raise UsageError(f"{shown(str(folder))} is no folder: give a run's (run.dir of its configuration)")
    if not any((folder / name).exists() for name in (METRICS, EVENTS)):
        raise UsageError(f"{shown(str(folder))} is no run's folder: it has neither {METRICS} nor {EVENTS}")
    run = Run(folder, label)
    if (folder / METRICS).exists():
        try:
            run.metrics = [one for one in read_metrics(folder / METRICS) if abs(one.step) < LARGEST_STEP]
        except QEffectError as error:
            raise UsageError(str(error)) from error
    run.metrics.sort(key=lambda one: one.step)  # as every run writes them; a file may say anything
    if not run.metrics:
        run.lacks["metrics"] = f"{METRICS} has no line yet" if (folder / METRICS).exists() else f"no {METRICS}"
    no_events = f"no {EVENTS}" if not (folder / EVENTS).exists() else f"{EVENTS} has no line"
    if (folder / EVENTS).exists():
        none: list[dict[str, Any]] = []
        everything = run.part("events", EVENTS, lambda: _events(folder), none, no_events)
        fresh = [n for n, one in enumerate(everything) if one.get("event") == "start" and not one.get("resumed_from")]
        run.events = everything[fresh[-1] :] if fresh else everything
        if len(run.events) < len(everything):
            left = len(everything) - len(run.events)
            run.lacks["events"] = f"{left} events of an earlier run in the same folder are left out"
    else:
        run.lacks["events"] = no_events
    no_scales = "no scales.jsonl with lines (delayed scaling with logging.scales_every writes them)"
    run.scales = run.part("scales", "scales.jsonl", lambda: _scales(folder), [], no_scales)
    _timeline(run, step)
    no_config = "no config.yaml"
    run.configs = run.part("config", "config.yaml", lambda: _configs(folder), {}, no_config)
    return run


def _events(folder: Path) -> list[dict[str, Any]]:
    return [one for one in read_events(folder) if type(step := one.get("step")) is int and abs(step) < LARGEST_STEP]


def _scales(folder: Path) -> list[ScaleLine]:
    """Raises QEffectError also for lines whose lists do not fit together."""
    path, lines = folder / "scales.jsonl", read_scales(folder)
    for line in lines:
        lists = [line.amax, line.scale, line.windows, line.saturated, *([] if line.underflow is None else [line.underflow])]
        fits = _names(line.roles) and all(isinstance(one, list) and len(one) == len(line.roles) for one in lists)
        if not fits or type(line.step) is not int:
            raise QEffectError(f"{path}: the line of step {shown(str(line.step))} has no value for each role")
    return lines


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _timeline(run: Run, step: int | None) -> None:
    absent = "no timelines.jsonl with lines (timed work with logging.timeline_every writes them)"
    run.timeline_steps = run.part("timeline", "timelines.jsonl", lambda: timeline_steps(run.folder), [], absent)
    if not run.timeline_steps:
        return
    if step is not None and step not in run.timeline_steps:
        run.lacks["timeline"] = f"no timeline of step {step}"
        return
    chosen = run.timeline_steps[-1] if step is None else step
    none: list[Timeline] = []
    found = run.part("timeline", "timelines.jsonl", lambda: _one(run.folder, chosen), none, absent)
    run.timeline = found[-1] if found else None


def _one(folder: Path, step: int) -> list[Timeline]:
    try:
        return read_timelines(folder, step)
    except (AttributeError, OverflowError, RecursionError) as error:  # a plan's document may hold anything
        raise QEffectError(f"the plan of step {step}'s timeline cannot be read: {error}") from error


def _configs(folder: Path) -> dict[str, dict[str, str]]:
    def order(path: Path) -> tuple[int, str]:
        found = re.fullmatch(r"config\.resumed-at-(\d{1,15})\.yaml", path.name)
        return (int(found[1]) if found else -1, path.name)

    files = [path for path in [folder / "config.yaml"] if path.exists()]
    files += sorted(folder.glob("config.resumed-at-*.yaml"), key=order)[:MOST_CONFIGS]
    return {path.name: read_config(path) for path in files}


def read_config(path: Path) -> dict[str, str]:
    """Every key of a configuration (``section.key``) with its value as text; keys of other versions too.

    Raises:
        QEffectError: it cannot be read, or is none.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise QEffectError(f"{path} is larger than any configuration")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QEffectError(f"cannot read {path}: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise QEffectError(f"{path} holds no configuration")
    try:
        leaves = list(itertools.islice(_leaves(values, ""), MOST_KEYS + 1))
    except ValueError as error:  # a number of thousands of digits
        raise QEffectError(f"{path} holds no configuration: {error}") from error
    if len(leaves) > MOST_KEYS:
        raise QEffectError(f"{path} has more than {MOST_KEYS} keys")
    return dict(leaves)


def _leaves(value: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """A list is a leaf for each of its entries: text of an alias's alias would have no end."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if entries is None or not value or depth > 20:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        yield prefix, "…" if depth > 20 else "null" if value is None else text
        return
    for key, inner in entries:
        name = f"{prefix}[{key}]" if isinstance(value, list) else f"{prefix}.{key}" if prefix else str(key)
        yield from _leaves(inner, name, depth + 1)
