"""Metrics to Weights & Biases, where the ``wandb`` extra is installed; metrics.jsonl stays the complete
record.

The x axis is our own ``global_step``. The client's internal step only ever grows and silently drops rows
that go back, which is exactly what a resumed run does: saved at 5, logged to 8, killed, it runs 6 to 8
again. Here those steps are logged a second time, and every row carries the ``segment`` (how many processes
have logged this run before this one) that tells the two apart.

What a resume does:

* ``online`` continues the same run (same id).
* ``offline`` cannot append to a run's file, so each process writes a run of its own, a *segment*, and all
  segments share one group. ``wandb sync DIRECTORY`` uploads one.
* When the mode changed in between, a new run in the same group begins.

Which of these it is, and which steps are logged a second time, is said in one line.

Besides rows the run gets the plan as a picture, each durable checkpoint as an artifact that refers to its files where they lie
(nothing is copied or hashed), and an alert for each skipped step and each warning.

The client buffers rows for up to 15 seconds and loses them when the process is killed; here they are written
out every 50 ms, and :meth:`WandbLogger.settle`, called for every checkpoint, waits until they are in the file:
what a resumed run will not log again is on disk before the checkpoint says so.

The client is configured through its settings only. In offline mode it contacts nobody; left to itself,
version 0.31 sends telemetry even then, which setting up the session offline as well prevents.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.metrics import StepMetrics

MODES = ("disabled", "offline", "online")
FLUSH_SECONDS = 0.05
SETTLE_SECONDS = 2.0
"""How long a checkpoint waits at most until logged rows are in the run's file (usually 0.1 s)."""
FINISH_SECONDS = 60.0
"""How long finishing may wait for an upload; what is not uploaded then stays in the run's directory."""


