"""The plan: its slots against brute force, its graphs, its text, fingerprint and stored form."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import Action, Kind, parse_action, parse_actions
from pipeline.auto import auto
from pipeline.lower import lower
from pipeline.plan import GraphKey, Holding, Plan, assign_slots, build_plan, make_plan, peak_bytes
from pipeline.schedules import SCHEDULES, Placement, one_f_one_b
from pipeline.simulate import simulate
from pipeline.slots import Slots, Span
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from tests.unit.pipeline_plans import PLAIN, computes, named

RESOURCES = ("i_slots", "w_slots", "inputs", "outputs", "grad_ins", "dxs")
WINDOW = st.sampled_from(["step", "microbatch"])
SIZES = (st.integers(1, 6), st.integers(1, 12), st.none() | st.integers(0, 8), WINDOW)
PLAIN_PLANS = st.builds(build_plan, st.sampled_from(PLAIN), *SIZES)
PLANS = st.builds(lambda arguments, window: build_plan(*arguments[:4], window, arguments[4]), named(4, 9), WINDOW)


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    if draw(st.booleans()):
        return draw(PLANS)
    rows, placement, m = draw(computes())
    return make_plan("random", rows, placement, m)


# ---- slots ---------------------------------------------------------------------------------------


def replay(
    row: tuple[Action, ...], placement: Placement, rank: int, border_in_i_slot: bool
) -> dict[str, dict[int, int]]:
    """Per resource and chunk the most held at once, by walking the list and counting what is held."""
    held: dict[str, set[tuple[int, int]]] = {name: set() for name in RESOURCES}
    most: dict[str, dict[int, int]] = {name: {} for name in RESOURCES}
    sent = {action.key for action in row if action.kind is Kind.SEND_F}
    sent_back = {action.key for action in row if action.kind is Kind.SEND_B}
    last = placement.num_chunks - 1
    for action in row:
        if action.chunk is None or action.kind is Kind.COMMIT:
            continue
        (chunk, microbatch), kind = action.key, action.kind
        backward = kind in (Kind.I, Kind.B)
        claims, releases = [], []
        if kind is Kind.F:
            claims += [("i_slots", action.key), ("w_slots", action.key), ("inputs", action.key)]
            claims += [("outputs", action.key)] if action.key in sent else []
            if chunk < last and placement.ranks[chunk + 1] == rank:  # written where its reader is
                claims.append(("inputs", (chunk + 1, microbatch)))
            releases.append(("inputs", action.key))
        if backward:
            claims += [("dxs", action.key)] if action.key in sent_back else []
            if chunk > 0 and placement.ranks[chunk - 1] == rank:
                claims.append(("grad_ins", (chunk - 1, microbatch)))
            releases += [("i_slots", action.key), ("grad_ins", action.key)]
        claims += [("inputs", action.key)] if kind is Kind.RECV_F else []
        claims += [("grad_ins", action.key)] if kind is Kind.RECV_B else []
        if border_in_i_slot:
            claims += [("i_slots", key) for name, key in claims if name in ("inputs", "grad_ins")]
        releases += [("w_slots", action.key)] if kind in (Kind.W, Kind.B) else []
        releases += [("outputs", action.key)] if kind is Kind.SEND_F else []
        releases += [("dxs", action.key)] if kind is Kind.SEND_B else []
        for name, key in claims:
            held[name].add(key)
            now = sum(1 for other in held[name] if other[0] == key[0])
            most[name][key[0]] = max(now, most[name].get(key[0], 0))
        for name, key in releases:
            held[name].discard(key)
    assert not any(held.values()), "something is held after the step"
    return most


@given(any_plans(), st.booleans())
def test_counts_are_the_peaks_of_the_order(plan: Plan, border_in_i_slot: bool) -> None:
    for rank, row in enumerate(plan.actions):
        slots = assign_slots(row, Holding(border_in_i_slot=border_in_i_slot))
        peaks = replay(row, plan.placement, rank, border_in_i_slot)
        for name in RESOURCES:
            assert dict(getattr(slots, name).count) == peaks[name], name


@given(any_plans())
def test_nothing_arrives_in_a_slot_that_is_in_use(plan: Plan) -> None:
    """A receive posted into an I-slot finds it released: the I of the slot's holder before it has run."""
    for row, slots in zip(plan.actions, plan.slots, strict=True):
        holder: dict[tuple[int, int], tuple[int, int]] = {}
        for action in row:
            if action.kind in (Kind.F, Kind.RECV_F, Kind.RECV_B):
                slot = action.key[0], slots.i_slots.index[action.key]
                assert holder.setdefault(slot, action.key) == action.key
            elif action.kind in (Kind.I, Kind.B):
                del holder[action.key[0], slots.i_slots.index[action.key]]
        assert not holder


