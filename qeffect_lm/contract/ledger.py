"""The ledger: one place where every action's effects on named state are declared, checked and, if asked, traced.

An action runs inside a *scope*. In eager execution layers call the scope's methods as they touch state. A captured graph
cannot: its effects are recorded once, while it is captured, and become its :class:`Summary`; :meth:`Ledger.replay` checks
and applies the summary in a few comparisons.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

from qeffect_lm.contract.collectives import Collectives
from qeffect_lm.contract.errors import ContractViolation, GradSlotError, LeaseError, ScaleOrderError
from qeffect_lm.contract.grads import GradSlots
from qeffect_lm.contract.leases import Joint, LeaseTable, Slot
from qeffect_lm.contract.names import Interned, Names
from qeffect_lm.contract.steady import SteadyClock
from qeffect_lm.contract.streams import HOST, BufferAccess, Event
from qeffect_lm.contract.summary import BodySummary, Summary
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.contract.trace import TraceWriter
from qeffect_lm.contract.tracing import Tracer
from qeffect_lm.contract.versions import WeightVersions


class Mode(StrEnum):
    """``enforce`` checks, ``trace`` also writes every effect to a file, ``off`` neither (to measure the cost)."""

    ENFORCE = "enforce"
    TRACE = "trace"
    OFF = "off"


class _Groups(NamedTuple):
    """A summary's names; ``layers`` sorted, None where one is named twice."""

    weights: Names
    grads: Names
    layers: Names | None
    idle: Names
    joined: Names


