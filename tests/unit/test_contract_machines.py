"""State machines: leases, scale timeline and weight versions, driven at random against models of a few lines.

Each rule predicts the exact error class from its own model, or that there is none; after an error the object is as before.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from qeffect_lm.contract.errors import (
    ContractViolation,
    InputGradTwiceError,
    LeaseError,
    LeaseLeakError,
    LeaseRetainedError,
    NotForwardedError,
    ScaleOrderError,
    StaleHandleError,
    StaleWeightError,
    WeightGradBeforeInputGradError,
    WeightGradTwiceError,
)
from qeffect_lm.contract.leases import LeaseTable, Slot
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions


class Machine(RuleBasedStateMachine):
    """Counts what it met, so that a test can say that every case occurred."""

    met: Counter[str]

    def expect(self, error: type[ContractViolation] | None, call):
        """The call's result, or None after it raised exactly ``error``."""
        self.met[error.__name__ if error else "allowed"] += 1
        if error is None:
            return call()
        with pytest.raises(ContractViolation) as caught:
            call()
        assert type(caught.value) is error, caught.value
        return None


def run(machine: type[Machine], examples: int, errors: set[type[ContractViolation]]) -> None:
    """Run a machine; every error of ``errors`` must have occurred, and many calls that none of them met."""
    met: Counter[str] = Counter()
    counted = type(machine.__name__, (machine,), {"met": met})
    run_state_machine_as_test(counted, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
    assert {error.__name__ for error in errors} <= set(met) and met["allowed"] > 3 * examples, met


# ---- leases --------------------------------------------------------------------------------------------------

LAYERS = ("qkv", "down")
keys = st.sampled_from([(0, 0), (0, 1), (1, 0)])
indices = st.integers(0, 1)


class Leases(Machine):
    """The model: per microbatch of the step its last move and slots; per slot its holder and how many it had; per handle the
    count that its slot had then, and whether it was consumed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.step: int | None = None
        self.number = 0
        self.lives: dict[tuple[int, int], tuple[str, Slot, Slot]] = {}
        self.holder: dict[Slot, tuple | None] = {}
        self.count: Counter[Slot] = Counter()
        self.kept: list[dict] = []

    def illegal(self, kind: str, key: tuple[int, int]) -> type[LeaseError] | None:
        state = self.lives[key][0] if key in self.lives else ""
        if kind == "I":
            return {"": NotForwardedError, "F": None}.get(state, InputGradTwiceError)
        return {"": NotForwardedError, "F": WeightGradBeforeInputGradError, "I": None}.get(state, WeightGradTwiceError)

    @property
    def leaks(self) -> bool:
        return any(state != "W" for state, _, _ in self.lives.values())

    @precondition(lambda self: self.step is None or len(self.lives) > 1)
    @rule()
    def begin_step(self) -> None:
        self.expect(LeaseLeakError if self.leaks else None, lambda: self.table.begin_step(self.number + 1))
        if not self.leaks:
            self.number += 1
            self.step, self.lives = self.number, {}

    @precondition(lambda self: len(self.lives) > 1)
    @rule()
    def end_step(self) -> None:
        self.expect(LeaseLeakError if self.leaks else None, self.table.end_step)
        if not self.leaks:
            self.step, self.lives = None, {}

    @precondition(lambda self: len(self.lives) > 1)
    @rule()
    def abandon(self) -> None:
        self.table.abandon()
        self.step, self.lives = None, {}
        for slot in self.holder:
            self.holder[slot] = None
            self.count[slot] += 1

    @rule(key=keys, i=indices, w=indices, graph=st.booleans())
    def forward(self, key, i, w, graph) -> None:
        slots = (Slot("I", key[0], i), Slot("W", key[0], w))
        error: type[LeaseError] | None = None
        if self.step is None:
            error = LeaseError
        elif key in self.lives or any(self.holder.get(slot) is not None for slot in slots):
            error = LeaseRetainedError
        self.expect(error, lambda: self.table.open(*key, *slots))
        if error is not None:
            return
        for slot in slots:
            self.holder[slot] = (self.step, *key)
            self.count[slot] += 1
        if graph:
            self.table.replay("F", *key, LAYERS)
        else:
            for layer in LAYERS:
                handle = self.table.retain(*key, layer, (layer, self.step, *key))
                self.table.advance("F", *key, layer)
                self.kept.append(
                    {
                        "handle": handle,
                        "owner": (self.step, *key),
                        "slot": slots[1],
                        "count": self.count[slots[1]],
                        "consumed": False,
                        "key": key,
                        "step": self.step,
                        "layer": layer,
                    }
                )
            self.table.finish("F", *key)
        self.lives[key] = ("F", *slots)

    @rule(key=keys, kind=st.sampled_from("IIWW"), how=st.sampled_from(["replay", "eager", "require", "finish"]))
    def advance(self, key, kind, how) -> None:
        error = self.illegal(kind, key)
        if how == "eager" and error is None:
            self.table.require(kind, *key, self.lives[key][1:])
            for layer in LAYERS:
                self.table.advance(kind, *key, layer)
                with pytest.raises(LeaseError):  # one layer, twice in one action
                    self.table.advance(kind, *key, layer)
            self.table.finish(kind, *key)
        elif how == "replay" or error is None:
            self.expect(error, lambda: self.table.replay(kind, *key, LAYERS))
        elif how == "finish":
            self.expect(error, lambda: self.table.finish(kind, *key))
        else:
            self.expect(error, lambda: self.table.require(kind, *key))
        if error is None:
            _, i_slot, w_slot = self.lives[key]
            self.lives[key] = (kind, i_slot, w_slot)
            self.holder[i_slot if kind == "I" else w_slot] = None

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), kind=st.sampled_from("IWW"), how=st.sampled_from(["replay", "eager", "require", "finish"]))
    def advance_a_live_one(self, data, kind, how) -> None:
        self.advance(data.draw(st.sampled_from(sorted(self.lives))), kind, how)

    @precondition(lambda self: any(state != "W" for state, _, _ in self.lives.values()))
    @rule(data=st.data(), how=st.sampled_from(["replay", "eager"]))
    def advance_as_it_should(self, data, how) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, life in self.lives.items() if life[0] != "W")))
        self.advance(key, {"F": "I", "I": "W"}[self.lives[key][0]], how)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), i=indices, w=indices, kind=st.sampled_from("IW"))
    def over_slots(self, data, i, w, kind) -> None:
        """Work names the slots it runs over: they must be those that F took."""
        key = data.draw(st.sampled_from(sorted(self.lives)))
        slots = (Slot("I", key[0], i), Slot("W", key[0], w))
        error = self.illegal(kind, key) or (None if slots == self.lives[key][1:] else StaleHandleError)
        self.expect(error, lambda: self.table.require(kind, *key, slots))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def consume(self, data) -> None:
        kept = data.draw(st.sampled_from(self.kept[-6:]))
        same = self.count[kept["slot"]] == kept["count"]
        error: type[LeaseError] | None = None
        if not same:
            error = StaleHandleError
        elif kept["consumed"]:
            error = WeightGradTwiceError
        elif self.holder[kept["slot"]] != kept["owner"]:
            error = StaleHandleError  # W gave the slot back
        elif self.lives[kept["key"]][0] == "F":
            error = WeightGradBeforeInputGradError
        payload = self.expect(error, lambda: self.table.consume(kept["handle"]))
        if error is None:
            kept["consumed"] = True
            assert payload == (kept["layer"], *kept["owner"])

    @invariant()
    def the_books_agree(self) -> None:
        held = sum(state != "W" for state, _, _ in self.lives.values())
        slots = sum(holder is not None for holder in self.holder.values())
        assert self.table.counts() == {"groups": held, "slots": slots}
        assert self.table.generations() == {slot.name: self.count[slot] for slot in sorted(self.holder)}
        assert self.table.step == self.step


def test_leases():
    """L4, L5, L7: moves, slots, generations and handles over steps that end, leak and are abandoned."""
    run(
        Leases,
        60,
        {
            LeaseError,
            LeaseLeakError,
            LeaseRetainedError,
            NotForwardedError,
            InputGradTwiceError,
            StaleHandleError,
            WeightGradBeforeInputGradError,
            WeightGradTwiceError,
        },
    )


# ---- timeline ------------------------------------------------------------------------------------------------

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ROLES = [ScaleRole("a.input", FORWARD, 448.0), ScaleRole("a.grad_output", BACKWARD, 448.0)]
contributors = st.tuples(st.sampled_from("FI"), st.integers(0, 2))
offsets = st.sampled_from([0, 0, 0, 0, 0, -1, 1])


def direction_of(contributor: tuple[str, int]) -> Direction:
    return FORWARD if contributor[0] == "F" else BACKWARD


class Timeline(Machine):
    """The model: two epoch numbers; who runs, since which epoch; who has contributed to the open window of a direction."""

    @initialize(window=st.sampled_from(["step", "microbatch"]), expected=st.sets(contributors, max_size=2))
    def start(self, window, expected) -> None:
        self.line = ScaleTimeline(ROLES, window=window, history=2)
        self.window, self.expected = window, expected
        for direction in Direction:
            self.line.expect(direction, [c for c in expected if direction_of(c) is direction])
        self.epoch = dict.fromkeys(Direction, 0)
        self.running: dict[tuple, int] = {}
        self.done: set[tuple] = set()
        self.open = False
        self.commits = self.refreshes = 0

    def contributed(self, direction: Direction) -> bool:
        return any(c[0] != "R" and direction_of(c) is direction for c in self.done | set(self.running))

    def order(self, wrong: object) -> type[ScaleOrderError] | None:
        return ScaleOrderError if wrong else None

    @rule()
    def begin_window(self) -> None:
        self.expect(self.order(self.open), self.line.begin_window)
        self.open = True

    @rule(contributor=contributors, stated=st.booleans(), off=offsets)
    def begin(self, contributor, stated, off) -> None:
        direction = direction_of(contributor)
        epoch = self.epoch[direction] + off if stated else None
        wrong = (
            (stated and off)
            or (self.window == "step" and not self.open)
            or contributor in self.done
            or contributor in self.running
            or (self.window == "microbatch" and self.contributed(direction))
        )
        got = self.expect(self.order(wrong), lambda: self.line.begin(contributor, direction, epoch=epoch))
        if not wrong:
            assert got == self.epoch[direction]
            self.running[contributor] = got

    @rule()
    def refresh(self) -> None:
        """Between windows and inside them."""
        self.refreshes += 1
        contributor = ("R", self.refreshes)
        assert self.line.begin(contributor, FORWARD, between=True) == self.epoch[FORWARD]
        self.line.end(contributor)

    @rule(contributor=contributors, role=st.sampled_from(ROLES))
    def touch(self, contributor, role) -> None:
        foreign = self.window == "microbatch" and role.direction is not direction_of(contributor)
        wrong = contributor not in self.running or foreign
        self.expect(self.order(wrong), lambda: self.line.check_reader(contributor, role.name))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data) -> None:
        contributor = data.draw(st.sampled_from(sorted(self.running)))
        self.line.end(contributor)
        del self.running[contributor]
        self.done.add(contributor)

    @rule(which=st.sampled_from(["both", "own", "forward", "backward"]), off=offsets)
    def commit(self, which, off) -> None:
        self._commit({"own": "both" if self.window == "step" else "forward"}.get(which, which), off, False)

    @rule(off=offsets)
    def calibrate(self, off) -> None:
        self._commit("both", off, True)

    def _commit(self, which: str, off: int, calibration: bool) -> None:
        directions = {"both": tuple(Direction), "forward": (FORWARD,), "backward": (BACKWARD,)}[which]
        epoch = self.epoch[directions[0]] + off
        wrong = (
            (self.window == "step" and which != "both")
            or any(epoch != self.epoch[d] for d in directions)
            or any(direction_of(c) in directions for c in self.running)
        )
        if calibration:
            wrong = wrong or epoch != 0 or self.open
        elif self.window == "step":
            wrong = wrong or not self.open or not self.expected <= self.done
        else:
            wrong = wrong or not all(self.contributed(d) for d in directions)
        self.expect(self.order(wrong), lambda: self.line.commit(epoch, directions, calibration=calibration))
        if wrong:
            return
        for direction in directions:
            self.epoch[direction] += 1
        self.done = {c for c in self.done if direction_of(c) not in directions}
        self.commits += 1
        self.open = self.open and self.window == "microbatch"

    @rule()
    def close(self) -> None:
        """A step's end."""
        wrong = any(self.contributed(d) for d in Direction)
        self.expect(self.order(wrong), self.line.check_committed)
        if not wrong:
            self.line.close_window()
            self.open = False

    @precondition(lambda self: self.running)
    @rule()
    def abandon(self) -> None:
        self.line.abandon()
        self.running, self.done, self.open = {}, set(), False

    @rule()
    def resume(self) -> None:
        """Epochs and commits come back from what a checkpoint saves."""
        state = self.line.state()
        self.line.load_state(state)
        assert self.line.state() == state == {
            "epochs": {str(d): e for d, e in self.epoch.items()},
            "commits": self.commits,
            "window": self.window,
        }


def test_timeline():
    """Both windows: epochs, readers, contributors, commits, calibration, a step's end, a step abandoned."""
    run(Timeline, 80, {ScaleOrderError})


# ---- versions ------------------------------------------------------------------------------------------------

NAMES, LAYOUTS = ("a", "b", "c"), ("rows", "columns")
some_names = st.sets(st.sampled_from(NAMES), min_size=1).map(sorted)
some_layouts = st.sampled_from([LAYOUTS, LAYOUTS, LAYOUTS, ("rows",), ("columns",)])
epochs = st.integers(0, 1)


class Versions(Machine):
    """The model: per weight a version; per cache the version, epoch and layouts it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = WeightVersions(NAMES)
        self.version = dict.fromkeys(NAMES, 0)
        self.cache: dict[str, tuple[int, int, set[str]]] = {}
        self.casts: Counter[str] = Counter()

    def stale(self, name: str, layout: str, epoch: int | None, version: int | None = None) -> bool:
        if name not in self.cache:
            return True
        made, made_epoch, layouts = self.cache[name]
        return (
            made != self.version[name]
            or version not in (None, self.version[name])
            or epoch not in (None, made_epoch)
            or layout not in layouts
        )

    @rule(names=some_names)
    def bump(self, names) -> None:
        self.versions.bump(names)
        for name in NAMES if names is None else names:
            self.version[name] += 1

    @rule(names=some_names, epoch=epochs, layouts=some_layouts)
    def refresh(self, names, epoch, layouts) -> None:
        for name in names:
            self.versions.refreshed(name, epoch=epoch, layouts=layouts)
            self.cache[name] = (self.version[name], epoch, set(layouts))
            self.casts[name] += 1

    @initialize(epoch=epochs)
    def made(self, epoch) -> None:
        self.refresh(NAMES, epoch, LAYOUTS)

    @rule(epoch=epochs)
    def update(self, epoch) -> None:
        """As a step's end does."""
        self.bump(None)
        self.refresh(NAMES, epoch, LAYOUTS)

    @rule(epoch=epochs)
    def refresh_all(self, epoch) -> None:
        self.refresh(NAMES, epoch, LAYOUTS)

    @rule(
        name=st.sampled_from(NAMES),
        layout=st.sampled_from(LAYOUTS),
        epoch=st.one_of(st.none(), epochs),
        own_epoch=st.booleans(),
        off=offsets,
        stated=st.booleans(),
    )
    def require(self, name, layout, epoch, own_epoch, off, stated) -> None:
        if own_epoch and name in self.cache:
            epoch = self.cache[name][1]
        version = self.version[name] + off if stated else None
        wrong = self.stale(name, layout, epoch, version)
        self.expect(
            StaleWeightError if wrong else None,
            lambda: self.versions.require(name, layout, epoch=epoch, version=version),
        )

    @rule(
        reads=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(LAYOUTS)), min_size=1, max_size=3).map(tuple),
        own_epoch=st.booleans(),
        epoch=st.one_of(st.none(), epochs),
    )
    def require_all(self, reads, own_epoch, epoch) -> None:
        """A graph's reads: what the shortcut answers is what each read by itself would."""
        if own_epoch and reads[0][0] in self.cache:
            epoch = self.cache[reads[0][0]][1]
        wrong = any(self.stale(name, layout, epoch) for name, layout in reads)
        self.expect(StaleWeightError if wrong else None, lambda: self.versions.require_all(reads, epoch=epoch))

    @invariant()
    def the_books_agree(self) -> None:
        assert self.versions.versions == self.version
        assert self.versions.stale == {name for name, (made, _, _) in self.cache.items() if made != self.version[name]}
        assert self.versions.casts == self.casts
        assert self.versions.state() == {
            "versions": self.version,
            "cache_version": {name: made for name, (made, _, _) in self.cache.items()},
            "cache_epoch": {name: epoch for name, (_, epoch, _) in self.cache.items()},
        }


def test_versions():
    """V1, V4: several weights, epochs and layouts; a graph's reads are judged as each by itself."""
    run(Versions, 50, {StaleWeightError})
