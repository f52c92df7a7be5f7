"""Plans that break a rule are rejected, with rank, position, action and reason; lowered plans never block."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import RECEIVES, SENDS, Action, Kind, format_actions, parse_action, parse_actions
from pipeline.lower import lower
from pipeline.schedules import SCHEDULES, Placement, one_f_one_b
from pipeline.validate import validate
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import PLAIN, can_finish, computes, named

LINEAR_2 = Placement.linear(2)
LOOP = Placement((0, 1, 0, 1))  # P5: previous and next peer are the same rank
WINDOWS = st.sampled_from(["step", "microbatch"])


def rejected(rows: list, placement: Placement, m: int, reason: str | None, **options: bool) -> PlanError:
    options.setdefault("lowered", False)
    rows = [parse_actions(row) if isinstance(row, str) else row for row in rows]
    with pytest.raises(PlanError, match=reason) as caught:
        validate(rows, placement, m, **options)
    return caught.value


# ---- compute plans -------------------------------------------------------------------------------


def test_last_stage_out_of_order() -> None:
    """P2: the last stage runs F1 before F0."""
    rows = ["0F0 0F1 0I0 0W0 0I1 0W1", "1F1 1F0 1I0 1W0 1I1 1W1"]
    error = rejected(rows, LINEAR_2, 2, "leaves microbatch order")
    assert error.place == {"rank": 1, "position": 1, "action": "1F0"}


def test_order_may_be_left_by_declaration() -> None:
    """P2: a plan that declares it may run F1 before F0, and its messages follow."""
    rows = [parse_actions("0F0 0F1 0I0 0W0 0I1 0W1"), parse_actions("1F1 1F0 1I0 1W0 1I1 1W1")]
    plan = lower(rows, LINEAR_2)
    validate(plan, LINEAR_2, 2, lowered=True, allow_unordered=True)
    assert can_finish(plan, LINEAR_2, lowered=True)


@pytest.mark.parametrize(
    ("row", "reason", "position", "action"),
    [
        ("0F0 0I0 0W0 0W0", "0W0 a second time", 3, "0W0"),  # P3: W twice
        ("0F0 0B0 0I0 0W0", "0B0 already is I and W", 2, "0I0"),  # P3: B and I both
        ("0F0 0B0 0W0", "0B0 already is I and W", 2, "0W0"),
        ("0F0 0I0 0W0 0F1", "microbatch out of range", 3, "0F1"),  # P3
        ("0F0", "0I0 is missing: this microbatch has no backward", 1, "0I0"),  # P3
        ("0F0 0I0", "0W0 is missing", 2, "0W0"),
        ("0I0 0W0", "0F0 is missing", 2, "0F0"),
        ("0I0 0F0 0W0", "0I0 before its 0F0", 0, "0I0"),
        ("0F0 0W0 0I0", "0W0 before its 0I0", 1, "0W0"),
        ("0F0 1F0 0I0 0W0", "chunk out of range", 1, "1F0"),
        ("0F0 0SEND_F0 0I0 0W0", "compute plan", 1, "0SEND_F0"),
        ("0F0 0I0 0W0 STEP", "compute plan", 3, "STEP"),
    ],
)
def test_broken_rows(row: str, reason: str, position: int, action: str) -> None:
    """P3: rejected with the place."""
    error = rejected([row], Placement.linear(1), 1, reason)
    assert error.place == {"rank": 0, "position": position, "action": action}
    assert f"position={position}" in str(error)


def test_wrong_rank() -> None:
    error = rejected(["0F0 0I0 0W0 1I0", "1F0 1W0"], LINEAR_2, 1, "chunk 1 lives on rank 1")
    assert error.place == {"rank": 0, "position": 3, "action": "1I0"}


def test_wrong_number_of_rows() -> None:
    rejected(["0F0 0I0 0W0"], LINEAR_2, 1, "1 rows.*2 ranks")


@pytest.mark.parametrize("row", ["0F0 0F1 0I1 0W1 0I0 0W0", "0F0 0F1 0I0 0I1 0W1 0W0", "0F0 0F1 0B1 0I0 0W0"])
def test_backward_in_microbatch_order(row: str) -> None:
    rejected([row], Placement.linear(1), 2, "leaves microbatch order")
    validate([parse_actions(row)], Placement.linear(1), 2, lowered=False, allow_unordered=True)


def test_data_dependencies_in_a_cycle() -> None:
    """Each rank would need the other's later work: no order of messages can help."""
    rows = ["0F0 0I0 0W0 2F0 2I0 2W0", "1F0 1I0 1W0"]
    error = rejected(rows, Placement((0, 1, 0)), 1, "deadlock")
    assert "rank 0 at position 1 (0I0) waits for rank 1 to run 1I0" in str(error)
    assert "rank 1 at position 1 (1I0) waits for rank 0 to run 2I0" in str(error)
    rejected(
        ["1F0 0F0 1I0 0I0 0W0 1W0"], Placement((0, 0)), 1, r"deadlock: .*\(1F0\) waits for rank 0 to run 0F0"
    )


