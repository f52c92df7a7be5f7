"""Leases, gradient slots and plans where W of several microbatches is one product: what may come when, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.actions import Action, Kind, parse_actions
from pipeline.coalesce import members_of, together
from pipeline.effects import Effects, program
from pipeline.mutate import score
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.program import Program
from pipeline.prove import prove
from pipeline.schedules import SCHEDULES, Placement
from pipeline.slots import Holding
from pipeline.validate import validate
from qeffect_lm.contract.errors import (
    ContractViolation,
    GradSlotError,
    LeaseError,
    LeaseLeakError,
    LeaseRetainedError,
    NotForwardedError,
    PlanError,
    ScaleOrderError,
    StaleHandleError,
    WeightGradBeforeInputGradError,
)
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Joint, Slot
from qeffect_lm.contract.ledger import Ledger, Summary
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import UsageError

# ---- plans -----------------------------------------------------------------------------------------------------------


def test_members_of_a_group():
    """Groups of three of seven microbatches: the last one of each multiplies for all, the step's last group is smaller."""
    assert [members_of(m, 3, 7) for m in range(7)] == [0, 0, 3, 0, 0, 3, 1]
    assert [members_of(m, 1, 3) for m in range(3)] == [1, 1, 1]


def test_w_moves_to_the_last_of_its_group():
    """Later, never earlier; each chunk's by itself; everything else keeps its order."""
    row = parse_actions("0F0 1F0 1I0 1W0 0I0 0W0 0F1 1F1 1I1 1W1 0I1 0W1 0F2 1F2 1I2 0I2 0W2 1W2")
    moved = together([row], 2, 3)[0]
    assert moved == parse_actions("0F0 1F0 1I0 0I0 0F1 1F1 1I1 1W0 1W1 0I1 0W0 0W1 0F2 1F2 1I2 0I2 0W2 1W2")
    with pytest.raises(UsageError, match="0B0 is I and W in one: coalesce_w=2 needs W apart"):
        together([parse_actions("0F0 0B0")], 2, 2)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule(name, p):
    """Every W once, groups together, proved; places are group · n + position and held from the first F to the last W."""
    for m, n in ((4, 2), (5, 3), (3, 3)):
        plan = build_plan(name, p, m, coalesce_w=n)
        prove(plan)
        prove(program(plan, replicas=True))
        assert Plan.from_json(plan.to_json()) == plan and plan.fingerprint() != build_plan(name, p, m).fingerprint()
        assert f"\ncoalesce_w {n}\n" in plan.text() and "coalesce" not in build_plan(name, p, m).text()
        written = program(plan)
        assert Program.from_json(written.to_json()) == written
        for row, slots in zip(plan.actions, plan.slots, strict=True):
            at = {action: position for position, action in enumerate(row)}
            index, span = slots.w_slots.index, slots.w_slots.span
            for chunk, microbatch in index:
                first = microbatch - microbatch % n
                last = min(first + n, m) - 1
                assert index[chunk, microbatch] == index[chunk, first] + microbatch - first and index[chunk, first] % n == 0
                whole = at[Action(Kind.F, chunk, first)], at[Action(Kind.W, chunk, last)]
                assert tuple(span[chunk, microbatch]) == whole
                others = [k for k in index if k[0] == chunk and index[k] == index[chunk, microbatch] and k[1] != microbatch]
                assert all(span[k].start > whole[1] or span[k].end < whole[0] for k in others)
            assert all(count % n == 0 for count in slots.w_slots.count.values())


def test_graphs_of_a_plan():
    """A graph for each (kind, chunk, I-slot, W-slot, beta); a W that multiplies for others is another one."""
    plan = build_plan("gpipe", 1, 3, coalesce_w=2)
    found = {str(a): plan.graph_key(a)[3:] for a in plan.actions[0] if a.kind is Kind.W}
    assert found == {"0W0": (0, 0, None), "0W1": (1, 1, Joint(2, 0)), "0W2": (2, 1, Joint(1, 1))}
    assert build_plan("gpipe", 1, 3).joint(Action(Kind.W, 0, 0)) is None and plan.joint(Action(Kind.F, 0, 0)) == Joint()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"coalesce_w": 0}, "coalesce_w=0: W of 1 .* to 3 microbatches"),
        ({"coalesce_w": 4}, "coalesce_w=4: W of 1 .* to 3 microbatches"),
        ({"coalesce_w": 2, "window": "microbatch"}, "does not go with window 'microbatch'"),
        ({"coalesce_w": 2, "holding": Holding(spare_slots=True)}, "does not go with spare slots"),
        ({"coalesce_w": 2, "holding": Holding(i_slot_until=Kind.W)}, "does not go with I-slots that are held until W"),
    ],
)
def test_what_a_plan_refuses(more, reason):
    with pytest.raises(UsageError, match=reason):
        build_plan("1f1b", 1, 3, **more)


