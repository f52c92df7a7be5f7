"""The plan check: sound plans are proved, and every rule rejects its breach with rank, position, action and reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import parse_actions
from pipeline.effects import program
from pipeline.mutate import effects_mutants, judge
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.program import Op, Program, parse_op
from pipeline.prove import prove, prove_rank
from pipeline.rendezvous import Rendezvous
from pipeline.schedules import SCHEDULES, Placement
from pipeline.symbolic import Simulator
from qeffect_lm.app.assemble import assemble
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from tests.tiny import config
from tests.unit.pipeline_plans import PLACEMENTS, random_compute
from tests.unit.test_pipeline_effects import split

Change = Callable[[list[str]], list[str]]


# ---- sound plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_proved(name, window):
    for p, m in ((1, 2), (2, 1), (2, 3), (3, 2), (3, 5)):
        plan = build_plan(name, p, m, window=window)
        counts = {what: count for what, count, _ in prove(plan).properties}
        chunks = plan.placement.num_chunks
        assert counts["leases"] == 2 * chunks * m and counts["scales"] == counts["caches"] == 4 * chunks * m
        crossing = sum(plan.placement.crosses(chunk, chunk + 1) for chunk in range(chunks - 1))
        assert counts["messages"] == 2 * 2 * crossing * m and counts["progress"] == p
        for rank in range(p):
            prove_rank(plan, rank)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(PLACEMENTS), st.integers(1, 4), st.integers(0, 2**32), st.sampled_from(["step", "microbatch"]))
def test_every_order_of_work_that_can_be_lowered_is_proved(ranks, microbatches, seed, window):
    """What the engine does around it is right for any plan: the check invents nothing."""
    placement = Placement(ranks)
    compute = split(random_compute(seed, placement, microbatches, unordered=False))
    prove(make_plan("random", compute, placement, microbatches, window=window))


def test_a_plan_may_declare_that_it_leaves_microbatch_order():
    rows = [parse_actions("0F1 0F0 0F2 0I2 0I0 0I1 0W1 0W0 0W2")]
    plan = make_plan("own", rows, Placement((0,)), 3, allow_unordered=True)
    prove(plan)
    prove_rank(plan, 0)
    assert Program.from_json(program(plan).to_json()).unordered
    with pytest.raises(PlanError, match="leaves microbatch order"):
        prove(replace(program(plan), unordered=False))


def test_b_is_refused():
    with pytest.raises(UsageError, match="this plan holds B"):
        prove(make_plan("fused", [parse_actions("0F0 0B0")], Placement((0,)), 1))


def seconds(name: str, p: int, m: int) -> float:
    plan = build_plan(name, p, m)
    begin = time.process_time()
    prove(plan)
    return time.process_time() - begin


def test_speed():
    """About half a second here; four times that, as the machine may be shared."""
    assert seconds("zb-h1", 8, 24) < 2


@pytest.mark.long
@pytest.mark.timeout(900)  # the bound is on CPU time
@pytest.mark.parametrize("name", ["zb-h1", "interleaved-1f1b"])
def test_speed_of_32_ranks_256_microbatches(name):
    assert seconds(name, 32, 256) < (30 if name == "zb-h1" else 60)


# ---- breaches --------------------------------------------------------------------------------------------------------


def changed(plan: Plan, rank: int, change: Change) -> Program:
    whole = program(plan)
    return whole.with_row(rank, map(parse_op, change([str(op) for op in whole.rows[rank]])))


def at(lines: list[str], start: str, which: int = 0) -> int:
    """The position of the ``which``-th line that begins with these words."""
    return [number for number, line in enumerate(lines) if line.startswith(start)][which]


def drop(start: str, which: int = 0) -> Change:
    def change(lines: list[str]) -> list[str]:
        place = at(lines, start, which)
        return [*lines[:place], *lines[place + 1 :]]

    return change


def sub(start: str, old: str, new: str) -> Change:
    def change(lines: list[str]) -> list[str]:
        place = at(lines, start)
        assert old in lines[place]
        return [*lines[:place], lines[place].replace(old, new, 1), *lines[place + 1 :]]

    return change


def twice(start: str) -> Change:
    def change(lines: list[str]) -> list[str]:
        place = at(lines, start)
        return [*lines[: place + 1], *lines[place:]]

    return change


def move(start: str, before: str) -> Change:
    def change(lines: list[str]) -> list[str]:
        line = lines[at(lines, start)]
        rest = drop(start)(lines)
        place = at(rest, before)
        return [*rest[:place], line, *rest[place:]]

    return change


def exchange(one: str, other: str) -> Change:
    """Exchange two launches, each with the event after it."""

    def change(lines: list[str]) -> list[str]:
        i, j = at(lines, one), at(lines, other)
        changed = list(lines)
        changed[i : i + 2], changed[j : j + 2] = lines[j : j + 2], lines[i : i + 2]
        return changed

    return change


def again(start: str, before: str) -> Change:
    def change(lines: list[str]) -> list[str]:
        place = at(lines, before)
        return [*lines[:place], lines[at(lines, start)], *lines[place:]]

    return change


FIRST, LATE = build_plan("gpipe", 2, 3), build_plan("1f1b", 2, 3, 3)
STEP, MICRO = build_plan("1f1b", 2, 3), build_plan("1f1b", 2, 3, window="microbatch")
LOCAL = make_plan("v", [parse_actions("0F0 1F0 1I0 1W0 0I0 0W0 0F1 1F1 1I1 1W1 0I1 0W1")], Placement((0, 0)), 2)

BREACHES: dict[str, tuple[Plan, int, Change, str, str]] = {  # plan, rank, change, action, reason
    # edges
    "no edge to a send": (STEP, 0, drop("wait send_F"), "0SEND_F0", "StreamOrderError.*not ordered after 0F0"),
    "no edge from a send": (STEP, 0, sub("wait compute e1", "compute", "send_F"), "0F2", "StreamOrderError.*after 0SEND_F0"),
    "no edge to a receive": (STEP, 1, drop("wait recv_F", 2), "1RECV_F2", "StreamOrderError.*not ordered after 1I"),
    "no edge from a receive": (STEP, 1, drop("wait compute"), "1F0", "StreamOrderError.*not ordered after 1RECV_F0"),
    "no edge to REDUCE": (STEP, 0, drop("wait collective"), "REDUCE", "StreamOrderError.*not ordered after 0W2"),
    "no edge from GATHER": (STEP, 0, drop("wait compute", -1), "STEP", "StreamOrderError.*not ordered after GATHER"),
    "an event of nobody": (STEP, 0, sub("wait send_F", "e0", "e999"), "wait send_F e999", "never recorded"),
    # leases and slots
    "no W": (STEP, 0, drop("launch compute 0W1"), "REDUCE", "GradSlotError.*2 of 3"),
    "W twice": (STEP, 0, twice("launch compute 0W1"), "0W1", "none of those who have still to read it"),
    "I before its F": (STEP, 0, move("launch compute 0I1", "launch compute 0F1"), "0I1", "reads dy.0.1, which holds nothing"),
    "W before its I": (LOCAL, 0, move("launch compute 0W0", "launch compute 0I0"), "0W0", "WeightGradBeforeInputGradError"),
    "an I-slot that is held": (
        STEP, 0, sub("launch compute 0F1", "i=1 w=1", "i=0 w=1"), "0F1", "states slot 0 and accesses retained_I of slot 1",
    ),
    "a W-slot that is held": (
        STEP, 0, sub("launch compute 0F1", "retained_W.0.1", "retained_W.0.0"), "0F1",
        "retained_W.0.0 is written while it holds microbatch 0 for I and W",
    ),
    "other slots at I": (
        STEP, 0, sub("launch compute 0I0", "w=0", "w=1"), "0I0", "states slot 1 and accesses retained_W of slot 0",
    ),
    "other slots at W": (STEP, 0, sub("launch compute 0W0", "i=0", "i=1"), "0W0", "StaleHandleError"),
    "a border buffer that is held": (
        FIRST, 1, sub("launch recv_F 1RECV_F1", "x.1.1", "x.1.0"), "1RECV_F1", "x.1.0 is written while it holds microbatch 0",
    ),
    "another microbatch's buffer": (
        STEP, 0, sub("launch send_F 0SEND_F1", "out.0.1", "out.0.0"), "0SEND_F1", "holds microbatch 0",
    ),
    "an input that nobody read": (LOCAL, 0, drop("launch compute 1F0"), "1LOSS0", "reads out.1.0, which holds nothing yet"),
    "an input for nobody": (
        STEP, 0, again("launch compute 0INPUT2", "launch compute SUM"), "end", "still holds microbatch 2 for F",
    ),
    "a receive that holds up its stream": (
        FIRST, 0, sub("launch recv_B 0RECV_B0", "launch recv_B", "launch compute"), "0RECV_B0", "deadlock between streams: ",
    ),
    "no hand-over": (LOCAL, 0, drop("launch compute 0PASS_F0"), "1F0", "reads x.1.0, which holds nothing yet"),
    "the wrong input": (STEP, 0, drop("launch compute 0INPUT2"), "0F2", "reads x.0.0, which holds microbatch 0"),
    # scales
    "no commit": (STEP, 0, drop("launch compute COMMIT"), "REFRESH", "when the step is 'committed', now it is 'stepped'"),
    "no commit of a forward": (MICRO, 0, drop("launch compute 0COMMIT_F1"), "0F2", "ScaleOrderError.*a commit is missing"),
    "no last commit": (MICRO, 0, drop("launch compute 0COMMIT_I2"), "end", "ScaleOrderError.*the commit after .* is missing"),
    "a commit twice": (MICRO, 0, twice("launch compute 0COMMIT_F1"), "0COMMIT_F1", "was not merged over replicas"),
    "amax not merged": (MICRO, 0, drop("launch collective 0REDUCE_F1"), "0COMMIT_F1", "0F1 was not merged over replicas"),
    "a commit of another epoch": (
        MICRO, 0, sub("launch compute 0COMMIT_F1", "epoch=1", "epoch=0"), "0COMMIT_F1", "ScaleOrderError",
    ),
    "a read of another epoch": (STEP, 0, sub("launch compute 0F1", "epoch=0", "epoch=1"), "0F1", "ScaleOrderError"),
    "a refresh of another epoch": (
        STEP, 0, sub("launch compute REFRESH", "epoch=1", "epoch=0"), "REFRESH", "the scales are at 1",
    ),
    "a commit of the other window": (
        STEP, 0, sub("launch compute 0F1", "0F1 i=1 w=1 epoch=0 version=0", "0COMMIT_F1 epoch=0"),
        "0COMMIT_F1", "no COMMIT_F in window step",
    ),
    "the step's commit in window microbatch": (
        MICRO, 0, sub("launch compute REFRESH", "REFRESH epoch=3 version=1", "COMMIT epoch=0"), "COMMIT", "no COMMIT in window",
    ),
    # caches
    "no refresh": (STEP, 0, drop("launch compute REFRESH"), "end", "has only come to 'committed'"),
    "a refresh of old weights": (
        STEP, 0, sub("launch compute REFRESH", "version=1", "version=0"), "REFRESH", "StaleWeightError",
    ),
    "a read of a later version": (STEP, 0, sub("launch compute 0I1", "version=0", "version=1"), "0I1", "StaleWeightError"),
    "a step that makes no version": (STEP, 0, sub("launch compute STEP", "version=1", "version=0"), "STEP", "StaleWeightError"),
    # gradients and losses
    "beta 1 first": (STEP, 0, sub("launch compute 0W0", "beta=0", "beta=1"), "0W0", "GradSlotError.*beta 1"),
    "beta 0 later": (STEP, 0, sub("launch compute 0I1", "beta=1", "beta=0"), "0I1", "GradSlotError.*beta 0"),
    "a sum in another order": (
        LATE, 0, exchange("launch compute 0W1", "launch compute 0W2"), "0W1", "leaves microbatch order",
    ),
    "W after REDUCE": (STEP, 0, move("launch compute 0W2", "launch compute NORM"), "REDUCE", "GradSlotError.*2 of 3"),
    "a loss that is not kept": (STEP, 1, drop("launch compute 1LOSS2"), "SUM", "losses are summed when 2 of 3"),
    "REDUCE twice": (STEP, 0, twice("launch collective REDUCE"), "REDUCE", "when the step is 'summed', now it is 'reduced'"),
    # messages
    "another peer": (STEP, 0, sub("launch send_F 0SEND_F0", "to=1", "to=0"), "0SEND_F0", "chunk 1 lives on rank 1, not on 0"),
    "a send twice": (STEP, 0, twice("launch send_F 0SEND_F0"), "0SEND_F0", "none of those who have still to read it"),
    "a receive twice": (STEP, 0, twice("launch recv_B 0RECV_B0"), "0RECV_B0", "is written while it holds"),
    "no wait for a transfer": (STEP, 0, drop("complete 0RECV_B0"), "0I0", "reads dy.0.0 before its transfer was completed"),
    "a send still running": (STEP, 0, drop("complete 0SEND_F0"), "0F2", "out.0.0 is written before 0SEND_F0 was completed"),
    "a send never waited for": (STEP, 0, drop("complete 0SEND_F2"), "end", "nobody waited for 0SEND_F2"),
    "a wait for what was not posted": (STEP, 0, sub("complete 0RECV_B0", "B0", "B1"), "0RECV_B1", "was not posted"),
    "a wait twice": (STEP, 0, twice("complete 0RECV_B0"), "0RECV_B0", "completed before"),
    "receives in another order": (
        FIRST, 1, exchange("launch recv_F 1RECV_F0", "launch recv_F 1RECV_F1"), "1RECV_F1", "meets 0SEND_F0",
    ),
    # form
    "an access that is not declared": (
        STEP, 0, sub("launch compute 0F1", " caches=read", ""), "0F1", "must declare that it accesses caches",
    ),
    "no workspace": (STEP, 0, sub("launch compute 0F1", " workspace.compute=write", ""), "0F1", "accesses workspace"),
    "a chunk of another rank": (STEP, 0, sub("launch compute 0F1", "0F1", "1F1"), "1F1", "chunk 1"),
    "no such microbatch": (STEP, 0, sub("launch compute 0F1", "0F1", "0F9"), "0F9", "the step has 3 microbatches"),
    "no slot": (STEP, 0, sub("launch compute 0F1", "i=1 ", ""), "0F1", "F says epoch, version, w_slot, it must say"),
    "a loss in the middle": (
        STEP, 0, sub("launch compute 0INPUT1", "INPUT", "LOSS"), "0LOSS1", "only the last chunk has a loss",
    ),
    "a hand-over to another rank": (STEP, 0, sub("launch compute 0INPUT1", "INPUT", "PASS_F"), "0PASS_F1", "has to be sent"),
    "a send to oneself": (LOCAL, 0, sub("launch compute 0PASS_F0", "PASS_F0", "SEND_F0 to=0"), "0SEND_F0", "nothing is sent"),
    "a send from the end": (
        STEP, 1, sub("launch compute 1INPUT1", "1INPUT1", "1SEND_F1 to=0"), "1SEND_F1", "nobody to exchange",
    ),
    "a receive at the start": (
        STEP, 0, sub("launch compute 0INPUT1", "0INPUT1", "0RECV_F1 from=1"), "0RECV_F1", "nobody to exchange",
    ),
    "work before the step": (STEP, 0, drop("begin"), "DIVISOR", "outside a step"),
    "a step in a step": (STEP, 0, twice("begin"), "begin", "before the one before it ended"),
    "a step that does not end": (STEP, 0, drop("end"), "end", "does not end its step"),
    "no divisor": (STEP, 0, drop("launch compute DIVISOR"), "0INPUT0", "when the step is 'open', now it is 'begun'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_rejected_at_its_place(name):
    plan, rank, change, action, reason = BREACHES[name]
    broken = changed(plan, rank, change)
    with pytest.raises(PlanError, match=reason) as caught:
        prove(broken)
    place = caught.value.place
    assert (place["rank"], place["action"]) == (rank, action)
    position = place["position"]
    row = broken.rows[rank]
    assert position == len(row) or row[position].name == action


def test_a_plan_that_breaks_a_rule_is_rejected_before_its_effects():
    rows = (STEP.actions[0], tuple(a for a in STEP.actions[1] if str(a) != "1SEND_B1"))
    with pytest.raises(PlanError, match="1SEND_B1 is missing") as caught:
        prove(replace(STEP, actions=rows))
    assert caught.value.place["rank"] == 1


def test_ranks_that_wait_for_each_other():
    """Both send before they post what the other sends: no rank gets on with rendezvous sends, both do with buffered ones.
    A wait for a message that is sent after the other's wait stops both kinds; the gather stops ranks too.
    """

    def late(lines: list[str]) -> list[str]:
        start = at(lines, "launch recv_B 0RECV_B0")
        block = lines[start - 2 : start + 2]  # with its edge before and its event after
        rest = lines[: start - 2] + lines[start + 2 :]
        place = at(rest, "launch send_F 0SEND_F1") + 2
        return [*rest[:place], *block, *rest[place:]]

    stops = r"deadlock with rendezvous sends: rank \d \(\dSEND_\w\d\) waits for rank \d; rank"
    with pytest.raises(PlanError, match=stops) as caught:
        prove(changed(build_plan("1f1b", 2, 2), 0, late))
    assert caught.value.place["action"] in ("0SEND_F1", "1SEND_B0")
    actions = [parse_actions("0SEND_F0 0RECV_B0 0I0"), parse_actions("1SEND_B0 1RECV_F0 1F0")]
    assert Rendezvous(actions, Placement((0, 1)), lowered=True, buffered=True).run()
    assert not Rendezvous(actions, Placement((0, 1)), lowered=True).run()
    waits = [parse_actions("0RECV_B0 0I0 0SEND_F0"), parse_actions("1RECV_F0 1F0 1SEND_B0")]
    assert not Rendezvous(waits, Placement((0, 1)), lowered=True, buffered=True).run()
    meet = [parse_actions("0F0 STEP 0SEND_F0"), parse_actions("1RECV_F0 1F0 STEP")]
    stuck = Rendezvous(meet, Placement((0, 1)), lowered=True, buffered=True)
    assert not stuck.run() and {str(one.action) for one in stuck.cycle()} == {"STEP", "1F0"}
    fine = [parse_actions("0SEND_F0 STEP STEP"), parse_actions("1RECV_F0 1F0 STEP STEP")]
    assert Rendezvous(fine, Placement((0, 1)), lowered=True).run()


def test_an_edge_that_only_the_next_step_misses():
    """Caches made on a stream of their own, with all edges there and none back: the first F of the next step reads them."""
    whole = program(build_plan("1f1b", 1, 1))
    lines = [str(op) for op in whole.rows[0]]
    place = at(lines, "launch compute REFRESH")
    refresh = lines[place].replace("launch compute", "launch refresh").replace("workspace.compute", "workspace.refresh")
    alone = [*lines[:place], "record compute e90", "wait refresh e90", refresh]
    broken = whole.with_row(0, map(parse_op, [*alone, *lines[place + 1 :]]))
    with pytest.raises(PlanError, match="0F0 .* is not ordered after REFRESH.*in the step after the first"):
        prove(broken)
    prove(whole.with_row(0, map(parse_op, [*alone, "record refresh e91", "wait compute e91", *lines[place + 1 :]])))


@pytest.mark.parametrize("kind", "FI")
def test_an_amax_merged_over_replicas_before_it_is_there(kind):
    """Window ``microbatch``: one rank has nobody to merge with, and is refused all the same; after its action it is right."""
    whole = program(build_plan("1f1b", 1, 2, window="microbatch"))
    lines = [str(op) for op in whole.rows[0]]
    reduce, action = at(lines, f"launch collective 0REDUCE_{kind}0"), at(lines, f"launch compute 0{kind}0")
    early = [*lines[:action], lines[reduce], *lines[action:reduce], *lines[reduce + 1 :]]
    with pytest.raises(PlanError, match=f"ScaleOrderError: 0REDUCE_{kind}0, and 0{kind}0 has not reported its amax yet"):
        prove(whole.with_row(0, map(parse_op, early)))
    prove(whole)


def test_a_host_that_waits_for_an_event():
    """``wait host`` blocks the host: before its send, for the answer to it, nobody gets on; after it, it is a host wait."""
    whole = program(build_plan("1f1b", 2, 1))
    lines = [str(op) for op in whole.rows[0]]
    send, gradient = at(lines, "launch send_F 0SEND_F0"), at(lines, "record recv_B")
    wait = lines[gradient].replace("record recv_B", "wait host")
    prove(whole.with_row(0, map(parse_op, [*lines[: send + 2], wait, *lines[send + 2 :]])))
    with pytest.raises(PlanError, match="deadlock between streams: .*0RECV_B0") as caught:
        prove(whole.with_row(0, map(parse_op, [*lines[:send], wait, *lines[send:]])))
    assert {"rank", "position", "action"} <= set(caught.value.place)


def test_the_simulator_knows_host_waits():
    """Both of the check's judges agree on them: the valid program is sound, the other one ends in a deadlock."""
    whole = program(build_plan("1f1b", 2, 1))
    lines = [str(op) for op in whole.rows[0]]
    send, gradient = at(lines, "launch send_F 0SEND_F0"), at(lines, "record recv_B")
    wait = lines[gradient].replace("record recv_B", "wait host")
    later = whole.with_row(0, map(parse_op, [*lines[: send + 2], wait, *lines[send + 2 :]]))
    earlier = whole.with_row(0, map(parse_op, [*lines[:send], wait, *lines[send:]]))
    assert Simulator().run(later).sound
    assert Simulator().run(earlier).deadlock