def test_unusable_arguments() -> None:
    with pytest.raises(UsageError):
        validate([[]], Placement.linear(1), 0, lowered=False)
    with pytest.raises(UsageError, match="window"):
        validate([[]], Placement.linear(1), 1, lowered=True, window="day")
    with pytest.raises(UsageError, match="window"):
        lower(one_f_one_b(1, 1), Placement.linear(1), window="day")


# ---- lowering ------------------------------------------------------------------------------------


def test_lowered_by_hand() -> None:
    """A receive one compute action ahead of its consumer, a send right after its producer, the step's end."""
    assert [format_actions(row) for row in lower(one_f_one_b(2, 2), LINEAR_2)] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1 REDUCE STEP COMMIT",
        "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1W0 1F1 1I1 1SEND_B1 1W1 REDUCE STEP COMMIT",
    ]


def test_window_microbatch_by_hand() -> None:
    """As Transformer Engine rolls: after each F and after each I."""
    assert [format_actions(row) for row in lower(one_f_one_b(2, 1), LINEAR_2, window="microbatch")] == [
        "0RECV_B0 0F0 0SEND_F0 0COMMIT_F0 0I0 0COMMIT_I0 0W0 REDUCE STEP",
        "1RECV_F0 1F0 1COMMIT_F0 1I0 1SEND_B0 1COMMIT_I0 1W0 REDUCE STEP",
    ]


def test_two_ranks_four_stages() -> None:
    """P5: forwards and backwards between the same two ranks are different queues."""
    rows = [
        parse_actions("0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1"),
        parse_actions("1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1"),
    ]
    plan = lower(rows, LOOP)
    validate(plan, LOOP, 2, lowered=True)
    assert can_finish(plan, LOOP, lowered=True)
    # A receive ahead by one action only would leave 3SEND_B1 and 2SEND_B1 waiting for each other's ranks:
    assert plan[1].index(parse_action("1RECV_B0")) < plan[1].index(parse_action("3SEND_B1"))


@given(named(), WINDOWS)
def test_lowered_schedules_never_block(arguments: tuple, window: str) -> None:
    name, p, m, w_delay, chunks = arguments
    placement = SCHEDULES[name].placement(p, chunks)
    plan = lower(SCHEDULES[name](p, m, w_delay, chunks), placement, window=window)
    validate(plan, placement, m, lowered=True, window=window)
    assert can_finish(plan, placement, lowered=True)


@given(st.data(), st.booleans(), WINDOWS)
def test_any_order_can_be_lowered(data: st.DataObject, unordered: bool, window: str) -> None:
    """Random orders on random placements: valid, no deadlock, work unchanged, messages complete."""
    rows, placement, m = data.draw(computes(unordered))
    assert can_finish(rows, placement, lowered=False)
    plan = lower(rows, placement, window=window)
    validate(plan, placement, m, lowered=True, allow_unordered=unordered, window=window)
    assert can_finish(plan, placement, lowered=True)
    assert [[action for action in row if action.is_compute] for row in plan] == rows
    crossings = sum(
        first != second for first, second in zip(placement.ranks, placement.ranks[1:], strict=False)
    )
    messages = [action for row in plan for action in row if action.kind in SENDS | RECEIVES]
    assert len(messages) == 2 * 2 * crossings * m
    for row in plan:
        work = [action for action in row if action.kind not in RECEIVES]
        for before, action in zip(work, work[1:], strict=False):
            if action.kind in SENDS:
                assert before.is_compute and before.key == action.key


@given(st.data())
def test_queues_have_one_order(data: st.DataObject) -> None:
    """The k-th send of each (source, destination, direction) meets the k-th receive."""
    rows, placement, _ = data.draw(computes(unordered=True))
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(lower(rows, placement)):
        for action in row:
            if action.kind in SENDS | RECEIVES:
                step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
                chunk, microbatch = action.key
                other = chunk + step
                if action.kind in SENDS:
                    sent[rank, placement.ranks[other], action.kind[-1]].append((other, microbatch))
                else:
                    received[placement.ranks[other], rank, action.kind[-1]].append((chunk, microbatch))
    assert sent == received


def test_lower_refuses_an_incomplete_plan() -> None:
    with pytest.raises(PlanError, match="1W0 is missing"):
        lower([parse_actions("0F0 0I0 0W0"), parse_actions("1F0 1I0")], LINEAR_2)


# ---- lowered plans -------------------------------------------------------------------------------

