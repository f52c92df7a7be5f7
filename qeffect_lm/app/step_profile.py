"""``train.profile``: a torch profiler trace of chosen steps of a run, and a table of where their time went (docs/profile.md).

Not :mod:`qeffect_lm.app.profile`, which measures single layers before a run, for ``pipeline.schedule: auto``.

Spans are those of :mod:`pipeline.spans`, entered as ``record_function`` on this rank's main thread while a chosen step runs.
The table's times are taken beside the trace: of the host on a CPU; on a GPU of two events on the compute stream, read after
the step's own host synchronisation. Nothing of a step's work changes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from checkpoint.comm import Communicator
from pipeline.actions import Action
from pipeline.engine import Engine
from pipeline.measure import Mark, mark, seconds_between
from pipeline.slots import SlotPlan
from pipeline.spans import NO_SPANS, SpanKind, action_name, kind_of, wait_name
from qeffect_lm.config import Config
from qeffect_lm.config_profile import range_text
from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.loop import Parts

OTHER = "other"
KINDS = (*map(str, SpanKind), OTHER)
SHOWN = 8  # ranks with columns of their own; of more than these the table says mean, least and most


@dataclass
class _Span:
    kind: SpanKind
    parent: int | None
    begin: Mark
    end: Mark


@dataclass
class TimedSpans:
    """Spans of one rank as ranges of the profiler's trace, with their times."""

    device: torch.device
    spans: list[_Span] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)

    def action(self, action: Action, slots: SlotPlan) -> AbstractContextManager[object]:
        return self.piece(action_name(action, slots), kind_of(action))

    def wait(self, transfer: tuple[str, int, int]) -> AbstractContextManager[object]:
        return self.piece(wait_name(transfer), SpanKind.WAIT)

    @contextmanager
    def piece(self, name: str, kind: SpanKind) -> Iterator[None]:
        begin = mark(self.device)
        span = _Span(kind, self._open[-1] if self._open else None, begin, begin)
        self._open.append(len(self.spans))
        self.spans.append(span)
        try:
            with record_function(name):
                yield
        finally:
            self._open.pop()
            span.end = mark(self.device)

    def seconds(self) -> dict[SpanKind, float]:
        """Of each kind, without the spans inside of them; forgets them. Call it after the host has waited for the work."""
        found = dict.fromkeys(SpanKind, 0.0)
        for span in self.spans:
            took = seconds_between(span.begin, span.end)
            found[span.kind] += took
            if span.parent is not None:
                found[self.spans[span.parent].kind] -= took
        self.spans.clear()
        return found


def make_folder(config: Config) -> Path:
    """Where traces go; made here, before a run begins, so that it does not find out at step 1,000.

    Raises:
        UsageError: it cannot be made.
    """
    given = config.train.profile.dir
    folder = Path(given) if given else Path(config.run.dir) / "profile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        key = "train.profile.dir" if given else "run.dir"
        raise UsageError(f"{key}: cannot make the folder {folder} ({error.strerror}): choose another") from None
    return folder