class WandbLogger:
    """Logs :class:`StepMetrics` to one wandb run. Make one on the one rank that logs.

    ``directory`` is where the client puts its ``wandb`` folder. ``config`` is shown with the run.
    ``resumed`` is the ``state()`` that the checkpoint recorded, ``resume_step`` the step a resumed run
    continues after. ``notice`` gets one-line messages for the user. ``settings`` adds to or overrides the
    client's settings.

    ``mode`` afterwards is the mode in force: ``disabled`` also where the client is not installed or cannot start,
    ``offline`` also where an online start found no login or no server (each with a notice).

    Raises UsageError for an unknown mode.
    """

    def __init__(
        self,
        mode: str,
        *,
        project: str,
        directory: str | os.PathLike[str],
        name: str = "run",
        entity: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        resumed: Mapping[str, Any] | None = None,
        resume_step: int = 0,
        notice: Callable[[str], None] = print,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"logging.wandb is {mode!r}; it must be one of {', '.join(MODES)}")
        self.mode = mode
        self.directory: Path | None = None
        self.url: str | None = None
        self._notice = notice
        self._resumed = dict(resumed) if resumed else None
        self._run: Any = None
        self._file: Path | None = None
        self._events: deque[Mapping[str, Any]] = deque()  # that the next row takes along
        self._last_log: float | None = None
        self._settled_size = 0
        self._settled_log: float | None = None  # when the last row was logged that is known to be in the file
        self._state: dict[str, Any] | None = self._resumed
        client = _import_client(notice) if mode != "disabled" else None
        if client is None:
            self.mode = "disabled"
            return
        self._client = client
        self._extra = dict(settings or {})
        root = os.path.abspath(directory)
        os.makedirs(root, exist_ok=True)
        common: dict[str, Any] = {"project": project, "entity": entity, "dir": root, "job_type": "train"}
        common["config"] = {**(config or {}), **({"resumed_from_step": resume_step} if resumed else {})}
        self._start(common, name, group, resume_step)
        if resumed and self._run is not None and self._state is not None:
            notice(self._said(resume_step))

    def _said(self, resume_step: int) -> str:
        """What a resume does, in a line."""
        assert self._state is not None and self._resumed is not None
        run, segment = self._state["run_id"], self._state["segment"]
        again = f"steps after {resume_step} that it has already are logged once more, as segment {segment}"
        if run == self._resumed.get("run_id"):
            return f"wandb: goes on with run {run}; {again}"
        group, before = self._state["group"], self._resumed.get("run_id")
        return f"wandb: a new run {run} of group {group} begins after step {resume_step}; {before} keeps its steps"

    def log(self, metrics: StepMetrics) -> None:
        """Log one step under ``global_step``. A client that fails is given up with a notice; training goes
        on."""
        if self._run is None:
            return
        row: dict[str, Any] = {}
        for key, value in metrics.as_dict().items():
            if isinstance(value, list):
                row |= {f"{key}/{rank}": one for rank, one in enumerate(value)}
            elif value is not None and key != "step":
                row[key] = value
        row["skipped"] = int(metrics.skipped)
        try:
            self._send_events()
            # Without step=: the client's own step must not decide what is kept.
            self._run.log({"global_step": metrics.step, "segment": self._segment, **row})
        except Exception as error:
            self._give_up(error, metrics.step)
            return
        self._last_log = time.monotonic()
        assert self._state is not None
        self._state["last_step"] = metrics.step

    def picture(self, name: str, svg: str, step: int) -> None:
        """Show an SVG with the run."""
        if self._run is None:
            return
        try:
            self._run.log({"global_step": step, name: self._client.Html(svg, inject=False)})
        except Exception as error:
            self._give_up(error, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """One of the run's events (:mod:`qeffect_lm.runtime.events`), from any thread; it goes with the next row."""
        if self._run is not None and event["event"] in ("save_durable", "skip", "warning"):
            self._events.append(event)

    def _send_events(self) -> None:
        while self._events:
            event = self._events.popleft()
            step = event["step"]
            if event["event"] == "save_durable":
                self._refer(Path(event["path"]).absolute(), step, event.get("bytes"))
            elif event["event"] == "skip":
                text = f"step {step} was skipped: {event.get('reason')} (loss {event.get('loss')})"
                self._run.alert("step skipped", text, level="WARN")
            else:
                self._run.alert(f"warning: {event['kind']}", f"step {step}: {event['text']}", level="WARN")

    def _refer(self, path: Path, step: int, size: int | None) -> None:
        """A checkpoint as an artifact of references; one that retention has removed already is left out."""
        if not path.is_dir():
            return
        base = str((self._state or {}).get("run_id", "")).split("-s")[0]
        artifact = self._client.Artifact(f"checkpoint-{base}", type="checkpoint", metadata={"step": step, "bytes": size})
        artifact.add_reference(path.as_uri(), name=path.name, checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])

    def state(self, wait: bool = True) -> dict[str, Any] | None:
        """What a checkpoint's manifest records: ``run_id``, ``group``, ``segment``, ``last_step``, ``mode``.

        Where wandb is disabled, what the resumed checkpoint recorded (or None), so that it is not forgotten. Who does not
        ``wait`` here has to call :meth:`settle` before the checkpoint is committed.
        """
        if wait:
            self.settle()
        return dict(self._state) if self._state is not None else None

    def settle(self) -> None:
        """Wait until the rows logged so far are in the run's file, at most :data:`SETTLE_SECONDS`; any thread may call it."""
        if self._run is not None:
            self._settle()

    def finish(self, exit_code: int = 0) -> None:
        """End the run (not zero: shown as failed) and write everything out; twice is fine."""
        if self._run is not None:
            try:
                self._send_events()
            except Exception as error:
                self._notice(f"wandb: the last events were not logged ({_first_line(error)})")
        run, self._run = self._run, None
        if run is None:
            return
        try:
            self._settle()  # the client returns from finish before its file is complete
            run.finish(exit_code=exit_code)
        except Exception as error:
            self._notice(
                f"wandb: finishing the run failed ({_first_line(error)}); its files are in {self.directory}"
            )

    def _start(self, common: dict[str, Any], name: str, group: str | None, resume_step: int) -> None:
        """Start a run, offline when there is no login or no server, else none. Nothing here ends a training run."""
        try:
            self._init(common, name, group, resume_step)
            return
        except Exception as error:
            if self.mode == "offline":
                self._notice(f"wandb cannot start offline ({_first_line(error)}); metrics go to metrics.jsonl only")
                self.mode, self._run, self._state = "disabled", None, self._resumed
                return
            login = isinstance(error, self._client.errors.UsageError)
            what = "no login" if login else "no connection"
            self._notice(
                f"wandb: {what} ({_first_line(error)}); logging this run offline instead"
                + (": log in with `wandb login`, and upload it later with `wandb sync`" if login else "")
            )
        self.mode = "offline"
        self._start(common, name, group, resume_step)

    def _init(self, common: dict[str, Any], name: str, group: str | None, resume_step: int) -> None:
        previous = self._resumed or {}
        base = str(previous.get("run_id", "")).split("-s")[0] or secrets.token_hex(4)
        self._segment = self._next_segment(previous, base, common["dir"])
        same_run = self.mode == "online" and previous.get("mode") == "online"
        if same_run:
            run_id = str(previous["run_id"])
        elif self.mode == "online":
            run_id = base if not previous else f"{base}-s{self._segment}-online"
        else:
            # The random part keeps ids apart when an earlier segment's directory is gone already.
            run_id = f"{base}-s{self._segment}-{secrets.token_hex(2)}"
        group = group or previous.get("group") or f"{name}-{base}"
        settings = self._settings()
        # Also for the session: its telemetry follows the session's mode, not the run's.
        self._client.setup(settings=settings)
        self._run = self._client.init(
            **common,
            id=run_id,
            group=group,
            name=name if self.mode == "online" else f"{name}-s{self._segment}",
            resume="allow" if self.mode == "online" else None,
            settings=settings,
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        self.directory = Path(self._run.settings.sync_dir)
        self._file = Path(self._run.settings.sync_file)
        self.url = self._run.url if self.mode == "online" else None
        self._state = {
            "run_id": run_id,
            "group": group,
            "segment": self._segment,
            "last_step": resume_step,
            "mode": self.mode,
        }

    def _settle(self) -> None:
        """Wait until the rows logged so far have reached the file: it has grown, and no longer grows."""
        last = self._last_log
        if last is None or last == self._settled_log or self._file is None:
            return
        time.sleep(max(0.0, last + FLUSH_SECONDS - time.monotonic()))
        deadline, before = time.monotonic() + SETTLE_SECONDS, -1
        while time.monotonic() < deadline:
            size = self._file.stat().st_size if self._file.exists() else 0
            if size == before and size > self._settled_size:
                break
            before = size
            time.sleep(FLUSH_SECONDS)
        self._settled_size, self._settled_log = before, last

    @staticmethod
    def _next_segment(previous: Mapping[str, Any], base: str, directory: str) -> int:
        """One more than the checkpoint's segment and any later one on disk (it may have died before it
        saved)."""
        used = [int(previous["segment"])] if "segment" in previous else []
        for path in Path(directory).glob(f"*wandb/*run-*-{base}-s*"):
            found = re.search(rf"-{re.escape(base)}-s(\d+)", path.name)
            if found:
                used.append(int(found[1]))
        return max(used, default=-1) + 1

    def _settings(self) -> Any:
        """The client's settings; those that this version does not know are left out."""
        wanted = {
            "mode": self.mode,
            "console": "off",  # our lines are ours
            "silent": True,  # also: never asks for a login in the middle of a job
            "reinit": "create_new",  # leaves runs of other code in this process alone
            "allow_val_change": True,  # a resumed run may have another configuration
            "finish_timeout": FINISH_SECONDS,
            "x_transaction_log_flush_interval": FLUSH_SECONDS,
            **self._extra,
        }
        known = self._client.Settings.model_fields
        return self._client.Settings(**{key: value for key, value in wanted.items() if key in known})

    def _give_up(self, error: Exception, step: int) -> None:
        self._notice(
            f"wandb: logging failed ({_first_line(error)}); steps from {step} on are in metrics.jsonl only"
        )
        self._run = None


def _import_client(notice: Callable[[str], None]) -> Any:
    """The wandb module, or None with a notice when it is not installed or does not import."""
    try:
        import wandb
    except ImportError as error:
        absent = error.name == "wandb"
        reason = "is not installed" if absent else f"cannot be imported ({_first_line(error)})"
    else:
        if hasattr(wandb, "init"):
            return wandb
        # A folder called "wandb", such as the client's own output, imports as an empty namespace package.
        reason = "is not installed (what `import wandb` finds is a plain folder)"
    notice(
        f"wandb {reason}: metrics go to metrics.jsonl only. Install it (pip install 'qeffect-lm[wandb]') or "
        "set logging.wandb=disabled"
    )
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