def test_a_plan_that_leaves_microbatch_order_is_refused():
    rows = [parse_actions("0F0 0F1 0I0 0I1 0W0 0W1")]
    make_plan("x", rows, Placement((0,)), 2, allow_unordered=True)
    with pytest.raises(UsageError, match="coalesce_w=2 does not go with a plan that leaves microbatch order"):
        make_plan("x", rows, Placement((0,)), 2, allow_unordered=True, coalesce_w=2)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("0F0 0F1 0I0 0W0 0I1 0W1", (0, 5), "one product with 0W0: it comes directly after it, not after 0I1"),
        ("0F0 0F1 0I0 0I1 0W0 0F2 0W1 0I2 0W2", (0, 6), "not after 0F2"),
        ("0F0 0B0 0F1 0B1", (0, 1), "I and W in one"),
    ],
)
def test_a_group_that_is_not_together(text, place, reason):
    rows = [parse_actions(text)]
    number = 1 + max(a.key[1] for a in rows[0])
    validate(rows, Placement((0,)), number, lowered=False)
    with pytest.raises(PlanError, match=reason) as caught:
        validate(rows, Placement((0,)), number, lowered=False, coalesce_w=2)
    assert (caught.value.place["rank"], caught.value.place["position"]) == place


def test_a_stored_plan_that_claims_another_size():
    """The size belongs to the fingerprint, and actions that do not fit it are refused."""
    text = build_plan("1f1b", 1, 4, coalesce_w=2).to_json()
    with pytest.raises(PlanError, match="the stored plan was changed"):
        Plan.from_json(text.replace('"coalesce_w": 2', '"coalesce_w": 1'))
    with pytest.raises(PlanError, match="one product with"):
        Plan.from_json(text.replace('"coalesce_w": 2', '"coalesce_w": 4'))


# ---- effects and their proof -------------------------------------------------------------------------------------------


def test_the_last_w_reads_all_places():
    i_slots, w_slots = {(0, m): 0 for m in range(5)}, {(0, m): 2 + m for m in range(5)}
    effects = Effects(Placement((0,)), 0, i_slots, w_slots, coalesce_w=3, microbatches=5)
    reads = {m: [b[2] for b, access in effects.launch("W", 0, m).accesses if b[0] == "retained_W"] for m in range(5)}
    assert reads == {0: [2], 1: [3], 2: [2, 3, 4], 3: [5], 4: [5, 6]}
    writes = {m: ("grads_J", 0) in dict(effects.launch("W", 0, m).accesses) for m in range(5)}
    assert writes == {0: False, 1: False, 2: True, 3: False, 4: True}
    assert ("grads_J", 0) in dict(effects.launch("REDUCE").accesses) and ("grads_J", 0) in dict(effects.launch("STEP").accesses)
    early = Effects(Placement((0,)), 0, {(0, 0): 0}, {(0, 0): 0}, True, False, 2, 2).launch("REDUCE_G", 0, 0)
    assert (("grads_J", 0), "write") in early.accesses