@dataclass
class Scope:
    """One running action, as the layers see it. ``epoch`` is the scale epoch it is bound to."""

    ledger: Ledger
    kind: str
    chunk: int
    microbatch: int
    beta: int | None
    slots: tuple[Slot, Slot] | None = None
    joint: Joint | None = None
    epoch: int = 0
    _layers: list[str] = field(default_factory=list)
    _roles: list[str] = field(default_factory=list)
    _empty: list[str] = field(default_factory=list)
    _weights: dict[tuple[str, str], None] = field(default_factory=dict)
    _grads: list[str] = field(default_factory=list)
    _idle: list[str] = field(default_factory=list)
    _joined: list[str] = field(default_factory=list)
    _collectives: list[str] = field(default_factory=list)

    @property
    def contributor(self) -> Hashable:
        return (self.kind, self.chunk, self.microbatch)

    # ---- what layers call --------------------------------------------------------------------------------------

    def read_scale(self, role: str) -> None:
        """The action reads a scale of the epoch it is bound to."""
        if self.ledger.checks:
            self.ledger.timeline.check_reader(self.contributor, role)

    def report_amax(self, role: str) -> None:
        """The action max-merges an amax into the role's open slot."""
        self._roles.append(role)
        if self.ledger.checks:
            self.ledger.timeline.check_reader(self.contributor, role)

    def report_empty(self, role: str) -> None:
        """The role had no work in this action (an idle expert): its slot stays as it is."""
        self._roles.append(role)
        self._empty.append(role)

    def read_weight(self, name: str, layout: str) -> None:
        """The action reads a cached weight: current version and, in window ``step``, current epoch."""
        self._weights[name, layout] = None
        if self.ledger.checks:
            self.ledger.versions.require(
                name, layout, epoch=self.ledger.weight_epoch(), reader=self._who(), microbatch=self.microbatch
            )

    def retain(self, layer: str, payload: Any) -> None:
        """F leaves the payload of a later W."""
        self._layers.append(layer)
        leases = self.ledger.leases
        leases.retain(self.chunk, self.microbatch, layer, payload)
        if self.ledger.checks:
            leases.advance("F", self.chunk, self.microbatch, layer)

    def input_grad_done(self, layer: str) -> Any:
        """I of one layer: gives back the payload that F left, for dY to be added to it."""
        self._layers.append(layer)
        leases = self.ledger.leases
        if self.ledger.checks:
            leases.advance("I", self.chunk, self.microbatch, layer)
        return leases.handle(self.chunk, self.microbatch, layer).payload

    def take_weight_grad(self, layer: str) -> Any:
        """W of one layer: the payload, once."""
        self._layers.append(layer)
        leases = self.ledger.leases
        handle = leases.handle(self.chunk, self.microbatch, layer)
        if self.ledger.checks:
            leases.advance("W", self.chunk, self.microbatch, layer)
        return leases.consume(handle)

    def write_grad(self, name: str) -> int:
        """The action writes a main gradient; returns the beta to write it with."""
        assert self.beta is not None, "only I and W write gradients"
        self._grads.append(name)
        if self.ledger.checks:
            self.ledger.grads.write(name, self.beta, self.microbatch)
        return self.beta

    def write_joined_grad(self, name: str) -> int:
        """W writes the product of several microbatches' operands to a main gradient; returns the beta to write it with."""
        assert self.joint is not None and self.joint.beta is not None, "this W multiplies nobody else's operands"
        self._joined.append(name)
        if self.ledger.checks:
            self.ledger.grads.write(name, self.joint.beta, self.microbatch)
        return self.joint.beta

    def leave_grad(self, name: str) -> None:
        """W leaves its operands, and so its part of a main gradient, to the W of a later microbatch."""
        self._idle.append(name)
        if self.ledger.checks:
            self.ledger.grads.report_group((name,))  # part of the action: no record of its own in a trace

    def collective(self, name: str) -> None:
        """The action exchanges something with tensor-parallel peers: ``<layer>.gather``, ``.scatter`` or ``.sum``."""
        self._collectives.append(name)

    def _who(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    def summarise(self) -> Summary:
        """The effects so far, as a graph's summary."""
        directions = {"F": {Direction.FORWARD}, "I": {Direction.BACKWARD}}.get(self.kind, set())
        return Summary(
            self.kind,
            frozenset(directions),
            tuple(self._roles),
            tuple(self._weights),
            tuple(self._layers),
            tuple(self._grads),
            self.beta,
            tuple(self._empty),
            self.joint,
            tuple(self._idle),
            tuple(self._joined),
            tuple(self._collectives),
        )


_DIRECTION = {"F": Direction.FORWARD, "I": Direction.BACKWARD}


class Ledger:
    """Timeline, leases, weight versions, gradient slots and stream clock of one rank, under one mode."""

    def __init__(
        self,
        timeline: ScaleTimeline,
        versions: WeightVersions,
        grads: GradSlots,
        *,
        mode: Mode | str = Mode.ENFORCE,
        trace: TraceWriter | None = None,
    ) -> None:
        self.mode = Mode(mode)
        self.timeline, self.versions, self.grads = timeline, versions, grads
        self.leases, self.streams = LeaseTable(), SteadyClock()
        self._tracer: Tracer | None = None
        self._attach(trace)
        self._current: Scope | None = None
        self._declared: dict[tuple[str, int], frozenset[str]] = {}
        self.collectives = Collectives()
        self._refused_by: str | None = None  # what raised in this step
        self._untold = False  # work was launched while the mode was off: the stream clock does not know of it
        self._interned = Interned()
        self._replayed: dict[int, tuple[Summary, _Groups]] = {}
        self.step = 0

    @property
    def checks(self) -> bool:
        return self.mode is not Mode.OFF

    @property
    def traces(self) -> bool:
        """Whether every effect goes to a file."""
        return self._tracer is not None

    def switch(self, mode: Mode | str, trace: TraceWriter | None = None, *, synchronised: bool = False) -> None:
        """Change the mode between two steps (to compare what modes cost on the same objects).

        Args:
            synchronised: the host has waited for all streams (``torch.cuda.synchronize()``). From ``off`` that must be so, if
                anything was launched: nobody knows what was ordered after what meanwhile.

        Raises:
            LeaseError: inside a step, or from ``off`` without that.
        """
        if self._current is not None or self.leases.step is not None:
            self._refuse(LeaseError("the mode changes between steps only", step=self.step))
        if Mode(mode) is not Mode.OFF:
            if self._untold and not synchronised:
                why = "work was launched while the contract was off, and what orders it is not known"
                remedy = "wait for the device (torch.cuda.synchronize()) and pass synchronised=True"
                self._refuse(LeaseError(f"{why}: {remedy}", step=self.step))
            if synchronised:
                self._untold = False
                self.streams.settle()
        self.mode = Mode(mode)
        self._attach(trace)

    def weight_epoch(self) -> int | None:
        """The scale epoch a cached weight must have: in window ``microbatch`` a cache keeps the scale it was made with."""
        return self.timeline.epochs[Direction.FORWARD] if self.timeline.window == "step" else None

    def declare_roles(self, kind: str, chunk: int, roles: Iterable[str]) -> None:
        """Say which scale roles every F (or I) of ``chunk`` must report, by an amax or as EMPTY."""
        self._declared[kind, chunk] = frozenset(roles)

    def check_roles(self, kind: str, chunk: int, microbatch: int, reported: Iterable[str]) -> None:
        """At the end of an eager action, and of a capture.

        Raises:
            ScaleOrderError: a declared role was not reported: its scale would freeze unnoticed.
        """
        missing = self._declared.get((kind, chunk), frozenset()).difference(reported)
        if missing:
            self._refuse(
                ScaleOrderError(
                    f"{chunk}{kind}{microbatch} ended and nobody reported an amax (or EMPTY) of {min(missing)!r}: its scale "
                    "would never move again",
                    role=min(missing),
                    chunk=chunk,
                    microbatch=microbatch,
                    epoch=self.timeline.epochs[_DIRECTION[kind]],
                )
            )

    def check_collectives(self, kind: str, chunk: int, microbatch: int, told: tuple[str, ...]) -> None:
        """At the end of an eager action, and of a capture (:class:`~qeffect_lm.contract.collectives.Collectives`).

        Raises:
            CollectiveError: an exchange with tensor-parallel peers was left out, or is another than before.
        """
        error = self.collectives.fault(kind, chunk, microbatch, told)
        if error is not None:
            self._refuse(error)

    # ---- the step ----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self.step = step
        self._refused_by = None
        if self._tracer is not None:
            self._tracer.begin_step(step)
        self.leases.begin_step(step)
        self.timeline.begin_window()
        self.grads.begin_step()
        if self.checks:
            self.streams.begin_step()

    def end_step(self) -> None:
        """No lease is left, no window is open.

        Raises:
            LeaseError: a launch or replay of this step was refused, and somebody went on: it may be half accounted for.
        """
        if self._refused_by is not None and self.checks:
            self._refuse(LeaseError(f"the step ends although {self._refused_by} was refused in it: abandon it", step=self.step))
        if self.checks:
            self.leases.end_step()
            self.timeline.check_committed()
        else:
            self.leases.abandon()
        self.timeline.close_window()
        if self._tracer is not None:
            self._tracer.end_step()

    def abandon_step(self) -> None:
        """After an exception: nothing of the step stays behind on the host's side."""
        self._current = self._refused_by = None
        self.leases.abandon()
        self.timeline.abandon()
        self.streams.settle()
        if self._tracer is not None:
            self._tracer.abandon_step(sys.exception())

    # ---- actions -----------------------------------------------------------------------------------------------

    @contextmanager
    def action(
        self,
        kind: str,
        chunk: int,
        microbatch: int,
        *,
        beta: int | None = None,
        slots: tuple[Slot, Slot] | None = None,
        epoch: int | None = None,
        joint: Joint | None = None,
    ) -> Iterator[Scope]:
        """Run F, I or W of a microbatch over ``slots`` (I-slot, W-slot), which F takes.

        ``epoch``: the scale epoch that F or I needs by its plan (None: whichever is current). ``joint``: given where W of
        several microbatches is one product, of F, I and W alike.
        """
        if self._current is not None:
            self._refuse(LeaseError(f"{kind} starts inside {self._current.kind}", chunk=chunk, microbatch=microbatch))
        scope = Scope(self, kind, chunk, microbatch, beta, slots, joint)
        if self._tracer is not None:
            self._tracer.begin_action(kind, chunk, microbatch)
        self._enter(kind, chunk, microbatch, slots, joint)
        direction = _DIRECTION.get(kind)
        if direction is not None and self.checks:
            scope.epoch = self.timeline.begin(scope.contributor, direction, epoch=epoch)
            if joint is not None:
                self.leases.bind(chunk, microbatch, scope.epoch)
        self._current = scope
        if self._tracer is not None:
            self._tracer.begin_effects(scope)
        try:
            yield scope
        except BaseException:
            if self._tracer is not None:
                self._tracer.end_action(scope, whole=False)
            raise
        finally:
            self._current = None
        if direction is not None and self.checks:
            self.check_roles(kind, chunk, microbatch, scope._roles)
            self.check_collectives(kind, chunk, microbatch, tuple(scope._collectives))
            self.timeline.end(scope.contributor)
        if self.checks:
            self.leases.finish(kind, chunk, microbatch, joint=joint)
        if self._tracer is not None:
            self._tracer.end_action(scope, whole=True)

    def replay(
        self,
        summary: Summary,
        chunk: int,
        microbatch: int,
        *,
        slots: tuple[Slot, Slot] | None = None,
        epoch: int | None = None,
    ) -> None:
        """Check and apply a captured graph's effects for this microbatch, before the graph is launched (``slots``,
        ``epoch``: as in :meth:`action`)."""
        if not self.checks:
            return
        self._refused_by, refused = "a replay", self._refused_by
        self._replay(summary, chunk, microbatch, slots, epoch)
        self._refused_by = refused

    def _replay(
        self, summary: Summary, chunk: int, microbatch: int, slots: tuple[Slot, Slot] | None, epoch: int | None
    ) -> None:
        kind = summary.kind
        if self._current is not None:
            self._refuse(LeaseError(f"{kind} starts inside {self._current.kind}", chunk=chunk, microbatch=microbatch))
        if self._tracer is not None:
            self._tracer.begin_action(kind, chunk, microbatch)
        groups, joint = self._groups_of(summary), summary.joint
        self._enter(kind, chunk, microbatch, slots, joint)
        contributor = (kind, chunk, microbatch)
        direction = _DIRECTION.get(kind)
        bound = self.timeline.begin(contributor, direction, epoch=epoch) if direction is not None else 0
        if summary.weights:
            self.versions.require_all(
                groups.weights, epoch=self.weight_epoch(), reader=f"{chunk}{kind}{microbatch}", microbatch=microbatch
            )
        if summary.beta is not None:
            self.grads.write_group(groups.grads, summary.beta, microbatch)
        if joint is not None:
            self._replay_joint(groups, joint, chunk, microbatch, bound if direction is not None else None)
        if direction is not None:
            self.timeline.end(contributor)
        self.leases.replay(kind, chunk, microbatch, summary.layers, groups.layers, joint)
        if self._tracer is not None:
            self._tracer.replayed(summary, chunk, microbatch, bound)

    def _replay_joint(self, groups: _Groups, joint: Joint, chunk: int, microbatch: int, epoch: int | None) -> None:
        if epoch is not None:
            self.leases.bind(chunk, microbatch, epoch)
        if groups.idle:
            self.grads.report_group(groups.idle)
        if groups.joined:
            assert joint.beta is not None
            self.grads.write_group(groups.joined, joint.beta, microbatch)

    def replay_body(self, summary: BodySummary) -> None:
        """Check and apply what a graph of a whole step does up to its reduction, before it is launched.

        Raises:
            LeaseError: an action runs, or a microbatch is under way.
            StaleWeightError: a cached weight that the graph reads is not fresh.
            ScaleOrderError: the window is not new.
            GradSlotError: a main gradient has been written in this step already.
        """
        if not self.checks:
            for direction, count in summary.commits.items():
                self.timeline.epochs[direction] += count
                self.timeline.commits += count
            return
        self._refused_by, refused = "a replay", self._refused_by
        if self._current is not None or self.leases.counts()["groups"]:
            self._refuse(LeaseError("a step's graph starts while a microbatch of the step is under way", step=self.step))
        self.versions.require_all(summary.weights, epoch=self.weight_epoch(), reader="the step's graph")
        self.timeline.replay_body(summary.contributors, summary.commits)
        self.grads.write_counts(summary.grads)
        self.grads.report_counts(summary.idle)
        self._refused_by = refused

    def _groups_of(self, summary: Summary) -> _Groups:
        """What a summary names, as groups that are compared at once."""
        known = self._replayed.get(id(summary))
        if known is None:
            if summary.grads and summary.beta is None:
                self._refuse(GradSlotError(f"a graph writes {summary.grads[0]!r} and its summary gives no beta"))
            distinct = len(set(summary.layers)) == len(summary.layers)
            layers = self._interned.of(sorted(summary.layers)) if distinct else None
            named = (summary.idle, summary.joined)
            groups = _Groups(
                self._interned.of(summary.weights), self._interned.of(summary.grads), layers, *map(self._interned.of, named)
            )
            known = self._replayed[id(summary)] = (summary, groups)  # kept: its identity is the key
        return known[1]

    def _enter(
        self, kind: str, chunk: int, microbatch: int, slots: tuple[Slot, Slot] | None, joint: Joint | None = None
    ) -> None:
        if kind == "F":
            assert slots is not None, "F takes an I-slot and a W-slot"
            self.leases.open(chunk, microbatch, *slots, check=self.checks)
        elif self.checks:
            self.leases.require(kind, chunk, microbatch, slots, joint)

    @contextmanager
    def recording(self, *, checked: bool = False) -> Iterator[None]:
        """While a graph is captured: scopes record their effects, nothing is checked (a replay will be).

        ``checked`` keeps the checks on, for the graph of a whole step: what is captured is then a step like any other.
        """
        mode, untold = self.mode, self._untold
        if not checked:
            self.mode = Mode.OFF
        try:
            with self.untraced():
                yield
        finally:
            self.mode, self._untold = mode, untold

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """What happens inside is no part of the trace's story: a capture, and its roll-back."""
        tracer = self._tracer
        if tracer is None:
            yield
            return
        before, tracer.silent = tracer.silent, True
        try:
            yield
        finally:
            tracer.silent = before

    def commit(
        self,
        epoch: int,
        directions: Sequence[Direction] = tuple(Direction),
        by: str = "COMMIT",
        *,
        calibration: bool = False,
    ) -> None:
        """Account for a scale commit that closes ``epoch``."""
        if self.checks:
            self.timeline.commit(epoch, directions, by, calibration=calibration)
        else:  # the counters are state that checkpoints compare; only the checks are off
            for direction in directions:
                self.timeline.epochs[direction] = epoch + 1
            self.timeline.commits += 1

    def refreshed(self, layers: dict[str, str], layouts: Sequence[str]) -> None:
        """Account for one refresh of the weight caches: ``layers`` maps each parameter to its layer."""
        epoch = self.timeline.epochs[Direction.FORWARD]
        if self.checks and self.timeline.roles:
            contributor = ("REFRESH", self.versions.refreshes)
            self.timeline.begin(contributor, Direction.FORWARD, between=True)
            self.timeline.end(contributor)
        if self._tracer is not None:
            self._tracer.refresh()
        for name in layers:
            self.versions.refreshed(name, epoch=epoch, layouts=layouts)
        self.versions.refreshes += 1
        if self._tracer is not None:
            self._tracer.refreshed(layers, epoch)

    # ---- streams -----------------------------------------------------------------------------------------------

    def launch(self, stream: str, accesses: Sequence[BufferAccess], who: str) -> None:
        """The host launches work on ``stream`` (or does it itself, on ``"host"``) that accesses buffers.

        Raises:
            StreamOrderError: a conflicting earlier access is not ordered before this one.
        """
        if not self.checks:
            self._untold = True
            return
        if self._tracer is not None:
            self._tracer.launch(stream, accesses, who)
        self._refused_by, refused = who or "a launch", self._refused_by
        self.streams.work(stream, accesses, who)
        self._refused_by = refused
        if self._tracer is not None:
            self._tracer.launched()

    def record(self, stream: str, covers: Iterable[Hashable] | None = None) -> Event | None:
        """An event after all work launched on ``stream`` so far (early: for the buffers in ``covers`` only).

        None in mode ``off``, which :meth:`wait` and :meth:`synchronize` take.
        """
        if self.checks:
            return self.streams.record(stream, covers)
        self._untold = True
        return None

    def wait(self, stream: str, event: Event | None) -> None:
        """Work launched on ``stream`` from here on waits for ``event``."""
        if self.checks and event is not None:
            self.streams.wait(stream, event)

    def synchronize(self, event: Event | None) -> None:
        """The host blocks until ``event``."""
        self.wait(HOST, event)

    def settle(self) -> None:
        """The host has waited for all streams."""
        if self.checks:
            self.streams.settle()

    # ---- trace -------------------------------------------------------------------------------------------------

    def captured(self, graphs: int) -> None:
        """Say that so many graphs were captured and everything was put back."""
        self._replayed.clear()  # of graphs that these replace
        if self._tracer is not None:
            self._tracer.captured(graphs)

    def _attach(self, writer: TraceWriter | None) -> None:
        if self._tracer is not None:
            self._tracer.detach()
        traced = writer is not None and self.mode is Mode.TRACE
        self.streams.pause(not traced)  # a trace tells every launch and edge as it is checked
        self._tracer = Tracer(self, writer) if writer is not None and traced else None

    def _refuse(self, error: ContractViolation) -> NoReturn:
        """Raise what the ledger itself finds; its parts' violations are traced where they are raised."""
        if self._tracer is not None:
            self._tracer.violation(error)
        raise error

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The host's counters that a checkpoint saves and a resume compares."""
        return {"timeline": self.timeline.state(), "weights": self.versions.state()}
