"""The GPU's matrix of parity, here on a CPU with HostReplay: that it passes, and that it can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint import SingleProcess
from pipeline.actions import Kind
from pipeline.plan import build_plan
from qeffect_lm.parallel.mesh import Mesh
from tools.proofs import double, lockstep
from tools.proofs.cells import MICROBATCHES, SKIPS, Cell, cells, on_one_rank
from tools.proofs.matrix import line, one_answer

CELL = Cell("zb-v@2", "step", 64, 4, dropout=0.1)


def check(cell: Cell, steps: int = 4) -> dict[str, Any]:
    return lockstep.check(cell, Mesh({}), SingleProcess(), "cpu", steps)


ROLLING, ONE_GRAPH = replace(CELL, plan="1f1b", window="microbatch"), replace(CELL, plan="zb-h1@3", scope="step")


@pytest.mark.parametrize(
    "cell", [CELL, pytest.param(ROLLING, marks=pytest.mark.long), pytest.param(ONE_GRAPH, marks=pytest.mark.long)], ids=str
)
def test_lock_step(cell, monkeypatch):
    """Equal after each step, one of them skipped, evaluations and a second capture in between; a changed scale shows."""
    monkeypatch.setattr("tools.proofs.cells.SKIPS", (2,))
    monkeypatch.setattr("tools.proofs.lockstep.SKIPS", (2,))
    monkeypatch.setattr("tools.proofs.lockstep.EVALUATE_EVERY", 2)
    report = check(cell, 6)
    assert report["first"] is None and report["skipped"] == 1 and report["tensors_per_step"] > 300
    assert all("scale of" in fault for fault in report["faults"])  # six steps are few for a history of four
    assert report["control_first"].split("/")[0] in ("output", "main gradient")


def test_lock_step_notices_a_difference(monkeypatch):
    """A captured engine with another dropout; a gradient that only one side has; a step skipped without cause."""
    config = Cell.config

    def other(self: Cell, graphs: str, device: str, **more: Any) -> Any:
        return config(self, graphs, device, **more, **({"optim": {"lr": 2.1e-3}} if graphs != "eager" else {}))

    monkeypatch.setattr(Cell, "config", other)
    report = check(CELL, 2)
    assert not report["ok"] and report["first"] == "step 0: lr"
    monkeypatch.setattr(Cell, "config", config)
    monkeypatch.setattr("tools.proofs.lockstep.SKIPS", (1,))
    report = check(CELL, 2)
    assert report["first"] is None and "step 1 was not skipped" in report["faults"] and not report["ok"]
    assert "NOT SOUND" in line(report)
    a = {"x": torch.zeros(2), "y": torch.zeros(1)}
    assert lockstep.first_difference(a, {"x": -torch.zeros(2), "y": torch.zeros(1)}) == "x"
    assert lockstep.first_difference(a, {"x": torch.zeros(2)}) == "y" and lockstep.first_difference({}, a) == "x"


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipev", "1f1b"])
def test_all_ranks_on_one(schedule):
    """Each F, I, W once, several slots, and an order in which W does not follow its I at once."""
    plan = on_one_rank(build_plan(schedule, 3, MICROBATCHES, int(schedule == "1f1b")), "step")
    work = [action for action in plan.actions[0] if action.is_compute]
    assert len(work) == len(set(work)) == 3 * MICROBATCHES * plan.placement.num_chunks
    assert max(plan.slots[0].i_slots.count.values()) > 1
    late = [a for a, b in zip(work, work[1:], strict=False) if a.kind is Kind.I and (b.kind, b.key) != (Kind.W, a.key)]
    assert late


def test_the_cells():
    """Both windows for each plan at the smallest width; every cell has a plan and a configuration; names are distinct."""
    made = [*cells(1, (256, 1024, 4096), ("step", "microbatch"), ("action", "step"))]
    made += cells(2, (256, 1024, 4096), ("step", "microbatch"), ("action",))
    assert len({cell.name for cell in made}) == len(made) and {cell.pp for cell in made} == {1, 2}
    for cell in made:
        assert cell.make_plan().num_ranks == cell.pp == cell.config("eager", "cpu").parallel.pp
    assert {cell.dropout for cell in made if cell.hidden == 256} == {0.0, 0.1}
    assert {(c.plan, c.window) for c in made if c.hidden == 256 and c.pp == 2} >= {("zb-v", "step"), ("zb-v", "microbatch")}
    batch, skipped = CELL.batch(SKIPS[0] - 1), CELL.batch(SKIPS[0])
    assert torch.isfinite(batch.loss_mask).all() and not torch.isfinite(skipped.loss_mask).all()
    assert not torch.equal(batch.inputs, skipped.inputs)


@pytest.mark.long
def test_one_answer():
    """Equal losses of all cells of window step are one answer; a plan that differs is named; no control, no proof."""

    def cell(name: str, window: str, *losses: float) -> dict[str, Any]:
        return {"cell": name, "hidden": 64, "layers": 4, "dropout": 0.0, "window": window, "losses": losses, "steps": 2}

    same, other = [cell("a", "step", 1.0, 2.0), cell("b", "step", 1.0, 2.0)], cell("m", "microbatch", 1.0, 2.5)
    (row,) = one_answer([*same, other])
    assert row["ok"] and row["plans"] == ["a", "b"] and row["control_first"] == "m" and "equal" in line(row)
    (row,) = one_answer([*same, cell("c", "step", 1.0, 2.1), other])
    assert not row["ok"] and row["first"] == "c against a"
    assert not one_answer([*same, cell("m", "microbatch", 1.0, 2.0)])[0]["ok"]
    assert one_answer(same) == [] and one_answer([same[0], other]) == []


def test_float64_reference():
    """Within the bounds, far above BF16's error; a gradient counted twice is outside of them."""
    report = double.check(replace(CELL, plan="1f1b", layers=2), "cpu", 1)
    assert report["ok"] and report["gradients"] == 15, report
    assert report["median_relative_error"] > 5 * report["median_relative_error_bf16"] > 0
    assert report["control_relative_error"] > report["bound"] > report["worst_relative_error"]
    assert report["loss_bound"] > report["loss_relative_error"] > 0