def test_a_gradient_may_be_awaited_before_f() -> None:
    """A slot is reserved by whichever receive comes first, also if it is the gradient's."""
    row = parse_actions("0F0 0SEND_F0 0RECV_B0 0RECV_B1 0I0 0W0 0F1 0SEND_F1 0I1 0W1")
    slots = assign_slots(row)
    assert dict(slots.i_slots.span) == {(0, 0): Span(0, 4), (0, 1): Span(3, 8)}
    assert dict(slots.i_slots.count) == {0: 2}


@given(PLAIN_PLANS)
def test_receiving_ahead_costs_no_slot(plan: Plan) -> None:
    """In 1F1B and GPipe the I-slots are those that F and I alone would need."""
    for row, slots in zip(plan.actions, plan.slots, strict=True):
        apart = assign_slots(row, Holding(border_in_i_slot=False))
        assert slots.i_slots.count == apart.i_slots.count


@given(
    any_plans(),
    st.builds(
        Holding,
        st.booleans(),
        st.sampled_from("FIW").map(Kind),
        st.sampled_from("IW").map(Kind),
        st.integers(1, 3),
    ),
)
def test_slots_never_overlap_and_none_is_spare(plan: Plan, holding: Holding) -> None:
    """Two holders of one index never hold it at one position; each chunk's count is its largest overlap."""
    for row in plan.actions:
        slots = assign_slots(row, holding)
        for name in RESOURCES:
            resource: Slots = getattr(slots, name)
            assert resource.index.keys() == resource.span.keys()
            busy: set[tuple[int, int, int]] = set()
            for key, (start, end) in resource.span.items():
                assert 0 <= start <= end < len(row)
                for position in range(start, end + 1):
                    taken = (key[0], resource.index[key], position)
                    assert taken not in busy, f"{name} {taken} is held twice"
                    busy.add(taken)
            for chunk, count in resource.count.items():
                overlaps = [
                    sum(1 for c, _, p in busy if c == chunk and p == position) for position in range(len(row))
                ]
                assert count == max(overlaps)
                assert {index for key, index in resource.index.items() if key[0] == chunk} == set(
                    range(count)
                )


@given(any_plans())
def test_peak_over_chunks(plan: Plan) -> None:
    plan = replace(plan, holding=Holding(border_in_i_slot=False))
    for rank, row in enumerate(plan.actions):
        held_i = held_w = most_i = most_w = 0
        for action in row:
            held_i += action.kind is Kind.F
            held_w += action.kind is Kind.F
            most_i, most_w = max(most_i, held_i), max(most_w, held_w)
            held_i -= action.kind in (Kind.I, Kind.B)
            held_w -= action.kind in (Kind.W, Kind.B)
        assert plan.peak_leases(rank) == (most_i, most_w)


def test_1f1b_holds_no_more_than_its_depth() -> None:
    """Not the number of microbatches: stage s of p holds p − s, with any number of them."""
    plan = build_plan("1f1b", 4, 32)
    for rank in range(4):
        assert dict(plan.slots[rank].i_slots.count) == {rank: 4 - rank}
        assert dict(plan.slots[rank].w_slots.count) == {rank: 4 - rank}
        assert sum(plan.slots[rank].inputs.count.values()) <= 2
    assert build_plan("gpipe", 4, 32).peak_leases(0) == (32, 32)


