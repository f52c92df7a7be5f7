"""A whole step as one graph: F, I and W of all microbatches, their transfers, commits, refresh and, by choice, the optimizer.

What the graph does to contract state is what the plan says, so its summary is the plan's: the step ran under the ledger while
it was captured, which checked every action, edge and access then. A replay has the same verdict if it begins in a state like
that one (:meth:`StepGraph.replay` checks it): no lease is held, every cached weight is fresh, the window is new. In mode
``trace`` each step is told to the ledger piece by piece instead (:func:`walk`), so that a trace tells the same story as with a
graph for each action.

The graph holds the transfers: every rank must replay it, and nothing on the host can give up waiting for a peer inside of it
(see :mod:`qeffect_lm.runtime.watchdog`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.actions import Action, Kind
from pipeline.effects import rank_program
from pipeline.epochs import directions_of
from pipeline.plan import GraphKey
from pipeline.program import BEGIN, COMPUTE, END, LAUNCH, RECORD, WAIT, Op
from pipeline.spans import SpanKind
from qeffect_lm.contract.leases import Joint, Slot
from qeffect_lm.contract.ledger import BodySummary, Summary
from qeffect_lm.contract.streams import Access, BufferAccess
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.fp8.cache import LAYOUTS
from qeffect_lm.graphs.backend import Graph

if TYPE_CHECKING:
    from pipeline.engine import Engine

WHO = "the step's graph"
Mark = tuple[Action, "torch.cuda.Event", "torch.cuda.Event"]


class GraphMarks:
    """An engine's watch while a step is captured on a GPU: each replay records the events anew."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def begin(self, action: Action) -> None:
        self._began = self._event()

    def end(self, action: Action) -> None:
        self.marks.append((action, self._began, self._event()))

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[call-arg]
        event.record()
        return event


@dataclass(frozen=True)
class StepGraph:
    """The graph and its account.

    Attributes:
        body: effects of the actions before REDUCE.
        accesses: every buffer that the graph touches, once.
        inside: what the graph runs; ``rest`` are the plan's actions after it (none with the optimizer inside).
        program: the same as operations, for traces.
        summaries: of every F, I and W by graph key.
        marks: events that the graph records before and after each of them, if it was captured with them.
    """

    graph: Graph
    body: BodySummary
    accesses: tuple[BufferAccess, ...]
    inside: tuple[Action, ...]
    rest: tuple[Action, ...]
    program: tuple[Op, ...]
    summaries: Mapping[GraphKey, Summary]
    marks: tuple[Mark, ...] = ()

    def replay(self, engine: Engine) -> None:
        """Account for one step, launch the graph, and run what is left of the step.

        Raises:
            ContractViolation: the step does not begin in the state that the graph was captured for.
        """
        ledger = engine.ledger
        if ledger.traces:
            walk(engine, self.program, self.summaries)
        else:
            ledger.launch(COMPUTE, self.accesses, WHO)
            ledger.replay_body(self.body)
            if not self.rest:
                _account_end(engine, self.inside)
        with engine.spans.piece("STEP_GRAPH", SpanKind.GRAPH):
            self.graph.replay()
        engine.watch_completion()
        engine.run_actions(self.rest)
        if self.rest:
            engine.finish()
        else:
            engine.check_updated()


def _account_end(engine: Engine, actions: Iterable[Action]) -> None:
    """The step's end on the host's side, in its order: optimizer, versions, commit, caches."""
    ledger = engine.ledger
    for action in actions:
        if action.kind is Kind.STEP:
            if ledger.checks:
                ledger.grads.check_complete(engine.plan.microbatches)
            engine.updating = True
            ledger.versions.bump()
        elif action.kind is Kind.COMMIT and action.chunk is None:
            ledger.commit(ledger.timeline.epochs[Direction.FORWARD], by=str(action))
    if engine.cache.names:
        engine.account_refresh()


def walk(engine: Engine, program: Sequence[Op], summaries: Mapping[GraphKey, Summary]) -> None:
    """Tell the ledger of a rank's program, operation by operation, as the engine does while it launches it."""
    ledger, events = engine.ledger, {}
    for op in program:
        if op.kind == RECORD:
            events[op.event] = ledger.record(op.stream)
        elif op.kind == WAIT:
            ledger.wait(op.stream, events[op.event])
        elif op.kind == LAUNCH:
            _before(engine, op)
            ledger.launch(op.stream, op.accesses, op.who)
            _after(engine, op, summaries)


