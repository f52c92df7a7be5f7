"""The training loop, in time order: data, step, metrics, evaluation, checkpoint, stop.

It knows its parts by what they do (:class:`Parts`); :mod:`qeffect_lm.app.run` makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qeffect_lm.config import Config, TrainConfig
from qeffect_lm.errors import QEffectError
from qeffect_lm.optim.spikes import NOT_FINITE, reason_text
from qeffect_lm.runtime.metrics import StepMetrics, Value


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
            synchronisation and gives further metrics. Both on every rank.
        observe: called with each step's number (from 1) and whether it was skipped, right after its host synchronisation, on
            every rank.
        describe: further metrics of a step's result, asked for after the step's host synchronisation.
        record: called with ``(step, tokens, batch, result)`` after each step, on every rank.
        meanwhile: called once a step is launched, before the host waits for it: time that costs nothing where a device works.
    """

    next_batch: Callable[[], Any]
    step: Callable[[int, Any], Result]
    evaluate: Callable[[], float | None]
    save: Callable[[int, int], object]
    epoch: Callable[[], int | None]
    stop: Callable[[], str | None]
    report: Callable[[StepMetrics], object]
    watch: Callable[[], Callable[[], Mapping[str, Value]]] = lambda: dict
    observe: Callable[[int, bool], object] = lambda *_: None
    record: Callable[[int, int, Any, Result], object] = lambda *_: None
    meanwhile: Callable[[], object] = lambda: None
    describe: Callable[[Any], Mapping[str, Value]] = lambda _: {}


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: the last completed step, tokens seen, and why it stopped early (None: all steps ran)."""

    step: int
    tokens: int
    stopped: str | None


def train(config: Config, parts: Parts, start: int, tokens: int) -> Outcome:
    """Run steps ``start + 1 … train.steps`` (counted from 1 as logged).

    Raises:
        NonFiniteError: with ``optim.nonfinite: raise``, at the step whose numbers were not finite.
    """
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
        parts.meanwhile()
        step += 1
        tokens += batch.tokens
        loss, skipped = float(result.loss), bool(result.skipped)  # the step's one host synchronisation
        seconds = time.monotonic() - began
        parts.observe(step, skipped)
        extra = measured() if measured is not None else {}
        if logged or skipped:
            extra = {**extra, **parts.describe(result)}
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
            parts.report(
                StepMetrics(
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
            )
        stopped = parts.stop() if step < settings.steps else None
        every = config.checkpoint.every
        if stopped or (every and step % every == 0) or (step == settings.steps and config.checkpoint.save_at_end):
            parts.save(step, tokens)
            saved = step
    if stopped and saved != step:
        parts.save(step, tokens)
    return Outcome(step, tokens, stopped)


def _evaluated(settings: TrainConfig, step: int) -> bool:
    return bool(settings.eval_every) and (step % settings.eval_every == 0 or step == settings.steps)


def _logged(settings: TrainConfig, step: int, start: int) -> bool:
    """Whether step ``step`` (from 1) is reported whatever it brings; a skipped one is too."""
    return step % settings.log_every == 0 or step in (start + 1, settings.steps) or _evaluated(settings, step)
