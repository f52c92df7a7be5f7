"""The ledger: eager actions and replayed graphs under one account, modes, traces and streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import (
    ContractViolation,
    GradSlotError,
    InputGradTwiceError,
    LeaseError,
    LeaseLeakError,
    LeaseRetainedError,
    NotForwardedError,
    ScaleOrderError,
    StaleWeightError,
    StreamOrderError,
    WeightGradBeforeInputGradError,
    WeightGradTwiceError,
)
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Mode, Summary
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.contract.trace import TraceWriter
from qeffect_lm.errors import UsageError
from tests.unit.contract_driver import WEIGHTS, Driver


@pytest.fixture(params=["eager", "replay"])
def how(request) -> str:
    return request.param


def fails(error: type[ContractViolation], call, *args, message: str = "", **place) -> ContractViolation:
    with pytest.raises(ContractViolation) as caught:
        call(*args)
    assert type(caught.value) is error, caught.value
    assert message in str(caught.value)
    for key, value in place.items():
        assert caught.value.place[key] == value, caught.value
    return caught.value


def full_step(driver: Driver, step: int, epoch: int) -> None:
    driver.ledger.begin_step(step)
    for microbatch in range(2):
        driver.act("F", microbatch, slot=microbatch)
    for kind in "IW":
        for microbatch in range(2):
            driver.act(kind, microbatch)
    driver.ledger.grads.check_complete(2)
    driver.ledger.versions.bump()
    driver.ledger.commit(epoch)
    driver.refresh()
    driver.ledger.end_step()


def test_steps_in_order(how):
    """Three sound steps: epochs, versions and casts count, nothing is left behind."""
    driver = Driver(how)
    driver.expect(2)
    for step in range(3):
        full_step(driver, step, step)
        assert driver.ledger.leases.counts() == {"groups": 0, "slots": 0}
    assert driver.ledger.state()["timeline"] == {
        "epochs": {"forward": 3, "backward": 3},
        "commits": 3,
        "window": "step",
    }
    assert driver.ledger.versions.casts == dict.fromkeys(WEIGHTS, 4)
    assert driver.ledger.versions.refreshes == 4
    assert driver.ledger.versions.caches["a.weight"].epoch == driver.ledger.versions.versions["a.weight"] == 3


@pytest.mark.parametrize(
    ("before", "kind", "error"),
    [
        ("F", "W", WeightGradBeforeInputGradError),
        ("FIW", "W", WeightGradTwiceError),
        ("FI", "I", InputGradTwiceError),
        ("FIW", "I", InputGradTwiceError),
        ("", "I", NotForwardedError),
        ("", "W", NotForwardedError),
        ("FIW", "F", LeaseRetainedError),
        ("F", "F", LeaseRetainedError),
    ],
)
def test_illegal_moves_in_eager_and_replay(how, before, kind, error):
    """L4, L5: the same named error, before any work is launched, in both ways of execution."""
    driver = Driver(how)
    driver.ledger.begin_step(6)
    for done in before:
        driver.act(done, 0)
    launched = []
    driver.work = lambda scope: launched.append(scope)  # type: ignore[method-assign]
    fails(error, driver.act, kind, 0, chunk=0, microbatch=0)
    assert launched == []


@pytest.mark.parametrize(("moves", "missing"), [("FI", "W did not run"), ("F", "I did not run")])
def test_a_step_that_ends_too_early(how, moves, missing):
    """L4: naming layer and microbatch."""
    driver = Driver(how)
    driver.ledger.begin_step(2)
    for microbatch in (0, 1):
        for kind in "FIW" if microbatch == 0 else moves:
            driver.act(kind, microbatch, slot=microbatch)
    fails(LeaseLeakError, driver.ledger.end_step, message=missing, layer="a", microbatch=1, step=2, chunk=0)


def test_a_slot_claimed_while_retained(how):
    driver = Driver(how)
    driver.ledger.begin_step(0)
    driver.act("F", 0)
    fails(LeaseRetainedError, driver.act, "F", 1, microbatch=1, holder=(0, 0, 0))


def test_a_stale_weight_at_the_first_read(how):
    """V1, V2: bumped and not refreshed, or refreshed without one of the layouts: the reader is named."""
    driver = Driver(how)
    driver.ledger.begin_step(0)
    driver.act("F", 0)
    driver.ledger.versions.bump(["a.weight"])
    error = fails(StaleWeightError, driver.act, "F", 1, None, 1, layer="a.weight", cached_version=0, parameter_version=1)
    assert error.place["microbatch"] == 1 and "0F1" in str(error)
    driver.ledger.abandon_step()
    driver.refresh(["rows"])
    driver.ledger.begin_step(0)
    driver.act("F", 0)
    fails(StaleWeightError, driver.act, "I", 0, message="layout 'columns'")


def test_a_cache_of_an_older_epoch(how):
    """Window step: the cache is made with the epoch's scale; a commit without a refresh is noticed by the
    next F.
    """
    driver = Driver(how)
    driver.ledger.begin_step(0)
    driver.ledger.commit(0)
    driver.ledger.end_step()
    driver.ledger.begin_step(1)
    fails(StaleWeightError, driver.act, "F", 0, cached_epoch=0, epoch=1)


def test_a_cache_outlives_commits_within_a_step_in_window_microbatch(how):
    """S1: five microbatches with a forward commit after each: the cache keeps its scale, nobody complains."""
    driver = Driver(how, window="microbatch")
    driver.ledger.begin_step(0)
    for microbatch in range(5):
        driver.act("F", microbatch, slot=microbatch)
        driver.ledger.commit(microbatch, (Direction.FORWARD,))
    assert driver.ledger.versions.caches["a.weight"].epoch == 0 and driver.ledger.timeline.epochs[Direction.FORWARD] == 5
    assert driver.ledger.weight_epoch() is None


@pytest.mark.parametrize("beta", [0, 1])
def test_a_wrong_beta(how, beta):
    """G1: the rule holds for I's cheap parameters and W's weights alike."""
    driver = Driver(how)
    driver.ledger.begin_step(0)
    for microbatch in (0, 1):
        driver.act("F", microbatch, slot=microbatch)
    if beta == 1:
        fails(GradSlotError, driver.act, "I", 0, 1, layer="norm.weight", microbatch=0, beta=1, writers=0)
        return
    driver.act("I", 0)
    driver.act("I", 1)
    driver.act("W", 0)
    error = fails(GradSlotError, driver.act, "W", 1, 0, microbatch=1, beta=0, writers=1)
    assert error.place["layer"] == "b.weight"


def test_a_contributor_is_missing_at_the_commit(how):
    driver = Driver(how)
    driver.expect(3)
    driver.ledger.begin_step(0)
    for microbatch in (0, 2):
        driver.act("F", microbatch, slot=microbatch)
    fails(ScaleOrderError, driver.ledger.commit, 0, message="before ('F', 0, 1) reported (1 missing)", epoch=0)


def test_a_declared_role_that_nobody_reports():
    """I1: its scale would freeze unnoticed; an idle producer reports EMPTY, which counts and leaves the slot alone."""
    driver = Driver()
    ledger = driver.ledger
    ledger.declare_roles("F", 0, ["a.input", "b.input", "idle.input"])
    ledger.declare_roles("I", 1, ["other.grad_output"])
    ledger.begin_step(0)
    error = fails(ScaleOrderError, driver.act, "F", 0, message="0F0 ended and nobody reported an amax (or EMPTY)")
    assert error.place == {"role": "idle.input", "chunk": 0, "microbatch": 0, "epoch": 0}
    ledger.abandon_step()
    ledger.begin_step(0)
    with ledger.action("F", 0, 0, slots=(Slot("I", 0, 0), Slot("W", 0, 0))) as scope:
        driver.work(scope)
        scope.report_empty("idle.input")
    assert "idle.input" in scope.summarise().roles
    driver.act("I", 0)
    ledger.check_roles("W", 0, 0, [])
    fails(ScaleOrderError, ledger.check_roles, "F", 0, 3, ["a.input"], role="b.input", microbatch=3)


def test_work_outside_a_step(how):
    driver = Driver(how)
    fails(LeaseError, driver.act, "F", 0, message="outside a step")
    driver.ledger.begin_step(0)
    driver.ledger.commit(0)
    fails(ScaleOrderError, driver.act, "F", 0, message="outside a window")


def test_a_commit_inside_an_action_is_refused():
    """I1: before any reader of the next epoch, after every reader of this one."""
    driver = Driver()
    driver.ledger.begin_step(0)
    slots = (Slot("I", 0, 0), Slot("W", 0, 0))
    with driver.ledger.action("F", 0, 0, slots=slots) as scope:
        assert scope.epoch == 0
        fails(ScaleOrderError, driver.ledger.commit, 0, message="still reads epoch 0")
        driver.work(scope)
    with pytest.raises(ScaleOrderError, match="outside its action"):
        scope.read_scale("a.input")
    with pytest.raises(ScaleOrderError, match="outside its action"):
        scope.report_amax("a.input")


def test_actions_do_not_nest():
    driver = Driver()
    driver.ledger.begin_step(0)
    slots = (Slot("I", 0, 0), Slot("W", 0, 0))
    with driver.ledger.action("F", 0, 0, slots=slots) as scope:
        with pytest.raises(LeaseError, match="F starts inside F"):
            with driver.ledger.action("F", 0, 1, slots=slots):
                pass
        driver.work(scope)
    driver.act("I", 0)


def test_after_an_exception_the_next_action_may_start():
    """L7: what an aborted action had begun is forgotten by ``abandon_step``; the same step then runs."""
    driver = Driver()
    driver.expect(2)
    fresh = driver.account()
    driver.ledger.begin_step(0)
    with pytest.raises(ZeroDivisionError):
        with driver.ledger.action("F", 0, 0, slots=(Slot("I", 0, 0), Slot("W", 0, 0))) as scope:
            driver.work(scope)
            raise ZeroDivisionError
    fails(LeaseRetainedError, driver.act, "F", 0)
    driver.ledger.abandon_step()
    assert {**driver.account(), "generations": None, "reported": None} == {
        **fresh,
        "generations": None,
        "reported": None,
    }
    full_step(driver, 0, 0)


orders = st.permutations([kind for kind in "FIW" for _ in range(3)])


@settings(max_examples=100)
@given(orders, st.integers(1, 3))
def test_replay_leaves_the_same_account_as_eager(order, steps):
    """Any order of three microbatches, right or wrong: eager and replay agree on the first error and on all
    counters.
    """
    eager, replay = Driver("eager"), Driver("replay")
    replay_start = replay.ledger.leases.generations()
    offset = replay_start.get("I0.0", 0)
    for driver in (eager, replay):
        driver.expect(3)
    for step in range(steps):
        for driver in (eager, replay):
            driver.ledger.begin_step(step)
        turn = dict.fromkeys("FIW", 0)
        for kind in order:
            microbatch, turn[kind] = turn[kind], turn[kind] + 1
            results = []
            for driver in (eager, replay):
                try:
                    driver.act(kind, microbatch, slot=microbatch)
                    results.append(None)
                except ContractViolation as error:
                    results.append((type(error), error.place.get("microbatch")))
            assert results[0] == results[1]
            if results[0]:
                return
        for driver in (eager, replay):
            driver.ledger.commit(step)
            driver.ledger.versions.bump()
            driver.refresh()
        a, b = eager.account(), replay.account()
        b["generations"] = {n: g - offset * (n in replay_start) for n, g in b["generations"].items()}
        assert a == b
        for driver in (eager, replay):
            driver.ledger.end_step()


def test_a_summary_is_what_the_graph_did():
    summaries = Driver("replay").summaries
    forward, backward, weight = summaries["F", None], summaries["I", 1], summaries["W", 0]
    assert forward == Summary(
        "F",
        frozenset({Direction.FORWARD}),
        ("a.input", "b.input"),
        (("a.weight", "rows"), ("b.weight", "rows")),
        ("a", "b"),
        (),
        None,
    )
    assert (backward.scales, backward.grads, backward.beta) == (
        frozenset({Direction.BACKWARD}),
        ("norm.weight",),
        1,
    )
    assert (weight.scales, weight.layers, weight.grads, weight.beta) == (
        frozenset(),
        ("b", "a"),
        ("b.weight", "a.weight"),
        0,
    )


def test_recording_checks_and_traces_nothing_and_ends_in_any_case(tmp_path):
    driver = Driver(mode="trace", trace=TraceWriter(tmp_path / "t.jsonl"))
    before = (tmp_path / "t.jsonl").read_text()
    with pytest.raises(ZeroDivisionError):
        with driver.ledger.recording():
            assert not driver.ledger.checks
            driver.ledger.versions.bump()
            fails(StaleWeightError, lambda: driver.ledger.versions.require(WEIGHTS[0], "rows", epoch=0))
            raise ZeroDivisionError
    assert driver.ledger.mode is Mode.TRACE and driver.ledger.checks
    assert (tmp_path / "t.jsonl").read_text() == before
    driver.ledger.versions.bump()
    assert (tmp_path / "t.jsonl").read_text() != before


# ---- modes -------------------------------------------------------------------------------------------------


def test_mode_off_checks_nothing_and_keeps_the_counters(how):
    """What a checkpoint saves is the same as under ``enforce``; what would be an error passes."""
    off, enforce = Driver(how, mode="off"), Driver(how)
    for step in range(2):
        full_step_unchecked(off, step)
        full_step(enforce, step, step)
    assert off.ledger.state() == enforce.ledger.state()
    assert off.ledger.versions.casts == enforce.ledger.versions.casts
    off.ledger.versions.bump()
    off.ledger.begin_step(5)
    off.act("F", 0)
    off.act("F", 1, slot=0)
    off.ledger.launch("a", [("x", Access.WRITE)], "one")
    off.ledger.launch("b", [("x", Access.WRITE)], "two")
    assert off.ledger.streams.buffers == ()
    off.ledger.end_step()
    assert off.ledger.leases.counts() == {"groups": 0, "slots": 0}


def full_step_unchecked(driver: Driver, step: int) -> None:
    driver.ledger.begin_step(step)
    for kind in "FIW":
        for microbatch in range(2):
            driver.act(kind, microbatch, slot=microbatch)
    driver.ledger.versions.bump()
    driver.ledger.commit(step)
    driver.refresh()
    driver.ledger.end_step()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError):
        Driver(mode="lenient")


# ---- streams -----------------------------------------------------------------------------------------------

READ, WRITE = Access.READ, Access.WRITE
EDGES = {
    "input was read": ("FILL1 (write on stream 'caller')", "REPLAY0 (read on stream 'graph')"),
    "input is ready": ("REPLAY0 (read on stream 'graph')", "FILL0 (write on stream 'caller')"),
    "output was read": ("REPLAY1 (write on stream 'graph')", "USE0 (read on stream 'caller')"),
    "output is ready": ("USE0 (read on stream 'caller')", "REPLAY0 (write on stream 'graph')"),
}


def caller_and_graph(ledger: Ledger, drop: str | None = None) -> float:
    """Two replays of ``output = 2 * input`` as a caller on another stream makes them; the data always come
    out right.
    """
    clock, total = ledger.streams, 0.0

    def edge(name: str, source: str, target: str) -> None:
        if name != drop:
            clock.wait(target, clock.record(source, [name.split()[0]]))

    for step in range(2):
        edge("input was read", "graph", "caller")
        ledger.launch("caller", [("input", WRITE)], f"FILL{step}")
        value = torch.tensor(float(step + 1))
        edge("input is ready", "caller", "graph")
        edge("output was read", "caller", "graph")
        ledger.launch("graph", [("input", READ), ("output", WRITE)], f"REPLAY{step}")
        output = value * 2
        edge("output is ready", "graph", "caller")
        ledger.launch("caller", [("output", READ)], f"USE{step}")
        total += float(output)
    return total


def test_a_replay_with_all_its_edges():
    assert caller_and_graph(Driver().ledger) == 6.0


@pytest.mark.parametrize("drop", EDGES)
def test_every_edge_of_a_replay_is_needed(drop):
    """T4: inputs → graph, graph → consumer, consumer → next replay, graph → next filling, each dropped in
    turn: trapped every time with the same words, though nothing ran concurrently; mode ``off`` shows that
    the data came out right.
    """
    for _ in range(3):
        error = fails(StreamOrderError, caller_and_graph, Driver().ledger, drop)
        late, early = EDGES[drop]
        assert f"{late} is not ordered after {early} of buffer '{drop.split()[0]}'" in str(error)
    assert caller_and_graph(Driver(mode="off").ledger, drop) == 6.0


def test_a_launch_is_an_edge_from_the_host():
    """What the host has synchronised with is ordered before whatever it launches next, on any stream."""
    ledger = Driver().ledger
    ledger.launch("a", [("x", WRITE)], "one")
    with pytest.raises(StreamOrderError):
        ledger.launch("b", [("x", READ)], "two")
    ledger.synchronize(ledger.record("a"))
    ledger.launch("c", [("x", READ)], "three")


def test_edges_through_the_ledger():
    """Full and early events, and settling, order accesses as the clock's own do; mode ``off`` records none."""
    ledger = Driver().ledger
    ledger.launch("a", [("x", WRITE), ("y", WRITE)], "one")
    ledger.wait("b", ledger.record("a", covers=["x"]))
    ledger.launch("b", [("x", READ)], "two")
    fails(StreamOrderError, ledger.launch, "b", [("y", READ)], "three")
    ledger.settle()
    ledger.launch("b", [("y", READ)], "three")
    off = Driver(mode="off").ledger
    off.launch("a", [("x", WRITE)], "one")
    event = off.record("a")
    off.wait("b", event)
    off.synchronize(event)
    off.settle()
    assert event is None and off.streams._streams == {}