GOOD = [
    "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1 REDUCE STEP COMMIT",
    "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1 REDUCE STEP COMMIT",
]
GOOD_MICROBATCH = ["0F0 0COMMIT_F0 0F1 0COMMIT_F1 0I0 0COMMIT_I0 0W0 0I1 0COMMIT_I1 0W1 REDUCE STEP"]


@pytest.mark.parametrize(
    ("rank", "old", "new", "reason"),
    [
        (0, "0SEND_F0 ", "", "0SEND_F0 is missing: 1RECV_F0 on rank 1 has no partner"),
        (1, "1RECV_F1 ", "", "1RECV_F1 is missing: 0SEND_F1 on rank 0 has no partner"),
        (1, "1SEND_B1 ", "1SEND_B1 1SEND_F1 ", "nobody to exchange"),
        (0, "0F0 ", "0RECV_F0 0F0 ", "nobody to exchange"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 before its producer 0F0"),
        (1, "1F0 1RECV_F1", "1RECV_F1 1F0", None),  # earlier is fine
        (1, "1RECV_F0 1F0", "1F0 1RECV_F0", "1RECV_F0 is posted after its consumer 1F0"),
        (0, "0RECV_B1 0W0 0I1", "0W0 0I1 0RECV_B1", "0RECV_B1 is posted after its consumer 0I1"),
        (1, "1RECV_F0 1F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0", "message 0 from rank 0 to rank 1.*1RECV_F1"),
        (0, "REDUCE STEP COMMIT", "REDUCE STEP", "COMMIT"),
        (1, "REDUCE STEP COMMIT", "STEP COMMIT", "missing|ends with"),
        (1, "REDUCE STEP COMMIT", "STEP REDUCE COMMIT", "ends with REDUCE STEP COMMIT"),
        (1, "1W1 REDUCE", "REDUCE 1W1", "ends with"),
        (0, "REDUCE STEP COMMIT", "REDUCE STEP COMMIT COMMIT", "ends with"),
        (0, "0F0 ", "0F0 0COMMIT_F0 ", "only the step commits"),
    ],
)
def test_broken_messages_and_ends(rank: int, old: str, new: str, reason: str | None) -> None:
    rows = list(GOOD)
    assert rows[rank].count(old) == 1
    rows[rank] = rows[rank].replace(old, new)
    if reason is None:
        validate([parse_actions(row) for row in rows], LINEAR_2, 2, lowered=True)
    else:
        rejected(rows, LINEAR_2, 2, reason, lowered=True)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0COMMIT_F0 0F1", "0F1 0COMMIT_F0", "0COMMIT_F0 must come first"),
        ("0COMMIT_I1 ", "", "0COMMIT_I1 is missing"),
        ("0I0 0COMMIT_I0", "0COMMIT_I0 0I0", "0COMMIT_I0 does not follow its I"),
        ("REDUCE STEP", "REDUCE STEP COMMIT", "missing|does not|only the step"),
    ],
)
def test_broken_microbatch_commits(old: str, new: str, reason: str) -> None:
    single = Placement.linear(1)
    validate([parse_actions(row) for row in GOOD_MICROBATCH], single, 2, lowered=True)
    rejected([GOOD_MICROBATCH[0].replace(old, new)], single, 2, reason, lowered=True)


def test_the_window_can_be_required() -> None:
    rows = [parse_actions(row) for row in GOOD]
    validate(rows, LINEAR_2, 2, lowered=True, window="step")
    with pytest.raises(PlanError):
        validate(rows, LINEAR_2, 2, lowered=True, window="microbatch")


def test_sends_within_a_rank() -> None:
    rows = ["0F0 0SEND_F0 1RECV_F0 1F0 1I0 0I0 0W0 1W0 REDUCE STEP COMMIT"]
    rejected(rows, Placement((0, 0)), 1, "share rank 0", lowered=True)


def test_deadlock_by_hand() -> None:
    """Both ranks send before they post the receive that the other send needs."""
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0RECV_B1 0W0 0I1 0W1 REDUCE STEP COMMIT",
        "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1W0 1F1 1I1 1SEND_B1 1W1 REDUCE STEP COMMIT",
    ]
    assert not can_finish([parse_actions(row) for row in rows], LINEAR_2, lowered=True)
    error = rejected(rows, LINEAR_2, 2, "deadlock", lowered=True)
    assert "rank 0 at position 3 (0SEND_F1) waits for rank 1 to post 1RECV_F1" in str(error)
    assert "rank 1 at position 3 (1SEND_B0) waits for rank 0 to post 0RECV_B0" in str(error)
    assert error.place == {"rank": 0, "position": 3, "action": "0SEND_F1"}


