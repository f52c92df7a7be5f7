"""``SteadyClock``: the shortcut over steps that repeat gives the verdicts of the clock without it, whatever changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import StreamOrderError
from qeffect_lm.contract.steady import ROUNDS, Promise, SteadyClock
from qeffect_lm.contract.streams import Access, StreamClock

READ, WRITE, MERGE = Access.READ, Access.WRITE, Access.MAX_MERGE
STREAMS = ("host", "a", "b", "c")


def random_step(rng: Random) -> list[tuple[Any, ...]]:
    """Work on streams, events and waits; waits mostly for this step's events, now and then for an older one."""
    step: list[tuple[Any, ...]] = []
    events = 0
    for _ in range(rng.randint(2, 10)):
        kind = rng.random()
        if kind < 0.5:
            accesses = tuple((rng.randrange(4), rng.choice([READ, READ, WRITE, MERGE])) for _ in range(rng.randint(1, 3)))
            if rng.random() < 0.2:
                lo = rng.randrange(8)
                accesses += ((4, rng.choice([READ, WRITE]), lo, lo + rng.randint(1, 4)),)
            step.append(("work", rng.choice(STREAMS), accesses))
        elif kind < 0.7:
            covers = None if rng.random() < 0.8 else [rng.randrange(4)]
            step.append(("record", rng.choice(STREAMS), covers))
            events += 1
        elif kind < 0.95 and events:
            step.append(("wait", rng.choice(STREAMS), 0, rng.randrange(events)))
        elif kind < 0.97:
            step.append(("wait", rng.choice(STREAMS), rng.randint(1, ROUNDS + 2), rng.randrange(3)))
        elif kind < 0.98:
            step.append(("settle",))
        elif kind < 0.99:
            step.append(("forget", rng.randrange(4)))
        else:
            step.append(("access", rng.choice(STREAMS), rng.randrange(4), rng.choice([READ, WRITE])))
    if rng.random() < 0.5:  # a whole circle at the end makes the step legal to repeat more often
        for source in STREAMS[1:]:
            step += [("record", source, None), ("wait", "host", 0, events)]
            events += 1
    return step


def changed(step: list[tuple[Any, ...]], rng: Random) -> list[tuple[Any, ...]]:
    """One operation left out, doubled or replaced: a step that leaves the order."""
    step = list(step)
    at = rng.randrange(len(step))
    how = rng.randrange(5)
    kind, *rest = step[at]
    if how == 4 and kind == "work":
        step[at] = (kind, rng.choice(STREAMS), rest[1])
    elif how == 3 and kind == "work":
        step[at] = (kind, rest[0], tuple((buffer, rng.choice([READ, WRITE]), *span) for buffer, _, *span in rest[1]))
    elif how == 0:
        del step[at]
    elif how == 1:
        step.insert(at, step[at])
    else:
        step[at] = ("work", rng.choice(STREAMS), ((rng.randrange(4), rng.choice([READ, WRITE])),))
    return step


def run(clock: StreamClock, steps: list[list[tuple[Any, ...]]], follow: list[bool] | None = None) -> list[str]:
    """The verdict of every operation; after a violation the step goes on, as far as the clock is concerned."""
    said: list[str] = []
    past: list[list[Any]] = []
    for step in steps:
        if isinstance(clock, SteadyClock):
            clock.begin_step()
            if follow is not None:
                follow.append(clock._script is not None)
        events: list[Any] = []
        past.append(events)
        for number, operation in enumerate(step):
            kind, *arguments = operation
            try:
                if kind == "record":
                    events.append(clock.record(*arguments))
                elif kind == "wait":
                    stream, age, serial = arguments
                    of = past[-1 - age] if age < len(past) else []
                    if serial < len(of):
                        clock.wait(stream, of[serial])
                elif kind == "work":
                    clock.work(*arguments, f"work {number}")
                else:
                    getattr(clock, kind)(*arguments)
                said.append("")
            except StreamOrderError as error:
                said.append(error.message.split(" [")[0])
                return said  # what follows a violation is abandoned, as a step is
    return said


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_verdicts_are_those_of_the_clock_without_the_shortcut(rng, repeats):
    """A step repeated, then changed somewhere, then repeated again: same verdict on every operation, same words."""
    step = random_step(rng)
    steps = [step] * repeats
    if rng.random() < 0.7:
        steps += [changed(step, rng), *[step] * rng.randint(0, 4)]
    assert run(SteadyClock(), steps) == run(StreamClock(), steps)


def test_the_programs_follow_and_leave_and_violate():
    """The property above is about something: many programs take the shortcut, many leave it, many end in a violation."""
    rng = Random(1)
    followed = left = wrong = wrong_after = 0
    for _ in range(300):
        step = random_step(rng)
        steps = [step] * 6 + [changed(step, rng), step]
        follow: list[bool] = []
        said = run(SteadyClock(), steps, follow)
        followed += any(follow)
        left += any(follow[:7]) and said[-1] == "" and not all(follow[3:])
        wrong += said[-1] != ""
        wrong_after += any(follow) and said[-1] != ""
    assert followed > 80 and left > 50 and wrong > 80 and wrong_after > 5, (followed, left, wrong, wrong_after)


