"""The bubble rates published in "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024), to four decimals."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import Kind, parse_actions
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.schedules import Placement, fused, one_f_one_b, zb_h1, zb_h2
from pipeline.simulate import peak_activations, simulate
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import computes

# p, m, (T_F, T_I, T_W, T_comm), 1F1B, ZB-H1, ZB-H2, ZB-2p
ROWS = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585, 0.1083, 0.0433),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 0.1898, 0.1045, 0.0559, 0.0022),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 0.2082, 0.1088, 0.0516, 0.0054),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 0.2646, 0.1421, 0.0641, 0.0038),
]


@cache
def undivided(p: int, m: int) -> Plan:
    """1F1B as the paper has it: B in one, its gradient sent when all of it has run."""
    return make_plan("1f1b", fused(one_f_one_b(p, m)), Placement.linear(p), m)


@cache
def plan_of(name: str, p: int, m: int) -> Plan:
    return build_plan(name, p, m)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}/{row[1]}" for row in ROWS])
def test_published_bubble_rates(row: tuple) -> None:
    p, m, times, one_f_one_b_rate, h1, h2, _ = row
    found = simulate(undivided(p, m), *times)
    assert round(found.bubble, 4) == one_f_one_b_rate
    assert found.cost == pytest.approx(found.makespan)  # 1F1B: rank 0 begins first and ends last
    assert round(simulate(plan_of("zb-h1", p, m), *times).bubble, 4) == h1
    assert round(simulate(plan_of("zb-h2", p, m), *times).bubble, 4) == h2


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}/{row[1]}" for row in ROWS])
def test_published_peaks(row: tuple) -> None:
    """1F1B and H1 hold p·M_B, H2 (2p − 1)·M_B, whatever M_W is."""
    p, m = row[:2]
    for m_w in (1.0, 0.4):
        assert max(peak_activations(undivided(p, m).actions, 1.0, m_w)) == p
        assert max(peak_activations(zb_h1(p, m), 1.0, m_w)) == p
        assert max(peak_activations(zb_h2(p, m), 1.0, m_w)) == 2 * p - 1


def test_the_other_conventions_do_not_give_the_numbers() -> None:
    """With I and W apart 1F1B sends earlier; by makespan H2 costs more than published (on three of the four rows)."""
    for p, m, times, one_f_one_b_rate, _, h2, _ in ROWS:
        assert simulate(plan_of("1f1b", p, m), *times).bubble < one_f_one_b_rate - 0.04
        found = simulate(plan_of("zb-h2", p, m), *times)
        assert found.makespan_bubble >= found.bubble
        if (p, m) != (8, 24):
            assert round(found.makespan_bubble, 4) > h2 + 0.02


def test_zb_v_on_the_first_row() -> None:
    """PyTorch's ZB-V and DualPipeV on the same costs; as one action DualPipeV's pair of F and B costs far more."""
    p, m, (f, i, w, comm), *_ = ROWS[0]
    assert round(simulate(plan_of("zb-v", p, m), f / 2, i / 2, w / 2, comm).bubble, 4) == 0.0728
    assert round(simulate(plan_of("dualpipev", p, m), f / 2, i / 2, w / 2, comm).bubble, 4) == 0.0879


# ---- both conventions, and memory, on any order --------------------------------------------------


@given(computes(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_both_conventions(plan: tuple, f: int, i: int, w: int, comm: int) -> None:
    rows, placement, m = plan
    found = simulate(make_plan("any", rows, placement, m), f, i, w, comm)
    assert found.makespan == max(ends[-1] for ends in found.end)
    assert found.cost <= found.makespan and 0 <= found.bubble <= found.makespan_bubble < 1
    assert found.bubble == pytest.approx(1 - max(found.busy) / found.cost)
    assert found.makespan_bubble == pytest.approx(1 - max(found.busy) / found.makespan)


@given(computes(), st.integers(0, 9), st.integers(0, 9))
def test_memory_is_what_a_walk_finds(plan: tuple, m_w: int, more: int) -> None:
    """F +M_B, I M_W − M_B, W −M_W, B −M_B; messages hold nothing."""
    rows, placement, m = plan
    m_b = m_w + more
    change = {Kind.F: m_b, Kind.I: m_w - m_b, Kind.W: -m_w, Kind.B: -m_b}
    expected = tuple(float(max(accumulate(change[action.kind] for action in row))) for row in rows)
    assert peak_activations(rows, m_b, m_w) == expected
    assert peak_activations(make_plan("any", rows, placement, m).actions, m_b, m_w) == expected


def test_memory_by_hand() -> None:
    row = parse_actions("0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2")
    assert peak_activations([row], 10, 4) == (24.0,)  # after 0F2: two at 10, one at 4
    assert peak_activations([parse_actions("0F0 1F0 1I0 0I0 0W0 1W0")], [10, 3], [4, 1]) == (13.0,)


@pytest.mark.parametrize("sizes", [(1, 2), (1, -1), ([1, 1], [1, 2])])
def test_impossible_memory(sizes: tuple) -> None:
    with pytest.raises(UsageError, match="M_W"):
        peak_activations([parse_actions("0F0 0I0 0W0")], *sizes)
