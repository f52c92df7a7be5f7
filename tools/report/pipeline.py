"""The pipeline of a report: the lanes of one step, measured above predicted, and what each rank was predicted to do and did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qeffect_lm.app.run_folder import Piece
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.units import format_bytes
from tools.report.reading import Run
from tools.report.series import evenly, number, short

PIECES = 4000  # of F, I and W that a page shows, of all runs
ROWS = 64  # ranks of the table


def timeline(run: Run, place: int, runs: int) -> dict[str, Any] | None:
    """The chosen step; of many ranks some, evenly over the pipeline, so that it stays drawable."""
    told = run.timeline
    if told is None or not any(told.measured):
        return None
    ranks, longest = len(told.measured), max(map(len, told.measured))
    room = PIECES // runs
    chosen = evenly(range(ranks), max(1, room // longest))
    most = max(1, room // len(chosen))
    spans = [_span(row) for row in told.measured]
    made: dict[str, Any] = {
        "run": place,
        "step": told.step,
        "steps": evenly(run.timeline_steps, 12),
        "recorded": len(run.timeline_steps),
        "schedule": told.plan.schedule,
        "ranks": ranks,
        "chunks": told.plan.placement.num_chunks,
        "cut": sum(max(0, len(told.measured[rank]) - most) for rank in chosen),
        "bubble": [bubble(told.measured), bubble(told.predicted)],
        "lanes": [],
    }
    for rank in chosen:
        pieces = list(zip(told.measured[rank], told.predicted[rank], strict=True))[:most]
        made["lanes"].append(
            {
                "rank": rank,
                "span": short(spans[rank], 4),
                "busy": short(_work(told.measured[rank]), 4),
                "kinds": "".join(action.kind.value for (action, _, _), _ in pieces),
                "chunks": [action.chunk for (action, _, _), _ in pieces],
                "microbatches": [action.microbatch for (action, _, _), _ in pieces],
                **{
                    name: [_ms(one[side][when]) for one in pieces]
                    for name, side, when in (("begin", 0, 1), ("end", 0, 2), ("from", 1, 1), ("to", 1, 2))
                },
            }
        )
    return made


def _ms(value: float) -> float | int | None:
    return short(round(value, 3), 9)


def _span(row: Sequence[Piece]) -> float:
    return row[-1][2] - row[0][1] if row else 0.0


def _work(row: Sequence[Piece]) -> float:
    return sum(end - begin for _, begin, end in row)


def bubble(rows: Sequence[Sequence[Piece]]) -> float | int | None:
    """(longest span − longest work) / longest span, as ``bubble`` of the metrics; None where nothing took time."""
    span, work = max(map(_span, rows), default=0.0), max(map(_work, rows), default=0.0)
    return short(max(0.0, (span - work) / span), 4) if span > 0 else None


def ranks(run: Run) -> dict[str, Any] | None:
    """Predicted beside measured for each rank, at the last step that has both."""
    keys = ("peak_leases", "peak_activation_bytes")
    for one in reversed(run.metrics):
        if all(isinstance(one.extra.get(f"{key}{end}"), list) for key in keys for end in ("", "_predicted")):
            return {"step": one.step, "rows": _rows(one)}
    return None


def _rows(one: StepMetrics) -> list[list[str]]:
    def column(name: str) -> list[Any]:
        values = one.extra.get(name)
        return values if isinstance(values, list) else []

    def cell(name: str, rank: int, form: Any) -> str:
        values = column(name)
        value = number(values[rank]) if rank < len(values) else None
        return "–" if value is None or not 0 <= value < 1e30 else form(value)

    forms = {"peak_leases": "{:.0f}".format, "peak_activation_bytes": format_bytes}
    rows = []
    for rank in evenly(range(len(column("peak_leases"))), ROWS):
        row = [str(rank), cell("bubble_per_rank", rank, "{:.1%}".format), cell("work_ms", rank, "{:.1f} ms".format)]
        rows.append(row + [cell(key + end, rank, form) for key, form in forms.items() for end in ("", "_predicted")])
    return rows
