"""1F1B and GPipe as pure functions: the orders by hand, then what holds for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import Kind, format_actions
from pipeline.schedules import SCHEDULES, Placement, gpipe, one_f_one_b
from pipeline.validate import validate
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import PLAIN, named

SIZES = (st.integers(1, 6), st.integers(1, 12), st.none() | st.integers(0, 14))


def _texts(plan: list) -> list[str]:
    return [format_actions(row) for row in plan]


def test_1f1b_by_hand() -> None:
    assert _texts(one_f_one_b(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    """P1: m < p."""
    assert _texts(one_f_one_b(3, 2)) == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1F1 1I0 1W0 1I1 1W1",
        "2F0 2I0 2W0 2F1 2I1 2W1",
    ]
    assert _texts(one_f_one_b(4, 1)) == [f"{stage}F0 {stage}I0 {stage}W0" for stage in range(4)]


def test_gpipe_by_hand() -> None:
    assert _texts(gpipe(2, 2)) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"]


def test_w_trails_i() -> None:
    assert _texts(one_f_one_b(1, 3, 1)) == ["0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"]
    assert _texts(gpipe(1, 3, 2)) == ["0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"]
    assert _texts(gpipe(1, 2, 99)) == ["0F0 0F1 0I0 0I1 0W0 0W1"]


def test_w_delay_none_is_the_stage_index() -> None:
    for schedule in (one_f_one_b, gpipe):
        by_stage = schedule(4, 7, None)
        for stage in range(4):
            assert by_stage[stage] == schedule(4, 7, stage)[stage]


@given(named())
def test_every_size_is_valid(arguments: tuple) -> None:
    """P1: any m, below p and not divisible by it or by the chunks."""
    name, p, m, w_delay, chunks = arguments
    plan = SCHEDULES[name](p, m, w_delay, chunks)
    placement = SCHEDULES[name].placement(p, chunks)
    validate(plan, placement, m, lowered=False)
    assert sum(map(len, plan)) == 3 * placement.num_chunks * m


@given(st.sampled_from(PLAIN), *SIZES)
def test_activations_held(name: str, p: int, m: int, w_delay: int | None) -> None:
    """Between F and I lie min(m, p − stage) microbatches in 1F1B, m in GPipe; W trails by w_delay."""
    for stage, row in enumerate(SCHEDULES[name](p, m, w_delay)):
        held = behind = most_held = most_behind = 0
        for action in row:
            held += (action.kind is Kind.F) - (action.kind is Kind.I)
            behind += (action.kind is Kind.I) - (action.kind is Kind.W)
            most_held, most_behind = max(most_held, held), max(most_behind, behind)
        assert most_held == (m if name == "gpipe" else min(m, p - stage))
        assert most_behind == min(m, 1 + (stage if w_delay is None else w_delay))


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (2, 2, -1)])
def test_impossible_sizes(arguments: tuple[int, int, int]) -> None:
    for schedule in SCHEDULES.values():
        with pytest.raises(UsageError):
            schedule(*arguments)


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SCHEDULES["mine"] = gpipe  # type: ignore[index]


def test_placement() -> None:
    placement = Placement((0, 1, 1, 0))
    assert (placement.num_chunks, placement.num_ranks) == (4, 2)
    assert placement.chunks(0) == (0, 3)
    assert [placement.source(chunk, "F") for chunk in range(4)] == [None, 0, 1, 2]
    assert [placement.target(chunk, "F") for chunk in range(4)] == [1, 2, 3, None]
    assert [placement.source(chunk, "B") for chunk in range(4)] == [1, 2, 3, None]
    assert placement.crosses(0, 1) and not placement.crosses(1, 2) and not placement.crosses(3, None)
    assert Placement.linear(3) == Placement((0, 1, 2))


@pytest.mark.parametrize("ranks", [(), (1,), (0, 2), (0, -1)])
def test_placement_without_gaps(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="placement"):
        Placement(ranks)
