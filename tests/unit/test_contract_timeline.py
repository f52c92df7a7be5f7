"""I1: the scale timeline: what a roll computes, and who may read, report and commit when."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import ContractViolation, ScaleOrderError
from qeffect_lm.contract.timeline import EMPTY, Direction, ScaleRole, ScaleTimeline
from qeffect_lm.fp8.quantise import E4M3, dequantise, quantise
from qeffect_lm.state import Role

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
E4, E5 = 448.0, 57344.0
NO = torch.zeros((), dtype=torch.bool)
YES = torch.ones((), dtype=torch.bool)
ROLES = [
    ScaleRole("b.grad_output", BACKWARD, E5),
    ScaleRole("a.input", FORWARD, E4),
    ScaleRole("a.grad_output", BACKWARD, E5),
    ScaleRole("a.weight", FORWARD, E4),
]


def timeline(**kwargs) -> ScaleTimeline:
    return ScaleTimeline(ROLES, **{"history": 3, **kwargs})


def report(line: ScaleTimeline, amax: dict[str, float]) -> None:
    """Max-merge amaxes by role."""
    for role, value in amax.items():
        slot = line.slot_of(role)
        torch.maximum(slot, torch.tensor(value), out=slot)


def fails(call, *args, message: str, **place) -> None:
    with pytest.raises(ScaleOrderError) as caught:
        call(*args)
    assert message in str(caught.value)
    assert isinstance(caught.value, ContractViolation)
    for key, value in place.items():
        assert caught.value.place[key] == value, caught.value


# ---- what a roll computes ----------------------------------------------------------------------------------


def test_delayed_scaling_by_hand():
    """scale = max / amax of the history; the oldest entry falls out after ``history`` rolls."""
    line = timeline()
    seen = []
    for amax in (2.0, 8.0, 1.0, 1.0, 1.0):
        report(line, {"a.input": amax})
        line.roll_(NO)
        seen.append(float(line.scale_of("a.input")))
    assert seen == [224.0, 56.0, 56.0, 56.0, 448.0]
    assert line.history[line.index["a.input"]].tolist() == [1.0, 1.0, 1.0]


def test_roles_that_report_nothing_keep_their_scale():
    """S2: half of the roles do not run in a window: no roll, no drift, and their slot stays EMPTY."""
    line = timeline()
    report(line, {"a.input": 2.0, "a.weight": 4.0, "a.grad_output": 1.0})
    line.roll_(NO)
    before = line.stash()
    for _ in range(5):
        report(line, {"a.input": 16.0})
        line.roll_(NO)
    idle = [line.index[name] for name in ("a.weight", "a.grad_output", "b.grad_output")]
    assert torch.equal(line.scale[idle], before["scale"][idle]) and torch.equal(line.history[idle], before["history"][idle])
    assert float(line.scale_of("a.input")) == 28.0
    assert (line.open_amax == EMPTY).all()


def test_a_stash_is_a_copy():
    """S5: updating the live scale and history does not change what was stashed."""
    line = timeline()
    report(line, {"a.input": 2.0})
    line.roll_(NO)
    stash = line.stash()
    kept = {name: value.clone() for name, value in stash.items()}
    report(line, {"a.input": 64.0})
    line.roll_(NO)
    assert all(torch.equal(stash[name], kept[name]) for name in kept)
    assert float(line.scale_of("a.input")) != float(stash["scale"][line.index["a.input"]])


def test_a_cached_weight_keeps_the_scale_it_was_quantised_with():
    """S1: cached over five microbatches while the scale moves between them: identical inputs give identical
    outputs.
    """
    torch.manual_seed(0)
    line = timeline(window="microbatch")
    weight, x = torch.randn(8, 8), torch.randn(4, 8)
    report(line, {"a.weight": float(weight.abs().max()) * 3})
    line.roll_(NO)
    cached = quantise(weight, line.scale_of("a.weight"), E4M3)
    outputs, scales = [], []
    for microbatch in range(5):
        outputs.append(x @ dequantise(cached.rows, cached.scale_inv).t())
        scales.append(float(line.scale_of("a.weight")))
        report(line, {"a.weight": 20.0 * (microbatch + 1)})
        line.roll_(NO, (FORWARD,))
    assert len(set(scales)) == 5
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_amax_never_enters_a_history(bad):
    """S8: infinity or NaN, after or before a finite amax: no roll for that role, the next window is sound."""
    line = timeline()
    report(line, {"a.input": 2.0, "a.weight": 2.0})
    line.roll_(NO)
    line.slot_of("a.input").fill_(bad)
    report(line, {"a.weight": 7.0})
    count = torch.zeros((), dtype=torch.float64)
    line.non_finite_(count)
    assert float(count) == 1
    line.roll_(NO)
    assert float(line.scale_of("a.input")) == 224.0 and float(line.scale_of("a.weight")) == 64.0
    assert torch.isfinite(line.history).all() and torch.isfinite(line.scale).all()
    report(line, {"a.input": 4.0})
    line.roll_(NO)
    assert float(line.scale_of("a.input")) == 112.0
    line.non_finite_(count)
    assert float(count) == 0


def test_a_skipped_step_rolls_nothing_and_clears_the_window():
    """S8: the slots of a skipped step are gone, scales and histories keep their bytes."""
    line = timeline()
    report(line, {"a.input": 2.0, "a.grad_output": 3.0})
    line.roll_(NO)
    before = line.stash()
    report(line, {"a.input": 9.0, "a.weight": 9.0, "a.grad_output": 9.0})
    line.roll_(YES)
    assert torch.equal(line.scale, before["scale"]) and torch.equal(line.history, before["history"])
    assert (line.open_amax == EMPTY).all()


@pytest.mark.parametrize("window", ["step", "microbatch"])
def test_a_non_finite_amax_is_counted_once_and_in_its_step(window):
    """S8: window microbatch clears a slot long before the vote: what was rolled away there counts, then and only then."""
    line = timeline(window=window)
    count = torch.full((), -1.0, dtype=torch.float64)
    line.slot_of("a.input").fill_(math.inf)
    line.slot_of("a.grad_output").fill_(math.nan)
    if window == "microbatch":
        line.roll_(NO, (FORWARD,))
        line.slot_of("a.weight").fill_(math.nan)
    for expected in (3 if window == "microbatch" else 2, 0):
        line.non_finite_(count)
        assert float(count) == expected
        line.open_amax.fill_(EMPTY)


def test_an_amax_of_zero_rolls_and_keeps_the_scale():
    line = timeline(history=1)
    report(line, {"a.input": 2.0})
    line.roll_(NO)
    report(line, {"a.input": 0.0})
    line.roll_(NO)
    assert float(line.scale_of("a.input")) == 224.0
    assert line.history[line.index["a.input"]].tolist() == [0.0]


def test_one_direction_rolls_alone():
    """Window microbatch: a forward roll leaves backward rows and slots alone, and the other way round."""
    for mine, other in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
        line = timeline(window="microbatch")
        report(line, {role.name: 2.0 for role in ROLES})
        line.roll_(NO, (mine,))
        rows = {d: [line.index[role.name] for role in ROLES if role.direction is d] for d in Direction}
        assert (line.open_amax[rows[mine]] == EMPTY).all() and (line.scale[rows[mine]] != 1).all()
        assert (line.open_amax[rows[other]] == 2.0).all() and (line.scale[rows[other]] == 1).all()
        assert (line.history[rows[other]] == 0).all()


def test_a_timeline_of_one_direction_or_none():
    line = ScaleTimeline([ScaleRole("a.input", FORWARD, E4)], history=2)
    report(line, {"a.input": 2.0})
    line.roll_(NO)
    assert line.scale.tolist() == [224.0]
    ScaleTimeline([]).roll_(NO)


class Reference:
    """One role, in plain float32 arithmetic."""

    def __init__(self, fmt_max: float, history: int, amax: str, margin: int) -> None:
        self.scale, self.fmt_max, self.amax, self.margin = np.float32(1), np.float32(fmt_max), amax, margin
        self.history = [np.float32(0)] * history
        self.open = np.float32(EMPTY)

    def merge(self, value: np.float32) -> None:
        self.open = np.float32(math.nan) if math.isnan(value) or math.isnan(self.open) else max(self.open, value)

    def roll(self, skip: bool) -> None:
        if not skip and math.isfinite(self.open) and self.open >= 0:
            self.history = [self.open, *self.history[:-1]]
            peak = max(self.history) if self.amax == "max" else self.history[0]
            if peak > 0:
                with np.errstate(over="ignore"):
                    scale = np.float32(self.fmt_max / peak) / np.float32(2.0**self.margin)
                if math.isfinite(scale):
                    self.scale = scale
        self.open = np.float32(EMPTY)


amaxes = st.one_of(
    st.floats(0, 1e4, width=32),
    st.sampled_from([0.0, 2.0**-149, 2.0**-126, 1e-37, 448.0, 3e38, math.inf, math.nan]),
)
windows = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(ROLES), amaxes), max_size=6),
        st.booleans(),
        st.sampled_from(["both", "f", "b"]),
    ),
    max_size=8,
)


@settings(max_examples=120)
@given(windows, st.integers(1, 4), st.sampled_from(["max", "most_recent"]), st.integers(0, 3))
def test_rolls_equal_plain_arithmetic(script, history, amax, margin):
    """S2, S8: random windows of random reports, skips and directions: bitwise the reference's scales and
    histories, finite.
    """
    line = timeline(history=history, amax=amax, margin=margin)
    reference = {role.name: Reference(role.fp8_max, history, amax, margin) for role in ROLES}
    for reports, skip, which in script:
        for role, value in reports:
            slot = line.slot_of(role.name)
            torch.maximum(slot, torch.tensor(value, dtype=torch.float32), out=slot)
            reference[role.name].merge(np.float32(value))
        directions = {"both": tuple(Direction), "f": (FORWARD,), "b": (BACKWARD,)}[which]
        line.roll_(YES if skip else NO, directions)
        for role in ROLES:
            if role.direction in directions:
                reference[role.name].roll(skip)
        for role in ROLES:
            row = line.index[role.name]
            assert np.float32(line.scale[row]) == reference[role.name].scale
            assert [np.float32(v) for v in line.history[row]] == reference[role.name].history
        assert torch.isfinite(line.history).all() and torch.isfinite(line.scale).all() and (line.scale > 0).all()


# ---- who may do what, when ---------------------------------------------------------------------------------


def run(line: ScaleTimeline, contributor, direction=FORWARD) -> None:
    line.begin(contributor, direction)
    line.end(contributor)


def test_a_window_in_order():
    """Begin, contributors of both directions, one commit: epoch 0 → 1 in both directions, and the next window
    may start.
    """
    line = timeline()
    line.expect(FORWARD, ["F0", "F1"])
    line.expect(BACKWARD, ["I0"])
    for epoch in range(3):
        line.begin_window()
        assert line.begin("F0", FORWARD) == epoch
        line.check_reader("F0", "a.input")
        line.end("F0")
        run(line, "F1")
        run(line, "I0", BACKWARD)
        line.commit(epoch)
        assert line.epochs == {FORWARD: epoch + 1, BACKWARD: epoch + 1} and line.commits == epoch + 1


def test_a_commit_happens_once_and_closes_the_current_epoch():
    """Exactly once per window: a second commit, an older or a later epoch are refused, and nothing is
    counted.
    """
    line = timeline()
    line.begin_window()
    for epoch in (-1, 1, 7):
        fails(
            line.commit,
            epoch,
            message=f"closes forward epoch {epoch}, the current one is 0",
            epoch=epoch,
            current_epoch=0,
        )
    line.commit(0, by="3COMMIT")
    fails(line.commit, 0, message="the current one is 1", epoch=0, current_epoch=1)
    fails(lambda: line.commit(1, by="3COMMIT"), message="3COMMIT of forward epoch 1 outside a window", epoch=1)
    assert line.epochs == {FORWARD: 1, BACKWARD: 1} and line.commits == 1


def test_window_step_commits_both_directions_together():
    line = timeline()
    line.begin_window()
    fails(line.commit, 0, (FORWARD,), message="closes forward alone", epoch=0)
    assert line.epochs[FORWARD] == 0


@pytest.mark.parametrize("direction", list(Direction))
def test_a_commit_waits_for_every_contributor(direction):
    """The error names the first that is missing, and how many are."""
    line = timeline()
    line.expect(direction, [("F", 0, 0), ("F", 0, 1), ("F", 0, 2)])
    line.begin_window()
    run(line, ("F", 0, 0), direction)
    fails(line.commit, 0, message=f"of {direction} epoch 0 before ('F', 0, 1) reported (2 missing)", epoch=0)
    run(line, ("F", 0, 2), direction)
    run(line, ("F", 0, 1), direction)
    line.commit(0)
    line.begin_window()
    fails(line.commit, 1, message="(3 missing)", epoch=1)  # last window's reports are not this one's


@pytest.mark.parametrize("direction", list(Direction))
def test_a_commit_waits_for_running_work(direction):
    line = timeline()
    line.begin_window()
    line.begin("F3", direction)
    fails(line.commit, 0, message="while F3 still reads epoch 0", epoch=0)
    line.end("F3")
    line.commit(0)


def test_readers_are_bound_to_the_epoch_they_began_in():
    """A read or report after a commit names both epochs; one outside any action names the role."""
    line = timeline(window="microbatch")
    fails(
        line.check_reader,
        "F0",
        "a.input",
        message="F0 touches scale 'a.input' outside its action",
        role="a.input",
    )
    line.begin("F0", FORWARD)
    line.epochs[FORWARD] += 2  # what only a commit does, and a commit would not
    fails(
        line.check_reader,
        "F0",
        "a.input",
        message="began at epoch 0 and touches 'a.input' at epoch 2",
        epoch=0,
        current_epoch=2,
    )
    line.end("F0")
    fails(line.check_reader, "F0", "a.input", message="outside its action")


def test_contributors_report_once_per_window_and_only_inside_one():
    line = timeline()
    fails(line.begin, "F0", FORWARD, message="F0 reads scales outside a window", epoch=0)
    line.begin_window()
    line.begin("F0", FORWARD)
    fails(line.begin, "F0", FORWARD, message="F0 contributes a second time", epoch=0)
    line.end("F0")
    fails(line.begin, "F0", FORWARD, message="F0 contributes a second time", epoch=0)
    line.commit(0)
    fails(line.begin, "F0", FORWARD, message="outside a window", epoch=1)
    assert line.begin("REFRESH", FORWARD, between=True) == 1
    line.end("REFRESH")
    line.begin_window()
    run(line, "F0")


def test_windows_do_not_overlap():
    line = timeline()
    line.begin_window()
    fails(line.begin_window, message="before the previous one was committed", epoch=0)
    line.commit(0)
    line.begin_window()
    line.close_window()
    line.begin_window()


def test_calibration_comes_before_everything_and_once():
    """It makes epoch 1 without contributors and without a window; later it is refused."""
    line = timeline()
    line.expect(FORWARD, ["F0"])
    line.commit(0, calibration=True, by="CALIBRATION")
    assert line.epochs == {FORWARD: 1, BACKWARD: 1}
    fails(
        lambda: line.commit(1, calibration=True, by="CALIBRATION"),
        message="CALIBRATION calibrates after training began",
        epoch=1,
    )
    late = timeline()
    late.begin_window()
    fails(lambda: late.commit(0, calibration=True), message="after training began", epoch=0)


def test_window_microbatch_commits_each_direction_by_itself():
    line = timeline(window="microbatch")
    line.begin_window()
    for microbatch in range(3):
        run(line, ("F", microbatch))
        line.commit(microbatch, (FORWARD,))
    fails(line.commit, 0, (FORWARD,), message="the current one is 3")
    run(line, ("I", 0), BACKWARD)
    line.commit(0, (BACKWARD,))
    assert line.epochs == {FORWARD: 3, BACKWARD: 1} and line.commits == 4
    fails(line.begin_window, message="before the previous one was committed")
    line.close_window()
    line.begin_window()


def test_abandon_forgets_work_and_reports():
    """L7: after a failed step the same contributors may run again, and nobody still reads."""
    line = timeline()
    line.expect(FORWARD, ["F0"])
    line.begin_window()
    run(line, "F0")
    line.begin("I0", BACKWARD)
    line.abandon()
    line.begin_window()
    fails(line.commit, 0, message="before F0 reported")
    run(line, "F0")
    line.commit(0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"window": "epoch"}, "window must be one of"), ({"amax": "mean"}, "amax must be")],
)
def test_wrong_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        timeline(**bad)


def test_two_roles_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        ScaleTimeline([ROLES[0], ROLES[0]])


def test_saved_state_comes_back():
    line = timeline()
    line.begin_window()
    line.commit(0)
    other = timeline()
    other.load_state(line.state())
    assert other.state() == line.state() == {"epochs": {"forward": 1, "backward": 1}, "commits": 1, "window": "step"}
    other.begin_window()
    other.commit(1)


def test_logical_tensors_are_views_of_the_live_storages():
    """Loads are in place: writing a logical tensor writes what readers see, under the role's name."""
    line = timeline()
    items = {item.name: item for item in line.logical_tensors()}
    assert len(items) == 3 * len(ROLES)
    for value, role in enumerate(ROLES):
        items[f"scale/{role.name}"].tensor.fill_(value + 2.0)
        items[f"amax_history/{role.name}"].tensor.fill_(value + 0.5)
        items[f"amax_open/{role.name}"].tensor.fill_(value + 0.25)
    for value, role in enumerate(ROLES):
        row = line.index[role.name]
        assert float(line.scale_of(role.name)) == value + 2.0 and float(line.slot_of(role.name)) == value + 0.25
        assert line.history[row].tolist() == [value + 0.5] * 3
        assert float(line.fp8_max[row]) == role.fp8_max
    assert items["scale/a.input"].role is Role.SCALE and items["amax_open/a.input"].role is Role.AMAX_OPEN
    assert items["amax_history/a.input"].role is Role.AMAX_HISTORY


