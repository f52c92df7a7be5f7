"""How long one effect takes: nanoseconds of host time, enforced and off, against a ledger alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from qeffect_lm.contract import Access, Direction, GradSlot, GradSlots, Ledger, ScaleRole, ScaleTimeline, Slot, WeightVersions

STREAMS = ("compute", "send", "receive", "collective")


class Clock:
    """Collects, per effect, the nanoseconds of one call in each block of calls."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    @contextmanager
    def block(self, effect: str, calls: int) -> Iterator[None]:
        began = time.perf_counter_ns()
        yield
        self.samples.setdefault(effect, []).append((time.perf_counter_ns() - began) / calls)

    def medians(self) -> dict[str, float]:
        return {effect: statistics.median(values) for effect, values in self.samples.items()}


def make_ledger(layers: list[str], mode: str) -> Ledger:
    roles = [ScaleRole(f"{layer}.{kind}", direction, 448.0) for layer in layers for kind, direction in _ROLES]
    weights = [f"{layer}.weight" for layer in layers]
    grads = GradSlots(GradSlot(name, torch.zeros(1)) for name in weights)
    return Ledger(ScaleTimeline(roles, history=2), WeightVersions(weights), grads, mode=mode)


_ROLES = (("input", Direction.FORWARD), ("grad_output", Direction.BACKWARD))


def one_step(ledger: Ledger, layers: list[str], step: int, clock: Clock, streams: int) -> None:
    """F, I and W of one microbatch, effect by effect, then commit, bump and refresh."""
    n = len(layers)
    slots = (Slot("I", 0, 0), Slot("W", 0, 0))
    with clock.block("begin_step + end_step", 1):
        ledger.begin_step(step)

    def each(effect: str, call: Callable[[str], object]) -> None:
        with clock.block(effect, n):
            for layer in layers:
                call(layer)

    with ledger.action("F", 0, 0, slots=slots) as scope:
        each("read_scale", lambda layer: scope.read_scale(f"{layer}.input"))
        each("report_amax", lambda layer: scope.report_amax(f"{layer}.input"))
        each("read_weight", lambda layer: scope.read_weight(f"{layer}.weight", "rows"))
        each("retain (F)", lambda layer: scope.retain(layer, None))
    with ledger.action("I", 0, 0, beta=0) as scope:
        each("input_grad_done (I)", scope.input_grad_done)
    with ledger.action("W", 0, 0, beta=0) as scope:
        each("take_weight_grad (W)", scope.take_weight_grad)
        each("write_grad", lambda layer: scope.write_grad(f"{layer}.weight"))
    names = STREAMS[:streams]
    accesses = tuple((("buffer", k), (Access.READ, Access.WRITE)[k % 2]) for k in range(8))
    for name in names:
        with clock.block("launch with 8 accesses", 1):
            ledger.launch(name, accesses, "work")
        with clock.block("edge (record + wait)", 1):
            ledger.wait(names[(names.index(name) + 1) % len(names)], ledger.record(name))
    with clock.block("commit", 1):
        ledger.commit(step)
    with clock.block("bump + refresh, per weight", n):
        ledger.versions.bump()
        ledger.refreshed({f"{layer}.weight": layer for layer in layers}, ["rows", "columns"])
    ledger.end_step()


def measure(layers: int = 128, steps: int = 200) -> dict[str, dict[str, float]]:
    """Effect → {enforce, off} in nanoseconds: medians over steps that take turns between the modes."""
    names = [f"layers.{k}.linear" for k in range(layers)]
    ledgers = {mode: make_ledger(names, mode) for mode in ("off", "enforce")}
    clocks = {mode: Clock() for mode in ledgers}
    for ledger in ledgers.values():
        ledger.refreshed({f"{name}.weight": name for name in names}, ["rows", "columns"])
    for step in range(steps):
        for mode, ledger in ledgers.items():
            one_step(ledger, names, step, clocks[mode], len(STREAMS))
    medians = {mode: clock.medians() for mode, clock in clocks.items()}
    return {effect: {mode: medians[mode][effect] for mode in medians} for effect in medians["enforce"]}
