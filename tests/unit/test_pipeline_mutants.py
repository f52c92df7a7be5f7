"""Mutation testing of the plan check, judged by the simulator of all interleavings; and tests of that judge."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import mutate, prove_rank, symbolic
from pipeline.actions import parse_actions
from pipeline.effects import program
from pipeline.mutate import Mutant, Score, effects_mutants, plan_mutants, score
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.program import Program, parse_op
from pipeline.prove import prove
from pipeline.schedules import SCHEDULES, Placement
from pipeline.symbolic import Simulator
from qeffect_lm.contract.streams import StreamClock
from qeffect_lm.errors import UsageError
from tests.unit.test_pipeline_prove import STEP, at, changed, drop, move, sub, twice, w_on_its_own_stream

SAMPLED = [
    ("1f1b", 2, 3, "step"), ("gpipe", 2, 2, "microbatch"), ("zb-h1", 3, 2, "step"), ("zb-v", 2, 2, "step"),
    ("interleaved-1f1b", 2, 2, "microbatch"),
]  # fmt: skip
ALL = [
    ("1f1b", 1, 2, "step"), ("1f1b", 1, 2, "microbatch"), ("1f1b", 2, 2, "step"), ("1f1b", 2, 2, "microbatch"),
    ("gpipe", 2, 2, "step"), ("gpipe", 2, 3, "step"), ("zb-h1", 2, 2, "step"), ("zb-h1", 3, 2, "step"),
    ("zb-h2", 2, 3, "step"), ("zb-v", 1, 2, "step"), ("zb-v", 2, 2, "step"), ("interleaved-1f1b", 2, 2, "step"),
    ("1f1b", 3, 2, "step"),
]  # fmt: skip


def assert_nothing_missed(result: Score) -> None:
    print("\n".join(result.lines()))
    assert result.wrong_survivors == [] and result.unplaced == []
    assert result.unknown.total() == 0


def test_a_sample_of_mutants():
    """Of several plans: none is accepted that can go wrong, all rejections have a place; the score is printed."""
    total = Score()
    for seed, (name, p, m, window) in enumerate(SAMPLED):
        total += score(build_plan(name, p, m, window=window), sample=40, seed=seed)
    assert_nothing_missed(total)
    assert total.total == 40 * len(SAMPLED) and total.wrong.total() > 100 and total.equal.total() > 3


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", ALL, ids=str)
def test_all_mutants(which):
    name, p, m, window = which
    assert_nothing_missed(score(build_plan(name, p, m, window=window)))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_mutants_of_effects_of_one_s_own():
    """W on a stream of its own: more edges that matter."""
    assert_nothing_missed(score(w_on_its_own_stream(build_plan("zb-h1", 2, 2), "wgrad"), sample=6000))


@pytest.mark.parametrize("weaker", ["contents", "edges", "slots"])
def test_a_weaker_check_would_be_found_out(weaker, monkeypatch):
    """The control: with a part of the check gone, mutants survive that the simulator shows to be wrong."""
    subject = w_on_its_own_stream(build_plan("1f1b", 2, 2), "wgrad")
    how, word = {"edges": ("drop", "wait"), "contents": ("drop", "INPUT"), "slots": ("retarget", "to launch recv_B")}[weaker]
    if weaker == "edges":
        monkeypatch.setattr(StreamClock, "_check", lambda *_: None)
    else:
        monkeypatch.setattr(prove_rank.RankCheck, "_touch", lambda *_: None)
    mutants = [one for one in effects_mutants(subject) if one.how == how and word in one.what]
    assert mutate.judge(subject, mutants).wrong_survivors


def test_a_survivor_by_hand():
    """W of two chunks may change places: accepted, and equal."""
    plan = make_plan("v", [parse_actions("0F0 1F0 1I0 0I0 1W0 0W0")], Placement((0, 0)), 1)
    mutants = [one for one in plan_mutants(plan) if one.how == "swap" and one.what.startswith("1W0") and "with 0W0" in one.what]
    result = mutate.judge(plan, mutants)
    assert len(mutants) == 1 and dict(result.equal) == {"plan swap": 1}


def test_mutants_cover_every_operation_and_field():
    whole = program(build_plan("1f1b", 2, 2))
    mutants = list(effects_mutants(whole))
    for rank, row in enumerate(whole.rows):
        for i, op in enumerate(row):
            mine = [one for one in mutants if one.what.startswith(f"{op.name} (rank {rank}, operation {i})")]
            assert {"drop", "duplicate"} <= {one.how for one in mine}
            swaps = [one for one in mine if one.how == "swap"]
            assert len(swaps) == sum(other != op for other in row[i + 1 :])
    fields = ("stream", "event", "chunk", "microbatch", "peer", "i_slot", "w_slot", "beta", "epoch", "version", "accesses")
    seen = set()
    for one in mutants:
        if one.how == "retarget":
            assert isinstance(one.subject, Program) and one.subject != whole
            for row, other in zip(whole.rows, one.subject.rows, strict=True):
                for a, b in zip(row, other, strict=True):
                    seen |= {field for field in fields if getattr(a, field) != getattr(b, field)}
    assert seen == set(fields)


# ---- the judge -------------------------------------------------------------------------------------------------------


def result(subject: Plan | Program, steps: int = 2):
    return Simulator(steps).run(subject if isinstance(subject, Program) else program(subject))


def test_one_result_for_all_schedules():
    """Plans of one placement give one result, whatever their order: losses, ordered sums, weights, scales, caches."""
    for window in ("step", "microbatch"):
        simulator = Simulator()
        for shape in ("linear", "v"):
            names = [name for name, one in SCHEDULES.items() if one.shape == shape]
            outcomes = [simulator.run(program(build_plan(name, 2, 3, window=window))) for name in names]
            assert len(names) > 1 and all(one.sound for one in outcomes)
            assert len(set().union(*(one.finals for one in outcomes))) == 1
    more = simulator.run(program(build_plan("1f1b", 2, 4)))
    assert more.sound and more.finals != outcomes[0].finals


WRONG = {
    "stale scales": drop("launch compute COMMIT"),
    "stale caches": drop("launch compute REFRESH"),
    "another microbatch's activations": sub("launch compute 0W1", "retained_W.0.1", "retained_W.0.0"),
    "a lost gradient": drop("launch compute 0W1"),
    "a gradient twice": twice("launch compute 0W1"),
    "a sum that starts again": sub("launch compute 0I1", "beta=1", "beta=0"),
    "last step's sum": sub("launch compute 0I0", "beta=0", "beta=1"),
    "a sum in another order": lambda lines: exchange_lines(lines, "launch compute 0W1", "launch compute 0W2"),
    "an update before the sum": move("launch compute STEP", "launch collective REDUCE"),
    "amax that replicas do not share": drop("launch collective REDUCE"),
    "a message of another microbatch": sub("launch send_F 0SEND_F1", "out.0.1", "out.0.0"),
    "a send that does not wait": drop("wait send_F"),
    "a read that does not wait": drop("wait compute"),
}


def exchange_lines(lines: list[str], one: str, other: str) -> list[str]:
    """Two pieces of work in each other's place, each with its own beta."""
    i, j = at(lines, one), at(lines, other)
    swapped = list(lines)
    swapped[i], swapped[j] = lines[j], lines[i]
    return swapped