# ---- effects of one's own -------------------------------------------------------------------------------------------


def w_on_its_own_stream(plan: Plan, workspace: str, *, back: bool = True) -> Program:
    """Every W on a stream ``wgrad`` that waits for its I; compute waits where it writes the slot again, and before SUM."""
    whole = program(plan)
    rows = []
    for row in whole.rows:
        ops: list[Op] = []
        number = 1000
        done: dict[object, int] = {}  # W-slot → the event after its W
        for op in row:
            needed = [done.pop(buffer) for buffer, access in op.accesses if access == "write" and buffer in done]
            if op.work == "SUM":
                needed += done.values()
            ops += [parse_op(f"wait compute e{event}") for event in needed if back]
            if op.work != "W":
                ops.append(op)
                continue
            waited = ops.pop()  # W's own wait for its I
            scratch = ("workspace", workspace)
            accesses = tuple((scratch if buffer[0] == "workspace" else buffer, kind) for buffer, kind in op.accesses)
            ops += [replace(waited, stream="wgrad"), replace(op, stream="wgrad", accesses=accesses)]
            ops.append(parse_op(f"record wgrad e{number}"))
            done[next(buffer for buffer, _ in op.accesses if buffer[0] == "retained_W")] = number
            number += 1
        rows.append(tuple(ops))
    return replace(whole, rows=tuple(rows))