def _before(engine: Engine, op: Op) -> None:
    ledger = engine.ledger
    if op.work.startswith("COMMIT"):
        detail = op.work.removeprefix("COMMIT").removeprefix("_")
        directions = {"": tuple(Direction), "F": (Direction.FORWARD,), "I": (Direction.BACKWARD,)}[detail]
        assert op.epoch is not None
        ledger.commit(engine.first_epochs[directions[0]] + op.epoch, directions, op.who)
    elif op.work == "REDUCE_G" and ledger.checks:
        ledger.grads.close(engine.stages[op.key[0]].gradients, engine.plan.microbatches)
    elif op.work == "NORM" and ledger.checks:
        ledger.grads.check_complete(engine.plan.microbatches)


def _after(engine: Engine, op: Op, summaries: Mapping[GraphKey, Summary]) -> None:
    ledger = engine.ledger
    if op.work == "STEP":
        engine.updating = True
        ledger.versions.bump()
    elif op.work == "REFRESH":
        ledger.refreshed({name: engine.cache.layer_of(name) for name in engine.cache.names}, LAYOUTS)
    elif op.work in ("F", "I", "W"):
        chunk, microbatch = op.key
        assert op.i_slot is not None and op.w_slot is not None
        joint = Joint(op.members, op.joint_beta) if op.members else None
        summary = summaries[GraphKey(Kind(op.work), chunk, op.i_slot, op.w_slot, op.beta, joint)]
        direction = {"F": Direction.FORWARD, "I": Direction.BACKWARD}.get(op.work)
        epoch = None if direction is None or op.epoch is None else engine.first_epochs[direction] + op.epoch
        slots = (Slot("I", chunk, op.i_slot), Slot("W", chunk, op.w_slot))
        ledger.replay(summary, chunk, microbatch, slots=slots, epoch=epoch)


def cut(actions: Sequence[Action], optimizer: bool) -> int:
    """How many of a rank's actions its step graph holds: all, or those before REDUCE."""
    if optimizer:
        return len(actions)
    return next(place for place, action in enumerate(actions) if action.kind is Kind.REDUCE)


def make(engine: Engine, graph: Graph, optimizer: bool, marks: Sequence[Mark] = ()) -> StepGraph:
    """The account of a captured step; ``engine.summaries`` holds those of its actions."""
    assert engine.summaries is not None
    place = cut(engine.actions, optimizer)
    inside, rest = engine.actions[:place], engine.actions[place:]
    replicas, tied = engine.end.replicated, engine.end.tied is not None
    program = rank_program(engine.plan, engine.rank, bool(engine.cache.names), replicas, tied, engine.end.exchanging)
    if rest:
        end = next(place for place, op in enumerate(program) if op.work == "SUM")
        program = program[:end]
    program = tuple(op for op in program if op.kind not in (BEGIN, END) and op.work != "DIVISOR")
    body = _body(engine, [a for a in inside if a.is_compute or a.kind is Kind.COMMIT], engine.summaries)
    return StepGraph(graph, body, _union(program), inside, rest, program, dict(engine.summaries), tuple(marks))


def _body(engine: Engine, actions: Sequence[Action], summaries: Mapping[GraphKey, Summary]) -> BodySummary:
    weights: dict[tuple[str, str], None] = {}
    grads: dict[str, int] = {}
    idle: dict[str, int] = {}
    contributors: dict[Direction, list[tuple[str, int, int]]] = {direction: [] for direction in Direction}
    commits = dict.fromkeys(Direction, 0)
    for action in actions:
        if action.kind is Kind.COMMIT:
            for direction in directions_of(action) if action.chunk is not None else ():
                commits[direction] += 1
            continue
        summary = summaries[engine.plan.graph_key(action)]
        weights.update(dict.fromkeys(summary.weights))
        for name in (*summary.grads, *summary.joined):
            grads[name] = grads.get(name, 0) + 1
        for name in summary.idle:
            idle[name] = idle.get(name, 0) + 1
        for direction in summary.scales:
            contributors[direction].append((str(action.kind), *action.key))
    return BodySummary(
        tuple(weights), grads, {direction: tuple(found) for direction, found in contributors.items()}, commits, idle
    )


def _union(program: Iterable[Op]) -> tuple[BufferAccess, ...]:
    """Every buffer of a program, written where anything writes it (or merges into it: the next step's order is the graph's)."""
    touched: dict = {}
    for op in program:
        for buffer, access in op.accesses:
            if buffer not in touched or access != Access.READ:
                touched[buffer] = Access.READ if access == Access.READ else Access.WRITE
    return tuple(touched.items())
