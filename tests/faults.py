"""Faults: an engine that leaves out one real wait, commit, refresh or weight gradient, or does one too often.

    with Injected(engine, FAULTS["drop W"], Place(step=1, microbatch=2)) as injected:
        engine.step(1, batch)               # raises; injected.action is the first illegal action
    FAULTS["drop W"].first(engine, place)   # what is expected: (class, action, words of the message)

A fault replaces a method of the engine (an edge, a transfer's completion, the handler of an action, the refresh), so the
device work and what the ledger is told vanish together, as a bug in the engine would make them. No fault touches the
ledger's checks. The action under way is watched from outside, by wrapping the handlers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType, TracebackType
from typing import Any
from unittest import mock

from pipeline.actions import Action, Kind
from pipeline.engine import Engine
from pipeline.plan import Plan, build_plan
from pipeline.slots import SlotPlan, assign_slots
from qeffect_lm.contract.errors import (
    ContractViolation,
    GradSlotError,
    LeaseRetainedError,
    NotForwardedError,
    ScaleOrderError,
    StaleWeightError,
    StreamOrderError,
    WeightGradBeforeInputGradError,
    WeightGradTwiceError,
)

END, REFRESH = "end of the step", "REFRESH"
SIDE = "side"  # a second compute stream


@dataclass(frozen=True)
class Place:
    """The step and the microbatch (of the action concerned) at which a fault strikes."""

    step: int
    microbatch: int = 0


@dataclass(frozen=True)
class Trap:
    """The first illegal action: the error's class, the action under way (in step ``step``) and words of the message."""

    error: type[ContractViolation]
    action: str
    words: str
    step: int


class Injected:
    """``engine`` with ``fault`` at ``place`` while entered; ``jitter`` sleeps at random before actions."""

    def __init__(self, engine: Engine, fault: Fault, place: Place, jitter: Random | None = None) -> None:
        self.engine, self.fault, self.place, self.jitter = engine, fault, place, jitter
        self.action = ""
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Injected:
        handlers = dict(self.engine._handlers)
        self._undo.append(lambda: self.engine._handlers.update(handlers))
        self.fault.inject(self)
        for kind, run in self.engine._handlers.items():
            self.engine._handlers[kind] = lambda action, run=run: self._watched(action, run)  # type: ignore[misc]
        self._name("check_updated", END)
        self._name("_refresh", REFRESH)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()

    def _watched(self, action: Action, run: Callable[[Action], None]) -> None:
        self.action = str(action)
        if self.jitter is not None and self.jitter.random() < 0.2:
            time.sleep(self.jitter.uniform(0, 2e-3))
        run(action)

    def _name(self, method: str, name: str) -> None:
        run = getattr(self.engine, method)

        def named() -> None:
            self.action = name
            run()

        self.patch(self.engine, method, named)

    # ---- for faults --------------------------------------------------------------------------------------------

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object until the fault is taken away."""
        before = owner.__dict__.get(name, mock.DEFAULT)

        def undo() -> None:
            delattr(owner, name) if before is mock.DEFAULT else setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def handle(self, kind: Kind, wrong: Callable[[Action, Callable[[Action], None]], None], detail: str | None = None) -> None:
        """At the place, ``wrong(action, handler)`` runs instead of the handler of ``kind``."""
        run = self.engine._handlers[kind]

        def handler(action: Action) -> None:
            strikes = self.strikes and action.detail == detail and (
                action.chunk is None or action.microbatch == self.place.microbatch
            )
            wrong(action, run) if strikes else run(action)

        self.engine._handlers[kind] = handler

    @property
    def strikes(self) -> bool:
        """It is the step of the fault."""
        return self.engine._step == self.place.step

    def within(self, word: str, back: int = 0) -> bool:
        """The action under way is the place's: ``F`` means F of the place's microbatch (or of ``back`` before), ``REDUCE`` the
        step's."""
        if not self.strikes:
            return False
        if word in ("REDUCE", "STEP"):
            return self.action == word
        chunk = self.action[: len(self.action) - len(self.action.lstrip("0123456789"))]
        return self.action == f"{chunk}{word}{self.place.microbatch - back}"