def test_w_on_a_stream_of_its_own():
    plan = build_plan("zb-h1", 2, 4)
    own = w_on_its_own_stream(plan, "wgrad")
    assert Program.from_json(own.to_json()) == own
    counts = {name: text for name, _, text in prove(own).properties}
    assert "of 4 library workspaces" in counts["workspaces"]
    with pytest.raises(PlanError, match=r"StreamOrderError.*\('workspace', 'compute'\)") as caught:
        prove(w_on_its_own_stream(plan, "compute"))
    assert caught.value.place["action"].startswith(("0W", "0F", "0I", "0INPUT"))
    with pytest.raises(PlanError, match="StreamOrderError"):
        prove(w_on_its_own_stream(plan, "wgrad", back=False))


# ---- at the start of a run ----------------------------------------------------------------------------------------


def test_a_run_proves_its_plan_before_it_begins(monkeypatch):
    """Assembling a rank checks the rank's program; mode off does not, as it checks nothing."""
    seen = []
    monkeypatch.setattr("pipeline.effects._Row._weight_grad", lambda self, action: seen.append(action))  # an engine without W
    with pytest.raises(PlanError, match="retained_W.0.0 is written while it holds microbatch 0 for W") as caught:
        assemble(config())
    assert caught.value.place["action"] == "0F2" and len(seen) == 4
    assemble(config(contract__mode="off"))
    assert len(seen) == 4


