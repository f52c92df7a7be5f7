"""The training loop, in time order: data, step, metrics, evaluation, checkpoint, stop.

It knows its parts by what they do (:class:`Parts`); :mod:`qeffect_lm.app.run` makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from qeffect_lm.config import Config, TrainConfig
from qeffect_lm.errors import QEffectError
from qeffect_lm.optim.spikes import NOT_FINITE, reason_text
from qeffect_lm.runtime.metrics import StepMetrics, Value

Finish = Callable[[], Mapping[str, Value]]


class NonFiniteError(QEffectError):
    """A gradient, an amax or the loss was not finite, and the policy is to stop."""


class Result(Protocol):
    """0-dim device tensors of one step."""

    @property
    def loss(self) -> Any: ...
    @property
    def grad_norm(self) -> Any: ...
    @property
    def lr(self) -> Any: ...
    @property
    def skipped(self) -> Any: ...
    @property
    def reason(self) -> Any: ...


@dataclass
class Parts:
    """What the loop drives.

    Attributes:
        next_batch: the next whole optimizer step of data, with its DP-global ``tokens``.
        step: runs one optimizer step.
        evaluate: held-out loss in nats per token, or None where there is no held-out data.
        save: writes a checkpoint of ``(step, tokens)`` completed.
        epoch: the scale epoch that the next step reads; None without FP8 histories.
        stop: why to stop now, agreed by all ranks, or None.
        report: called with each step's metrics on every rank (the sinks live on rank 0).
        watch: called before a step whose metrics will be reported; what it returns is called after the step's host
            synchronisation, reads what the next step overwrites, and returns what gives further metrics. All on every rank.
        observe: called with each step's number (from 1) and whether it was skipped, right after its host synchronisation, on
            every rank.
        describe: further metrics of a step's result, asked for after the step's host synchronisation.
        record: called with ``(step, tokens, batch, result)`` after each step, on every rank.
        patient: a step is reported once the next one is launched, before the host waits for it: a device works meanwhile, and
            the milliseconds of reporting cost none. Before a save, and at the end, all steps are reported.
    """

    next_batch: Callable[[], Any]
    step: Callable[[int, Any], Result]
    evaluate: Callable[[], float | None]
    save: Callable[[int, int], object]
    epoch: Callable[[], int | None]
    stop: Callable[[], str | None]
    report: Callable[[StepMetrics], object]
    watch: Callable[[], Callable[[], Finish]] = lambda: lambda: dict
    observe: Callable[[int, bool], object] = lambda *_: None
    record: Callable[[int, int, Any, Result], object] = lambda *_: None
    describe: Callable[[Any], Mapping[str, Value]] = lambda _: {}
    patient: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: the last completed step, tokens seen, and why it stopped early (None: all steps ran)."""

    step: int
    tokens: int
    stopped: str | None


@dataclass
class Reports:
    """Steps that are not reported yet: at most one, with ``parts.patient``, else none."""

    parts: Parts
    waiting: list[tuple[StepMetrics, Finish]] = field(default_factory=list)

    def add(self, metrics: StepMetrics, finish: Finish) -> None:
        """``finish`` gives metrics beside those of ``metrics``."""
        self.waiting.append((metrics, finish))
        if not self.parts.patient:
            self.catch_up()

    def catch_up(self) -> None:
        while self.waiting:
            metrics, finish = self.waiting.pop(0)
            self.parts.report(replace(metrics, extra={**finish(), **metrics.extra}))

    def give_up(self) -> None:
        """Report what is known: after an error, ranks do not wait for each other to know more."""
        while self.waiting:
            self.parts.report(self.waiting.pop(0)[0])


def train(config: Config, parts: Parts, start: int, tokens: int) -> Outcome:
    """Run steps ``start + 1 … train.steps`` (counted from 1 as logged).

    Raises:
        NonFiniteError: with ``optim.nonfinite: raise``, at the step whose numbers were not finite.
    """
    reports = Reports(parts)
    try:
        outcome = _train(config, parts, reports, start, tokens)
        reports.catch_up()
    except BaseException:
        reports.give_up()
        raise
    return outcome


def _train(config: Config, parts: Parts, reports: Reports, start: int, tokens: int) -> Outcome:
    settings = config.train
    saved = start
    stopped = parts.stop() if start < settings.steps else None  # asked to stop before the first step
    step = start
    while step < settings.steps and stopped is None:
        began = time.monotonic()
        batch = parts.next_batch()
        epoch = parts.epoch()
        logged = _logged(settings, step + 1, start)
        measured = parts.watch() if logged else None
        result = parts.step(step, batch)
        reports.catch_up()
        step += 1
        tokens += batch.tokens
        loss, skipped = float(result.loss), bool(result.skipped)  # the step's one host synchronisation
        seconds = time.monotonic() - began
        parts.observe(step, skipped)
        finish: Finish = measured() if measured is not None else dict
        extra: Mapping[str, Value] = parts.describe(result) if logged or skipped else {}
        parts.record(step, tokens, batch, result)
        reason = int(result.reason) if skipped else 0
        if skipped:
            extra = {**extra, "skip_reason": reason_text(reason)}
        if reason & NOT_FINITE and config.optim.nonfinite == "raise":
            raise NonFiniteError(
                f"step {step}: a gradient, an amax or the loss is not finite (loss {loss}, norm {float(result.grad_norm)}); "
                "nothing was updated. optim.nonfinite: skip goes on without such steps"
            )
        eval_loss = parts.evaluate() if _evaluated(settings, step) else None
        if logged or skipped:
            metrics = StepMetrics(
                step=step,
                loss=loss,
                grad_norm=float(result.grad_norm),
                lr=float(result.lr),
                tokens=tokens,
                tokens_per_second=batch.tokens / seconds,
                step_ms=1000 * seconds,
                scale_epoch=epoch,
                skipped=skipped,
                eval_loss=eval_loss,
                extra=extra,
            )
            reports.add(metrics, finish)
        stopped = parts.stop() if step < settings.steps else None
        every = config.checkpoint.every
        if stopped or (every and step % every == 0) or (step == settings.steps and config.checkpoint.save_at_end):
            reports.catch_up()
            parts.save(step, tokens)
            saved = step
    if stopped and saved != step:
        reports.catch_up()
        parts.save(step, tokens)
    return Outcome(step, tokens, stopped)


def _evaluated(settings: TrainConfig, step: int) -> bool:
    return bool(settings.eval_every) and (step % settings.eval_every == 0 or step == settings.steps)


def _logged(settings: TrainConfig, step: int, start: int) -> bool:
    """Whether step ``step`` (from 1) is reported whatever it brings; a skipped one is too."""
    return step % settings.log_every == 0 or step in (start + 1, settings.steps) or _evaluated(settings, step)
