"""Plans with their effects: what the engine does is what the program says, operation by operation; programs are data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.actions import Action, Kind
from pipeline.effects import program, rank_program
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.program import WORKS, Op, Program, parse_op
from pipeline.schedules import SCHEDULES, Placement
from qeffect_lm.contract.errors import PlanError
from tests.tiny import batch, config
from tests.unit.effects_recorder import Recorder, words
from tests.unit.in_process import Ranks
from tests.unit.pipeline_plans import random_compute

M = 3


def split(rows: list[list[Action]]) -> list[list[Action]]:
    """B as I, then W: what the engine runs."""
    parts = {Kind.B: (Kind.I, Kind.W)}
    return [[Action(kind, *a.key) for a in row for kind in parts.get(a.kind, (a.kind,))] for row in rows]


def hand_made(ranks: tuple[int, ...], seed: int, window: str) -> Plan:
    placement = Placement(ranks)
    compute = split(random_compute(seed, placement, M, unordered=False))
    return make_plan("hand-made", compute, placement, M, window=window)


PLANS = {
    **{
        f"{name} on {p}, {window}": (name, p, window)
        for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")
        for p in (1, 2, 3)
        for window in ("step", "microbatch")
    },
    **{
        f"{ranks}, {window}": (ranks, 5 + len(ranks), window)
        for ranks in ((0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (2, 0, 1, 0))
        for window in ("step", "microbatch")
    },
}


def ranks_of(plan: Plan, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Ranks:
    """Tiny ranks that run a plan: one layer per chunk."""
    monkeypatch.setattr("qeffect_lm.app.assemble.make_plan", lambda _: plan)
    chunks = plan.placement.num_chunks
    settings = config(
        model__num_layers=chunks,
        model__hidden_size=16,
        model__num_heads=2,
        model__ffn_size=16,
        parallel__pp=plan.num_ranks,
        pipeline__microbatches=M,
        precision__fp8__window=plan.window,
        **overrides,
    )
    ranks = Ranks(settings, monkeypatch)
    ranks.prepare(batch(0, M))
    return ranks


def assert_as_written(plan: Plan, ranks: Ranks, caches: bool = True) -> None:
    recorders = [Recorder(part) for part in ranks.parts]
    for number in range(2):
        ranks.step(number, batch(number, M))
        for recorder, row in zip(recorders, program(plan, caches).rows, strict=True):
            assert recorder.lines == words(row)


def costly(which: str) -> bool:
    """Window microbatch on several ranks, except once: it differs by its commits only."""
    return which.endswith("microbatch") and which != "1f1b on 2, microbatch"


@pytest.mark.parametrize("which", [pytest.param(one, marks=[pytest.mark.long] * costly(one)) for one in PLANS])
def test_the_engine_does_what_the_program_says(which, monkeypatch):
    """Recorded in two consecutive steps: launches with stream and accesses, events and waits by identity, transfers with the
    very tensors that their launch declares, lease moves with slots and betas, epochs, versions, commits, refresh.
    """
    name, number, window = PLANS[which]
    plan = build_plan(name, number, M, window=window) if isinstance(name, str) else hand_made(name, number, window)
    assert_as_written(plan, ranks_of(plan, monkeypatch))


def test_graphs_do_what_the_program_says(monkeypatch):
    plan = build_plan("zb-h1", 2, M)
    assert_as_written(plan, ranks_of(plan, monkeypatch, graphs__backend="host_replay"))


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_with_w_of_two_microbatches_as_one_product(backend, monkeypatch):
    """Its places, members and betas; a group of two and one of one."""
    plan = build_plan("1f1b", 2, M, coalesce_w=2)
    assert_as_written(plan, ranks_of(plan, monkeypatch, graphs__backend=backend))


EXPERTS = {"parallel__ep": 2, "model__family": "mixtral", "model__moe": {"num_experts": 4}}


@pytest.mark.parametrize(
    ("layout", "tied"), [({"parallel__dp": 2}, False), ({"parallel__dp": 2}, True), (EXPERTS, False)], ids=str
)
def test_what_replicas_run_is_what_was_proved(layout, tied, monkeypatch):
    """Reductions of chunks and, of tied weights, REDUCE's own: the program that assembly proves is the one that runs. Where F
    and I exchange with peers too, they come after a chunk's reduction: one communicator, one order."""
    proved: list[tuple[Op, ...]] = []

    def noted(*args: Any, **more: Any) -> tuple[Op, ...]:
        proved.append(rank_program(*args, **more))
        return proved[-1]

    monkeypatch.setattr("pipeline.prove.rank_program", noted)
    layout = {**layout, "pipeline__schedule": "zb-v", "pipeline__w_delay": 0, "pipeline__microbatches": M}
    ranks = Ranks(config(**layout, model__num_layers=2, model__tie_word_embeddings=tied), monkeypatch)
    ranks.prepare(batch(0, M))
    recorders = [Recorder(part) for part in ranks.parts]
    ranks.step(0, batch(0, M))
    for recorder, row in zip(recorders, proved, strict=True):
        assert recorder.lines == words(row)
        (reduced,) = (op for op in row if op.work == "REDUCE")
        assert any(buffer[0] == "grads_W" for buffer, _ in reduced.accesses if isinstance(buffer, tuple)) == tied


