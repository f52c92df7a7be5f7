"""Interleaved 1F1B, ZB-H1, ZB-H2, ZB-V and DualPipeV: orders by hand and against PyTorch's, memory, small sizes, speed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import Action, Kind, format_actions
from pipeline.plan import build_plan
from pipeline.schedules import SCHEDULES, Placement, find_schedule, fused, interleaved, one_f_one_b, zb_h1, zb_h2
from pipeline.schedules_v import dual_pipe_v, zb_v
from pipeline.simulate import peak_activations, simulate
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import named

P, M = st.integers(1, 7), st.integers(1, 20)


def texts(plan: list) -> list[str]:
    return [format_actions(row) for row in plan]


# ---- orders by hand ------------------------------------------------------------------------------


def test_zb_h1_by_hand() -> None:
    assert texts(zb_h1(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_h2_by_hand() -> None:
    assert texts(zb_h2(2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_interleaved_by_hand() -> None:
    """Groups of p microbatches go through all chunks; I with the chunks reversed."""
    assert texts(interleaved(2, 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1",
    ]
    assert texts(interleaved(2, 3))[0] == (
        "0F0 0F1 2F0 2F1 0F2 2I0 2W0 2I1 2W1 2F2 0I0 0W0 0I1 0W1 2I2 2W2 0I2 0W2"
    )


def test_interleaved_w_trails_i_over_all_chunks() -> None:
    assert texts(interleaved(1, 2, 1)) == ["0F0 1F0 1I0 0F1 0I0 1W0 1F1 1I1 0W0 0I1 1W1 0W1"]
    assert interleaved(3, 4, None)[2] == interleaved(3, 4, 2)[2]


def test_zb_v_by_hand() -> None:
    assert texts(zb_v(1, 2)) == ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]
    assert texts(zb_v(2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dual_pipe_v_by_hand() -> None:
    assert texts(dual_pipe_v(1, 2)) == ["0F0 1F0 0F1 1I0 1W0 1F1 0I0 0W0 1I1 1W1 0I1 0W1"]


# ---- against PyTorch's generators ----------------------------------------------------------------


def from_torch(name: str, p: int, m: int) -> list[list[Action]]:
    """What torch.distributed.pipelining computes, F and B in a pair one after the other."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    method = getattr(getattr(schedules, name, None), "_calculate_single_rank_operations", None)
    if method is None:
        pytest.skip(f"this PyTorch has no {name}")
    halves = {"BACKWARD_INPUT": [Kind.I], "BACKWARD_WEIGHT": [Kind.W], "FULL_BACKWARD": [Kind.I, Kind.W]}
    kinds = {"FORWARD": [Kind.F], **halves}
    rows = []
    for rank in range(p):
        stand_in = SimpleNamespace(pp_group_size=p, _n_microbatches=m, num_stages=2 * p, _num_stages=2 * p, rank=rank)
        row = []
        for action in method(stand_in, rank):
            for part in () if action is None else action.sub_actions or (action,):
                word = part.computation_type.name
                row += [Action(kind, part.stage_index, part.microbatch_index) for kind in kinds[word]]
        rows.append(row)
    return rows


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13, 24])
def test_orders_are_pytorch_s(p: int, m: int) -> None:
    assert zb_v(p, m) == from_torch("ScheduleZBVZeroBubble", p, m)
    if m >= 2 * p:
        assert dual_pipe_v(p, m) == from_torch("ScheduleDualPipeV", p, m)


# ---- what holds for all sizes --------------------------------------------------------------------


@given(P, M)
def test_h1_is_1f1b_with_w_late_by_the_stage(p: int, m: int) -> None:
    assert zb_h1(p, m) == one_f_one_b(p, m, None)
    assert interleaved(p, m, 1, 1) == one_f_one_b(p, m, 1)