class Model:
    """Epochs, open work and reports of window ``step``, told plainly."""

    def __init__(self, expected: dict[Direction, set[str]]) -> None:
        self.expected, self.epoch, self.in_window = expected, 0, False
        self.running: dict[str, Direction] = {}
        self.done: set[tuple[str, Direction]] = set()

    def allows(self, op: str, name: str, direction: Direction, epoch: int) -> bool:
        if op == "window":
            return not self.in_window
        if op == "begin":
            return self.in_window and name not in self.running and (name, direction) not in self.done
        if op == "check":
            return name in self.running
        complete = all((name, d) in self.done for d in Direction for name in self.expected[d])
        return self.in_window and epoch == self.epoch and not self.running and complete


names = st.sampled_from(["F0", "F1", "I0"])
steps = st.tuples(
    st.sampled_from(["window", "window", "begin", "begin", "begin", "end", "end", "check", "commit", "commit", "abandon"]),
    names,
    st.integers(-1, 1),
)


@settings(max_examples=120)
@given(st.lists(steps, min_size=10, max_size=60), st.sets(names))
def test_random_commits_and_readers(script, expected):
    """Random windows, readers and commits: refused exactly when a plain model refuses, with the epoch always
    its own.
    """
    direction_of = {"F0": FORWARD, "F1": FORWARD, "I0": BACKWARD}
    wanted = {d: {name for name in expected if direction_of[name] is d} for d in Direction}
    line, model = timeline(), Model(wanted)
    for direction, contributors in wanted.items():
        line.expect(direction, contributors)
    for op, name, off in script:
        direction = direction_of[name]
        if op == "abandon":
            line.abandon()
            model.running, model.done, model.in_window = {}, set(), False
            continue
        if op == "end":
            if name in model.running:
                line.end(name)
                model.done.add((name, model.running.pop(name)))
            continue
        epoch = model.epoch + (off if op == "commit" and off < 0 else 0)
        call = {
            "window": line.begin_window,
            "begin": lambda n=name, d=direction: line.begin(n, d),
            "check": lambda n=name: line.check_reader(n, "a.input"),
            "commit": lambda e=epoch: line.commit(e),
        }[op]
        try:
            result = call()
            assert model.allows(op, name, direction, epoch), (op, name)
        except ScaleOrderError:
            assert not model.allows(op, name, direction, epoch), (op, name)
            continue
        if op == "window":
            model.in_window = True
        elif op == "begin":
            assert result == model.epoch
            model.running[name] = direction
        elif op == "commit":
            model.epoch, model.in_window, model.done = model.epoch + 1, False, set()
        assert line.epochs == {FORWARD: model.epoch, BACKWARD: model.epoch} and line.commits == model.epoch