def test_without_fp8_nothing_is_refreshed(monkeypatch):
    plan = build_plan("1f1b", 2, M)
    assert_as_written(plan, ranks_of(plan, monkeypatch, precision__fp8__recipe="none"), caches=False)
    assert not any(op.work == "REFRESH" for op in program(plan, caches=False).rows[0])


# ---- programs are data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("window", ["step", "microbatch"])
def test_text_and_json_round_trip(name, window):
    for p in (1, 2, 3):
        written = program(build_plan(name, p, M, window=window))
        assert Program.from_json(written.to_json()) == written
        assert all(parse_op(str(op)) == op for row in written.rows for op in row)


def test_the_text_is_the_documented_one():
    row = program(build_plan("1f1b", 2, 2)).rows[0]
    assert [str(op) for op in row[:7]] == [
        "begin",
        "launch compute DIVISOR : divisor=write workspace.compute=write",
        "launch compute 0INPUT0 : key.0.0=write x.0.0=write workspace.compute=write",
        "launch compute 0F0 i=0 w=0 epoch=0 version=0 : x.0.0=read key.0.0=read retained_I.0.0=write retained_W.0.0=write "
        "out.0.0=write parameters=read caches=read scales_forward=read amax_forward=max_merge workspace.compute=write",
        "record compute e0",
        "wait send_F e0",
        "launch send_F 0SEND_F0 to=1 : out.0.0=read",
    ]
    assert {op.work for op in row if op.work} <= set(WORKS)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("jump", "begins with one of begin, launch"),
        ("begin now", "begins with one of"),
        ("record compute", "is no operation"),
        ("wait compute x1", "is no operation"),
        ("launch compute 0X1 :", "'0X1' is no work"),
        ("launch compute F :", "F takes a chunk and a microbatch"),
        ("launch compute 0F :", "F takes a chunk and a microbatch"),
        ("launch compute 0STEP0 :", "STEP takes no chunk"),
        ("launch compute 0F0 q=1 :", "no field 'q'"),
        ("launch compute 0F0 i=x :", "is no operation"),
        ("launch compute 0F0 : x.0.0=look", "is no access: write BUFFER=read|write|max_merge"),
        ("complete 0F0", "only transfers are completed"),
    ],
)
def test_what_is_no_operation_is_refused(line, reason):
    with pytest.raises(ValueError, match="is no operation of a program") as caught:
        parse_op(line)
    assert reason in str(caught.value)
    document = json.loads(program(build_plan("1f1b", 1, 1)).to_json())
    document["ranks"][0][3] = line
    with pytest.raises(PlanError) as placed:
        Program.from_json(json.dumps(document))
    assert placed.value.place == {"rank": 0, "position": 3} and reason in str(placed.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"effects": 2}, "a program of format 2; this version reads format 1"),
        ({"microbatches": 0}, "microbatches 0"),
        ({"window": "day"}, "window 'day'"),
        ({"placement": [0, 1]}, "1 ranks, the placement has 2"),
        ({"placement": []}, "each rank"),
        ({"ranks": None}, "not a plan with its effects"),
    ],
)
def test_what_is_no_program_is_refused(change, reason):
    document = json.loads(program(build_plan("1f1b", 1, 1)).to_json())
    with pytest.raises(PlanError, match=reason):
        Program.from_json(json.dumps(document | change))
    for text in ("", "[]", "{}", "7"):
        with pytest.raises(PlanError, match="not a plan with its effects"):
            Program.from_json(text)


def test_names():
    op = Op("launch", "compute", "LOSS", 3, 1)
    assert (op.name, op.who) == ("3LOSS1", "3F1")
    assert (Op("launch", "compute", "NORM").who, Op("begin").name) == ("STEP", "begin")