def edited(plan: Plan, name: str, **fields: Any) -> Program:
    """The plan's program with one launch changed; ``reads`` (``writes``) replaces what a W reads (writes there instead)."""
    subject = program(plan)
    row = list(subject.rows[0])
    at = next(place for place, op in enumerate(row) if op.work and op.name == name)
    reads, writes = fields.pop("reads", None), fields.pop("writes", ())
    if reads is not None:
        kept = [(buffer, access) for buffer, access in row[at].accesses if buffer[0] != "retained_W"]
        places = [(("retained_W", 0, place), how) for how, those in (("read", reads), ("write", writes)) for place in those]
        fields["accesses"] = (*places, *kept)
    row[at] = replace(row[at], **fields)
    return subject.with_row(0, row)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("0W1", {"reads": (1,)}, "retained_W.0.0 .*the product|W-slot is retained|written while it holds"),
        ("0W1", {"reads": (0, 1, 2)}, "multiplies what lies in retained_W.0.2, which is no place of its group"),
        ("0W1", {"reads": (0, 1), "w_slot": 0}, "retained_W"),
        ("0W1", {"reads": (0,), "writes": (1,)}, "retained_W.0.1 is written while it holds microbatch 1 for W and the product"),
        ("0W1", {"members": 1}, "multiplies the operands of 1 microbatches, by its place they are 2"),
        ("0W0", {"members": None}, "it must say .*members"),
        ("0W1", {"joint_beta": 1}, "GradSlotError: writer 1 of '0.weight'|GradSlotError"),
        ("0W3", {"joint_beta": 0}, "GradSlotError"),
        ("0F2", {"w_slot": 0}, "slot"),
    ],
)
def test_effects_that_do_not_fit(name, fields, reason):
    plan = build_plan("gpipe", 1, 4, coalesce_w=2)
    prove(program(plan))
    with pytest.raises(PlanError, match=reason):
        prove(edited(plan, name, **fields))


def test_mutants():
    """A sample of broken plans: none that can go wrong is accepted."""
    result = score(build_plan("1f1b", 2, 3, coalesce_w=2), sample=60, seed=4)
    assert result.wrong_survivors == [] and result.unplaced == [] and result.wrong.total() > 25


@pytest.mark.long
@pytest.mark.parametrize("which", [("1f1b", 1, 3, 2), ("1f1b", 2, 3, 2), ("zb-v", 1, 2, 2), ("gpipe", 1, 3, 3)], ids=str)
def test_many_mutants(which):
    result = score(build_plan(*which[:3], coalesce_w=which[3]), sample=3000)
    assert result.wrong_survivors == [] and result.unplaced == [] and result.unknown.total() == 0


# ---- the ledger ----------------------------------------------------------------------------------------------------------


class Driver:
    """One joined linear of one chunk: groups of ``n``, eagerly or from summaries."""

    def __init__(self, how: str, n: int = 2, m: int = 4) -> None:
        self.how, self.n, self.m = how, n, m
        roles = [ScaleRole("a.input", Direction.FORWARD, 448.0), ScaleRole("a.grad_output", Direction.BACKWARD, 57344.0)]
        timeline = ScaleTimeline(roles, history=2)
        for kind, direction in (("F", Direction.FORWARD), ("I", Direction.BACKWARD)):
            timeline.expect(direction, [(kind, 0, microbatch) for microbatch in range(m)])
        self.ledger = Ledger(timeline, WeightVersions(["a.weight"]), GradSlots([GradSlot("a.weight", torch.zeros(1))]))
        self.ledger.begin_step(0)

    def joint(self, kind: str, microbatch: int) -> Joint:
        members = members_of(microbatch, self.n, self.m) if kind == "W" else 0
        return Joint(members, int(microbatch >= self.n)) if members else Joint()

    def act(self, kind: str, microbatch: int, *, w: int | None = None, joint: Joint | None = None) -> None:
        joint = joint or self.joint(kind, microbatch)
        slots = Slot("I", 0, microbatch), Slot("W", 0, microbatch if w is None else w)
        beta = None if kind == "F" else int(microbatch > 0)
        if self.how == "replay":
            roles = {"F": ("a.input",), "I": ("a.grad_output",)}.get(kind, ())
            idle, joined = (("a.weight",) * (kind == "W" and bool(joint.members) is which) for which in (False, True))
            scales = frozenset({"F": [Direction.FORWARD], "I": [Direction.BACKWARD]}.get(kind, []))
            summary = Summary(kind, scales, roles, (), ("a",), (), beta, (), joint, idle, joined)
            self.ledger.replay(summary, 0, microbatch, slots=slots)
            return
        with self.ledger.action(kind, 0, microbatch, beta=beta, slots=slots, joint=joint) as scope:
            if kind == "F":
                scope.report_amax("a.input")
                scope.retain("a", microbatch)
            elif kind == "I":
                scope.report_amax("a.grad_output")
                scope.input_grad_done("a")
            else:
                assert scope.take_weight_grad("a") == microbatch
                if joint.members:
                    assert scope.write_joined_grad("a.weight") == joint.beta
                else:
                    scope.leave_grad("a.weight")

    def run(self, text: str) -> Driver:
        for word in text.split():
            self.act(word[0], int(word[1:]))
        return self