@pytest.mark.parametrize("name", WRONG)
def test_the_simulator_sees_wrong_results(name):
    simulator = Simulator()
    valid = simulator.run(program(STEP))
    outcome = simulator.run(changed(STEP, 0, WRONG[name]))
    assert valid.sound and not outcome.deadlock and outcome.finals - valid.finals
    assert outcome.sound == (len(outcome.finals) == 1)


def test_the_simulator_sees_deadlocks_and_shared_workspaces():
    for start in ("launch send_F 0SEND_F1", "launch recv_B 0RECV_B1", "launch collective GATHER"):
        assert result(changed(STEP, 0, drop(start))).deadlock
    first = "launch send_F 0SEND_F0"
    awaited = changed(STEP, 0, lambda lines: move("complete 0RECV_B0", first)(move("launch recv_B 0RECV_B0", first)(lines)))
    assert result(awaited).deadlock
    assert result(changed(STEP, 0, sub("launch send_F 0SEND_F0", "to=1", "to=0"))).deadlock
    plan = build_plan("zb-h1", 2, 3)
    own, shared = w_on_its_own_stream(plan, "wgrad"), w_on_its_own_stream(plan, "compute")
    assert result(own).sound and result(shared).overlap and result(own).finals == Simulator().run(own).finals
    simulator = Simulator()
    assert simulator.run(own).finals == simulator.run(program(plan)).finals


