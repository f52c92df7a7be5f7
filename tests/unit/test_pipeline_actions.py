"""The words of a plan: text and CSV forms, order, and what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import (
    Action,
    Kind,
    collector_paused,
    format_actions,
    from_csv,
    parse_action,
    parse_actions,
    to_csv,
)
from qeffect_lm.errors import UsageError

_of_chunk = st.builds(
    Action,
    st.sampled_from([kind for kind in Kind if kind not in (Kind.COMMIT, Kind.REDUCE, Kind.STEP)]),
    st.integers(0, 300),
    st.integers(0, 3000),
)
_commits = st.builds(
    Action, st.just(Kind.COMMIT), st.integers(0, 30), st.integers(0, 30), st.sampled_from("FI")
)
_bare = st.sampled_from([Action(Kind.REDUCE), Action(Kind.STEP), Action(Kind.COMMIT)])
ACTIONS = st.one_of(_of_chunk, _commits, _bare)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.F, 2, 0)),
        ("2I0", Action(Kind.I, 2, 0)),
        ("2W0", Action(Kind.W, 2, 0)),
        ("0B17", Action(Kind.B, 0, 17)),
        ("12SEND_F3", Action(Kind.SEND_F, 12, 3)),
        ("1RECV_B0", Action(Kind.RECV_B, 1, 0)),
        ("2COMMIT_F0", Action(Kind.COMMIT, 2, 0, "F")),
        ("2COMMIT_I5", Action(Kind.COMMIT, 2, 5, "I")),
        ("COMMIT", Action(Kind.COMMIT)),
        ("REDUCE", Action(Kind.REDUCE)),
        ("STEP", Action(Kind.STEP)),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert str(action) == text
    assert parse_action(text) == action
    assert hash(parse_action(f" {text} ")) == hash(action)


@given(ACTIONS)
def test_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.lists(ACTIONS))
def test_row_round_trip(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


@given(st.lists(st.lists(ACTIONS, min_size=1), min_size=1))
def test_csv_round_trip(plan: list[list[Action]]) -> None:
    text = to_csv(plan)
    assert from_csv(text) == plan
    assert len(text.splitlines()) == len(plan)


def test_csv_with_idle_cells() -> None:
    """torch.distributed.pipelining writes idle time as empty cells."""
    assert from_csv("0F0,0F1,,,0B0\r\n,1F0,1B0,\r\n") == [
        parse_actions("0F0 0F1 0B0"),
        parse_actions("1F0 1B0"),
    ]


@given(st.lists(ACTIONS, min_size=2))
def test_actions_have_one_order(actions: list[Action]) -> None:
    ordered = sorted(actions)
    assert sorted(reversed(actions)) == ordered
    for first, second in zip(ordered, ordered[1:], strict=False):
        assert first <= second
        assert (first == second) == (not first < second)
        assert first == second or str(first) != str(second)


def test_order_is_chunk_microbatch_kind() -> None:
    words = "0F0 0I0 0W0 0F1 1F0 1COMMIT_F0 COMMIT REDUCE STEP".split()
    actions = [parse_action(word) for word in words]
    assert sorted(reversed(actions)) == actions


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "02F0", "2F00", "2f0", "2COMMIT0", "1STEP0", "2F0 "]
)
def test_unreadable_text(text: str) -> None:
    if text.endswith(" "):
        assert parse_action(text) == Action(Kind.F, 2, 0)
        return
    with pytest.raises(UsageError, match="no action"):
        parse_action(text)


def test_unreadable_csv_names_the_cell() -> None:
    with pytest.raises(UsageError, match="row 1, cell 2"):
        from_csv("0F0\n1F0,,1Q0\n")


@pytest.mark.parametrize(
    "parts",
    [
        (Kind.F,),
        (Kind.F, 1),
        (Kind.STEP, 0, 0),
        (Kind.F, -1, 0),
        (Kind.F, 0, -1),
        (Kind.F, 0, 0, "F"),
        (Kind.COMMIT, 0, 0),
        (Kind.COMMIT, 0, 0, "W"),
        (Kind.COMMIT, None, None, "F"),
    ],
)
def test_parts_must_fit(parts: tuple) -> None:
    with pytest.raises(UsageError):
        Action(*parts)


def test_key_of_a_bare_action() -> None:
    assert Action(Kind.I, 3, 4).key == (3, 4)
    with pytest.raises(UsageError, match="STEP"):
        _ = Action(Kind.STEP).key


@pytest.mark.parametrize("running", [True, False])
def test_the_collector_is_left_as_it_was(running: bool) -> None:
    """Also inside another pause, and by an error."""
    before = gc.isenabled()
    try:
        (gc.enable if running else gc.disable)()
        with collector_paused(), pytest.raises(UsageError), collector_paused():
            assert not gc.isenabled()
            parse_action("x")
        assert gc.isenabled() == running
        with collector_paused():
            with collector_paused():
                pass
            assert not gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


def test_planning_needs_no_torch() -> None:
    code = "import sys, pipeline.timeline_text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