Inject = Callable[[Injected], None]
First = Callable[[Engine, Place], Trap]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: for the documentation's table.
        inject: puts it into an engine.
        first: the trap it must meet.
        error, illegal: class(es) and first illegal action(s), in words, for the table.
        settings: of the configuration it needs.
        rank: the rank it is put into (of two where it is an edge of transfers).
        microbatches: where it can strike.
        late: the stream whose work is delayed to show what the missing edge allows.
        changes: what comes out wrong without the contract: any of loss, gradients, scales, weights, caches.
        why_not: why nothing does, where ``changes`` is empty.
        replicas: that is seen with two replicas.
        plan: (microbatch, ranks) → the corrupted plan.
        load: the sound run loads too.
    """

    name: str
    what: str
    inject: Inject
    first: First
    error: str
    illegal: str
    settings: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    rank: int = 0
    microbatches: tuple[int, ...] = (0, 1, 2, 3)
    late: str | None = None
    changes: tuple[str, ...] = ()
    why_not: str = ""
    replicas: bool = False
    plan: Callable[..., Plan] | None = None
    load: bool = False

    @property
    def separate(self) -> bool:
        """W runs on a stream of its own (:func:`separate_w`)."""
        return self.inject is no_mark

    @property
    def transfers(self) -> bool:
        """It is about messages, so it needs two ranks."""
        return "parallel__pp" in self.settings


# ---- edges -------------------------------------------------------------------------------------------------------


def no_edge(word: str, source: str, target: str, before: int = 0) -> Inject:
    """Within action ``word`` (and those of so many microbatches before) the edge from ``source`` to ``target`` is not made."""

    def inject(injected: Injected) -> None:
        edge = injected.engine._edge

        def patched(a: str, b: str) -> None:
            if (a, b) != (source, target) or not any(injected.within(word, back) for back in range(before + 1)):
                edge(a, b)

        injected.patch(injected.engine, "_edge", patched)

    return inject


def no_completion(word: str, transfer: str) -> Inject:
    """Action ``word`` does not wait for a transfer (neither the host nor the stream)."""

    def inject(injected: Injected) -> None:
        complete = injected.engine._complete

        def patched(key: tuple[str, int, int]) -> None:
            if key[0] != transfer or not injected.within(word):
                complete(key)

        injected.patch(injected.engine, "_complete", patched)

    return inject


def no_mark(injected: Injected) -> None:
    """W runs on a stream of its own and nothing says when I is done."""
    engine = injected.engine
    mark = engine._mark

    def patched(what: str, chunk: int, microbatch: int) -> None:
        if not injected.within("I"):
            mark(what, chunk, microbatch)

    injected.patch(engine, "_mark", patched)


def separate_w(engine: Engine) -> None:
    """W goes to a compute stream of its own; between two steps the host waits for everything."""
    current = ["compute"]
    engine.compute_stream = lambda: current[0]
    step = engine.step

    def stepped(number: int, data: Any) -> Any:
        current[0] = "compute"
        engine.ledger.settle()
        return step(number, data)

    engine.step = stepped  # type: ignore[method-assign]
    for kind, stream in ((Kind.F, "compute"), (Kind.W, SIDE)):
        run = engine._handlers[kind]

        def on(action: Action, run: Any = run, stream: str = stream) -> None:
            current[0] = stream
            run(action)

        engine._handlers[kind] = on


def stream_error(word: str, stream: str, other: str) -> First:
    """Trapped within action ``word``, on ``stream``, against what ``other`` did."""

    def first(engine: Engine, place: Place) -> Trap:
        action = word if word in ("REDUCE", "STEP") else f"{min(engine.stages)}{word}{place.microbatch}"
        words = f"on stream {stream!r}\\) is not ordered after .* on stream {other!r}\\)"
        return Trap(StreamOrderError, action, words, place.step)

    return first


# ---- state -------------------------------------------------------------------------------------------------------


def skip(kind: Kind, detail: str | None = None) -> Inject:
    return lambda injected: injected.handle(kind, lambda action, run: None, detail)


def twice(kind: Kind, detail: str | None = None) -> Inject:
    def again(action: Action, run: Callable[[Action], None]) -> None:
        run(action)
        run(action)

    return lambda injected: injected.handle(kind, again, detail)


def next_microbatch(engine: Engine, microbatch: int) -> int:
    return (microbatch + 1) % engine.plan.microbatches


def wrong_microbatch(injected: Injected) -> None:
    """W of the next microbatch in place of the one whose turn it is."""

    def other(action: Action, run: Callable[[Action], None]) -> None:
        chunk, microbatch = action.key
        run(Action(Kind.W, chunk, next_microbatch(injected.engine, microbatch)))

    injected.handle(Kind.W, other)


def no_refresh(injected: Injected) -> None:
    refresh = injected.engine._refresh
    injected.patch(injected.engine, "_refresh", lambda: None if injected.strikes else refresh())


def no_bump(injected: Injected) -> None:
    """The optimizer writes the parameters, says nothing, and the caches stay as they are."""
    versions = injected.engine.ledger.versions
    bump = versions.bump
    injected.patch(versions, "bump", lambda *names: None if injected.strikes else bump(*names))
    no_refresh(injected)


def load(refresh: bool) -> Inject:
    """Before the step other weights are loaded into the same storages."""

    def inject(injected: Injected) -> None:
        engine = injected.engine
        step = engine.step

        def patched(number: int, batch: Any) -> Any:
            if number == injected.place.step:
                engine.end._flat.master_buffer.mul_(1.25)
                engine.end._flat.gather()
                engine.ledger.versions.bump()
                if refresh:
                    engine.cache.refresh_()
                    engine.account_refresh()
            return step(number, batch)

        injected.patch(engine, "step", patched)

    return inject


def at(error: type[ContractViolation], word: str, words: str) -> First:
    """Trapped in the action itself: ``W`` means W of the place's microbatch; other words stand for themselves."""

    def first(engine: Engine, place: Place) -> Trap:
        action = f"0{word}{place.microbatch}" if word in ("F", "I", "W", "COMMIT_F", "COMMIT_I") else word
        return Trap(error, action, words.format(m=place.microbatch), place.step)

    return first