# ---- replicas --------------------------------------------------------------------------------------------------------


def too_early(lines: list[str]) -> list[str]:
    """The reduction with its edge, before the last writer."""
    start, stop = at(lines, "launch collective 1REDUCE_G1") - 2, at(lines, "launch collective 1REDUCE_G1") + 1
    rest = [*lines[:start], *lines[stop:]]
    place = at(rest, "launch compute 1W1")
    return [*rest[:place], *lines[start:stop], *rest[place:]]


OWN = "launch collective 0REDUCE_G1"
REPLICAS: dict[str, tuple[Change, str]] = {
    "before the last writer": (too_early, "with 1 of 2 contributions"),
    "before its edge": (move("launch collective 1REDUCE_G1", "launch compute 1W1"), "not ordered after 1W0"),
    "without an edge": (drop("wait collective"), "not ordered after"),
    "twice": (twice("launch collective 1REDUCE_G1"), "a second time"),
    "never": (drop("launch collective 1REDUCE_G1"), "the gradients of chunk 1 are complete and not reduced over replicas"),
    "without its gradients": (sub(OWN, "grads_I.0=write", ""), "must declare that it accesses grads_I.0"),
    "of a chunk that is elsewhere": (sub(OWN, "0REDUCE_G1", "2REDUCE_G1"), "does not live on rank 0"),
}


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("window", ["step", "microbatch"])
def test_replicas_reduce_each_chunk_when_it_is_complete(name, window):
    plan = build_plan(name, 2, 3, window=window)
    whole = program(plan, replicas=True)
    prove(whole)
    for rank, row in enumerate(whole.rows):
        for peers in (False, True):
            prove_rank(plan, rank, replicas=True, peers=peers)
        works = [op.name for op in row if op.work in ("W", "REDUCE_G")]
        for chunk in plan.placement.chunks(rank):
            place = works.index(f"{chunk}REDUCE_G2")
            assert works[place - 1] == f"{chunk}W2" and not any(work.startswith(f"{chunk}W") for work in works[place:])


@pytest.mark.parametrize("which", REPLICAS)
def test_a_breach_of_the_reduction_over_replicas(which):
    change, reason = REPLICAS[which]
    whole = program(LOCAL, replicas=True)
    prove(whole)
    with pytest.raises(PlanError, match=reason):
        prove(whole.with_row(0, map(parse_op, change([str(op) for op in whole.rows[0]]))))


def test_no_mutant_of_the_reduction_over_replicas_survives_wrongly():
    """Every way to break the operations around it, judged by the simulator, which shares no code with the check."""
    whole = program(LOCAL, replicas=True)
    mutants = [one for one in effects_mutants(whole) if "REDUCE_G" in one.what]
    found = judge(whole, mutants)
    assert len(mutants) > 100 and found.total == len(mutants)
    assert found.wrong_survivors == [] and found.unplaced == [] and found.wrong.total() > 30
