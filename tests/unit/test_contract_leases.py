"""I2: leases, slots and handles, rule by rule and against a plain reference model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import (
    InputGradTwiceError,
    LeaseError,
    LeaseLeakError,
    LeaseRetainedError,
    NotForwardedError,
    StaleHandleError,
    WeightGradBeforeInputGradError,
    WeightGradTwiceError,
)
from qeffect_lm.contract.leases import LeaseState, LeaseTable, Owner, Slot

I0, I1 = Slot("I", 0, 0), Slot("I", 0, 1)
W0, W1 = Slot("W", 0, 0), Slot("W", 0, 1)
LAYERS = ("qkv", "down")


def table(step: int = 3) -> LeaseTable:
    leases = LeaseTable()
    leases.begin_step(step)
    return leases


def forward(leases: LeaseTable, microbatch: int = 0, i_slot: Slot = I0, w_slot: Slot = W0, layers=LAYERS) -> None:
    """F of a microbatch of chunk 0, as an eager action makes it."""
    leases.open(0, microbatch, i_slot, w_slot)
    for layer in layers:
        leases.retain(0, microbatch, layer, f"{layer}@{microbatch}")
    move(leases, "F", microbatch, layers)


def move(leases: LeaseTable, kind: str, microbatch: int = 0, layers=LAYERS) -> None:
    if kind != "F":
        leases.require(kind, 0, microbatch)
    for layer in layers:
        leases.advance(kind, 0, microbatch, layer)
    leases.finish(kind, 0, microbatch)


def fails(error: type[LeaseError], call, *args, message: str = "", **place) -> LeaseError:
    """The call raises exactly this class, with these values in its place."""
    with pytest.raises(LeaseError) as caught:
        call(*args)
    assert type(caught.value) is error, caught.value
    assert message in str(caught.value)
    for key, value in place.items():
        assert caught.value.place[key] == value, (key, caught.value)
        assert f"{key}={value}" in str(caught.value)
    return caught.value


# ---- each illegal move is its own error --------------------------------------------------------------------


def test_the_life_of_a_lease():
    """EMPTY → FORWARDED → INPUT_GRAD_DONE → FREE, I frees the I-slot, W the W-slot; nothing is left."""
    leases = table()
    forward(leases)
    assert leases.counts() == {"groups": 1, "slots": 2}
    move(leases, "I")
    assert leases.counts() == {"groups": 1, "slots": 1}
    move(leases, "W")
    assert leases.counts() == {"groups": 0, "slots": 0}
    leases.end_step()
    assert leases.step is None
    assert leases.generations() == {"I0.0": 1, "W0.0": 1}


@pytest.mark.parametrize("how", ["require", "finish", "advance", "replay"])
@pytest.mark.parametrize(
    ("before", "kind", "error", "message"),
    [
        ("F", "W", WeightGradBeforeInputGradError, "W before I"),
        ("FIW", "W", WeightGradTwiceError, "W runs a second time"),
        ("FI", "I", InputGradTwiceError, "I runs a second time"),
        ("FIW", "I", InputGradTwiceError, "I runs a second time"),
        ("", "I", NotForwardedError, "never forwarded"),
        ("", "W", NotForwardedError, "never forwarded"),
    ],
)
def test_illegal_moves(before, kind, error, message, how):
    """L4, L5: W before I; W twice; I twice, also after W; I and W of a microbatch never forwarded: each its
    own error.
    """
    leases = table(step=7)
    for done in before:
        if done == "F":
            forward(leases, microbatch=5)
        else:
            move(leases, done, 5)
    call = {
        "require": lambda: leases.require(kind, 0, 5),
        "finish": lambda: leases.finish(kind, 0, 5),
        "advance": lambda: leases.advance(kind, 0, 5, "down"),
        "replay": lambda: leases.replay(kind, 0, 5, LAYERS),
    }[how]
    state = {"": "empty", "F": "forwarded", "FI": "input_grad_done", "FIW": "free"}[before]
    layer = "down" if how == "advance" and before else "*"
    fails(error, call, message=message, step=7, chunk=0, microbatch=5, layer=layer, state=state)


def test_a_layer_moves_once_within_an_action():
    """L5: the layers of one action are guarded one by one."""
    leases = table()
    leases.open(0, 0, I0, W0)
    leases.advance("F", 0, 0, "qkv")
    fails(LeaseRetainedError, leases.advance, "F", 0, 0, "qkv", layer="qkv", state="forwarded")
    fails(NotForwardedError, leases.advance, "I", 0, 0, "down", layer="down")
    leases.finish("F", 0, 0)
    leases.advance("I", 0, 0, "qkv")
    fails(InputGradTwiceError, leases.advance, "I", 0, 0, "qkv", layer="qkv")
    leases.finish("I", 0, 0)
    leases.advance("W", 0, 0, "qkv")
    fails(WeightGradTwiceError, leases.advance, "W", 0, 0, "qkv", layer="qkv")


@pytest.mark.parametrize("before", ["open", "F", "FI", "FIW"])
def test_a_microbatch_goes_forward_once(before):
    leases = table()
    if before == "open":
        leases.open(0, 0, I0, W0)
    else:
        forward(leases)
        for done in before[1:]:
            move(leases, done)
    fails(LeaseRetainedError, leases.open, 0, 0, I1, W1, message="already went forward", microbatch=0, layer="*")


@pytest.mark.parametrize(
    ("slots", "done", "claimed"),
    [((I0, W1), "F", I0), ((I1, W0), "F", W0), ((I1, W0), "FI", W0), ((I0, W0), "FI", W0)],
)
def test_a_retained_slot_is_not_given_away(slots, done, claimed):
    """A slot is claimed while another microbatch retains it: the error names holder and generation, and
    nothing is taken.
    """
    leases = table()
    forward(leases, 0)
    if "I" in done:
        move(leases, "I", 0)
    error = fails(
        LeaseRetainedError,
        leases.open,
        0,
        1,
        *slots,
        chunk=0,
        microbatch=1,
        holder=(3, 0, 0),
        generation=1,
        step=3,
    )
    assert str(tuple(claimed)) in str(error)
    fails(NotForwardedError, leases.require, "I", 0, 1)
    leases.open(0, 1, I1, W1)


def test_a_released_slot_is_given_to_the_next_with_a_new_generation():
    leases = table()
    forward(leases, 0)
    move(leases, "I", 0)
    forward(leases, 1, I0, W1)  # I freed the I-slot, W's is still held
    assert leases.generations() == {"I0.0": 2, "W0.0": 1, "W0.1": 1}
    assert leases.held(0, 1) == ("I0.0", 2, "W0.1", 1)


@pytest.mark.parametrize(
    ("done", "missing", "layer", "state"),
    [("F", "I did not run", "qkv", "forwarded"), ("FI", "W did not run", "qkv", "input_grad_done")],
)
@pytest.mark.parametrize("close", ["end_step", "begin_step"])
def test_a_step_ends_with_every_lease_free(done, missing, layer, state, close):
    """L4: the step ends with one W (or I) not run: the error names layer and microbatch."""
    leases = table(step=9)
    forward(leases, 0)
    move(leases, "I", 0)
    move(leases, "W", 0)
    forward(leases, 4)
    if "I" in done:
        move(leases, "I", 4)
    call = leases.end_step if close == "end_step" else lambda: leases.begin_step(10)
    place = {
        "step": 9,
        "chunk": 0,
        "microbatch": 4,
        "layer": layer,
        "state": state,
        "slot": ("W", 0, 0),
        "generation": 2,
    }
    fails(LeaseLeakError, call, message=missing, **place)


def test_a_chunk_without_split_layers_is_guarded_too():
    leases = table()
    forward(leases, layers=())
    fails(LeaseLeakError, leases.end_step, layer="*", microbatch=0, message="I did not run")
    move(leases, "I", layers=())
    fails(LeaseLeakError, leases.end_step, layer="*", microbatch=0, message="W did not run")
    move(leases, "W", layers=())
    leases.end_step()


@pytest.mark.parametrize("kind", ["I", "W"])
def test_an_action_that_leaves_a_layer_out_is_a_leak(kind):
    leases = table()
    forward(leases)
    if kind == "W":
        move(leases, "I")
    leases.advance(kind, 0, 0, "qkv")
    fails(
        LeaseLeakError,
        leases.finish,
        kind,
        0,
        0,
        message=f"{kind} ended but",
        layer="down",
        microbatch=0,
        step=3,
        chunk=0,
    )


def test_an_action_outside_a_step():
    with pytest.raises(LeaseError, match="outside a step") as caught:
        LeaseTable().open(2, 5, I0, W0)
    assert caught.value.place == {"chunk": 2, "microbatch": 5}
    fails(NotForwardedError, LeaseTable().require, "I", 2, 5, step=-1)


# ---- graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["I", "W"])
@pytest.mark.parametrize("layers", [("qkv",), ("qkv", "down", "up"), ("qkv", "up"), ("qkv", "qkv")])
def test_a_replay_moves_exactly_the_layers_that_went_forward(kind, layers):
    """A graph that leaves a layer out, brings another or moves one twice is refused, and the lease stays
    where it was.
    """
    leases = table()
    leases.open(0, 0, I0, W0)
    leases.replay("F", 0, 0, LAYERS)
    if kind == "W":
        leases.replay("I", 0, 0, LAYERS[::-1])
    with pytest.raises(LeaseError) as caught:
        leases.replay(kind, 0, 0, layers)
    expected = {1: "down", 3: "up", 2: "up" if "up" in layers else "qkv"}[len(layers)]
    assert caught.value.place["layer"] == expected


def test_a_replay_that_retains_one_layer_twice_is_refused():
    """Two uses of one layer in a chunk would share one handle."""
    leases = table()
    leases.open(0, 0, I0, W0)
    fails(LeaseRetainedError, leases.replay, "F", 0, 0, ("qkv", "qkv"), layer="qkv")


# ---- handles -----------------------------------------------------------------------------------------------


def test_a_payload_is_given_out_once_by_key():
    """Look-ups are by key, never first-in-first-out; a handle is affine and keeps no memory."""
    leases = table()
    forward(leases, 0)
    forward(leases, 1, I1, W1)
    handle = leases.handle(0, 1, "down")
    assert (handle.owner, handle.layer, handle.slot, handle.generation) == (Owner(3, 0, 1), "down", W1, 1)
    fails(WeightGradBeforeInputGradError, leases.consume, handle, layer="down", microbatch=1)
    move(leases, "I", 1)
    assert leases.consume(handle) == "down@1"
    assert handle.payload is None
    fails(WeightGradTwiceError, leases.consume, handle, layer="down", microbatch=1)
    move(leases, "I", 0)
    assert leases.consume(leases.handle(0, 0, "down")) == "down@0"
    move(leases, "W", 1)
    fails(WeightGradTwiceError, leases.consume, handle, layer="down", microbatch=1, step=3, chunk=0)
    fails(WeightGradTwiceError, leases.handle, 0, 1, "down", layer="down")
    fails(NotForwardedError, leases.handle, 0, 0, "gate", layer="gate")


def test_a_handle_of_an_older_generation_reads_nothing():
    """L5: handle of generation g used when the slot is at g + 1: both are named."""
    leases = table()
    forward(leases, 0)
    old, consumed = leases.handle(0, 0, "qkv"), leases.handle(0, 0, "down")
    move(leases, "I", 0)
    leases.consume(consumed)
    move(leases, "W", 0)
    fails(StaleHandleError, leases.consume, old, layer="qkv", generation=1, slot_generation=1)  # released, not reused
    forward(leases, 1)
    place = {"step": 3, "chunk": 0, "microbatch": 0, "layer": "qkv", "generation": 1, "slot_generation": 2}
    error = fails(StaleHandleError, leases.consume, old, **place)
    assert "generation 1" in str(error) and "is at 2" in str(error)
    fails(StaleHandleError, leases.consume, consumed, layer="down", generation=1, slot_generation=2)
    assert old.payload == "qkv@0"


def test_abandon_frees_everything_and_kills_old_handles():
    """L7: after a failed step slots are free, the step is over, and an old handle stays dead for good."""
    leases = table()
    forward(leases, 0)
    handle = leases.handle(0, 0, "qkv")
    leases.abandon()
    assert leases.counts() == {"groups": 0, "slots": 0} and leases.step is None
    fails(StaleHandleError, leases.consume, handle, generation=1, slot_generation=2)
    leases.begin_step(3)
    forward(leases, 0)
    fails(StaleHandleError, leases.consume, handle, generation=1, slot_generation=3)
    move(leases, "I", 0)
    assert leases.consume(leases.handle(0, 0, "qkv")) == "qkv@0"


def test_payloads_are_put_back_for_another_capture():
    leases = table()
    forward(leases)
    move(leases, "I")
    left = leases.payloads(0, 0)
    assert left == {"qkv": "qkv@0", "down": "down@0"}
    leases.consume(leases.handle(0, 0, "qkv"))
    leases.put_back(0, 0, left)
    assert leases.consume(leases.handle(0, 0, "qkv")) == "qkv@0"


def test_unchecked_the_table_only_keeps_books():
    """Mode off: a second F and a retained slot pass, so that the cost of the checks can be measured."""
    leases = table()
    leases.open(0, 0, I0, W0, check=False)
    leases.open(0, 0, I0, W0, check=False)
    leases.open(0, 1, I0, W0, check=False)
    assert leases.generations() == {"I0.0": 3, "W0.0": 3}


# ---- a reference model -------------------------------------------------------------------------------------


class Model:
    """What may happen, told from the log of what happened: per microbatch the moves so far, per slot its
    holder.
    """

    def __init__(self) -> None:
        self.open_step = False
        self.log: dict[tuple[int, int], str] = {}
        self.slots_of: dict[tuple[int, int], tuple[Slot, Slot]] = {}
        self.claims: dict[Slot, int] = {}

    def holder(self, slot: Slot) -> tuple[int, int] | None:
        for key, (i_slot, w_slot) in self.slots_of.items():
            done = self.log[key]
            if (slot == i_slot and "I" not in done) or (slot == w_slot and "W" not in done):
                return key
        return None

    def verdict(self, kind: str, key: tuple[int, int], slots: tuple[Slot, Slot]) -> type[LeaseError] | None:
        done = self.log.get(key)
        if kind == "F":
            if not self.open_step:
                return LeaseError
            if done is not None or any(self.holder(slot) for slot in slots):
                return LeaseRetainedError
            return None
        if done is None:
            return NotForwardedError
        if kind == "I":
            return InputGradTwiceError if "I" in done else None
        if "I" not in done:
            return WeightGradBeforeInputGradError
        return WeightGradTwiceError if "W" in done else None

    def apply(self, kind: str, key: tuple[int, int], slots: tuple[Slot, Slot]) -> None:
        if kind == "F":
            self.log[key], self.slots_of[key] = "", slots
            for slot in slots:
                self.claims[slot] = self.claims.get(slot, 0) + 1
        else:
            self.log[key] += kind


keys = st.tuples(st.integers(0, 1), st.integers(0, 1))
moves = st.tuples(st.sampled_from("FFIIWW"), keys, st.integers(0, 1), st.integers(0, 1), st.booleans())
marks = st.sampled_from(["begin", "end", "end", "abandon"])
scripts = st.lists(st.one_of(moves, moves, moves, moves, moves, moves, moves, marks), min_size=20, max_size=60)


def run_one(leases: LeaseTable, kind: str, key: tuple[int, int], slots: tuple[Slot, Slot], graph: bool) -> None:
    """One action, as the ledger makes it, eagerly or by a graph."""
    if kind == "F":
        leases.open(*key, *slots)
        for layer in LAYERS:
            leases.retain(*key, layer, (key, layer))
    else:
        leases.require(kind, *key)
    if graph:
        leases.replay(kind, *key, LAYERS)
        return
    for layer in LAYERS:
        leases.advance(kind, *key, layer)
    if kind == "W":
        for layer in LAYERS:
            assert leases.consume(leases.handle(*key, layer)) == (key, layer)
    leases.finish(kind, *key)


@settings(max_examples=120)
@given(scripts)
def test_the_table_is_the_reference_model(script):
    """Random legal and illegal moves, eager and replayed mixed: the same verdicts, slots and generations."""
    leases, model = LeaseTable(), Model()
    for one in ["begin", *script]:
        if one == "abandon":
            leases.abandon()
            for slot in model.claims:
                model.claims[slot] += 1
            model.log.clear()
            model.slots_of.clear()
            model.open_step = False
        elif one in ("begin", "end"):
            leaks = sorted(key for key, done in model.log.items() if "W" not in done)
            try:
                leases.begin_step(1) if one == "begin" else leases.end_step()
                assert not leaks
                model.log.clear()
                model.slots_of.clear()
                model.open_step = one == "begin"
            except LeaseLeakError as error:
                key = (error.place["chunk"], error.place["microbatch"])
                assert key in leaks and error.place["layer"] == LAYERS[0]
                assert ("W did not run" in str(error)) == (model.log[key] == "I")
        else:
            kind, key, i, w, graph = one
            slots = Slot("I", key[0], i), Slot("W", key[0], w)
            expected = model.verdict(kind, key, slots)
            try:
                run_one(leases, kind, key, slots, graph)
                assert expected is None, (one, expected)
                model.apply(kind, key, slots)
            except LeaseError as error:
                assert type(error) is expected, (one, error)
                assert (error.place["chunk"], error.place["microbatch"]) == key
        assert leases.generations() == {slot.name: count for slot, count in sorted(model.claims.items())}
        held = sum(model.holder(slot) is not None for slot in model.claims)
        assert leases.counts() == {
            "groups": sum("W" not in done for done in model.log.values()),
            "slots": held,
        }


def test_states_are_named_as_the_design_names_them():
    assert [state.name for state in LeaseState] == ["EMPTY", "FORWARDED", "INPUT_GRAD_DONE", "FREE"]
