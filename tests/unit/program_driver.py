"""Runs a program of qeffect_lm.modelcheck through the real ledger, called as the engine calls it."""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm.contract.errors import ContractViolation
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Scope, Summary
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.modelcheck import program as p

LAYERS = ("a", "b")
ROLE = {"F": "input", "I": "grad_output"}
ROLES = [
    *(ScaleRole(f"{layer}.input", Direction.FORWARD, 448.0) for layer in LAYERS),
    *(ScaleRole(f"{layer}.weight", Direction.FORWARD, 448.0) for layer in LAYERS),
    *(ScaleRole(f"{layer}.grad_output", Direction.BACKWARD, 448.0) for layer in LAYERS),
]
CHUNKS = (0, 1)
_VIEW = torch.zeros(1)


def ways(program: p.Program) -> tuple[str, ...]:
    """How the program can be executed: a graph is launched whole, reports what it reported at capture, keeps no handles."""
    works = [op.work for op in program.ops if isinstance(op, p.Launch)]
    if any(isinstance(work, p.Consume) for work in works):
        return ("eager",)
    return ("eager", "mixed" if _eager_keys(program) else "replay")


def _eager_keys(program: p.Program) -> frozenset[tuple[int, int]]:
    """The microbatches with an action that no graph does."""
    works = [op.work for op in program.ops if isinstance(op, p.Launch)]
    return frozenset(w.key for w in works if isinstance(w, p.Move) and (w.part != "whole" or w.silent))


def _keys(program: p.Program) -> frozenset[tuple[int, int]]:
    return frozenset(op.work.key for op in program.ops if isinstance(op, p.Launch) and isinstance(op.work, p.Move))