HOW = pytest.mark.parametrize("how", ["eager", "replay"])


@HOW
def test_a_step_of_groups(how):
    """Places are held until the last W of the group; each gradient has one write per group and a report for each other W."""
    driver = Driver(how).run("F0 F1 I0 I1 W0")
    ledger = driver.ledger
    assert ledger.leases.counts() == {"groups": 1, "slots": 2}
    driver.run("W1")
    assert ledger.leases.counts() == {"groups": 0, "slots": 0}
    driver.run("F2 F3 I2 I3 W2 W3")
    ledger.grads.check_complete(4)
    assert ledger.grads._count("a.weight") == 2
    ledger.leases.end_step()


@HOW
@pytest.mark.parametrize(
    ("before", "then", "error", "message"),
    [
        ("F0 F1 I1", "W1", WeightGradBeforeInputGradError, "W before I"),
        ("F1 I1", "W1", NotForwardedError, "never forwarded"),
        ("F0 F1 I0 I1", "W1", LeaseError, "W of microbatch 0 has not handed its leases over"),
        ("F0 F1 I0 I1 W0 W1 F2 I2", "W3", NotForwardedError, "never forwarded"),
    ],
)
def test_a_member_is_missing(how, before, then, error, message):
    """Each as the error of the member's own state, before anything is launched."""
    driver = Driver(how).run(before)
    with pytest.raises(ContractViolation, match=message) as caught:
        driver.run(then)
    assert type(caught.value) is error


@HOW
def test_a_place_is_claimed_while_its_group_is_retained(how):
    """After its own W a place still holds what the group's last W will multiply."""
    driver = Driver(how).run("F0 F1 I0 I1 W0")
    with pytest.raises(LeaseRetainedError, match="is claimed while .* retains it"):
        driver.act("F", 2, w=0)


@HOW
def test_operands_that_lie_elsewhere(how):
    """The product reads adjacent places; a member in another one is not among them."""
    driver = Driver(how)
    driver.act("F", 0, w=5)
    driver.run("F1 I1")
    driver.act("I", 0, w=5)
    driver.act("W", 0, w=5)
    with pytest.raises(StaleHandleError, match=r"those of microbatch 0 lay in W0.5, they are read in W0.0"):
        driver.run("W1")


@HOW
def test_operands_that_were_released(how):
    """A member whose W kept nothing (as if each W were a product of its own): its place may hold anything."""
    driver = Driver(how).run("F0 F1 I0 I1")
    driver.ledger.leases.replay("W", 0, 0, ("a",))
    with pytest.raises(StaleHandleError, match="those of microbatch 0 lay in W0.0"):
        driver.run("W1")


@HOW
def test_operands_of_another_epoch(how):
    """A commit between two members: their scales differ, and one product has one."""
    driver = Driver(how).run("F0 I0 W0")
    driver.ledger.timeline.epochs = {direction: epoch + 1 for direction, epoch in driver.ledger.timeline.epochs.items()}
    driver.run("F1 I1")
    with pytest.raises(ScaleOrderError, match="microbatch 0 was quantised in other epochs"):
        driver.run("W1")


@HOW
def test_a_group_whose_product_is_never_made(how):
    driver = Driver(how).run("F0 F1 I0 I1 W0")
    driver.act("W", 1, joint=Joint())
    with pytest.raises(LeaseLeakError, match="the W that multiplies its operands with others' did not run"):
        driver.ledger.leases.end_step()


@HOW
def test_gradients_of_groups_are_counted(how):
    """The first product overwrites, later ones add; a report that is missing stops the optimizer."""
    driver = Driver(how).run("F0 F1 I0 I1 W0")
    with pytest.raises(GradSlotError, match="beta 1: it would add to the previous step's gradient"):
        driver.act("W", 1, joint=Joint(2, 1))
    driver = Driver(how).run("F0 F1 I0 I1 W0 W1 F2 F3 I2 I3 W2")
    with pytest.raises(GradSlotError, match="3 of 4 contributions"):
        driver.ledger.grads.check_complete(4)


def test_reports_of_an_unknown_gradient():
    grads = GradSlots([GradSlot("a", torch.zeros(1))])
    for report in (lambda: grads.report_group(("b",)), lambda: grads.report_counts({"b": 1}), lambda: grads.report_empty("b")):
        with pytest.raises(GradSlotError, match="no gradient slot was declared for 'b'"):
            report()
