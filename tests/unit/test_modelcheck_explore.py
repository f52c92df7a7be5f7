"""The generic explorer: every order, once, with deadlocks; restriction keeps the orders of what is kept."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qeffect_lm.modelcheck.explore import BLOCKED, STOP, TooManyStatesError, explore, mask, restrict


def orders(before: list[int]) -> set[tuple[int, ...]]:
    """All allowed orders, by trying every permutation."""
    return {
        order
        for order in permutations(range(len(before)))
        if all(not before[node] & ~mask(order[:place]) for place, node in enumerate(order))
    }


@st.composite
def posets(draw, size=5) -> list[int]:
    n = draw(st.integers(0, size))
    return [mask(draw(st.sets(st.integers(0, node - 1)))) if node else 0 for node in range(n)]


@given(posets())
def test_the_final_states_are_those_of_all_permutations(before):
    """The state is the order itself, so no two orders meet: every one is seen, with itself as its example."""
    found = explore(before, (), lambda state, executed, node: (*state, node))
    assert set(found.finals) == orders(before) and not found.deadlocks
    assert all(order == state for state, order in found.finals.items())


@given(posets())
def test_orders_that_meet_in_one_state_continue_as_one(before):
    visited = []
    found = explore(before, 0, lambda state, executed, node: 0, visit=lambda executed, state: visited.append(executed))
    downsets = {mask(order[:n]) for order in orders(before) for n in range(len(before) + 1)}
    assert sorted(visited) == sorted(downsets) and found.states == len(downsets)


@given(posets(), st.data())
def test_restriction_keeps_the_orders_of_what_is_kept(before, data):
    keep = sorted(data.draw(st.sets(st.sampled_from(range(len(before)))))) if before else []
    kept = orders(restrict(before, keep))
    assert {tuple(keep[i] for i in order) for order in kept} == {
        tuple(node for node in order if node in keep) for order in orders(before)
    }


def test_restriction_needs_the_order_of_launching():
    with pytest.raises(ValueError, match="node 0 comes before"):
        restrict([0b10, 0], [0, 1])


def queues(state, executed, node):
    """Two ranks: 0 sends a then b; 2 receives b first, 3 then a; a queue holds one message."""
    if node in (0, 1):
        return (*state, "ab"[node]) if len(state) < 1 else BLOCKED
    wanted = "ba"[node - 2]
    return state[1:] if state[:1] == (wanted,) else BLOCKED


def test_a_deadlock_is_told_with_an_order_that_leads_there():
    before = [0, 0b1, 0, 0b100]
    found = explore(before, (), queues)
    assert not found.finals and found.deadlocks == {0b1: (0,)}
    swapped = explore(before, (), lambda state, executed, node: queues(state, executed, {2: 3, 3: 2}.get(node, node)))
    assert set(swapped.finals) == {()} and not swapped.deadlocks


def test_what_follows_a_stop_is_not_explored():
    seen = []

    def apply(state, executed, node):
        seen.append((executed, node))
        return STOP if node == 0 else state

    found = explore([0, 0], 0, apply)
    assert sorted(seen) == [(0b00, 0), (0b00, 1), (0b10, 0)] and not found.finals and not found.deadlocks


def test_too_many_states():
    with pytest.raises(TooManyStatesError, match="more than 10 states"):
        explore([0] * 5, (), lambda state, executed, node: (*state, node), limit=10)
