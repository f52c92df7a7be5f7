"""Is a program sound? By running it in every order that its edges allow and looking at what happened.

An action is illegal if and only if the program up to and including it has an order in which

- two conflicting accesses happen the other way round than they were launched, or
- a work sees a value that it must not (:mod:`qeffect_lm.modelcheck.storage`), or
- the host, whose own sequence has one order only, makes a move that a microbatch's life does not allow.

:func:`judge` gives the first illegal action. Since early events vouch for some buffers only, the orders are those of a buffer:
buffers for which the same events are edges are explored together, and values of the others are taken from the order of
launching (whether they can be anything else is the question that their own exploration answers).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from qeffect_lm.modelcheck import storage
from qeffect_lm.modelcheck.explore import STOP, explore, mask, restrict
from qeffect_lm.modelcheck.program import (
    HOST,
    Abandon,
    Begin,
    Consume,
    End,
    Launch,
    Move,
    Program,
    Record,
    Settle,
    Touch,
    Wait,
    located,
)

RACE = "StreamOrderError"


@dataclass
class Verdict:
    """``first``: the place of the first illegal operation (None: the program is sound); ``reasons``: what was seen there, by
    the kind of error; ``states``: how many were visited."""

    first: int | None = None
    reasons: dict[str, list[str]] = field(default_factory=dict)
    states: int = 0

    def add(self, place: int, kind: str, what: str) -> None:
        if self.first is None or place < self.first:
            self.first, self.reasons = place, {}
        if place == self.first:
            self.reasons.setdefault(kind, []).append(what)

    def matters(self, place: int) -> bool:
        """Could something seen at ``place`` still be the first?"""
        return self.first is None or place <= self.first


def judge(program: Program) -> Verdict:
    """The first illegal action of ``program``, and what is wrong with it."""
    verdict = Verdict()
    contexts, account = _host(program)
    for place, kind, what in account:
        verdict.add(place, kind, what)
    names = storage.storages(program)
    launched = _in_order(program, names, contexts, verdict)
    graph = _Graph(program)
    for buffers, edges in graph.groups():
        _explore(program, names, contexts, launched, buffers, edges, graph, verdict)
    if verdict.first is not None and any(kind in _LEASE_ACCOUNT for _, kind, _ in account):
        _prefer_account(verdict, account)
    return verdict


# ---- the host: one order -------------------------------------------------------------------------------------

_LEASE_ACCOUNT = (
    "LeaseError",
    "LeaseRetainedError",
    "NotForwardedError",
    "InputGradTwiceError",
    "WeightGradBeforeInputGradError",
    "WeightGradTwiceError",
)


def _host(program: Program) -> tuple[list[storage.Context], list[tuple[int, str, str]]]:
    """Where every operation stands, and the first move that the life of a microbatch does not allow.

    Later ones are not listed: the account is not defined after an illegal move.
    """
    contexts: list[storage.Context] = []
    seen: list[tuple[int, str, str]] = []
    step, begun, running = None, 0, ""
    lives: dict[tuple[int, int], str] = {}
    handles: dict[tuple[int, int], tuple[storage.Owner, int]] = {}
    for place, op in enumerate(program.ops):
        wrong: tuple[str, str] | None = None
        if isinstance(op, Begin | End) and any(state != "W" for state in lives.values()):
            wrong = ("LeaseLeakError", f"{[key for key, state in lives.items() if state != 'W']} are retained")
        if isinstance(op, Begin):
            begun += 1
            step, lives = begun, {}
        elif isinstance(op, End | Abandon):
            step, lives = None, {}
        work = op.work if isinstance(op, Launch) else None
        owner, slot = None, 0
        if isinstance(work, Consume):
            owner, slot = handles.get((work.chunk, work.microbatch), (None, 0))
        contexts.append(storage.Context(place, step, begun, owner, slot))
        if isinstance(work, Move):
            if work.part != "close":
                wrong = ("LeaseError", f"it starts inside {running}") if running else _illegal(work, lives, step)
                if work.kind == "F":
                    lives[work.key] = "begun"
                running = str(work)
            if work.part != "open":
                running = ""
                lives[work.key] = work.kind
                if work.kind == "F":
                    handles[work.key] = ((begun, *work.key), work.w_slot)
        if wrong is not None and not seen:
            seen.append((place, *wrong))
    return contexts, seen


def _illegal(move: Move, lives: dict[tuple[int, int], str], step: int | None) -> tuple[str, str] | None:
    state = lives.get(move.key)
    if move.kind == "F":
        if step is None:
            return "LeaseError", "outside a step"
        return None if state is None else ("LeaseRetainedError", f"{move.key} went forward before")
    if state is None:
        return "NotForwardedError", f"{move.key} never went forward"
    if move.kind == "I":
        return None if state == "F" else ("InputGradTwiceError", f"{move.key} is past I")
    if state == "F":
        return "WeightGradBeforeInputGradError", f"{move.key} has no output gradient"
    return None if state == "I" else ("WeightGradTwiceError", f"{move.key} is past W")


def _prefer_account(verdict: Verdict, account: list[tuple[int, str, str]]) -> None:
    """Where the host's account has a name for an illegal move, what the slots show is the same thing less precisely."""
    named = {kind for place, kind, _ in account if place == verdict.first}
    if named & set(_LEASE_ACCOUNT):
        for kind in (*_LEASE_ACCOUNT, "StaleHandleError"):
            if kind not in named:
                verdict.reasons.pop(kind, None)