@given(st.data())
def test_deadlocks_are_found_exactly(data: st.DataObject) -> None:
    """Receives moved about at random, queues kept in order: rejected exactly if the waits form a cycle."""
    rows, placement, m = data.draw(computes())
    plan = [list(row) for row in lower(rows, placement)]
    for row in plan:
        for action in [action for action in row if action.kind in RECEIVES]:
            place = row.index(action)
            last = place + 1
            while (
                row[last].chunk is not None
                and row[last].kind not in RECEIVES
                and not _reads(row[last], action)
            ):
                last += 1
            row.insert(data.draw(st.integers(place, last - 1)), row.pop(place))
    if can_finish(plan, placement, lowered=True):
        validate(plan, placement, m, lowered=True)
    else:
        rejected(plan, placement, m, "deadlock", lowered=True)


def _reads(action: Action, receive: Action) -> bool:
    kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.I, Kind.B)
    return action.kind in kinds and action.key == receive.key


# ---- mutations -----------------------------------------------------------------------------------


@st.composite
def lowered_plans(draw: st.DrawFn) -> tuple[list[list[Action]], Placement, int]:
    if draw(st.booleans()):
        rows, placement, m = draw(computes())
    else:
        p, m = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        placement = Placement.linear(p)
        rows = SCHEDULES[draw(st.sampled_from(PLAIN))](p, m, draw(st.none() | st.integers(0, 3)))
    return lower(rows, placement, window=draw(WINDOWS)), placement, m


@given(lowered_plans(), st.data(), st.sampled_from(["drop", "duplicate", "retarget", "move", "kind"]))
def test_mutations_are_rejected(plan: tuple, data: st.DataObject, mutation: str) -> None:
    """P3: an action dropped, repeated, given another microbatch, chunk, rank or kind never passes."""
    rows, placement, m = plan
    sites = [(rank, place) for rank, row in enumerate(rows) for place in range(len(row))]
    rank, place = data.draw(st.sampled_from(sites))
    row, action = rows[rank], rows[rank][place]
    if mutation == "drop":
        del row[place]
    elif mutation == "duplicate":
        row.insert(data.draw(st.integers(0, len(row))), action)
    elif mutation == "retarget" and action.chunk is not None:
        target = data.draw(st.tuples(st.integers(0, placement.num_chunks), st.integers(0, m)))
        if target == action.key:
            return
        row[place] = Action(action.kind, *target, action.detail)
    elif mutation == "move" and placement.num_ranks > 1:
        other = data.draw(st.sampled_from([other for other in range(placement.num_ranks) if other != rank]))
        rows[other].insert(data.draw(st.integers(0, len(rows[other]))), row.pop(place))
    elif mutation == "kind" and action.is_compute:
        kind = data.draw(
            st.sampled_from([kind for kind in (Kind.F, Kind.I, Kind.W, Kind.B) if kind != action.kind])
        )
        row[place] = Action(kind, *action.key)
    else:
        return
    rejected(rows, placement, m, None, lowered=True)


@given(lowered_plans(), st.data())
def test_swaps_within_a_microbatch_are_rejected(plan: tuple, data: st.DataObject) -> None:
    """P3: two of F, I, W of one (chunk, microbatch) in each other's place never pass."""
    rows, placement, m = plan
    rank = data.draw(st.integers(0, placement.num_ranks - 1))
    row = rows[rank]
    key = data.draw(st.sampled_from([action.key for action in row if action.kind is Kind.F]))
    places = [place for place, action in enumerate(row) if action.is_compute and action.key == key]
    first, second = data.draw(st.permutations(places))[:2]
    row[first], row[second] = row[second], row[first]
    rejected(rows, placement, m, None, lowered=True)


@given(computes(), st.data())
def test_other_swaps_pass_exactly_if_the_rules_hold(plan: tuple, data: st.DataObject) -> None:
    """Any two actions of a rank swapped: accepted if and only if order and dependencies still hold."""
    rows, placement, m = plan
    row = rows[data.draw(st.integers(0, placement.num_ranks - 1))]
    first, second = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
    row[first], row[second] = row[second], row[first]
    if _keeps_rules(rows) and can_finish(rows, placement, lowered=False):
        validate(rows, placement, m, lowered=False)
    else:
        rejected(rows, placement, m, None)


def _keeps_rules(rows: list[list[Action]]) -> bool:
    """F, I, W of each chunk in microbatch order, and F < I < W of each microbatch."""
    place = {}
    for row in rows:
        for position, action in enumerate(row):
            for part in "IW" if action.kind is Kind.B else str(action.kind):
                place[part, *action.key] = position
    for (part, chunk, microbatch), position in place.items():
        if place.get((part, chunk, microbatch - 1), -1) > position:
            return False
        if part != "F" and place["F" if part == "I" else "I", chunk, microbatch] > position:
            return False
    return True