def test_what_changes_nothing_is_seen_as_equal():
    simulator = Simulator()
    valid = simulator.run(program(STEP))
    for change in (drop("record compute", -1), twice("record compute"), twice("wait compute"), exchange_free):
        outcome = simulator.run(changed(STEP, 0, change))
        assert outcome.sound == (outcome.finals == valid.finals)
    assert simulator.run(changed(STEP, 0, twice("wait compute"))) == valid


def exchange_free(lines: list[str]) -> list[str]:
    i = at(lines, "record compute")
    return [*lines[:i], "record collective e777", *lines[i:]]


def test_the_reduction_loses_no_result():
    """Every order of all launches, tried one by one, gives the same verdict: small broken programs of one rank and two."""
    few = [build_plan("1f1b", 1, 1), build_plan("1f1b", 1, 1, window="microbatch")]
    few.append(make_plan("v", [parse_actions("0F0 1F0 1I0 0I0 1W0 0W0")], Placement((0, 0)), 1))
    seen = {True: 0, False: 0}
    for number, plan in enumerate(few):
        subject = w_on_its_own_stream(plan, "wgrad")
        mutants = list(effects_mutants(subject))
        for one in random.Random(number).sample(mutants, 60):
            simulator = Simulator(steps=1)
            assert isinstance(one.subject, Program)
            reduced, full = simulator.run(one.subject), simulator.run(one.subject, reduce=False)
            assert (reduced.deadlock, reduced.overlap, reduced.sound) == (full.deadlock, full.overlap, full.sound), one.what
            if reduced.sound:
                assert reduced.finals == full.finals
            seen[reduced.sound] += 1
    assert min(seen.values()) > 15


def test_a_cycle_between_streams_is_a_deadlock():
    """Hosts get on, streams do not: each rank's send waits, on its stream, for what it receives."""
    plan = build_plan("gpipe", 2, 1)
    lines = [str(op) for op in program(plan).rows[0]]
    place = at(lines, "launch send_F 0SEND_F0")
    first = ["launch recv_B 0RECV_B0 from=1 : dy.0.0=write", "record recv_B e90", "wait send_F e90"]
    early = [*lines[:place], *first, *lines[place:]]
    late = at(early, "launch recv_B 0RECV_B0", 1)
    broken = program(plan).with_row(0, map(parse_op, [*early[:late], *early[late + 1 :]]))
    assert result(broken).deadlock


# ---- independence ----------------------------------------------------------------------------------------------------


def test_the_judge_shares_nothing_with_the_check():
    """Neither the simulator nor what it is built on imports the ledger, the clocks, the leases or the check."""
    root = Path(symbolic.__file__).parents[1]
    allowed = {
        "pipeline/symbolic.py": {"pipeline.program", "qeffect_lm.modelcheck.explore"},
        "pipeline/program.py": {"pipeline.schedules", "qeffect_lm.contract.errors", "qeffect_lm.errors"},
        "qeffect_lm/modelcheck/explore.py": set(),
    }
    for path, may in allowed.items():
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None}
        found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert {name for name in found if name.startswith(("pipeline", "qeffect_lm"))} <= may
    assert prove(replace(STEP)).operations == 2 * sum(map(len, program(STEP).rows))


def test_a_sample_is_drawn_from_all_and_a_large_plan_refused(monkeypatch):
    """The sample is what drawing from a list of all mutants gives, without that list; counting stops at the bound."""
    plan = build_plan("1f1b", 1, 2)
    everything = [*effects_mutants(program(plan)), *plan_mutants(plan)]
    seen: list[Mutant] = []
    monkeypatch.setattr("pipeline.mutate.judge", lambda subject, mutants: seen.extend(mutants))
    score(plan, 25, seed=3)
    assert seen == random.Random(3).sample(everything, 25)
    seen.clear()
    score(plan, 10 * len(everything))
    assert seen == everything
    monkeypatch.setattr("pipeline.mutate.MOST_MUTANTS", len(everything) - 1)
    with pytest.raises(UsageError, match="in more than .* ways: test the check on a smaller one"):
        score(plan, 25)