def test_i_frees_its_slot_before_w() -> None:
    """1F1B with W two microbatches late: I-slots as before, two more W-slots."""
    plan = build_plan("1f1b", 3, 12, 2)
    assert [plan.peak_leases(rank) for rank in range(3)] == [(3, 5), (2, 4), (1, 3)]
    held = build_plan("1f1b", 3, 12, 2, holding=Holding(i_slot_until=Kind.W))
    assert [held.peak_leases(rank) for rank in range(3)] == [(5, 5), (4, 4), (3, 3)]


def test_slots_by_hand() -> None:
    row = parse_actions(
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1I0 1SEND_B0 1RECV_B1 1W0 1I1 1SEND_B1 1W1"
    )
    assert dict(assign_slots(row).i_slots.span) == {(1, 0): Span(0, 7), (1, 1): Span(1, 11)}
    slots = assign_slots(row, Holding(border_in_i_slot=False))
    assert dict(slots.i_slots.span) == {(1, 0): Span(2, 7), (1, 1): Span(5, 11)}
    assert dict(slots.w_slots.span) == {(1, 0): Span(2, 10), (1, 1): Span(5, 13)}
    assert dict(slots.inputs.span) == {(1, 0): Span(0, 2), (1, 1): Span(1, 5)}
    assert dict(slots.outputs.span) == {(1, 0): Span(2, 3), (1, 1): Span(5, 6)}
    assert dict(slots.grad_ins.span) == {(1, 0): Span(4, 7), (1, 1): Span(9, 11)}
    assert dict(slots.dxs.span) == {(1, 0): Span(7, 8), (1, 1): Span(11, 12)}
    assert dict(slots.inputs.index) == {(1, 0): 0, (1, 1): 1}
    assert dict(slots.outputs.index) == {(1, 0): 0, (1, 1): 0}
    late = assign_slots(row, Holding(input_until=Kind.I, sends_in_flight=2))
    assert dict(late.inputs.span) == {(1, 0): Span(0, 7), (1, 1): Span(1, 11)}
    assert dict(late.outputs.span) == {(1, 0): Span(2, 6), (1, 1): Span(5, 13)}
    assert dict(late.outputs.index) == {(1, 0): 0, (1, 1): 1}


@pytest.mark.parametrize(
    "arguments", [{"input_until": Kind.SEND_F}, {"i_slot_until": Kind.F}, {"sends_in_flight": 0}]
)
def test_impossible_holding(arguments: dict) -> None:
    with pytest.raises(UsageError):
        Holding(**arguments)


def test_peak_bytes() -> None:
    plan = make_plan(
        "loop",
        [parse_actions("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"), parse_actions("1F0 1F1 1B0 1B1")],
        Placement((0, 1, 0)),
        2,
    )
    counts = {name: dict(getattr(plan.slots[0], name).count) for name in RESOURCES}
    assert counts["i_slots"] == {0: 2, 2: 2} and counts["outputs"] == {0: 1} and counts["dxs"] == {2: 1}
    assert peak_bytes(plan, 0, 10, 1) == 4 * 10 + 4 * 1
    assert peak_bytes(plan, 0, {0: 10, 2: 100}, 0) == 220
    buffers = peak_bytes(
        plan, 0, 0, 0, bytes_input=1, bytes_output=1000, bytes_grad_in=100000, bytes_dx=10**7
    )
    assert buffers == sum(counts["inputs"].values()) + 1000 + 100000 * counts["grad_ins"][0] + 10**7


# ---- graphs --------------------------------------------------------------------------------------


def test_graphs_by_hand() -> None:
    """1F1B on one rank: one slot, one F, and I and W with beta 0 and 1."""
    plan = build_plan("1f1b", 1, 5)
    assert plan.graph_keys(0) == [
        GraphKey(Kind.F, 0, 0, 0, None),
        GraphKey(Kind.I, 0, 0, 0, 0),
        GraphKey(Kind.W, 0, 0, 0, 0),
        GraphKey(Kind.I, 0, 0, 0, 1),
        GraphKey(Kind.W, 0, 0, 0, 1),
    ]
    assert plan.graph_key(parse_action("0W0")) == GraphKey(Kind.W, 0, 0, 0, 0)
    assert len(build_plan("1f1b", 1, 1).graph_keys(0)) == 3


