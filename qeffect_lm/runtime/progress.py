"""What a person sees while training: two live lines on a terminal, plain lines at intervals anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.metrics import StepMetrics, Value
from qeffect_lm.units import format_bytes

MODES = ("auto", "bar", "plain", "off")
REFRESH_SECONDS = 0.5
"""The live lines are redrawn at most this often: it is done between steps, and takes a millisecond or two."""

BAR_WIDTH, BAR_FROM_WIDTH = 12, 120
"""Columns of the bar, and the terminal width from which there is room for it."""


class Progress:
    """Shows loss, tokens/s, time left and step time; gradient norm, learning rate, MFU, memory, bubble, scale epoch, waits for
    data and checkpoints; skipped steps and the last held-out loss.

    ``mode``: ``bar`` are two live lines that stay in place, ``plain`` one line every ``interval_seconds`` (and
    for the first and last step and each evaluation), ``off`` nothing but messages, ``auto`` ``bar`` on a
    terminal and ``plain`` elsewhere. ``start_step`` is the step a resumed run continues after. Only one
    process should show progress.

    Raises UsageError for an unknown mode.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        mode: str = "auto",
        stream: TextIO | None = None,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"logging.progress is {mode!r}; it must be one of {', '.join(MODES)}")
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self.mode = mode if mode != "auto" else ("bar" if self._console.is_terminal else "plain")
        self._total = total_steps
        self._start = start_step
        self._interval = interval_seconds
        self._clock = clock
        self._shown_at = -math.inf
        self._step_seconds: float | None = None
        self._skipped = 0
        self._eval_loss: float | None = None
        self._stall: float | None = None
        self._pending: StepMetrics | None = None
        self._live: Live | None = None

    def update(self, metrics: StepMetrics) -> None:
        """Show one finished step, unless the last one was shown a moment ago."""
        self._skipped += metrics.skipped
        if metrics.eval_loss is not None:
            self._eval_loss = metrics.eval_loss
        self._stall = _value(metrics.extra.get("checkpoint_stall_ms"), self._stall)
        if metrics.step_ms is not None and math.isfinite(metrics.step_ms):
            seconds = metrics.step_ms / 1000
            old = self._step_seconds
            self._step_seconds = seconds if old is None else old + 0.1 * (seconds - old)
        if self.mode == "off":
            return
        self._pending = metrics
        wait = REFRESH_SECONDS if self.mode == "bar" else self._interval
        notable = metrics.step in (self._start + 1, self._total)
        notable = notable or (self.mode == "plain" and metrics.eval_loss is not None)
        if notable or self._clock() - self._shown_at >= wait:
            self._show()

    def message(self, text: str) -> None:
        """Print a line; above the live ones if there are any. Shown in every mode."""
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Show the last step if it was not shown yet and leave the terminal in order; twice is fine."""
        if self._pending is not None:
            self._show()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self) -> None:
        metrics, self._pending = self._pending, None
        if metrics is None:
            return
        self._shown_at = self._clock()
        if self.mode == "plain":
            parts = self._parts(metrics) + self._more(metrics)
            self._stream.write(f"step {metrics.step}/{self._total}  {'  '.join(parts)}\n")
            self._stream.flush()
            return
        if self._live is None:
            # No refresh thread: a step redraws the line itself, so nothing runs beside training.
            self._live = Live(
                console=self._console, auto_refresh=False, transient=False, vertical_overflow="crop"
            )
            self._live.start()
        self._live.update(self._line(metrics), refresh=True)

    def _line(self, metrics: StepMetrics) -> Table:
        """The live lines. On a narrow terminal the bar goes first, then the right ends; they never wrap."""
        line = Table.grid(padding=(0, 1))
        cells: list[ProgressBar | Text] = []
        if self._console.width >= BAR_FROM_WIDTH:
            line.add_column(width=BAR_WIDTH)
            cells.append(ProgressBar(total=max(1, self._total), completed=metrics.step, width=BAR_WIDTH))
        line.add_column()
        text = f"{metrics.step}/{self._total}  " + "  ".join(self._parts(metrics))
        line.add_row(*cells, Text(text, no_wrap=True, overflow="crop"))
        more = Text("  ".join(self._more(metrics)), style="dim", no_wrap=True, overflow="crop")
        line.add_row(*[""] * len(cells), more)
        return line

    def _parts(self, metrics: StepMetrics) -> list[str]:
        """What is looked at most."""
        parts = [f"loss {_number(metrics.loss)}"]
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        if self._eval_loss is not None and (self.mode == "bar" or metrics.eval_loss is not None):
            parts.append(f"held-out {_number(self._eval_loss)}")  # the live line keeps the last one in sight
        if metrics.tokens_per_second is not None:
            parts.append(f"{metrics.tokens_per_second:,.0f} tok/s")
        if self._step_seconds is not None:
            left = max(0, self._total - metrics.step) * self._step_seconds
            parts.append(f"ETA {format_seconds(left)}")
        if metrics.step_ms is not None:
            parts.append(f"{metrics.step_ms:,.0f} ms")
        return parts

    def _more(self, metrics: StepMetrics) -> list[str]:
        extra = metrics.extra
        parts = [] if metrics.grad_norm is None else [f"norm {_number(metrics.grad_norm)}"]
        if metrics.lr is not None:
            parts.append(f"lr {metrics.lr:.1e}")
        mfu, memory, wait = (_value(extra.get(key)) for key in ("mfu", "memory_bytes", "data_wait_ms"))
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        if memory is not None:
            parts.append(f"mem {format_bytes(memory)}")
        bubble, planned = _value(extra.get("bubble")), _value(extra.get("bubble_plan"))
        if bubble is not None:
            parts.append(f"bubble {bubble:.1%}")
        elif planned is not None:
            parts.append(f"bubble {planned:.1%} by the plan")
        if metrics.scale_epoch is not None:
            parts.append(f"scale epoch {metrics.scale_epoch}")
        if wait is not None:
            parts.append(f"data wait {wait:,.0f} ms")
        if self._stall is not None and (self.mode == "bar" or "checkpoint_stall_ms" in extra):
            parts.append(f"checkpoint stall {self._stall:,.0f} ms")
        return parts


def _value(value: Value, otherwise: float | None = None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


def format_seconds(seconds: float) -> str:
    """``m:ss``, from an hour on ``h:mm:ss``, from a day on ``d days h:mm:ss``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if not hours:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days} day{'s' * (days > 1)} {clock}" if days else clock


def _number(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:.4g}" if abs(value) < 1e-2 or abs(value) >= 1e3 else f"{value:.3f}"
    )
