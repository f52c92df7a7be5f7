"""The cost model against closed forms and the longest path, and the picture for the terminal."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.actions import Action, Kind, parse_actions
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.schedules import SCHEDULES, Placement, one_f_one_b
from pipeline.simulate import simulate
from pipeline.timeline_text import render
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import PLAIN, computes

TIMES = st.integers(1, 9)


def fused(name: str, p: int, m: int) -> Plan:
    """A schedule with B in the place of I and W."""
    rows = [
        [
            Action(Kind.B, *action.key) if action.kind is Kind.I else action
            for action in row
            if action.kind is not Kind.W
        ]
        for row in SCHEDULES[name](p, m, 0)
    ]
    return make_plan(name, rows, Placement.linear(p), m)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 12), TIMES, TIMES, TIMES)
def test_fused_backward_has_the_known_bubble(name: str, p: int, m: int, f: int, i: int, w: int) -> None:
    """(p − 1)(T_F + T_I + T_W) for both schedules, with m below p too."""
    simulation = simulate(fused(name, p, m), f, i, w)
    assert simulation.cost == (m + p - 1) * (f + i + w)
    assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.busy == (m * (f + i + w),) * p


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(0, 6), TIMES, TIMES, TIMES)
def test_split_backward_has_a_smaller_bubble(name: str, p: int, more: int, f: int, i: int, w: int) -> None:
    """(p − 1)(T_F + T_I): the gradient travels on before W runs."""
    m = p + more
    simulation = simulate(build_plan(name, p, m), f, i, w)
    assert simulation.cost - m * (f + i + w) == (p - 1) * (f + i)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 6), TIMES)
def test_late_w_fills_the_bubble_as_zb_h1_does(p: int, more: int, t: int) -> None:
    """W late by the stage index: the Zero Bubble paper's ZB-H1 bubble, (p − 1)(T_F + T_I − T_W)."""
    m = 2 * p + more
    simulation = simulate(build_plan("1f1b", p, m, None), t, t, t)
    assert simulation.cost - m * 3 * t == (p - 1) * t


def test_latency_is_paid_on_the_way_there_and_back() -> None:
    plan = build_plan("1f1b", 3, 1)
    assert simulate(plan, 1, 2, 4).cost == 3 * 1 + 3 * 2 + 4
    assert simulate(plan, 1, 2, 4, T_comm=10).cost == 3 * 1 + 3 * 2 + 4 + 4 * 10
    local = make_plan("v", [parse_actions("0F0 1F0 1I0 0I0 0W0 1W0")], Placement((0, 0)), 1)
    assert simulate(local, 1, 2, 4, T_comm=10).cost == 14


def test_time_by_hand() -> None:
    plan = build_plan("1f1b", 2, 2)
    simulation = simulate(plan, 1, 2, 3, T_comm=0.5)
    at = {
        str(action): (simulation.start[rank][place], simulation.end[rank][place])
        for rank, row in enumerate(plan.actions)
        for place, action in enumerate(row)
        if action.is_compute
    }
    assert at == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (1.5, 2.5), "1I0": (2.5, 4.5), "1W0": (4.5, 7.5), "0I0": (5, 7),
        "0W0": (7, 10), "1F1": (7.5, 8.5), "1I1": (8.5, 10.5), "1W1": (10.5, 13.5), "0I1": (11, 13),
        "0W1": (13, 16),
    }  # fmt: skip
    assert simulation.cost == 16 and simulation.bubble == pytest.approx(4 / 16)


def test_cost_starts_at_each_stage_s_first_f() -> None:
    """The paper's cost: a stage is not charged for the wait before its first F."""
    plan = build_plan("1f1b", 2, 1)
    assert simulate(plan, 5, 1, 10).cost == 22  # rank 0: 0 … 22, its I waits for rank 1; rank 1: 5 … 21
    assert simulate(plan, [1, 1], [1, 1], [1, 50]).cost == 52  # rank 1: 1 … 53


