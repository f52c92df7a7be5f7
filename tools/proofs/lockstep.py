"""Two engines in lock step, one eager, one from captured graphs: after each step everything is compared, byte for byte.

Compared are the outputs and input gradients of every microbatch, main gradients, and all that a checkpoint holds (weights,
masters, moments, scales, histories, open slots, cached FP8 weights), where they live, so no hash stands between.

The captured engine is disturbed where that must not matter: it is called from changing streams with other work in flight,
evaluates now and then, and is torn down and captured anew in the middle. A control follows: one scale of it is changed, and
then the comparison must fail.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from checkpoint.comm import Communicator
from pipeline.actions import Action, Kind
from pipeline.plan import Plan
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.parallel.mesh import Mesh
from tools.proofs.cells import SKIPS, Cell

EVALUATE_EVERY = 10
TAMPER = 1.5  # not a power of 2, by which FP8 would hardly change


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, NaN patterns and signed zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


class Seen:
    """Copies of every microbatch's output and input gradient, taken at once (a :class:`pipeline.engine.Watch`)."""

    def __init__(self, assembly: Assembly) -> None:
        self._engine = assembly.engine
        self.tensors: dict[str, torch.Tensor] = {}

    def begin(self, action: Action) -> None: ...

    def end(self, action: Action) -> None:
        _, _, slot = self._engine._place(action)
        if action.kind is Kind.F:
            self.tensors[f"output/{action}"] = slot.out.clone()
        elif action.kind is Kind.I and slot.dx is not None:
            self.tensors[f"input gradient/{action}"] = slot.dx.clone()


class Side:
    """One engine and what it shows after a step."""

    def __init__(self, cell: Cell, graphs: str, device: str, mesh: Mesh, plan: Plan) -> None:
        self.assembly = assemble(cell.config(graphs, device), mesh, plan)
        self.assembly.prepare(cell.batch(0))
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def step(self, number: int, cell: Cell, disturbed: bool) -> dict[str, torch.Tensor]:
        """Run a step; afterwards the host has waited for it. Returns what is compared, by name."""
        seen = Seen(self.assembly)
        self.assembly.engine.watch = seen
        with self._caller(disturbed and number % 2 == 1):
            result = self.assembly.engine.step(number, cell.batch(number))
            values = {name: getattr(result, name).clone() for name in ("loss", "grad_norm", "lr", "skipped")}
        self.assembly.engine.watch = None  # a capture of the whole step would take its copies down too
        if self.stream is not None:
            torch.cuda.synchronize()
        return {**seen.tensors, **self.gradients(), **values, **self.state()}

    @contextmanager
    def _caller(self, other: bool) -> Iterator[None]:
        """The caller's stream: torch's current one, or one of its own with work in flight on a third."""
        if self.stream is None or not other:
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            busy = torch.rand(2048, 2048, device="cuda", dtype=torch.bfloat16)
            for _ in range(20):
                busy = busy @ busy
        with torch.cuda.stream(self.stream):
            yield

    def gradients(self) -> dict[str, torch.Tensor]:
        flat = self.assembly.flat
        return {f"main gradient/{name}": flat.grad(name) for name in flat.trainable_names}

    def state(self) -> dict[str, torch.Tensor]:
        """All logical tensors; the histories and scales among them."""
        return {item.name: item.tensor for item in self.assembly.logical_tensors()}

    def close(self) -> None:
        """Give back graphs, communicators and memory."""
        self.assembly.release()
        if self.assembly.transport is not None:
            self.assembly.transport.close()


def first_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str | None:
    """The first name, in the order of computation, whose bytes differ or which one side lacks."""
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b or not same(a[name], b[name]):
            return name
    return None


