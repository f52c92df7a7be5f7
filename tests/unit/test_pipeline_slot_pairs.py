"""Pairs of an I-slot and a W-slot, each of which is a graph: as few as the peaks leave, and fewest with spare slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.auto import auto
from pipeline.lower import lower
from pipeline.plan import Holding, Plan, assign_slots, build_plan, make_plan
from pipeline.slot_pairs import few_pairs
from pipeline.slots import SlotPlan, Slots, Span, colour
from tests.unit.pipeline_plans import computes, named

SPARE = Holding(spare_slots=True)
PLANS = st.builds(lambda arguments: build_plan(*arguments[:4], chunks=arguments[4]), named(4, 16))


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    if draw(st.booleans()):
        return draw(PLANS)
    rows, placement, m = draw(computes())
    return make_plan("random", rows, placement, m)


def pairs(slots: SlotPlan, chunk: int) -> int:
    mine = [key for key in slots.i_slots.index if key[0] == chunk]
    return len({(slots.i_slots.index[key], slots.w_slots.index[key]) for key in mine})


def lowest_free(slots: SlotPlan) -> SlotPlan:
    """The same resources, each coloured by itself."""
    return replace(slots, i_slots=colour(slots.i_slots.span), w_slots=colour(slots.w_slots.span))


def graphs(plan: Plan) -> list[int]:
    return [len(plan.graph_keys(rank)) for rank in range(plan.num_ranks)]


def assert_apart(slots: Slots) -> None:
    held: dict[tuple[int, int], list[Span]] = {}
    for key, span in slots.span.items():
        held.setdefault((key[0], slots.index[key]), []).append(span)
    for spans in held.values():
        spans.sort()
        assert all(before.end < after.start for before, after in zip(spans, spans[1:], strict=False))


@given(any_plans())
def test_never_more_slots_and_never_more_pairs(plan: Plan) -> None:
    for slots in plan.slots:
        plain = lowest_free(slots)
        assert (slots.i_slots.count, slots.w_slots.count) == (plain.i_slots.count, plain.w_slots.count)
        for chunk in slots.i_slots.count:
            assert pairs(slots, chunk) <= pairs(plain, chunk)
        for resource in (slots.i_slots, slots.w_slots):
            assert_apart(resource)
            assert {(key[0], place) for key, place in resource.index.items()} == {
                (chunk, place) for chunk, count in resource.count.items() for place in range(count)
            }


@given(any_plans())
def test_spare_slots(plan: Plan) -> None:
    """As many of one kind as of the other at most; in microbatch order then max(i, w) pairs, the least there can be."""
    for row, exact in zip(plan.actions, plan.slots, strict=True):
        spare = assign_slots(row, SPARE)
        assert_apart(spare.i_slots)
        assert_apart(spare.w_slots)
        assert (spare.i_slots.peak, spare.w_slots.peak) == (exact.i_slots.peak, exact.w_slots.peak)
        for chunk, count in exact.i_slots.count.items():
            most = max(count, exact.w_slots.count[chunk])
            assert count <= spare.i_slots.count[chunk] <= most
            assert exact.w_slots.count[chunk] <= spare.w_slots.count[chunk] <= most
            assert pairs(spare, chunk) == most


@given(computes(unordered=True))
def test_any_order_keeps_its_slots_apart(case: tuple) -> None:
    rows, placement, _ = case
    for row in lower(rows, placement):
        for holding in (Holding(), SPARE):
            slots = assign_slots(row, holding)
            assert_apart(slots.i_slots)
            assert_apart(slots.w_slots)


@pytest.mark.parametrize(
    ("plan", "before", "exact", "spare"),
    [
        (lambda: build_plan("1f1b", 4, 64, 1), (62, 128), (62, 128), (17, 50)),  # nothing to choose: see the next test
        (lambda: build_plan("zb-v", 4, 64), (178, 379), (178, 379), (34, 130)),
        (lambda: build_plan("interleaved-1f1b", 4, 64), (85, 187), (53, 155), (40, 142)),
        (lambda: build_plan("interleaved-1f1b", 4, 64, None), (136, 256), (64, 184), (40, 160)),
        (lambda: auto(2, 32, 1.0, 0.95, 0.6, 0.02, limit=3).plan, (38, 63), (28, 53), (28, 53)),
    ],
)
def test_graphs_of_four_ranks(plan, before, exact, spare) -> None:  # noqa: ANN001
    """(The most on one rank, all ranks): the table of docs/schedules.md."""
    made = plan()
    with mock.patch("pipeline.plan.assign_slots", lambda row, holding, _: lowest_free(assign_slots(row, holding))):
        plain = replace(made)
        graphs(plain)
    for one, expected in ((plain, before), (made, exact), (replace(made, holding=SPARE), spare)):
        assert (max(graphs(one)), sum(graphs(one))) == expected


def test_where_the_peaks_leave_no_choice() -> None:
    """1F1B with W one microbatch late on two ranks: of all colourings in as many slots none has fewer pairs."""
    slots = build_plan("1f1b", 2, 8, 1).slots[0]
    counts = slots.i_slots.count[0], slots.w_slots.count[0]
    places = list(product(range(counts[0]), range(counts[1])))
    fewest = 8

    def descend(microbatch: int, chosen: list[tuple[int, int]]) -> None:
        nonlocal fewest
        if microbatch == 8:
            fewest = min(fewest, len(set(chosen)))
            return
        for pair in places:
            if all(
                resource.span[0, other].end < resource.span[0, microbatch].start
                for other, taken in enumerate(chosen)
                for resource, mine, its in zip((slots.i_slots, slots.w_slots), pair, taken, strict=True)
                if mine == its
            ):
                descend(microbatch + 1, [*chosen, pair])

    descend(0, [])
    assert counts == (2, 3)
    assert fewest == pairs(slots, 0) == 6
    assert pairs(assign_slots(build_plan("1f1b", 2, 8, 1).actions[0], SPARE), 0) == 3


def test_a_known_pair_is_preferred() -> None:
    """Two microbatches at a time, and a third slot of one kind: lowest free indices alone would drift apart."""
    i_spans = [Span(0, 9), Span(1, 3), Span(10, 19), Span(11, 13), Span(20, 29), Span(21, 23)]
    w_spans = [Span(0, 9), Span(1, 10), Span(11, 19), Span(12, 20), Span(21, 29), Span(22, 30)]
    first = [0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 1, 0]
    assert few_pairs(i_spans, w_spans, first, (2, 2), spare=False) == ([0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1])


def test_spare_slots_are_part_of_the_plan_and_only_then_of_its_text() -> None:
    plain, spare = build_plan("zb-v", 4, 16), build_plan("zb-v", 4, 16, holding=SPARE)
    assert "holding slot F I 1\n" in plain.text()
    assert "spare" not in plain.to_json()
    assert "holding slot F I 1 spare\n" in spare.text()
    assert Plan.from_json(spare.to_json()) == spare
    assert Plan.from_json(spare.to_json()).slots == spare.slots
    assert plain.fingerprint() != spare.fingerprint()