@given(computes(), st.data(), st.integers(0, 5))
def test_times_are_the_longest_paths(plan: tuple, data: st.DataObject, comm: int) -> None:
    rows, placement, m = plan
    chunks = placement.num_chunks
    lengths = {kind: data.draw(st.lists(TIMES, min_size=chunks, max_size=chunks)) for kind in "FIW"}
    built = make_plan("random", rows, placement, m)
    simulation = simulate(built, *lengths.values(), comm)
    before = {action: row[place - 1] if place else None for row in rows for place, action in enumerate(row)}

    @cache
    def end(action: Action) -> int:
        chunk, microbatch = action.key
        start = 0
        if before[action] is not None:
            start = end(before[action])
        forward = action.kind is Kind.F
        source = chunk - 1 if forward else chunk + 1
        if action.kind is not Kind.W and 0 <= source < chunks:
            kinds = [Kind.F] if forward else [Kind.I, Kind.B]
            made = next(
                made for made in (Action(kind, source, microbatch) for kind in kinds) if made in before
            )
            start = max(start, end(made) + comm * (placement.ranks[source] != placement.ranks[chunk]))
        return start + sum(lengths[part][chunk] for part in ("IW" if action.kind is Kind.B else action.kind))

    spans = []
    for rank, row in enumerate(built.actions):
        work = [(place, action) for place, action in enumerate(row) if action.is_compute]
        for place, action in work:
            assert simulation.end[rank][place] == end(action)
        spans.append(end(work[-1][1]) - simulation.start[rank][work[0][0]])
    assert simulation.cost == max(spans)
    assert simulation.bubble == pytest.approx(1 - max(simulation.busy) / simulation.cost)


@pytest.mark.parametrize("times", [(0, 0, 0), (-1, 1, 1), ([1, 2, 3], 1, 1), ([], 1, 1), (1, 1, 1, -1)])
def test_impossible_times(times: tuple) -> None:
    with pytest.raises(UsageError, match="durations"):
        simulate(build_plan("1f1b", 2, 2), *times)


# ---- the picture ---------------------------------------------------------------------------------


def test_picture_of_1f1b() -> None:
    lines = render(build_plan("1f1b", 2, 3, 1), width=80).splitlines()
    assert lines == [
        "1f1b: 2 chunks on 2 ranks, 3 microbatches, window step",
        "F forward, I input gradient, W weight gradient, . idle",
        "",
        "time    0              5              10",
        "rank 0  F0 F1 .. I0 F2 I1 W0 .. I2 W1 W2",
        "rank 1  .. F0 I0 F1 I1 W0 F2 I2 W1 W2 ..",
        "",
        "          idle  I-slots  W-slots  inputs  outputs  grad-ins  dX  graphs",
        "rank 0  18.2 %        2        3       1        1         1   0       9",
        "rank 1  18.2 %        1        2       1        0         0   1       8",
        "",
        "T_F 1, T_I 1, T_W 1, T_comm 0",
        "cost 11, of which work 9: bubble rate 18.2 %",
    ]


@given(
    st.sampled_from(PLAIN), st.integers(1, 6), st.integers(1, 12), st.none() | st.integers(0, 5)
)
def test_pictures_show_all_work_in_order(name: str, p: int, m: int, w_delay: int | None) -> None:
    """However wide: each rank's line holds its work in order, and no line is wider than asked."""
    plan = build_plan(name, p, m, w_delay)
    wide = render(plan, width=2000)
    for rank, row in enumerate(plan.actions):
        (line,) = [line for line in wide.splitlines() if line.startswith(f"rank {rank}") and "%" not in line]
        shown = [word for word in line.split()[2:] if word.strip(".")]
        assert shown == [f"{action.kind}{action.key[1]}" for action in row if action.is_compute]
    assert all(len(line) <= 72 for line in render(plan, width=72).splitlines())


def test_cells_are_as_wide_as_they_are_long() -> None:
    picture = render(build_plan("1f1b", 2, 1), width=80, durations=(1, 2, 1), comm=1)
    assert "rank 0  F0 .............. I0    W0\nrank 1  ..... F0 I0    W0 ........" in picture


def test_chunks_are_named_where_a_rank_has_several() -> None:
    rows = [parse_actions("0F0 1F0 1B0 0B0")]
    picture = render(make_plan("v", rows, Placement((0, 0)), 1))
    assert "2 chunks on 1 rank, 1 microbatch," in picture
    assert "rank 0  0F0 1F0 1B0     0B0" in picture


def test_long_pictures_leave_out_the_middle() -> None:
    picture = render(build_plan("1f1b", 4, 200), width=80)
    assert len(picture.splitlines()) < 45
    assert "blocks of" in picture and "left out" in picture
    assert "W199" in picture and " F0 " in picture


def test_narrow_terminals_are_refused() -> None:
    with pytest.raises(UsageError, match="72 columns"):
        render(build_plan("1f1b", 1, 1), width=20)


def test_bubble_is_printed() -> None:
    plan = make_plan("1f1b", one_f_one_b(4, 8, None), Placement.linear(4), 8)
    assert render(plan).endswith("\ncost 27, of which work 24: bubble rate 11.1 %\n")