def next_step(engine: Engine, place: Place) -> Trap:
    return Trap(StaleWeightError, "0F0", "0F0 needs .* refresh the cache after the last bump", place.step + 1)


def next_reader(kind: Kind) -> First:
    """The next F (or I) of the plan finds the epoch of before; after the last one the step's end does."""

    def first(engine: Engine, place: Place) -> Trap:
        later = [a for a in engine.actions if a.kind is kind and a.microbatch > place.microbatch]
        if later:
            return Trap(ScaleOrderError, str(later[0]), "a commit is missing", place.step)
        return Trap(ScaleOrderError, END, "its plan's commits lead to", place.step)

    return first


def _rest(engine: Engine, microbatch: int) -> list[Action]:
    row = list(engine.actions)
    return row[row.index(Action(Kind.W, 0, microbatch)) + 1 :]


def _slot(engine: Engine, microbatch: int) -> int:
    return engine._slots.w_slots.index[0, microbatch]


def after_dropped_w(engine: Engine, place: Place) -> Trap:
    """Its W-slot is still held when an F claims it; else the next W finds no first writer; else STEP counts."""
    me = place.microbatch
    for action in _rest(engine, me):
        if action.kind is Kind.F and _slot(engine, action.key[1]) == _slot(engine, me):
            return Trap(LeaseRetainedError, str(action), f"is claimed while \\({place.step}, 0, {me}\\) retains it", place.step)
        if action.kind is Kind.W and me == 0:
            return Trap(GradSlotError, str(action), "beta 1: it would add to the previous step's gradient", place.step)
    return Trap(GradSlotError, "STEP", "the optimizer would step on .* with 3 of 4 contributions", place.step)


def after_wrong_w(engine: Engine, place: Place) -> Trap:
    """The lease, or the gradient's beta, of the microbatch that is run; else what the one that is not run leaves behind."""
    me, other = place.microbatch, next_microbatch(engine, place.microbatch)
    done = [a for a in engine.actions if a not in _rest(engine, me)][:-1]
    here = f"0W{me}"
    for kind, error in ((Kind.F, NotForwardedError), (Kind.I, WeightGradBeforeInputGradError)):
        if Action(kind, 0, other) not in done:
            return Trap(error, here, f"microbatch={other}", place.step)
    if Action(Kind.W, 0, other) in done:
        return Trap(WeightGradTwiceError, here, f"microbatch={other}", place.step)
    if me == 0:
        return Trap(GradSlotError, here, "beta 1: it would add to the previous step's gradient", place.step)
    for action in _rest(engine, me):
        if action.kind is Kind.F and _slot(engine, action.key[1]) == _slot(engine, me):
            return Trap(LeaseRetainedError, str(action), f"is claimed while \\({place.step}, 0, {me}\\) retains it", place.step)
        if action == Action(Kind.W, 0, other):
            return Trap(WeightGradTwiceError, str(action), f"microbatch={other}", place.step)
    raise AssertionError("unreachable: the other microbatch's own turn comes")


# ---- plans whose slots are wrong ---------------------------------------------------------------------------------


def shared_slot(resource: str) -> Callable[..., Plan]:
    """A plan in whose colouring a microbatch gets the slot of the one before, which still holds it: GPipe for I-slots, 1F1B
    with delayed W for W-slots."""

    def plan(microbatch: int, ranks: int = 1) -> Plan:
        def colour(actions: Iterable[Action], holding: Any = None, coalesce_w: int = 1) -> SlotPlan:
            right = assign_slots(list(actions), holding, coalesce_w)
            slots = getattr(right, resource)
            if (0, microbatch) in slots.index:  # on the rank of chunk 0
                wrong = {**slots.index, (0, microbatch): slots.index[0, microbatch - 1]}
                object.__setattr__(slots, "index", MappingProxyType(wrong))
            return right

        with mock.patch("pipeline.plan.assign_slots", colour):
            made = build_plan(SCHEDULE[resource], ranks, MICROBATCHES, 1)
            assert made.slots  # coloured when first asked for, so here
            return made

    return plan


def slot_retained(kind: str) -> First:
    def first(engine: Engine, place: Place) -> Trap:
        m = place.microbatch
        words = f"\\('{kind}', .* is claimed while \\(.*, 0, {m - 1}\\) retains it"
        return Trap(LeaseRetainedError, f"0F{m}", words, place.step)

    return first


MICROBATCHES = 4
SCHEDULE = {"i_slots": "gpipe", "w_slots": "1f1b"}
