"""What happened once: marks on the curves, the table of events, how a run stands, what changed when it was resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from qeffect_lm.errors import shown
from qeffect_lm.units import format_bytes
from tools.report.reading import Run
from tools.report.series import evenly, number

Event = dict[str, Any]

MARKS = 160  # of a kind and run: more do not fit beside each other
ROWS = 600  # of the table, of all runs
CHANGES = 400
LONGEST = 400  # characters of an event's text
KINDS = {  # event → the kind that its mark and its filter have
    "start": "start",
    "evaluation": "evaluation",
    "skip": "skip",
    "save_durable": "save",
    "save_failed": "error",
    "warning": "warning",
    "error": "error",
    "end": "end",
}
_OWN = {"event", "step", "time"}


def kind_of(event: Event) -> str:
    """``save`` also for the stages of a save in the background; ``other`` for what this version does not know."""
    name = event.get("event")
    if not isinstance(name, str):
        return "other"
    return KINDS.get(name, "saving" if name.startswith("save_") else "other")


def told(run: Run) -> list[tuple[str, Event]]:
    """(kind, event) in order of time; a start that resumes is a ``restart``. Without events: what the metrics call skipped."""
    if not run.events:
        skipped = [one for one in run.metrics if one.skipped is True]
        return [("skip", {"event": "skip", "step": one.step, **_reason(one.extra)}) for one in skipped]
    kinds = [(kind_of(event), event) for event in run.events]
    return [("restart" if kind == "start" and event.get("resumed_from") else kind, event) for kind, event in kinds]


def _reason(extra: Any) -> Event:
    return {"reason": extra["skip_reason"]} if extra.get("skip_reason") else {}


def text_of(kind: str, event: Event) -> str:
    """One line about an event; what it does not know it gives as ``key value``."""
    name = str(event.get("event"))
    if kind in ("start", "restart"):
        parts = [f"resumed from {event['resumed_from']}" if event.get("resumed_from") else "a fresh run"]
        parts += [f"{key} {event[key]}" for key in ("schedule", "device") if event.get(key)]
    elif kind == "evaluation":
        loss = number(event.get("loss"))
        parts = ["held-out loss " + (f"{loss:.4f}" if loss is not None else str(event.get("loss")))]
    elif kind == "skip":
        parts = [str(event.get("reason", "a value that is not finite"))]
        parts += [f"{key} {event[key]}" for key in ("loss", "grad_norm") if key in event]
    elif name.startswith("save_"):
        parts = [name.removeprefix("save_").replace("_", " ")]
        seconds, size = number(event.get("seconds")), number(event.get("bytes"))
        parts += [f"{seconds:.2f} s after its request"] if seconds is not None else []
        parts += [format_bytes(size)] if size is not None and 0 <= size < 1e30 else []
        parts += [str(event[key]) for key in ("text", "path") if event.get(key)]
    elif kind in ("warning", "error"):
        parts = [": ".join(str(event[key]) for key in ("kind", "text") if event.get(key))]
    elif kind == "end":
        parts = [f"stopped: {event['stopped']}" if event.get("stopped") else "done"]
    else:
        parts = [name, *(f"{key} {value}" for key, value in event.items() if key not in _OWN)]
    return shown(", ".join(parts), LONGEST)


def moment(event: Event) -> str:
    """``2026-11-30 12:00:05`` (UTC); nothing where the time is none."""
    seconds = number(event.get("time"))
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def marks(run: Run, place: int) -> list[dict[str, Any]]:
    """Marks of the curves: kind, step, text, and how many events one stands for."""
    by_kind: dict[str, list[Event]] = {}
    for kind, event in told(run):
        if kind not in ("saving", "other", "start", "end"):
            by_kind.setdefault(kind, []).append(event)
    made = []
    for kind, events in by_kind.items():
        count = min(MARKS, len(events))
        for n in range(count):
            part = events[len(events) * n // count : len(events) * (n + 1) // count]
            text = text_of(kind, part[0])[:160]
            made.append({"run": place, "kind": kind, "step": part[0]["step"], "text": text, "of": len(part)})
    return made


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """Rows [run, kind, step, time, text] in order of time, of each run; frequent kinds thinned out, with ``counts`` of all."""
    room = ROWS // max(1, len(runs))
    rows: list[list[Any]] = []
    counts: Counter[str] = Counter()
    for place, run in enumerate(runs):
        by_kind: dict[str, list[tuple[int, Event]]] = {}
        for n, (kind, event) in enumerate(told(run)):
            by_kind.setdefault(kind, []).append((n, event))
        counts.update({kind: len(found) for kind, found in by_kind.items()})
        kept: list[tuple[int, str, Event]] = []
        rare_first = sorted(by_kind.items(), key=lambda item: len(item[1]))
        for left, (kind, found) in zip(range(len(rare_first), 0, -1), rare_first, strict=True):
            kept += [(n, kind, event) for n, event in evenly(found, max(2, (room - len(kept)) // left))]
        kept.sort(key=lambda one: one[0])
        rows += [[place, kind, event["step"], moment(event), text_of(kind, event)] for _, kind, event in kept]
    return {"rows": rows, "counts": dict(counts), "left": sum(counts.values()) - len(rows)}


def standing(run: Run) -> tuple[str, str]:
    """(how a run stands, a look for it: ``good``, ``bad`` or ``open``)."""
    for event in reversed(run.events):
        kind = kind_of(event)
        if kind == "end":
            why = event.get("stopped")
            return (f"stopped: {shown(str(why))}" if why else "finished", "good")
        if event.get("event") == "error":
            return f"failed: {shown(str(event.get('kind', 'error')))}", "bad"
        if kind == "start":
            break
    return ("still running, or killed" if run.events else "no events: how it ended is not known"), "open"


def starts(run: Run) -> list[Event]:
    return [event for event in run.events if kind_of(event) == "start"]


def resumes(runs: Sequence[Run]) -> dict[str, Any]:
    """What a resume changed: rows [run, step, key, before, after] of configuration, layout, device, versions and sources."""
    rows: list[list[Any]] = []
    for place, run in enumerate(runs):
        lives = starts(run)
        for before, after in zip(lives, lives[1:], strict=False):
            if after.get("resumed_from") is None:
                continue
            one, two = (_facts(run, event) for event in (before, after))
            rows += [[place, after["step"], key, one.get(key, "–"), two.get(key, "–")] for key in _differing([one, two])]
    return {"rows": evenly(rows, CHANGES), "left": max(0, len(rows) - CHANGES)}


def differences(columns: Sequence[dict[str, str]]) -> list[list[Any]]:
    """Rows [key, value of each]: where they are not all equal."""
    return [[shown(key), *(shown(one.get(key, "–")) for one in columns)] for key in _differing(columns)]


def _differing(columns: Sequence[dict[str, str]]) -> Iterable[str]:
    keys = dict.fromkeys(key for one in columns for key in one)
    return [key for key in keys if len({one.get(key) for one in columns}) > 1]


def _facts(run: Run, start: Event) -> dict[str, str]:
    name = start.get("config")
    config = run.configs.get(name, {}) if isinstance(name, str) else {}
    return {shown(key): shown(value) for key, value in config.items()} | dict(provenance(start))


def provenance(start: Event) -> list[tuple[str, str]]:
    """Device, layout, sizes, sources and versions of one process."""
    rows = [(key.replace("_", " "), start.get(key)) for key in ("device", "schedule", "steps", "tokens_per_step")]
    rows += [(key.replace("_", " "), start.get(key)) for key in ("parameters", "active_parameters", "flop_per_token")]
    rows += [("peak flop/s of a GPU", start.get("peak_flops")), ("peak's format", start.get("peak_format"))]
    layout, git = _mapping(start.get("layout")), _mapping(start.get("git"))
    rows.insert(1, ("layout", " × ".join(f"{key} {value}" for key, value in layout.items()) or None))
    if git.get("commit"):
        rows.append(("git commit", str(git["commit"])[:12] + (", with changes" if git.get("dirty") else "")))
    rows += [(f"{key} version", value) for key, value in list(_mapping(start.get("versions")).items())[:60]]
    return [(shown(key), shown(_grouped(value))) for key, value in rows if value is not None]


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _grouped(value: object) -> str:
    """Thousands apart: 1,234,567."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e18
    return f"{value:,}" if whole else f"{value:.4g}" if isinstance(value, float) else str(value)
