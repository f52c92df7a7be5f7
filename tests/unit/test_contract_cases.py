"""Cases that went wrong in public, told to the ledger itself; the rules that the exhaustive comparison asked for."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from qeffect_lm.contract.errors import (
    ContractViolation,
    LeaseError,
    LeaseRetainedError,
    ScaleOrderError,
    StaleHandleError,
    WeightGradBeforeInputGradError,
)
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.timeline import EMPTY, Direction
from tests.unit.contract_driver import LAYERS, Driver

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def fails(error: type[ContractViolation], call, *args, message: str, **kwargs) -> None:
    with pytest.raises(ContractViolation, match=message) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error


def begun(how: str = "eager", **kwargs) -> Driver:
    driver = Driver(how, **kwargs)
    driver.ledger.begin_step(0)
    return driver


# ---- scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_changes_no_scale(recompute):
    """S3: a forward that is run again inside I reads the same epoch and merges the same amax: scales, epochs and the number
    of commits are those without it.
    """
    driver = Driver()
    timeline = driver.ledger.timeline
    driver.expect(1)
    for step in range(3):
        driver.ledger.begin_step(step)
        driver.act("F", 0)
        merge(timeline, "a.input", 3.0 + step)
        with driver.ledger.action("I", 0, 0, beta=0) as scope:
            if recompute:
                scope.read_scale("a.input")
                scope.report_amax("a.input")
                merge(timeline, "a.input", 3.0 + step)
            driver.work(scope)
        driver.act("W", 0)
        driver.ledger.commit(step)
        timeline.roll_(torch.tensor(False))
        driver.ledger.refreshed({f"{layer}.weight": layer for layer in LAYERS}, ("rows", "columns"))
        driver.ledger.end_step()
    assert timeline.epochs == {FORWARD: 3, BACKWARD: 3} and timeline.commits == 3
    assert float(timeline.scale_of("a.input")) == pytest.approx(448.0 / 5.0)


def merge(timeline, role: str, amax: float) -> None:
    slot = timeline.slot_of(role)
    slot.copy_(torch.maximum(slot, torch.tensor(amax)))


def test_recompute_over_a_rolled_scale_is_refused():
    """S3: in window ``microbatch`` the forward scale has rolled when I comes: quantising again would give other values."""
    driver = begun(window="microbatch")
    driver.act("F", 0)
    driver.ledger.commit(0, (FORWARD,))
    with driver.ledger.action("I", 0, 0, beta=0) as scope:
        fails(ScaleOrderError, scope.read_scale, "a.input", message="'a.input', which may have rolled since its own F")
        fails(ScaleOrderError, scope.report_amax, "a.input", message="may have rolled")
        driver.work(scope)
    assert float(driver.ledger.timeline.slot_of("a.input")) == EMPTY


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_window_microbatch_holds_one_microbatch(how):
    """A commit that was left out is noticed by the next contributor, one too many by itself, the last one by the step's end."""
    driver = begun(how, window="microbatch")
    fails(ScaleOrderError, driver.ledger.commit, 0, (FORWARD,), message="nothing contributed to its window")
    driver.act("F", 0)
    fails(ScaleOrderError, driver.act, "F", 1, slot=1, message="window of .*, whose commit is missing")
    driver.ledger.abandon_step()
    driver.ledger.begin_step(1)
    for kind in "FIW":
        driver.act(kind, 0)
        if kind == "F":
            driver.ledger.commit(0, (FORWARD,))
    fails(ScaleOrderError, driver.ledger.end_step, message="the commit after .*'I', 0, 0.* is missing")
    driver.ledger.commit(0, (BACKWARD,))
    driver.ledger.end_step()


def test_a_step_without_its_commit_does_not_end():
    driver = begun()
    for kind in "FIW":
        driver.act(kind, 0)
    fails(ScaleOrderError, driver.ledger.end_step, message="the step ends and the commit after")
    driver.ledger.commit(0)
    driver.ledger.end_step()


# ---- ownership -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations([("embedding", 0), ("embedding", 1), ("head", 0), ("head", 1)])))
def test_two_producers_of_one_weight(order):
    """L1: each has a slot of its own with its own betas, so that the sum is there in every order of the Ws."""
    slots = GradSlots(GradSlot(name, torch.full((3,), 7.0)) for name in ("embedding", "head"))
    value = {("embedding", 0): 1.0, ("embedding", 1): 0.5, ("head", 0): 2.0, ("head", 1): 8.0}
    slots.begin_step()
    written = dict.fromkeys(slots.slots, 0)
    for name, microbatch in order:
        beta = int(written[name] > 0)
        slots.write(name, beta, microbatch)
        view = slots.slots[name].view
        view.copy_(beta * view + value[name, microbatch])
        written[name] += 1
    slots.check_complete(2)
    total = slots.slots["embedding"].view + slots.slots["head"].view
    assert torch.equal(total, torch.full((3,), 11.5))


def test_what_is_kept_over_the_next_use_of_its_slot_is_refused():
    """L3: a handle that the caller kept gives nothing once the slot has been given to another, and never the other's bytes."""
    driver = begun()
    driver.act("F", 0)
    kept = driver.ledger.leases.handle(0, 0, "a")
    driver.act("I", 0)
    driver.act("W", 0)
    driver.act("F", 1)
    fails(StaleHandleError, driver.ledger.leases.consume, kept, message="generation 1 is used when slot .* is at 2")


def test_a_handle_gives_nothing_before_the_output_gradient_is_there():
    driver = begun()
    driver.act("F", 0)
    kept = driver.ledger.leases.handle(0, 0, "a")
    fails(WeightGradBeforeInputGradError, driver.ledger.leases.consume, kept, message="W before I")
    driver.act("I", 0)
    assert driver.ledger.leases.consume(kept) == "a of 0"


def test_a_forward_is_run_once():
    """L8: a second F is refused before I, inside I and after it; inside I no layer retains a second time, so that W reads what
    F saved.
    """
    driver = begun()
    driver.act("F", 0)
    fails(LeaseRetainedError, driver.act, "F", 0, slot=1, message="already went forward")
    with driver.ledger.action("I", 0, 0, beta=0) as scope:
        fails(LeaseError, driver.act, "F", 0, slot=1, message="F starts inside I")
        fails(LeaseRetainedError, driver.ledger.leases.advance, "F", 0, 0, "a", message="already went forward")
        driver.work(scope)
    fails(LeaseRetainedError, driver.act, "F", 0, slot=1, message="already went forward")
    driver.act("W", 0, slot=0)


def test_no_graph_is_launched_inside_an_action():
    driver = begun("replay")
    slots = (Slot("I", 0, 1), Slot("W", 0, 1))
    with driver.ledger.action("F", 0, 5, slots=slots) as scope:
        fails(LeaseError, driver.act, "F", 0, message="F starts inside F")
        driver.work(scope)
    driver.act("F", 0)