def test_changes_that_make_a_step_wrong_are_trapped():
    """Legal steps that are followed, each changed in one place so that the clock without the shortcut refuses: so does this
    one, at the same operation, in the same words."""
    rng, trapped = Random(7), 0
    while trapped < 60:
        step = random_step(rng)
        follow: list[bool] = []
        if run(SteadyClock(), [step] * 5, follow)[-1] != "" or not follow[-1]:
            continue
        for _ in range(12):
            steps = [step] * 5 + [changed(step, rng), step]
            wanted = run(StreamClock(), steps)
            trapped += wanted[-1] != ""
            assert run(SteadyClock(), steps) == wanted


# ---- one by one --------------------------------------------------------------------------------------------

CIRCLE = [
    ("work", "a", (("x", WRITE),)),
    ("record", "a", None),
    ("wait", "b", 0, 0),
    ("work", "b", (("x", READ),)),
    ("record", "b", None),
    ("wait", "a", 0, 1),
]


def steady(step: list[tuple[Any, ...]] = CIRCLE) -> SteadyClock:
    clock = SteadyClock()
    assert run(clock, [step] * 5)[-1] == ""
    assert clock._script is not None
    return clock


@pytest.mark.parametrize("missing", [1, 2, 4, 5])
def test_each_edge_that_is_missing_later_is_trapped(missing):
    """In the step it is missing from, or in the one after it, as without the shortcut."""
    cut = [operation for number, operation in enumerate(CIRCLE) if number != missing]
    if cut[-1][0] == "wait" or missing in (1, 4):
        cut = [("wait", o[1], 0, 0) if o[0] == "wait" else o for o in cut]
    for repeats in (3, 6, 9):
        steps = [CIRCLE] * repeats + [cut, CIRCLE]
        assert run(SteadyClock(), steps) == run(StreamClock(), steps)
        assert run(SteadyClock(), steps)[-1] != "" or missing in (1, 4)


def test_a_shorter_step_leaves_the_shortcut_at_the_next_one():
    steps = [CIRCLE] * 5 + [CIRCLE[:4]] + [CIRCLE]
    assert run(SteadyClock(), steps) == run(StreamClock(), steps)
    assert "not ordered" in run(SteadyClock(), steps)[-1]


def test_a_step_that_waits_for_an_older_event_is_checked_each_time():
    older = [("record", "a", None), ("wait", "b", 1, 0), ("work", "a", (("x", READ),))]
    clock = SteadyClock()
    run(clock, [older] * 6)
    assert clock._script is None


@pytest.mark.parametrize("age", [1, 2, ROUNDS, ROUNDS + 1, ROUNDS + 4])
def test_an_event_kept_over_steps_vouches_for_what_it_did(age):
    """A promise that somebody waits for steps later is as good as the event would have been, and no better."""
    for buffer in ("x", "y"):
        late = [("wait", "c", age, 0), ("work", "c", ((buffer, READ),))]
        steps = [[("work", "a", (("y", READ),)), *CIRCLE]] * 9 + [late]
        steps[0] = [("work", "a", (("y", WRITE),)), *CIRCLE]
        assert run(SteadyClock(), steps) == run(StreamClock(), steps)


def test_a_step_that_was_refused_is_never_followed():
    """The same wrong step again and again, everything settled in between: refused every time, sound steps around it or not."""
    wrong = [operation for operation in CIRCLE if operation[0] != "wait"]
    clock = SteadyClock()
    for number in range(12):
        clock.begin_step()
        with pytest.raises(StreamOrderError):
            for kind, *arguments in wrong:
                getattr(clock, kind)(*arguments, *(["w"] if kind == "work" else []))
        clock.settle()
        if number > 6:
            assert run(clock, [CIRCLE] * (number % 5))[-1:] in ([], [""])
            clock.settle()


def test_events_of_followed_steps_are_promises_and_traces_see_real_ones():
    clock = steady()
    clock.begin_step()
    clock.work("a", (("x", WRITE),), "work 0")
    assert isinstance(clock.record("a"), Promise)
    clock.pause(False)
    assert clock._script is None
    assert not isinstance(clock.record("a"), Promise)
    for _ in range(5):
        clock.begin_step()
    assert clock._script is None
    clock.pause(True)
    assert run(clock, [CIRCLE] * 5)[-1] == "" and clock._script is not None


def test_promises_that_die_are_forgotten():
    """An event that is held until the next step's replaces it: one is kept, not one a step."""
    clock, held = steady(), None
    for _ in range(50):
        clock.begin_step()
        clock.work("a", (("x", WRITE),), "work 0")
        held = clock.record("a")
        clock.wait("b", held)
        clock.work("b", (("x", READ),), "work 3")
        clock.wait("a", clock.record("b"))
    assert isinstance(held, Promise) and clock._script is not None and len(clock._kept) <= 2


def test_what_is_collected_does_not_grow():
    """A clock without steps, and one whose steps never repeat, keep nothing of what was told."""
    clock = SteadyClock()
    for number in range(2000):
        clock.work("a", (("x", WRITE),), str(number))
    assert not clock._told and not clock._serials
    for number in range(50):
        clock.begin_step()
        clock.work("a", (("x", WRITE), (number, READ)), "w")
        clock.record("a")
    assert clock._script is None and not clock._told and not clock._serials
