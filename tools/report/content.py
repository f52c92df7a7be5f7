"""Everything that the page shows, as JSON values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from qeffect_lm import __version__
from qeffect_lm.errors import shown
from tools.report import curves, fp8, happenings, pipeline
from tools.report.reading import Run
from tools.report.series import number

LAST = 100  # logged steps whose median a tile shows


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """Sections in the page's order; each has ``lacks``, sentences about what it cannot show and why."""
    loss = curves.loss(runs)
    other, left = curves.other(runs)
    return {
        "version": __version__,
        "runs": [_run(run) for run in runs],
        "marks": [mark for place, run in enumerate(runs) for mark in happenings.marks(run, place)],
        "loss": {
            "charts": [] if loss is None else [loss],
            "lacks": _lacks(runs, "metrics") + ([] if loss else ["Loss: not recorded"]),
        },
        "speed": _charts(curves.SPEED, runs),
        "optimizer": _charts(curves.OPTIMIZER, runs),
        "pipeline": _charts(curves.PIPELINE, runs) | _pipeline(runs),
        "fp8": _charts(curves.FP8, runs) | _fp8(runs),
        "other": {"charts": other, "lacks": left},
        "events": happenings.table(runs) | {"lacks": _lacks(runs, "events")},
        "config": _config(runs),
        "provenance": _provenance(runs),
    }


def _lacks(runs: Sequence[Run], part: str) -> list[str]:
    return [shown(f"{run.label}: {run.lacks[part]}", 500) for run in runs if part in run.lacks]


def _charts(group: Sequence[curves.Chart], runs: Sequence[Run]) -> dict[str, Any]:
    made, lacking = curves.charts(group, runs)
    return {"charts": made, "lacks": lacking}


def _pipeline(runs: Sequence[Run]) -> dict[str, Any]:
    made, lacking = curves.charts(curves.PIPELINE, runs)
    timelines = [one for place, run in enumerate(runs) if (one := pipeline.timeline(run, place, len(runs))) is not None]
    tables = [{"run": place, **one} for place, run in enumerate(runs) if (one := pipeline.ranks(run)) is not None]
    return {"charts": made, "lacks": lacking + _lacks(runs, "timeline"), "timelines": timelines, "ranks": tables}


def _fp8(runs: Sequence[Run]) -> dict[str, Any]:
    made, lacking = curves.charts(curves.FP8, runs)
    maps = [{"run": place, **fp8.maps(run.scales, len(runs))} for place, run in enumerate(runs) if run.scales]
    return {"charts": made, "lacks": lacking + _lacks(runs, "scales"), "maps": maps}


def _run(run: Run) -> dict[str, Any]:
    status, look = happenings.standing(run)
    begun = happenings.starts(run)
    last = begun[-1] if begun else {}
    times = [time for event in (run.events[:1] + run.events[-1:]) if (time := happenings.moment(event))]
    about = [shown(str(last[key])) for key in ("schedule", "device") if last.get(key)]
    return {
        "label": shown(run.label),
        "folder": shown(str(run.folder), 500),
        "status": status,
        "look": look,
        "about": " · ".join(about),
        "times": " to ".join(dict.fromkeys(times)) + (" UTC" if times else ""),
        "tiles": _tiles(run, last),
        "axes": curves.axes(run),
    }


def _tiles(run: Run, start: dict[str, Any]) -> list[list[str]]:
    """[name, value, unit or remark] of what one looks at first; nothing for what is not known."""
    made: list[list[str]] = []
    goal = number(start.get("steps"))
    if run.metrics:
        made.append(["step", f"{run.metrics[-1].step:,}", f"of {goal:,.0f}" if goal is not None and goal < 1e15 else ""])
    losses = [loss for one in run.metrics if (loss := number(one.loss)) is not None]
    if losses:
        made.append(["training loss", f"{statistics.fmean(losses[-10:]):.4f}", f"mean of the last {len(losses[-10:])}"])
    tried = [(loss, one.step) for one in run.metrics if (loss := number(one.eval_loss)) is not None]
    held_out = [(loss, step) for loss, step in tried if math.isfinite(loss)]
    if held_out:
        best, step = min(held_out)
        made.append(["best held-out loss", f"{best:.4f}", f"at step {step:,}"])
    tokens = number(run.metrics[-1].tokens) if run.metrics else None
    if tokens is not None and abs(tokens) < 1e30:
        made.append(["tokens", _short(tokens), ""])
    for name, of, unit in (
        ("throughput", lambda one: one.tokens_per_second, "tokens/s"),
        ("step time", lambda one: one.step_ms, "ms"),
        ("MFU", lambda one: one.extra.get("mfu"), "%"),
        ("bubble", lambda one: one.extra.get("bubble"), "% of the step"),
    ):
        found = [one for line in run.metrics[-LAST:] if (one := number(of(line))) is not None and abs(one) < 1e30]
        if found:
            middle = statistics.median(found)
            value = f"{100 * middle:.1f}" if unit.startswith("%") else _short(middle)
            made.append([name, value, f"{unit}, median of the last {len(found)}"])
    counted = [kind for kind, _ in happenings.told(run)]
    for kind, name in (("restart", "restarts"), ("skip", "skipped steps"), ("warning", "warnings")):
        if kind in counted or run.events:
            made.append([name, str(counted.count(kind)), ""])
    return made


def _short(value: float) -> str:
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if size == 1e4 else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _config(runs: Sequence[Run]) -> dict[str, Any]:
    first = [next(iter(run.configs.values()), {}) for run in runs]
    different = happenings.differences(first) if len(runs) > 1 else []
    whole = [{"run": place, "rows": [[shown(k), shown(v)] for k, v in one.items()]} for place, one in enumerate(first) if one]
    return {"different": different, "resumes": happenings.resumes(runs), "whole": whole, "lacks": _lacks(runs, "config")}


def _provenance(runs: Sequence[Run]) -> dict[str, Any]:
    """Of each run's last process."""
    columns = [dict(happenings.provenance(begun[-1])) if (begun := happenings.starts(run)) else {} for run in runs]
    keys = dict.fromkeys(key for one in columns for key in one)
    return {"rows": [[key, *(one.get(key, "–") for one in columns)] for key in keys], "lacks": _lacks(runs, "events")}