@given(any_plans())
def test_graphs(plan: Plan) -> None:
    for rank, row in enumerate(plan.actions):
        keys = plan.graph_keys(rank)
        work = [action for action in row if action.is_compute]
        assert len(set(keys)) == len(keys)
        assert set(keys) == {plan.graph_key(action) for action in work}
        slots = plan.slots[rank]
        for action in work:
            key = plan.graph_key(action)
            assert (key.kind, key.chunk) == (action.kind, action.key[0])
            assert (key.i_slot, key.w_slot) == (
                slots.i_slots.index[action.key],
                slots.w_slots.index[action.key],
            )
            assert key.beta == (None if action.kind is Kind.F else int(action.key[1] > 0))


def test_beta_without_microbatch_order() -> None:
    """The first to write clears the gradient, whichever microbatch it is."""
    row = parse_actions("0F0 0F1 0I1 0I0 0W0 0W1")
    plan = make_plan("free", [row], Placement.linear(1), 2, allow_unordered=True)
    betas = {str(action): plan.graph_key(action).beta for action in row}
    assert betas == {"0F0": None, "0F1": None, "0I1": 0, "0I0": 1, "0W0": 0, "0W1": 1}
    row = parse_actions("0F0 0F1 0I0 0B1 0W0")
    with pytest.raises(PlanError, match="first writer of only one"):
        make_plan("free", [row], Placement.linear(1), 2, allow_unordered=True)


# ---- the plan itself -----------------------------------------------------------------------------


def test_text_is_canonical() -> None:
    """A stored fingerprint must stay valid: a change here is a change of format."""
    plan = build_plan("1f1b", 2, 2, 1)
    assert plan.text() == (
        "plan 1\n"
        "schedule 1f1b\n"
        "placement 0 1\n"
        "microbatches 2\n"
        "window step\n"
        "unordered no\n"
        "holding slot F I 1\n"
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0I0 0I1 0W0 0W1 REDUCE STEP COMMIT\n"
        "rank 1: 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 REDUCE STEP COMMIT\n"
    )
    assert plan.fingerprint() == "3495ebc559ce71045aba1efe5fcf5e036d5be49e22dd077428ea12a1f35842a4"


@given(any_plans())
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan)
    assert again.text() == plan.text() and again.fingerprint() == plan.fingerprint()
    assert again.slots == plan.slots


def test_fingerprints_differ() -> None:
    plans = [
        build_plan("1f1b", 2, 4),
        build_plan("gpipe", 2, 4),
        build_plan("1f1b", 2, 5),
        build_plan("1f1b", 2, 4, 1),
        build_plan("1f1b", 2, 4, window="microbatch"),
        build_plan("1f1b", 2, 4, holding=Holding(sends_in_flight=2)),
        build_plan("1f1b", 2, 4, holding=Holding(border_in_i_slot=False)),
        build_plan("1f1b", 1, 4),
        replace(build_plan("1f1b", 2, 4), allow_unordered=True),
    ]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_a_plan_is_frozen() -> None:
    plan = build_plan("1f1b", 2, 2)
    with pytest.raises(FrozenInstanceError):
        plan.window = "microbatch"  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.slots[0].i_slots.index[0, 0] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"actions": ["0F0 0I0 REDUCE STEP COMMIT"]}, "0W0 is missing"),
        ({"actions": ["0F0 what"]}, "no action"),
        ({"schedule": "other"}, "was changed"),
        ({"format": 2}, "format 2"),
        ({"placement": [1]}, "placement"),
        ({"window": "day"}, "window"),
        ({"window": "microbatch"}, "window microbatch"),
        ({"microbatches": "2"}, "not a stored plan"),
        ({"microbatches": 2}, "0F1 is missing"),
        ({"holding": {}}, "not a stored plan"),
    ],
)
def test_stored_plans_are_checked(change: dict, reason: str) -> None:
    document = json.loads(build_plan("1f1b", 1, 1).to_json())
    with pytest.raises(PlanError, match=reason):
        Plan.from_json(json.dumps({**document, **change}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "3"])