@settings(max_examples=30)
@given(P, st.integers(0, 9))
def test_peaks(p: int, more: int) -> None:
    """In M_B: 1F1B p − s, H1 p, H2 2p − 1, ZB-V p on every rank, DualPipeV p and a half."""
    m = 3 * p + more
    peaks = {name: peak_activations(SCHEDULES[name](p, m)) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert peaks["1f1b"] == tuple(p - stage for stage in range(p))
    assert peaks["zb-h1"] == (p,) * p
    assert peaks["zb-h2"] == (2 * p - 1,) * p
    assert peak_activations(zb_v(p, m), 0.5, 0.5) == (p,) * p
    assert peak_activations(dual_pipe_v(p, m), 0.5, 0.5) == (p + 0.5,) * p


@settings(max_examples=30)
@given(P, st.integers(0, 9), st.integers(1, 9))
def test_zero_bubble_where_it_is_promised(p: int, more: int, t: int) -> None:
    """With equal times and no latency ZB-H2 and ZB-V have no bubble by stage span, ZB-H1 (p − 1)·t."""
    m = 2 * p - 1 + more
    for name in ("zb-h2", "zb-v"):
        simulation = simulate(build_plan(name, p, m), t, t, t)
        assert simulation.bubble == 0 and simulation.cost == max(simulation.busy)
    work = 3 * m * t
    assert simulate(build_plan("zb-h1", p, m), t, t, t).cost - work == (p - 1) * t


@given(named(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40)
def test_fewer_microbatches_never_take_longer(arguments: tuple, f: int, i: int, w: int) -> None:
    """P1: a cut order is one of the whole order's, less some work."""
    name, p, m, w_delay, chunks = arguments
    if w_delay:
        w_delay = 0
    short = build_plan(name, p, m, w_delay, chunks=chunks)
    longer = build_plan(name, p, m + 1, w_delay, chunks=chunks)
    assert simulate(short, f, i, w).makespan <= simulate(longer, f, i, w).makespan


@given(named())
def test_fused_joins_only_neighbours(arguments: tuple) -> None:
    name, p, m, w_delay, chunks = arguments
    compute = SCHEDULES[name](p, m, w_delay, chunks)
    joined = fused(compute)
    parts = {Kind.B: [Kind.I, Kind.W]}
    split = [[Action(kind, *a.key) for a in row for kind in parts.get(a.kind, [a.kind])] for row in joined]
    assert split == compute
    for row in joined:
        for one, other in zip(row, row[1:], strict=False):
            assert not (one.kind is Kind.I and other == Action(Kind.W, *one.key))


# ---- the registry --------------------------------------------------------------------------------


def test_placements() -> None:
    assert SCHEDULES["zb-v"].placement(3) == Placement((0, 1, 2, 2, 1, 0)) == SCHEDULES["dualpipev"].placement(3)
    assert SCHEDULES["interleaved-1f1b"].placement(2, 3) == Placement((0, 1, 0, 1, 0, 1))
    assert SCHEDULES["interleaved-1f1b"].placement(2) == Placement((0, 1, 0, 1))
    assert SCHEDULES["zb-h1"].placement(3) == Placement.linear(3)
    assert build_plan("zb-v", 2, 3).placement == Placement((0, 1, 1, 0))
    assert build_plan("interleaved-1f1b", 2, 3, chunks=3).placement.num_chunks == 6


@pytest.mark.parametrize(
    ("name", "p", "enough"),
    [("zb-h1", 4, 4), ("zb-h2", 4, 7), ("zb-v", 4, 7), ("dualpipev", 4, 8)],
)
def test_too_few_microbatches_are_said(name: str, p: int, enough: int) -> None:
    schedule = find_schedule(name)
    assert schedule.notes(p, enough) == () == schedule.notes(p, enough + 5)
    (note,) = schedule.notes(p, enough - 1)
    assert str(enough) in note and str(enough - 1) in note and name in note


def test_an_indivisible_number_is_said() -> None:
    schedule = find_schedule("interleaved-1f1b")
    assert schedule.notes(4, 8) == ()
    assert "published for 12 microbatches" in schedule.notes(4, 9)[0]
    assert find_schedule("1f1b").notes(8, 1) == () == find_schedule("gpipe").notes(8, 1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("zb-h1", 2, 2, 1), "itself sets when W runs"),
        (("zb-v", 2, 2, 3), "itself sets when W runs"),
        (("zb-v", 2, 2, 0, "step", 3), "two chunks per rank, not 3"),
        (("zb-h2", 2, 2, 0, "step", 2), "one chunk per rank, not 2"),
        (("interleaved-1f1b", 2, 2, 0, "step", 0), "at least one chunk"),
        (("zb-v", 0, 2), "p=0"),
        (("zb", 2, 2), "unknown schedule 'zb'; use one of 1f1b, gpipe, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipev"),
    ],
)
def test_impossible_requests(arguments: tuple, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_plan(*arguments)


# ---- speed ---------------------------------------------------------------------------------------


def _seconds(name: str, p: int, m: int) -> float:
    begin = time.process_time()
    plan = build_plan(name, p, m)
    simulate(plan, 1, 1, 1, 0.1)
    peak_activations(plan.actions)
    return time.process_time() - begin


def test_32_ranks_256_microbatches() -> None:
    """Generated, lowered, validated and simulated in 5 s of one core; twice that here, as the machine may be shared."""
    assert _seconds("zb-h1", 32, 256) < 10


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_64_ranks_1024_microbatches(name: str) -> None:
    """5 s and 60 s of one core, whatever the schedule; twice that here, as above."""
    assert _seconds(name, 32, 256) < 10
    assert _seconds(name, 64, 1024) < 120