class StepProfiler:
    """Profiles the steps of ``train.profile.steps`` on one rank.

    Args:
        done: steps that the run has behind it, here or before a resume.
        say: takes notices and the tables; of one rank, the others' say nothing.
    """

    def __init__(self, config: Config, engine: Engine, comm: Communicator, done: int, say: Callable[[str], None]) -> None:
        settings = config.train.profile
        self._engine, self._comm, self._say, self._step = engine, comm, say, done
        self._ranges = [(first, last) for first, last in settings.ranges() if last > done]
        self._device = engine.divisor.device
        self._spans = TimedSpans(self._device)
        self._profiler: profile | None = None
        self._first = self._seen = 0
        self._began = self._waited = 0.0
        self._sums: dict[str, float] = {}
        self.folder = make_folder(config)
        if not self._ranges:
            say(f"train.profile.steps {settings.steps}: all of them are behind this run, nothing is profiled")

    def around(self, parts: Parts) -> Parts:
        """The loop's parts, with the chosen steps profiled."""

        def next_batch() -> Any:
            self._begin()
            if self._profiler is None:
                return parts.next_batch()
            began = time.perf_counter()
            with record_function("data"):
                batch = parts.next_batch()
            self._waited = time.perf_counter() - began
            return batch

        def step(number: int, batch: Any) -> Any:
            if self._profiler is None:
                return parts.step(number, batch)
            self._engine.spans = self._spans
            try:
                with record_function(f"step {number + 1}"):
                    return parts.step(number, batch)
            finally:
                self._engine.spans = NO_SPANS

        def observe(number: int, skipped: bool) -> object:
            self._step = number
            self._end()
            return parts.observe(number, skipped)

        return replace(parts, next_batch=next_batch, step=step, observe=observe)

    def _begin(self) -> None:
        """Before a step's data."""
        coming = self._step + 1
        if self._profiler is None and any(first <= coming <= last for first, last in self._ranges):
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
            self._first, self._seen, self._sums = coming, 0, dict.fromkeys(KINDS, 0.0)
        self._began = time.perf_counter()

    def _end(self) -> None:
        """After a step's host synchronisation."""
        if self._profiler is None:
            return
        total = time.perf_counter() - self._began
        took = self._spans.seconds()
        took[SpanKind.DATA] = self._waited
        for kind, seconds in took.items():
            self._sums[kind] += seconds
        self._sums[OTHER] += total - sum(took.values())
        self._seen += 1
        if any(self._step == last for _, last in self._ranges):
            self.finish()

    def finish(self) -> None:
        """Write what was profiled, if anything was; collective. Training goes on where a file cannot be written."""
        if self._profiler is None:
            return
        steps = range_text(self._first, self._step)
        problem = self._write_trace(self.folder / f"rank{self._comm.rank}.step{steps}.json.gz")
        milliseconds = {kind: 1000 * seconds / max(1, self._seen) for kind, seconds in self._sums.items()}
        told = self._comm.gather((milliseconds, problem))
        if told is None:
            return
        table = step_table(steps, self._seen, str(self._device.type), [row for row, _ in told])
        for _, said in told:
            if said is not None:
                self._say(said)
        text = table_text(table)
        self._say(text)
        try:
            (self.folder / f"time.step{steps}.txt").write_text(text + "\n", encoding="utf-8")
            (self.folder / f"time.step{steps}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._say(f"profile: cannot write {error.filename} ({error.strerror}); training goes on")

    def close(self) -> None:
        """Give up what is being profiled."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write_trace(self, path: Path) -> str | None:
        """What went wrong, if it did."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        part = path.with_name(f".part-{path.name}")  # of a trace that was cut off nothing is left under its name
        try:
            profiler.export_chrome_trace(str(part))
            os.replace(part, path)
        except OSError as error:
            return f"profile: rank {self._comm.rank} cannot write {path} ({error.strerror}); training goes on"
        return None


def step_table(steps: str, count: int, device: str, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The table as JSON has it, from each rank's milliseconds a step by kind."""
    ranks = []
    for rank, row in enumerate(rows):
        total = sum(row.values())
        kinds = {kind: {"ms": row[kind], "share": row[kind] / total if total else 0.0} for kind in KINDS}
        ranks.append({"rank": rank, "step_ms": total, "kinds": kinds})
    return {"steps": steps, "count": count, "device": device, "ranks": ranks}


def table_text(table: dict[str, Any]) -> str:
    """The table for people: a line for each kind that took time on any rank."""
    ranks = table["ranks"]
    kinds = [kind for kind in KINDS if any(rank["kinds"][kind]["ms"] for rank in ranks)]
    rows = {kind: [rank["kinds"][kind]["ms"] for rank in ranks] for kind in kinds}
    rows["step"] = [rank["step_ms"] for rank in ranks]
    heads, title = [f"rank {rank['rank']}" for rank in ranks], f"time of step {table['steps']}, milliseconds a step and share"
    wholes = rows["step"]
    if len(ranks) > SHOWN:
        heads, title = ["mean", "least", "most"], f"{title} of the mean step, {len(ranks)} ranks"
        wholes = 3 * [sum(wholes) / len(ranks)]
        rows = {kind: [sum(row) / len(ranks), min(row), max(row)] for kind, row in rows.items()}
    wide = max(map(len, rows))
    lines = [title, " " * wide + "".join(f"{head:>18}" for head in heads)]
    for kind, row in rows.items():
        cells = (f"{ms:>10.2f} {100 * ms / whole:>5.1f} %" for ms, whole in zip(row, wholes, strict=True))
        lines.append(f"{kind:<{wide}}" + "".join(cells))
    return "\n".join(lines)