class Moved:
    """Shows that what is compared changes: data, losses, scales, weights; that nothing does in a skipped step."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._roles = side.assembly.timeline.roles
        self._before = self._copy()
        self.losses: set[float] = set()
        self.scale_changes = torch.zeros_like(side.assembly.timeline.scale, dtype=torch.int64)
        self.faults: list[str] = []

    def _copy(self) -> dict[str, torch.Tensor]:
        assembly = self._side.assembly
        masters = {name: assembly.flat.master(name).clone() for name in assembly.flat.trainable_names}
        return {**masters, "scales": assembly.timeline.scale.clone(), "histories": assembly.timeline.history.clone()}

    def after(self, step: int, shown: dict[str, torch.Tensor], window: str) -> None:
        """Look at the eager side after a step."""
        now, before = self._copy(), self._before
        self._before = now
        self.scale_changes += (now["scales"] != before["scales"]).to(torch.int64)
        skipped = bool(shown["skipped"])
        if skipped != (step in SKIPS):
            self.faults.append(f"step {step} was {'' if skipped else 'not '}skipped")
        if skipped:
            still = [n for n in now if window == "step" or n not in ("scales", "histories")]
            self.faults += [f"the skipped step {step} changed {name}" for name in still if not same(now[name], before[name])]
            return
        self.losses.add(float(shown["loss"]))
        for name, tensor in now.items():
            if name != "scales" and same(tensor, before[name]) and float(shown["lr"]) > 0 and tensor.numel():
                self.faults.append(f"step {step} left {name} as it was")
        for name, gradient in shown.items():
            if name.startswith("main gradient/") and not bool(gradient.any()):
                self.faults.append(f"step {step} has no {name}")

    def verdict(self, steps: int) -> dict[str, Any]:
        """Counts for the report; :attr:`faults` must be empty."""
        if len(self.losses) != steps - sum(step < steps for step in SKIPS):
            self.faults.append(f"{len(self.losses)} different losses in {steps} steps")
        still = [role.name for role, count in zip(self._roles, self.scale_changes.tolist(), strict=True) if not count]
        self.faults += [f"the scale of {name} never changed" for name in still]
        changes = self.scale_changes.tolist()
        least_most = [min(changes), max(changes)] if changes else []
        return {"different_losses": len(self.losses), "scale_changes_of_a_role": least_most}


def check(cell: Cell, mesh: Mesh, comm: Communicator, device: str, steps: int) -> dict[str, Any]:
    """Run one cell on all ranks of the mesh; every rank returns the same report."""
    began = time.perf_counter()
    plan, graphs = cell.make_plan(), "cuda_graphs" if device == "cuda" else "host_replay"
    sides = [Side(cell, backend, device, mesh, plan) for backend in ("eager", graphs)]
    try:
        mine = _run(cell, sides[0], sides[1], steps)
    finally:
        for side in sides:
            side.close()
        del sides
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    every = comm.broadcast(comm.gather(mine))
    first = next((row["first"] for row in every if row["first"]), None)
    faults = [fault for row in every for fault in row["faults"]]
    control = next((row["control"] for row in every if row["control"]), None)
    return {
        "cell": cell.name,
        **asdict(cell),
        "ranks": len(every),
        "steps": steps,
        "ok": first is None and not faults and control is not None,
        "first": first,
        "faults": faults[:10],
        "control_first": control,
        **{key: sum(row[key] for row in every) for key in ("tensors_per_step", "bytes", "graphs")},
        **{key: every[0][key] for key in ("skipped", "different_losses", "scale_changes_of_a_role", "losses")},
        "fingerprints": [row["fingerprint"] for row in every],
        "seconds": round(time.perf_counter() - began, 1),
    }


def _run(cell: Cell, eager: Side, captured: Side, steps: int) -> dict[str, Any]:
    """This rank's part."""
    moved, losses = Moved(eager), []
    fingerprint = captured.assembly.graph_fingerprint()
    first = first_difference(eager.state(), captured.state())
    first = None if first is None else f"before the first step: {first}"
    skipped, nbytes, shown = 0, 0, {}
    for step in range(steps):
        shown, other = eager.step(step, cell, False), captured.step(step, cell, True)
        shown = comparable(shown, other, cell)
        found = first_difference(shown, other)
        if found is not None and first is None:
            first = f"step {step}: {found}"
        nbytes += sum(tensor.numel() * tensor.element_size() for tensor in shown.values())
        skipped += bool(shown["skipped"])
        losses.append(float(shown["loss"]))
        moved.after(step, shown, cell.window)
        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            captured.assembly.evaluator.run(cell.batch(5000 + step))
        if step == steps // 2:
            captured.assembly.capture()
            if captured.assembly.graph_fingerprint() != fingerprint and first is None:
                first = f"step {step}: the fingerprint of the second capture"
    made = captured.assembly.engine.captured
    assert made is not None
    return {
        "first": first,
        "control": _control(cell, eager, captured, steps),
        "faults": moved.faults,
        **moved.verdict(steps),
        "tensors_per_step": len(shown),
        "bytes": nbytes,
        "graphs": len(made.graphs()),
        "skipped": skipped,
        "losses": losses,
        "fingerprint": fingerprint,
    }


def _control(cell: Cell, eager: Side, captured: Side, step: int) -> str | None:
    """One more step after a scale of the captured side was changed in place: what differs first."""
    scale = captured.assembly.timeline.scale
    if scale.numel():
        scale[:1].mul_(TAMPER)
    if captured.stream is not None:
        torch.cuda.synchronize()
    shown, other = eager.step(step, cell, False), captured.step(step, cell, True)
    return first_difference(comparable(shown, other, cell), other)


def comparable(shown: dict[str, torch.Tensor], other: dict[str, torch.Tensor], cell: Cell) -> dict[str, torch.Tensor]:
    """What both sides can show: inside the graph of a whole step nobody looks on, so outputs and input gradients are not."""
    if cell.scope == "action":
        return shown
    return {name: tensor for name, tensor in shown.items() if name in other or not name.startswith(("output/", "input grad"))}