def test_an_abandoned_step_has_waited_for_everything():
    """L7: after an abort nothing of before is in flight, so the next step's accesses are ordered after it."""
    ledger = Driver().ledger
    ledger.begin_step(0)
    ledger.launch("a", [("x", WRITE)], "one")
    ledger.abandon_step()
    ledger.launch("b", [("x", READ)], "two")


def quiet() -> Ledger:
    return Driver().ledger


def one_step(ledger: Ledger, step: int, *, edge: bool = True) -> None:
    """``compute`` writes what ``copy`` reads in the step after."""
    ledger.begin_step(step)
    ledger.launch("copy", [("x", Access.WRITE)], "batch")
    ledger.wait("compute", ledger.record("copy"))
    ledger.launch("compute", [("x", Access.READ)], "work")
    if edge:
        ledger.wait("copy", ledger.record("compute"))
    ledger.commit(step)
    ledger.end_step()


def test_the_mode_goes_back_on():
    """Edges made while it was off are unknown: with them forgotten, correct work would be refused. Who has waited says so."""
    ledger = quiet()
    one_step(ledger, 0, edge=False)  # its edge is made in the next step's place, while the mode is off
    ledger.switch("off")
    ledger.wait("copy", ledger.record("compute"))
    one_step(ledger, 1)
    fails(LeaseError, lambda: ledger.switch("enforce"), message="pass synchronised=True")
    assert ledger.mode is Mode.OFF
    ledger.switch("enforce", synchronised=True)
    one_step(ledger, 2)
    ledger.switch("off")
    ledger.switch("enforce")  # nothing happened meanwhile
    ledger.switch("off")
    with ledger.recording():
        ledger.launch("compute", [("x", Access.WRITE)], "captured")  # a capture launches nothing
    ledger.switch("enforce")
    one_step(ledger, 3, edge=False)
    ledger.begin_step(4)
    fails(StreamOrderError, ledger.launch, "copy", [("x", Access.WRITE)], "batch", message="is not ordered after work")


def test_steps_between_switches_are_still_followed():
    """Settling at every switch leaves a steady order steady, so that benchmarks which take turns measure what a run has."""
    ledger = quiet()
    for step in range(12):
        ledger.switch("off" if step % 4 in (0, 3) else "enforce", synchronised=True)
        one_step(ledger, step)
    assert ledger.streams._script is not None


@pytest.mark.parametrize("number", [torch.tensor(0), 0.0])
def test_a_microbatch_that_is_no_whole_number(number):
    ledger = quiet()
    ledger.begin_step(0)
    with pytest.raises(UsageError, match="whole numbers, not 0 and .*0"), ledger.action(
        "F", 0, number, slots=(Slot("I", 0, 0), Slot("W", 0, 0))
    ):
        pass