# ---- the order of launching ------------------------------------------------------------------------------------


def _in_order(
    program: Program, names: tuple[str, ...], contexts: list[storage.Context], verdict: Verdict
) -> list[dict[str, Any]]:
    """Execute the program as launched, up to its first illegal action; the values before each operation."""
    values = {name: storage.START.get(name) for name in names}
    before: list[dict[str, Any]] = []
    for place, op in enumerate(program.ops):
        if not verdict.matters(place):
            break
        before.append(dict(values))
        if isinstance(op, Launch) and op.work is not None:
            memory = storage.Memory(values.__getitem__)
            storage.run(op.work, memory, contexts[place], program)
            for kind, what in memory.seen:
                verdict.add(place, kind, what)
            values.update(memory.written)
        elif isinstance(op, Abandon):
            values = {name: storage.abandon(name, value) for name, value in values.items()}
        elif isinstance(op, Begin | End):
            for kind, what in _at_a_border(op, values, program, contexts, place):
                verdict.add(place, kind, what)
    return before


def _at_a_border(
    op: Begin | End, values: dict[str, Any], program: Program, contexts: list[storage.Context], place: int
) -> list[tuple[str, str]]:
    """What is wrong when a step begins or ends and all work launched before is done."""
    step = contexts[place - 1].step if place else None
    if step is None:
        return []
    if isinstance(op, Begin):  # it ends the step before, whose window must be closed
        leaks = [seen for seen in storage.step_left_open(values) if seen[0] == "LeaseLeakError"]
        committed = values.get("scale.forward")
        if program.window == "microbatch" or (committed is not None and committed.committed_in != step):
            leaks.append(("ScaleOrderError", "the window of the step before is open"))
        return leaks
    return storage.step_left_open(values)


# ---- every order -----------------------------------------------------------------------------------------------


