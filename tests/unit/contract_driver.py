"""A ledger driven as the engine drives it, without a model: two linears of one chunk, eagerly or from summaries."""

from __future__ import annotations

import torch

from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Scope, Summary
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions

LAYERS = ("a", "b")
WEIGHTS = tuple(f"{layer}.weight" for layer in LAYERS)
LAYOUTS = ("rows", "columns")
ROLES = [
    ScaleRole(f"{layer}.{kind}", Direction.BACKWARD if kind == "grad_output" else Direction.FORWARD, 448.0)
    for layer in LAYERS
    for kind in ("input", "weight", "grad_output")
]


class Driver:
    """Two linears of one chunk, driven as the engine drives a stage: eagerly, or from summaries recorded
    once.
    """

    def __init__(self, how: str = "eager", *, window: str = "step", **kwargs) -> None:
        self.how = how
        timeline = ScaleTimeline(ROLES, window=window, history=2)
        grads = GradSlots(GradSlot(name, torch.zeros(1)) for name in (*WEIGHTS, "norm.weight"))
        self.ledger = Ledger(timeline, WeightVersions([*WEIGHTS, "norm.weight"]), grads, **kwargs)
        self.slot_of: dict[int, int] = {}  # microbatch → where its F ran
        self.refresh()
        self.summaries = self._record() if how == "replay" else {}

    def refresh(self, layouts=LAYOUTS) -> None:
        self.ledger.refreshed({name: name for name in WEIGHTS}, layouts)

    def work(self, scope: Scope) -> None:
        """What the layers of the chunk tell the scope."""
        for layer in LAYERS if scope.kind == "F" else LAYERS[::-1]:
            if scope.kind == "W":
                assert scope.take_weight_grad(layer) == f"{layer} of {scope.microbatch}"
                scope.write_grad(f"{layer}.weight")
                continue
            role = f"{layer}.{'input' if scope.kind == 'F' else 'grad_output'}"
            scope.read_scale(role)
            scope.report_amax(role)
            scope.read_weight(f"{layer}.weight", "rows" if scope.kind == "F" else "columns")
            if scope.kind == "F":
                scope.retain(layer, f"{layer} of {scope.microbatch}")
            else:
                assert scope.input_grad_done(layer) == f"{layer} of {scope.microbatch}"
        if scope.kind == "I":
            scope.write_grad("norm.weight")

    def _record(self) -> dict[tuple[str, int | None], Summary]:
        summaries = {}
        left: dict = {}
        slots = (Slot("I", 0, 0), Slot("W", 0, 0))
        with self.ledger.recording():
            self.ledger.begin_step(-1)
            for kind, beta in (("F", None), ("I", 0), ("W", 0), ("I", 1), ("W", 1)):
                if kind == "I" and beta:
                    self.ledger.leases.put_back(0, -1, left)
                with self.ledger.action(kind, 0, -1, beta=beta, slots=slots) as scope:
                    self.work(scope)
                    summaries[kind, beta] = scope.summarise()
                if kind == "F":
                    left = self.ledger.leases.payloads(0, -1)
        self.ledger.abandon_step()
        return summaries

    def act(self, kind: str, microbatch: int, beta: int | None = None, slot: int | None = None) -> None:
        """One action; without ``slot`` F takes slot 0, and I and W run where their F did."""
        beta = None if kind == "F" else int(microbatch > 0) if beta is None else beta
        slot = self.slot_of.get(microbatch, 0) if slot is None else slot
        if kind == "F":
            self.slot_of[microbatch] = slot
        slots = (Slot("I", 0, slot), Slot("W", 0, slot))
        if self.how == "replay":
            self.ledger.replay(self.summaries[kind, beta], 0, microbatch, slots=slots)
            return
        with self.ledger.action(kind, 0, microbatch, beta=beta, slots=slots) as scope:
            self.work(scope)

    def expect(self, microbatches: int) -> None:
        for kind, direction in (("F", Direction.FORWARD), ("I", Direction.BACKWARD)):
            self.ledger.timeline.expect(direction, [(kind, 0, m) for m in range(microbatches)])

    def account(self) -> dict:
        """Everything the host keeps."""
        ledger = self.ledger
        return {
            **ledger.state(),
            "leases": ledger.leases.counts(),
            "generations": ledger.leases.generations(),
            "writes": {name: ledger.grads._count(name) for name in ledger.grads.slots},
            "reported": {d: set(r) for d, r in ledger.timeline._reported.items()},
            "readers": dict(ledger.timeline._readers),
            "window": ledger.timeline._window_open,
            "casts": dict(ledger.versions.casts),
        }