class Driver:
    """A ledger with two FP8 linears per chunk. ``how``: ``eager`` (scopes), ``replay`` (summaries) or ``mixed`` (summaries
    where a microbatch's actions can be graphs)."""

    def __init__(self, program: p.Program, how: str) -> None:
        self.program = program
        self.graphs = {"eager": (), "replay": _keys(program), "mixed": _keys(program) - _eager_keys(program)}[how]
        timeline = ScaleTimeline(ROLES, window=program.window, history=1)
        grads = GradSlots(GradSlot(name, _VIEW) for name in p.GRADS)
        self.ledger = Ledger(timeline, WeightVersions(p.WEIGHTS), grads)
        for kind, direction in (("F", Direction.FORWARD), ("I", Direction.BACKWARD)):
            timeline.expect(direction, [(kind, *key) for key in program.expected])
            for chunk in CHUNKS:
                self.ledger.declare_roles(kind, chunk, [f"{layer}.{ROLE[kind]}" for layer in LAYERS])
        self.ledger.refreshed({name: name for name in p.WEIGHTS}, p.LAYOUTS)
        self.events: dict[int, Any] = {}
        self.spelled: dict[tuple, tuple] = {}
        self.handles: dict[tuple[int, int], Any] = {}
        self.running: Any = None
        self.begun = 0

    def run(self) -> tuple[int, ContractViolation] | None:
        """The place of the first operation that the ledger refuses, and its error."""
        for place, op in enumerate(self.program.ops):
            try:
                self.do(op, self.program.accesses[place])
            except ContractViolation as error:
                return place, error
        return None

    def do(self, op: p.Op, touches: tuple[p.Touch, ...]) -> None:
        ledger = self.ledger
        if isinstance(op, p.Launch):
            spelled = tuple((t.buffer, Access(t.kind), t.lo, t.hi) for t in touches)
            self.launch(op, self.spelled.setdefault(spelled, spelled))  # one object for what recurs, as an engine has it
        elif isinstance(op, p.Record):
            self.events[op.event] = ledger.record(op.stream, op.covers)
        elif isinstance(op, p.Wait) and op.event in self.events:
            if op.stream == p.HOST:
                ledger.synchronize(self.events[op.event])
            else:
                ledger.wait(op.stream, self.events[op.event])
        elif isinstance(op, p.Settle):
            ledger.settle()
        elif isinstance(op, p.Begin):
            self.begun += 1
            ledger.begin_step(self.begun)
        elif isinstance(op, p.End):
            ledger.end_step()
        elif isinstance(op, p.Abandon):
            ledger.abandon_step()

    def launch(self, op: p.Launch, accesses: tuple) -> None:
        """The order of the engine: what it checks before it launches, the launch, what it tells afterwards."""
        ledger, work = self.ledger, op.work
        if isinstance(work, p.Commit):
            ledger.commit(work.epoch, tuple(map(Direction, work.directions)))
        elif isinstance(work, p.Optimizer):
            ledger.grads.check_complete(work.expected)
        ledger.launch(op.stream, accesses, str(work or "plain"))
        if isinstance(work, p.Move):
            self.move(work)
        elif isinstance(work, p.Optimizer):
            ledger.versions.bump()
        elif isinstance(work, p.Bump):
            ledger.versions.bump(work.weights)
        elif isinstance(work, p.Refresh):
            ledger.refreshed({name: name for name in work.weights}, work.layouts)
        elif isinstance(work, p.ZeroIdle):
            ledger.grads.zero_empty_()
        elif isinstance(work, p.Consume) and (work.chunk, work.microbatch) in self.handles:
            ledger.leases.consume(self.handles[work.chunk, work.microbatch])

    # ---- F, I, W -----------------------------------------------------------------------------------------------

    def move(self, move: p.Move) -> None:
        if move.key in self.graphs:
            self.replay(move)
            return
        if move.part != "close":
            action = self.ledger.action(move.kind, *move.key, **self.terms(move), beta=move.beta)
            self.running = (action, action.__enter__())
        if move.part != "open":
            (action, scope), self.running = self.running, None
            try:
                self.work(move, scope)
            except ContractViolation as error:
                action.__exit__(type(error), error, None)
                raise
            action.__exit__(None, None, None)
            if move.kind == "F":
                self.handles[move.key] = self.ledger.leases.handle(*move.key, "a")

    def terms(self, move: p.Move) -> dict[str, Any]:
        slots = (Slot("I", move.chunk, move.i_slot), Slot("W", move.chunk, move.w_slot))
        return {"slots": slots, "epoch": None if move.kind == "W" else move.epoch}

    def work(self, move: p.Move, scope: Scope) -> None:
        """What the layers of the chunk tell the scope."""
        for layer in LAYERS if move.kind == "F" else LAYERS[::-1]:
            payload = (layer, self.begun, *move.key)
            if move.kind == "W":
                assert scope.take_weight_grad(layer) == payload
                continue
            role = f"{layer}.{ROLE[move.kind]}"
            scope.read_scale(role)
            if role not in move.silent:
                scope.report_amax(role)
            if move.kind == "F":
                scope.retain(layer, payload)
            else:
                assert scope.input_grad_done(layer) == payload
        for read in move.reads:
            self.require(read, move) if read.version is not None else scope.read_weight(read.weight, read.layout)
        for name in p.WRITES[move.kind]:
            self.ledger.grads.report_empty(name) if move.idle else scope.write_grad(name)

    def require(self, read: p.Read, move: p.Move) -> None:
        ledger = self.ledger
        ledger.versions.require(
            read.weight, read.layout, epoch=ledger.weight_epoch(), version=read.version, microbatch=move.microbatch
        )

    def replay(self, move: p.Move) -> None:
        summary = Summary(
            move.kind,
            weights=tuple((read.weight, read.layout) for read in move.reads),
            layers=LAYERS if move.kind == "F" else LAYERS[::-1],
            grads=() if move.idle else p.WRITES[move.kind],
            beta=move.beta,
        )
        self.ledger.replay(summary, *move.key, **self.terms(move))
        for read in move.reads:
            if read.version is not None:
                self.require(read, move)
        if move.idle:
            for name in p.WRITES[move.kind]:
                self.ledger.grads.report_empty(name)