class _Graph:
    """The program as nodes and edges: one node per operation on its stream, one on the host per launch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.before: list[list[tuple[int, frozenset[str] | None]]] = []  # per node: predecessors, and for which buffers
        self.nodes: dict[int, int] = {}  # operation → the node that does its work
        self.early: list[frozenset[str]] = []
        last: dict[str, int] = {}
        events: dict[int, tuple[int, frozenset[str] | None]] = {}

        def node(stream: str) -> int:
            self.before.append([(last[stream], None)] if stream in last else [])
            last[stream] = len(self.before) - 1
            return last[stream]

        for place, op in enumerate(program.ops):
            issued = node(HOST)
            if isinstance(op, Settle | Abandon):
                self.before[issued] += [(other, None) for other in last.values() if other != issued]
                self.nodes[place] = issued
            elif isinstance(op, Launch | Record | Wait):
                here = issued
                if op.stream != HOST:
                    here = node(op.stream)
                    self.before[here].append((issued, None))
                self.nodes[place] = here
                if isinstance(op, Record):
                    events[op.event] = (here, op.covers)
                elif isinstance(op, Wait) and op.event in events:
                    source, covers = events[op.event]
                    self.before[here].append((source, covers))
                    if covers is not None:
                        self.early.append(covers)

    def groups(self) -> list[tuple[frozenset[str], list[int]]]:
        """Buffers for which the same waits are edges, and the edges: per node a mask of predecessors."""
        by_edges: dict[Hashable, list[str]] = {}
        for buffer in sorted({touch.buffer for touches in self.program.accesses for touch in touches}):
            by_edges.setdefault(tuple(buffer in covers for covers in self.early), []).append(buffer)
        return [
            (
                frozenset(buffers),
                [mask(n for n, covers in edges if covers is None or buffers[0] in covers) for edges in self.before],
            )
            for buffers in by_edges.values()
        ]


def _explore(
    program: Program,
    names: tuple[str, ...],
    contexts: list[storage.Context],
    launched: list[dict[str, Any]],
    buffers: frozenset[str],
    edges: list[int],
    graph: _Graph,
    verdict: Verdict,
) -> None:
    """Run everything that touches ``buffers`` in every order of ``edges``."""
    live = tuple(name for name in names if located(name, "").buffer in buffers)
    places = [
        place
        for place, op in enumerate(program.ops)
        if isinstance(op, Abandon)
        or (isinstance(op, Launch) and any(touch.buffer in buffers for touch in program.accesses[place]))
    ]
    places = [place for place in places if verdict.matters(place)]
    before = restrict(edges, [graph.nodes[place] for place in places])
    conflicts = _conflicts(program, places, buffers)
    borders = [
        (mask(i for i, p in enumerate(places) if p < place), place, op)
        for place, op in enumerate(program.ops)
        if isinstance(op, Begin | End) and verdict.matters(place)
    ]

    def apply(state: tuple, executed: int, node: int) -> Any:
        place = places[node]
        last = max(place, places[executed.bit_length() - 1]) if executed else place
        if not verdict.matters(last):
            return STOP
        overtaken = conflicts[node] & ~executed & ((1 << node) - 1)
        if overtaken:  # launched before, and in this order they come after
            other = places[overtaken.bit_length() - 1]
            verdict.add(last, RACE, f"[{place}] {program.ops[place]} runs before [{other}] {program.ops[other]}")
            return STOP
        op = program.ops[place]
        if isinstance(op, Abandon):
            return tuple(storage.abandon(name, value) for name, value in zip(live, state, strict=True))
        assert isinstance(op, Launch)
        if op.work is None:
            return state
        values = dict(zip(live, state, strict=True))
        memory = storage.Memory(lambda name: values[name] if name in values else launched[place][name])
        storage.run(op.work, memory, contexts[place], program)
        for kind, what in memory.seen:
            verdict.add(last, kind, what)
        return STOP if memory.seen else tuple(memory.written.get(name, values[name]) for name in live)

    def visit(executed: int, state: tuple) -> None:
        for done, place, op in borders:
            if executed == done and verdict.matters(place):
                for kind, what in _at_a_border(op, dict(zip(live, state, strict=True)), program, contexts, place):
                    verdict.add(place, kind, what)

    start = tuple(storage.START.get(name) for name in live)
    verdict.states += explore(before, start, apply, visit=visit).states


def _conflicts(program: Program, places: list[int], buffers: frozenset[str]) -> list[int]:
    """Per node, the mask of those with an access that conflicts with one of its own."""
    touches: list[list[Touch]] = [[t for t in program.accesses[place] if t.buffer in buffers] for place in places]
    return [
        mask(j for j, others in enumerate(touches) if any(one.conflicts(other) for one in mine for other in others))
        for mine in touches
    ]