def test_not_a_plan_at_all(text: str) -> None:
    with pytest.raises(PlanError, match="not a stored plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("1f1c", 2, 2), "unknown schedule '1f1c'; use one of 1f1b, gpipe"),
        (("1f1b", 0, 2), "p=0"),
        (("1f1b", 2, 0), "m=0"),
        (("1f1b", 2, 2, -1), "w_delay"),
        (("1f1b", 2, 2, 0, "day"), "window"),
        (("1f1b", 2, 2, 0, "step", 2), "one chunk per rank"),
    ],
)
def test_build_plan_refuses(arguments: tuple, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_plan(*arguments)


def test_make_plan_refuses_what_breaks_a_rule() -> None:
    """P2: not lowered, not silent."""
    rows = [parse_actions("0F0 0F1 0B0 0B1"), parse_actions("1F1 1F0 1B0 1B1")]
    with pytest.raises(PlanError, match="leaves microbatch order"):
        make_plan("mine", rows, Placement.linear(2), 2)
    with pytest.raises(PlanError, match="out of range"):
        make_plan("mine", rows, Placement.linear(2), 1)


def test_a_plan_checks_its_window() -> None:
    rows = lower(SCHEDULES["1f1b"](1, 1, 0), Placement.linear(1))
    with pytest.raises(PlanError):
        Plan("1f1b", Placement.linear(1), 1, "microbatch", tuple(map(tuple, rows))).validate()


# ---- numbers of other kinds ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [numpy.int64, numpy.array, torch.tensor])
def test_whole_numbers_of_other_libraries(number) -> None:  # noqa: ANN001
    """numpy's and 0-dim ones are Python ints from there on: the plan has the same text, and can be stored."""
    expected = build_plan("interleaved-1f1b", 2, 4, 1, chunks=2)
    plan = build_plan("interleaved-1f1b", number(2), number(4), number(1), chunks=number(2))
    assert plan.to_json() == expected.to_json()
    placement, holding = Placement((number(0), number(1))), Holding(sends_in_flight=number(1))
    found = make_plan("x", one_f_one_b(2, 4), placement, number(4), holding=holding)
    assert Plan.from_json(found.to_json()) == found
    assert auto(number(2), number(4), 1, 1, 1, effort=0).plan == auto(2, 4, 1, 1, 1, effort=0).plan
    assert Action(Kind.F, number(1), number(2)) == Action(Kind.F, 1, 2)
    assert simulate(expected, number([1, 1, 1, 1]), 1, 1) == simulate(expected, [1, 1, 1, 1], 1, 1)
    assert peak_bytes(expected, 0, number(3), 5) == peak_bytes(expected, 0, 3, 5)


@pytest.mark.parametrize("number", [2.0, "2", torch.tensor([2, 2]), torch.tensor(2.0)])
def test_no_whole_numbers(number) -> None:  # noqa: ANN001
    for call in (
        lambda: build_plan("1f1b", number, 4),
        lambda: build_plan("1f1b", 2, number),
        lambda: build_plan("1f1b", 2, 4, number),
        lambda: build_plan("interleaved-1f1b", 2, 4, chunks=number),
        lambda: make_plan("x", one_f_one_b(2, 4), Placement.linear(2), number),
        lambda: Placement((0, number)),
        lambda: Placement.v_shaped(number),
        lambda: one_f_one_b(number, 4),
        lambda: auto(2, number, 1, 1, 1),
        lambda: Holding(sends_in_flight=number),
        lambda: Action(Kind.F, 0, number),
        lambda: peak_bytes(build_plan("1f1b", 1, 1), 0, number, 1),
    ):
        with pytest.raises(UsageError, match="is a whole number, not"):
            call()
