"""The curves of a report: which there are, in which unit, and each run's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from qeffect_lm.errors import shown
from qeffect_lm.runtime.metrics import StepMetrics
from tools.report.reading import Run
from tools.report.series import buckets, knots, line, number, short

Value = Callable[[StepMetrics], object]
MOST_OTHER = 24  # charts of metrics that have no place of their own
GIB = 2**30


def _extra(name: str) -> Value:
    return lambda one: one.extra.get(name)


def _largest(name: str, scale: float = 1.0) -> Value:
    """Of a list with one entry per rank the largest."""

    def of(one: StepMetrics) -> float | None:
        values = one.extra.get(name)
        numbers = [found for item in values if (found := number(item)) is not None] if isinstance(values, list) else []
        return max(numbers) / scale if numbers else None

    return of


@dataclass(frozen=True)
class Chart:
    """``lines``: (what it is called, its value of a step); the first is smoothed with ``smooth``."""

    key: str
    title: str
    unit: str
    lines: Sequence[tuple[str, Value]]
    smooth: bool = False
    log: bool = False  # at first; the reader may switch
    scale: float = 1.0  # values are divided by it
    dots: bool = False
    why: str = ""  # no run may have it

    def of(self, runs: Sequence[Run]) -> dict[str, Any] | None:
        """As the page draws it; None where no run has a value."""
        made: list[dict[str, Any]] = []
        for place, run in enumerate(runs):
            for style, (name, value) in enumerate(self.lines):
                found = ((one.step, number(value(one))) for one in run.metrics)
                points = [(step, one / self.scale) for step, one in found if one is not None]
                if points:
                    drawn = line(points, buckets(len(runs)), smooth=self.smooth and style == 0)
                    made.append({"run": place, "name": name, "style": style} | drawn)
        if not made:
            return None
        names = [name for n, (name, _) in enumerate(self.lines) if any(one["style"] == n for one in made)]
        looks = {"log": self.log, "dots": self.dots}
        return {"key": self.key, "title": self.title, "unit": self.unit, "names": names, "lines": made, **looks}


LOSS = Chart("loss", "Loss", "nats per token", [("training loss", lambda one: one.loss)], smooth=True)
SPEED = [
    Chart("tokens", "Throughput", "tokens/s", [("tokens/s", lambda one: one.tokens_per_second)], smooth=True),
    Chart("step", "Step time", "ms", [("step time", lambda one: one.step_ms)], smooth=True),
    Chart("memory", "Memory of rank 0", "GiB", [("memory", _extra("memory_bytes"))], scale=GIB),
    Chart("mfu", "Model FLOP utilisation", "%", [("MFU", _extra("mfu"))], True, scale=0.01, why="a device of unknown peak"),
    Chart("wait", "Wait for data", "ms", [("wait", _extra("data_wait_ms"))], smooth=True),
    Chart("stall", "Checkpoint stall", "ms", [("stall", _extra("checkpoint_stall_ms"))], dots=True, why="no save in it"),
]
OPTIMIZER = [
    Chart("lr", "Learning rate", "", [("learning rate", lambda one: one.lr)]),
    Chart("norm", "Gradient norm", "L2, before clipping", [("gradient norm", lambda one: one.grad_norm)], True, log=True),
]
PIPELINE = [
    Chart(
        "bubble",
        "Bubble",
        "% of the step",
        [("measured", _extra("bubble")), ("predicted", _extra("bubble_predicted")), ("by the plan", _extra("bubble_plan"))],
        smooth=True,
        scale=0.01,
        why="a run without timed work",
    ),
    Chart(
        "activations",
        "Peak activation memory, largest of the ranks",
        "GiB",
        [
            ("measured", _largest("peak_activation_bytes", GIB)),
            ("predicted", _largest("peak_activation_bytes_predicted", GIB)),
        ],
        why="a run that is not measured",
    ),
]
FP8 = [
    Chart("saturation", "Saturated windows", "%", [("saturated", _extra("saturation"))], True, scale=0.01),
    Chart("excess", "Largest amax × scale / fp8_max", "", [("excess", _extra("saturation_excess"))], log=True),
    Chart("jump", "Largest amax jump", "× its history", [("jump", _extra("amax_jump"))], log=True),
    Chart(
        "underflow",
        "Underflow: non-zero values that became zero",
        "%",
        [(kind, _extra(f"underflow_{kind}")) for kind in ("input", "weight", "grad_output")],
        scale=0.01,
        why="logging.underflow_every samples it",
    ),
    Chart("room", "Largest room above an amax", "bits", [("room", _extra("room_bits_max"))]),
]
PLACED = {
    *("memory_bytes", "mfu", "data_wait_ms", "checkpoint_stall_ms", "bubble", "bubble_predicted", "bubble_plan", "saturation"),
    *("saturation_excess", "amax_jump", "underflow_input", "underflow_weight", "underflow_grad_output", "room_bits_max"),
}


def axes(run: Run) -> dict[str, list[Any] | None]:
    """What the page draws curves over: steps, and at each of ``step`` the ``tokens`` of all ranks so far and the ``hours`` that
    steps took, without evaluations, saves and restarts between them; None for what was not recorded.

    Of steps that were not logged the time of the next logged one is taken.
    """
    rows = [one for one in run.metrics if one.step > 0]
    if len(rows) < 2:
        return {"step": [], "tokens": None, "hours": None}
    steps = [rows[0].step - 1, *(one.step for one in rows)]
    tokens = [number(one.tokens) for one in rows]
    counted = [0.0 if steps[0] == 0 else tokens[0] or 0.0, *(value or 0.0 for value in tokens)]
    rising = None not in tokens and all(a <= b < 1e30 for a, b in pairwise(counted))
    took = [number(one.step_ms) for one in rows]
    timed = all(value is not None and 0 <= value < 1e15 for value in took)
    spent = accumulate((step - before) * (ms or 0.0) / 3.6e6 for (before, step), ms in zip(pairwise(steps), took, strict=True))
    hours = [0.0, *spent]
    return {
        "step": knots(steps),
        "tokens": [short(value, 15) for value in knots(counted)] if rising else None,
        "hours": [short(value, 9) for value in knots(hours)] if timed else None,
    }


def loss(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Training loss and, as points, evaluations: of the metrics, or where those have none of the events."""
    nothing: dict[str, Any] = {
        "key": LOSS.key,
        "title": LOSS.title,
        "unit": LOSS.unit,
        "names": [],
        "lines": [],
        "log": False,
        "dots": False,
    }
    made = LOSS.of(runs) or nothing
    for place, run in enumerate(runs):
        found: dict[int, float] = {one.step: value for one in run.metrics if (value := number(one.eval_loss)) is not None}
        if not found:
            told = [one for one in run.events if one.get("event") == "evaluation"]
            found = {one["step"]: value for one in told if (value := number(one.get("loss"))) is not None}
        if found:
            points = line(sorted(found.items()), buckets(len(runs)) // 4)
            made["lines"].append({"run": place, "name": "evaluation", "style": 1, "points": True} | points)
            made["names"] = list(dict.fromkeys([*made["names"], "evaluation"]))
    return made if made["lines"] else None


def charts(group: Sequence[Chart], runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """Those that have values, and a sentence for each that none has or that some run lacks."""
    made, lacking = [], []
    for chart in group:
        drawn = chart.of(runs)
        if drawn is None:
            lacking.append(f"{chart.title}: not recorded" + (f" ({chart.why})" if chart.why else ""))
            continue
        made.append(drawn)
        without = [run.label for place, run in enumerate(runs) if all(one["run"] != place for one in drawn["lines"])]
        if without:
            lacking.append(f"{chart.title}: not recorded by {', '.join(without)}" + (f" ({chart.why})" if chart.why else ""))
    return made, lacking


def other(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """Every further metric that is a number: of experts, of a blend's sources, of a user's own."""
    names: dict[str, None] = {}
    for run in runs:
        for one in run.metrics:
            names.update((name, None) for name, value in one.extra.items() if name not in PLACED and number(value) is not None)
            if len(names) > 1000:
                break
    known = sorted(names)
    drawn = [Chart(f"other{n}", shown(name), "", [(shown(name), _extra(name))]) for n, name in enumerate(known[:MOST_OTHER])]
    made = [chart.of(runs) for chart in drawn]
    left = [f"{len(known) - MOST_OTHER} further metrics are not drawn"] if len(known) > MOST_OTHER else []
    return [one for one in made if one is not None], left
