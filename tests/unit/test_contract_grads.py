"""Gradient slots: the beta rule, and the number of writers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import ContractViolation, GradSlotError
from qeffect_lm.contract.grads import GradSlot, GradSlots

NAMES = ("a.weight", "b.weight", "c.weight")
GROUPS = (("a.weight",), ("b.weight", "c.weight"), ("a.weight", "c.weight"), NAMES)


def slots() -> GradSlots:
    made = GradSlots(GradSlot(name, torch.full((2, 3), 7.0)) for name in NAMES)
    made.begin_step()
    return made


def write(grads: GradSlots, how: str, name: str, beta: int, microbatch: int | None = None) -> None:
    if how == "eager":
        grads.write(name, beta, microbatch)
    else:
        grads.write_group((name,), beta, microbatch)


def fails(call, *args, message: str) -> GradSlotError:
    with pytest.raises(GradSlotError) as caught:
        call(*args)
    assert message in str(caught.value)
    assert isinstance(caught.value, ContractViolation)
    return caught.value


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_the_first_writer_of_a_step_overwrites_and_later_ones_add(how):
    """G1: beta 0 first (what the previous step left is gone), beta 1 after; the next step begins with beta 0
    again.
    """
    grads = slots()
    for _ in range(2):
        error = fails(write, grads, how, "a.weight", 1, 3, message="add to the previous step's gradient")
        assert error.place == {"layer": "a.weight", "microbatch": 3, "beta": 1, "writers": 0}
        write(grads, how, "a.weight", 0)
        for _ in range(2):
            write(grads, how, "a.weight", 1)
        error = fails(
            write,
            grads,
            how,
            "a.weight",
            0,
            4,
            message="writer 4 of 'a.weight' has beta 0: it would overwrite",
        )
        assert error.place == {"layer": "a.weight", "microbatch": 4, "beta": 0, "writers": 3}
        grads.begin_step()


@pytest.mark.parametrize(("first", "then"), [("eager", "replay"), ("replay", "eager")])
def test_eager_and_replayed_writers_count_together(first, then):
    grads = slots()
    write(grads, first, "a.weight", 0)
    fails(write, grads, then, "a.weight", 0, message="overwrite")
    write(grads, then, "a.weight", 1)
    for name in ("b.weight", "c.weight"):
        write(grads, then, name, 0)
        write(grads, first, name, 1)
    grads.check_complete(2)


def test_graphs_that_share_a_slot_count_together():
    """Two graphs over sets of parameters that overlap: the second may not overwrite the common one."""
    grads = slots()
    grads.write_group(("a.weight", "b.weight"), 0)
    error = fails(grads.write_group, ("c.weight", "b.weight"), 0, 5, message="'b.weight' has beta 0: it would overwrite")
    assert error.place == {"layer": "b.weight", "microbatch": 5, "beta": 0, "writers": 1}
    fails(grads.write_group, ("b.weight", "c.weight"), 1, message="'c.weight' has beta 1")


def test_a_graph_that_writes_a_slot_twice():
    """With beta 0 the second write would lose the first; with beta 1 both count."""
    grads = slots()
    error = fails(grads.write_group, ("a.weight", "a.weight"), 0, message="writer 2 of 'a.weight' has beta 0")
    assert error.place["writers"] == 1
    grads.write_group(("a.weight",), 0)
    grads.write_group(("a.weight", "a.weight"), 1)
    assert fails(grads.write, "a.weight", 0, message="writer 4").place["writers"] == 3
    error = fails(grads.check_complete, 2, message="with 3 of 2 contributions")
    assert error.place == {"layer": "a.weight", "writers": 3, "expected": 2}


def test_an_undeclared_slot():
    grads = slots()
    for call in (
        lambda: grads.write("d", 0),
        lambda: grads.write_group(("a.weight", "d"), 0),
        lambda: grads.report_empty("d"),
    ):
        assert fails(call, message="no gradient slot was declared for 'd'").place["layer"] == "d"
    grads.write_group((), 0)  # a graph without gradients
    grads.write_group((), 1)


@pytest.mark.parametrize("count", [1, 3])
def test_the_optimizer_waits_for_every_contribution(count):
    """Too few or too many writers of any slot: named, with both numbers."""
    grads = slots()
    grads.write_group(NAMES, 0)
    for _ in range(count - 1):
        grads.write_group(NAMES, 1)
    error = fails(grads.check_complete, 2, message=f"'a.weight' with {count} of 2 contributions")
    assert error.place == {"layer": "a.weight", "writers": count, "expected": 2}
    grads.check_complete(count)


def test_the_optimizer_reads_a_gradient_once_and_nobody_writes_after_it():
    grads = slots()
    grads.write_group(NAMES, 0)
    grads.check_complete(1)
    fails(grads.check_complete, 1, message="a second time")
    late = fails(grads.write, "b.weight", 1, message="writer 2 of 'b.weight' comes after the optimizer")
    assert late.place == {"layer": "b.weight", "writers": 1}
    fails(grads.write_group, NAMES, 1, message="writer 2 of 'a.weight' comes after the optimizer")
    grads.begin_step()
    grads.write_group(NAMES, 0)
    grads.check_complete(1)


def test_a_producer_without_work_reports_empty():
    """An idle expert: EMPTY counts as a contribution; a slot with only EMPTYs is zeroed, others keep what was
    written.
    """
    grads = slots()
    grads.report_empty("a.weight")
    grads.write("a.weight", 0)
    grads.write_group(("b.weight",), 0)
    grads.report_empty("b.weight")
    grads.report_empty("c.weight")
    fails(grads.check_complete, 2, message="'c.weight' with 1 of 2")
    grads.report_empty("c.weight")
    fails(grads.check_complete, 2, message="nobody wrote or zeroed 'c.weight'")
    assert grads.zero_empty_() == ["c.weight"]
    grads.check_complete(2)
    assert (grads.slots["c.weight"].view == 0).all()
    assert all((grads.slots[name].view == 7.0).all() for name in ("a.weight", "b.weight"))
    grads.begin_step()
    fails(grads.check_complete, 2, message="with 0 of 2")


writes = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 1)),
    st.tuples(st.sampled_from(GROUPS), st.integers(0, 1)),
    st.tuples(st.sampled_from(GROUPS), st.integers(0, 1)),
    st.sampled_from(["begin", "empty"]),
)


@settings(max_examples=120)
@given(st.lists(writes, min_size=3, max_size=25))
def test_random_writers(script):
    """Any mixture of eager and replayed writers: refused exactly when a beta does not fit, by counting one by
    one.
    """
    grads = slots()
    count, empties = dict.fromkeys(NAMES, 0), 0
    for one in script:
        if one == "begin":
            grads.begin_step()
            count, empties = dict.fromkeys(NAMES, 0), 0
            continue
        if one == "empty":
            grads.report_empty("a.weight")
            empties += 1
            continue
        names, beta = one
        group = (names,) if isinstance(names, str) else names
        wrong = [name for name in group if (beta == 0) != (count[name] == 0)]
        try:
            grads.write(names, beta) if isinstance(names, str) else grads.write_group(names, beta)
            assert not wrong, one
            for name in group:
                count[name] += 1
        except GradSlotError as error:
            assert wrong and error.place["layer"] == wrong[0] and error.place["writers"] == count[wrong[0]]
    assert grads.zero_empty_() == [name for name in NAMES if not count[name]]
    for expected in range(4):
        contributions = [count[name] + empties * (name == "a.weight") for name in NAMES]
        assert passes(lambda e=expected: grads.check_complete(e)) == all(n == expected for n in contributions)
        grads._read = False  # as if it had not been asked


def passes(call) -> bool:
    try:
        call()
    except GradSlotError:
        return False
    return True


# ---- reduced before the step's end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_what_was_reduced_over_replicas_stays_as_it_is(how):
    """Closing asks for all contributions of its names alone; a later writer of one of them is refused, of another is not."""
    grads = slots()
    write(grads, how, NAMES[0], 0)
    fails(grads.close, NAMES[:1], 2, message="replicas would reduce 'a.weight' with 1 of 2 contributions")
    write(grads, how, NAMES[0], 1)
    grads.close(NAMES[:1], 2)
    fails(grads.close, NAMES[:1], 2, message="would be reduced over replicas a second time")
    fails(write, grads, how, NAMES[0], 1, message="comes after its reduction over replicas: its part would be lost")
    for beta in (0, 1):
        write(grads, how, NAMES[1], beta)
        write(grads, how, NAMES[2], beta)
    if how == "replay":
        fails(grads.write_group, NAMES, 1, message="comes after its reduction over replicas")
    grads.check_complete(2)
    fails(grads.close, NAMES[1:2], 2, message="a second time")
    grads.begin_step()
    write(grads, how, NAMES[0], 0)


def test_idle_producers_are_zeroed_before_their_part_is_reduced():
    grads = slots()
    grads.report_empty(NAMES[0])
    fails(grads.close, NAMES[:1], 1, message="nobody wrote or zeroed 'a.weight'")
    assert grads.zero_empty_(NAMES[:1]) == [NAMES[0]]
    assert not grads.slots[NAMES[0]].view.any() and grads.slots[NAMES[1]].view.all()
    grads.close(NAMES[:1], 1)
    grads.slots[NAMES[0]].view.fill_(3)  # what replicas sum up to
    for name in NAMES[1:]:
        grads.report_empty(name)
    assert grads.zero_empty_(()) == []  # a chunk without gradients: the others' producers are still to come
    assert grads.zero_empty_() == [*NAMES[1:]] and grads.slots[NAMES[0]].view.all()
    grads.check_complete(1)
