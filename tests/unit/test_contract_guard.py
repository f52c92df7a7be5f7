"""``Guard``: the contract around somebody else's loop, alone, without models or pipeline."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qeffect_lm.contract as contract
from qeffect_lm.contract import (
    Access,
    Direction,
    Guard,
    LeaseLeakError,
    Mode,
    ScaleOrderError,
    ScaleRole,
    Slot,
    StaleWeightError,
    StreamOrderError,
    Summary,
)
from qeffect_lm.contract.guard import byte_ranges
from qeffect_lm.errors import UsageError
from qeffect_lm.graphs import HiddenStateRegister, HostReplay

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/guarded_graph.py"
PAGE = ROOT / "docs/contract-api.md"

# ---- bytes of tensors --------------------------------------------------------------------------------------


@given(st.data())
def test_byte_ranges_are_the_bytes_a_view_touches(data):
    """Against the set of bytes found by indexing a storage whose elements hold their own position."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.int16, torch.int64]))
    view = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    for dim in range(len(shape)):
        start = data.draw(st.integers(0, view.shape[dim] - 1))
        view = view.narrow(dim, start, data.draw(st.integers(0, view.shape[dim] - start)))
        view = view[(slice(None),) * dim + (slice(None, None, data.draw(st.integers(1, 3))),)]
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    if data.draw(st.booleans()):
        view = view.unsqueeze(0).expand(3, *view.shape)
    base = torch.arange(view.untyped_storage().nbytes() // view.element_size(), dtype=dtype)
    positions = base.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()
    size = view.element_size()
    touched = {byte for at in positions for byte in range(at * size, (at + 1) * size)}
    ranges = byte_ranges(view)
    assert {byte for lo, hi in ranges for byte in range(lo, hi)} == touched
    assert all(hi < lo for (_, hi), (lo, _) in itertools.pairwise(ranges))  # ascending, merged


def test_a_tensor_in_very_many_pieces_counts_as_its_hull():
    column = torch.zeros(5000, 2)[:, 0]
    assert byte_ranges(column) == [(0, 4 * (2 * 4999 + 1))]
    assert len(byte_ranges(column[:4096])) == 4096


# ---- streams -----------------------------------------------------------------------------------------------


def test_views_conflict_exactly_where_they_overlap():
    """Two columns of one matrix are apart, two rows are apart, a row and a column are not."""
    matrix = torch.zeros(4, 4)
    for other, overlap in ((matrix[:, 1], False), (matrix[:, 0], True), (matrix[2], True), (torch.zeros(4, 4), False)):
        guard = Guard(["a", "b"], tensors={"matrix": matrix})
        with guard.work("a", "one", writes=[matrix[:, 0]]):
            pass
        if overlap:
            with pytest.raises(StreamOrderError, match="'matrix'"), guard.work("b", "two", reads=[other]):
                pytest.fail("the body must not run")
        else:
            with guard.work("b", "two", reads=[other]):
                pass


def test_edges_events_and_the_host():
    x, y = torch.zeros(2), torch.zeros(2)
    guard = Guard(["a", "b"])
    with guard.work("a", "write x and y", writes=[x, y]):
        pass
    early = guard.record("a", covers=[x])
    guard.wait("b", early)
    with guard.work("b", "read x", reads=[x]):
        pass
    with pytest.raises(StreamOrderError, match="storage 1"), guard.work("b", "read y", reads=[y]):
        pass
    with pytest.raises(StreamOrderError), guard.work("host", "log", reads=[y]):
        pass
    guard.synchronize("a")
    with guard.work("host", "log", reads=[y]):
        pass
    with guard.work("a", "max", merges=[y]):
        pass
    with guard.work("b", "max", merges=[y]):  # maxima commute
        pass
    assert guard.accesses(merges=[y])[0][1] is Access.MAX_MERGE


def test_a_storage_stays_alive_while_the_guard_knows_it():
    """Else another tensor could get its identity, and its history."""
    guard = Guard(["a", "b"])
    with guard.work("a", "one", writes=[torch.zeros(8)]):
        pass
    for _ in range(20):
        with guard.work("b", "two", writes=[torch.zeros(8)]):
            pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guard(["host"]), "cannot be called 'host'"),
        (lambda: Guard(["a"], mode="trace"), "needs a file"),
        (lambda: Guard(["a"]).edge("a", "b"), "no stream 'b': there are 'a'"),
        (lambda: Guard(["a"]).graph("g", HostReplay(), "b"), "no stream 'b'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_use_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# ---- graphs and state --------------------------------------------------------------------------------------


def linear(mode: str = "enforce") -> tuple[Guard, dict[str, torch.Tensor], dict]:
    """F, I, W of one layer with a scale, as HostReplay graphs."""
    tensors = {name: torch.ones(4, 4) for name in ("x", "cache", "out", "dy", "dx", "grad")}
    guard = Guard(
        ["copy", "compute"],
        tensors=tensors,
        roles=[ScaleRole("x", Direction.FORWARD, 448.0)],
        weights=["w"],
        grads={"w": tensors["grad"]},
        mode=mode,
    )
    guard.timeline.expect(Direction.FORWARD, [("F", 0, 0), ("F", 0, 1)])
    scale, amax = guard.timeline.scale, guard.timeline.open_amax
    known = {**tensors, "scale": scale, "amax": amax}
    x, cache, out, dy, dx, grad = tensors.values()

    def forward() -> None:
        torch.maximum(amax, x.abs().amax(), out=amax)
        torch.mm(x * scale, cache, out=out)

    def graph(kind: str, work, effects: dict, **touched):  # noqa: ANN001, ANN202
        made = HostReplay().capture(kind, work, register=HiddenStateRegister(known))
        return guard.graph(kind, made, "compute", summary=Summary(kind, **effects), **touched)

    weight = {"layers": ("linear",), "weights": (("w", "rows"),)}
    graphs = {
        "F": graph("F", forward, {**weight, "roles": ("x",)}, reads=[x, cache, scale], writes=[out], merges=[amax]),
        "I": graph("I", lambda: torch.mm(dy, cache, out=dx), weight, reads=[dy, cache], writes=[dx]),
    }
    for beta, work in enumerate([lambda: torch.mm(x.t(), dy, out=grad), lambda: grad.addmm_(x.t(), dy)]):
        effects = {"layers": ("linear",), "grads": ("w",), "beta": beta}
        graphs[f"W{beta}"] = graph("W", work, effects, reads=[x, dy], writes=[grad])
    guard.ledger.refreshed({"w": "linear"}, ["rows"])
    grad.fill_(7.0)  # capturing ran the work
    return guard, tensors, graphs


SLOTS = [(Slot("I", 0, m), Slot("W", 0, m)) for m in range(2)]


def run_step(guard: Guard, graphs: dict, *, leave_out: tuple[str, int] | None = None) -> None:
    with guard.step(0):
        for m in range(2):
            for name in ("F", "I", f"W{m}"):
                if (name, m) != leave_out:
                    graphs[name].replay(m, slots=SLOTS[m])
        if guard.ledger.checks:
            guard.ledger.grads.check_complete(2)
        guard.ledger.commit(0)


def test_a_sound_step_and_the_next_one():
    guard, tensors, graphs = linear()
    run_step(guard, graphs)
    assert torch.equal(tensors["grad"], torch.full((4, 4), 8.0)) and guard.timeline.epochs[Direction.FORWARD] == 1
    with pytest.raises(StaleWeightError, match="epoch"), guard.step(1):  # the cache has the last epoch's scale
        graphs["F"].replay(0, slots=SLOTS[0])
    guard.ledger.refreshed({"w": "linear"}, ["rows"])
    with guard.step(2):
        graphs["F"].replay(0, slots=SLOTS[0])
        graphs["I"].replay(0)
        graphs["W0"].replay(0)
        graphs["F"].replay(1, slots=SLOTS[1])
        graphs["I"].replay(1)
        graphs["W1"].replay(1)
        guard.ledger.commit(1)


def test_faults_are_named_before_their_graph_runs():
    guard, tensors, graphs = linear()
    with pytest.raises(contract.GradSlotError):
        run_step(guard, graphs, leave_out=("W0", 0))
    assert torch.equal(tensors["grad"], torch.full((4, 4), 7.0))  # W of microbatch 1 would have added to last step's gradient
    guard, tensors, graphs = linear()
    with pytest.raises(ScaleOrderError, match="before"), guard.step(0):
        for name in ("F", "I", "W0"):
            graphs[name].replay(0, slots=SLOTS[0])
        guard.ledger.commit(0)
    guard, _, graphs = linear()
    with pytest.raises(LeaseLeakError), guard.step(0):
        for m in range(2):
            graphs["F"].replay(m, slots=SLOTS[m])
        guard.ledger.commit(0)
    guard, _, graphs = linear()
    guard.versions.bump(["w"])
    with pytest.raises(StaleWeightError, match="version 1"):
        run_step(guard, graphs)
    guard, tensors, graphs = linear(mode="off")
    guard.versions.bump(["w"])
    run_step(guard, graphs)  # nothing is checked
    assert guard.ledger.mode is Mode.OFF


def test_an_abandoned_step_leaves_the_guard_usable():
    guard, _, graphs = linear()
    with pytest.raises(RuntimeError, match="mine"), guard.step(0):
        graphs["F"].replay(0, slots=SLOTS[0])
        raise RuntimeError("mine")
    run_step(guard, graphs)


# ---- what an adversary found ---------------------------------------------------------------------------------


def ledger() -> contract.Ledger:
    return Guard(["a", "b"], weights=["w"], grads={"w": torch.zeros(4)}).ledger


def test_a_list_of_accesses_may_be_used_again():
    """A caller's list that changes is another piece of work, also in a step that is followed."""
    guard = Guard(["a", "b"])
    accesses = [("z", Access.READ)]
    for step in range(6):
        with guard.step(step):
            guard.ledger.launch("a", (("x", Access.WRITE),), "write")
            accesses[:] = [("z" if step < 5 else "x", Access.READ)]
            if step < 5:
                guard.ledger.launch("b", accesses, "read")
                guard.ledger.commit(step)
                continue
            with pytest.raises(StreamOrderError):
                guard.ledger.launch("b", accesses, "read")
            guard.ledger.abandon_step()
            guard.ledger.begin_step(step)
            guard.ledger.commit(step)


def test_an_event_of_an_earlier_phase_still_vouches():
    """Training, evaluation, then a save that waits for the last optimizer step: no false alarm."""
    guard = Guard(["compute", "save"])
    trained, evaluated = torch.zeros(4), torch.zeros(4)
    for step in range(8):
        with guard.step(step):
            with guard.work("compute", "work", writes=[trained if step < 5 else evaluated]):
                pass
            if step < 5:
                event = guard.record("compute")
            guard.ledger.commit(step)
    with guard.step(8):
        guard.wait("save", event)
        with guard.work("save", "save", reads=[trained]):
            pass
        with pytest.raises(StreamOrderError), guard.work("save", "save", reads=[evaluated]):
            pass
        guard.ledger.abandon_step()
        guard.ledger.begin_step(8)
        guard.ledger.commit(8)


def test_layers_that_a_graph_forwarded_do_not_move_by_themselves():
    book = ledger()
    book.begin_step(0)
    book.replay(Summary("F", layers=("linear",)), 0, 0, slots=SLOTS[0])
    with pytest.raises(LeaseLeakError, match="did not take part"), book.action("I", 0, 0):
        pass


@pytest.mark.parametrize("slots", [(Slot("I", 0, 0), Slot("I", 0, 0)), (Slot("I", 3, 0), Slot("W", 0, 0))])
def test_a_slot_is_of_its_kind_and_chunk(slots):
    book = ledger()
    book.begin_step(0)
    with pytest.raises(contract.LeaseError, match="one of its I-slots and one of its W-slots"):
        book.replay(Summary("F"), 0, 0, slots=slots)


def test_a_commit_names_a_direction_once():
    book = ledger()
    book.begin_step(0)
    with pytest.raises(ScaleOrderError, match="twice"):
        book.commit(0, (Direction.FORWARD, Direction.FORWARD, Direction.BACKWARD))


def test_a_graph_owes_what_an_eager_action_owes():
    """A beta for the gradients it writes."""
    book = ledger()
    book.begin_step(0)
    book.replay(Summary("F"), 0, 0, slots=SLOTS[0])
    book.replay(Summary("I"), 0, 0)
    with pytest.raises(contract.GradSlotError, match="no beta"):
        book.replay(Summary("W", grads=("w",)), 0, 0)


def test_a_step_does_not_end_well_after_a_refusal():
    """Somebody who swallows a violation: the step cannot pass for a sound one; abandoned, the next one can."""
    guard, tensors, graphs = linear()
    with pytest.raises(contract.LeaseError, match="F was refused"), guard.step(0):
        with guard.work("copy", "batch", writes=[tensors["x"]]):
            pass
        for m in range(2):
            if m == 0:
                with pytest.raises(StreamOrderError):
                    graphs["F"].replay(m, slots=SLOTS[m])
                guard.edge("copy", "compute")
            else:
                graphs["F"].replay(m, slots=SLOTS[m])
            graphs["I"].replay(m)
            graphs[f"W{m}"].replay(m)
        guard.ledger.commit(0)
    guard.ledger.refreshed({"w": "linear"}, ["rows"])
    with guard.step(1):
        guard.ledger.timeline.expect(Direction.FORWARD, [])
        guard.ledger.commit(1)


def test_a_guard_can_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    x = torch.zeros(2)
    guard = Guard(["a", "b"], tensors={"x": x}, mode="trace", trace=str(path))
    with guard.work("a", "writer", writes=[x]):
        pass
    with pytest.raises(StreamOrderError), guard.work("b", "reader", reads=[x]):
        pass
    guard.close()
    told = subprocess.run([sys.executable, "-m", "tools.explain", str(path)], capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == 0, told.stderr


# ---- the example and the page ------------------------------------------------------------------------------


def run_example(text: str) -> None:
    exec(compile(text, "guarded_graph.py", "exec"), {"__name__": "example"})


def test_the_example_runs_and_is_on_the_page():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 40
    assert text in PAGE.read_text()
    run_example(text)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('guard.edge("copy", "compute")', StreamOrderError),
        ('guard.edge("compute", "copy")', StreamOrderError),
        ('guard.ledger.refreshed({"weight": "linear"}, ["rows"])', StaleWeightError),
        (", w.replay()", contract.GradSlotError),
        ("f.replay(slots=(Slot(\"I\", 0, 0), Slot(\"W\", 0, 0))), i.replay(), w.replay()", contract.GradSlotError),
        (", i.replay()", contract.WeightGradBeforeInputGradError),
        ("guard.ledger.commit(epoch=step)", ScaleOrderError),
    ],
)
def test_each_line_of_the_example_is_needed(line, error):
    """Without it the loop stops with a name, on CPU too."""
    text = EXAMPLE.read_text()
    assert text.count(line) == 1
    with pytest.raises(error):
        run_example(text.replace(line, "" if line.startswith(",") else "pass"))


def test_the_page_names_the_whole_api():
    page = PAGE.read_text()
    for name in contract.__all__:
        assert re.search(rf"\b{name}\b", page), f"{name} is not on {PAGE.name}"
        assert getattr(contract, name) is not None
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)", page):
        if hasattr(contract, owner):
            assert hasattr(getattr(contract, owner), member) or member in getattr(
                getattr(contract, owner), "__dataclass_fields__", {}
            ), f"{owner}.{member} is on the page and does not exist"
    for name in ("Guard", "Ledger", "ScaleTimeline", "LeaseTable", "WeightVersions", "StreamClock", "GradSlots"):
        for member, value in inspect.getmembers(getattr(contract, name), inspect.isfunction):
            assert member.startswith("_") or value.__doc__ or member in OBVIOUS, f"{name}.{member} has no docstring"


OBVIOUS = {"begin_step", "load_state"}


def test_the_contract_stands_alone():
    """It imports neither models, pipeline, checkpoint nor the parts of qeffect_lm around it."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.split('.')[0]\n"
        "        allowed = ('qeffect_lm.contract', 'qeffect_lm.errors', 'qeffect_lm.state')\n"
        "        if top in ('models', 'pipeline', 'checkpoint', 'tools', 'pydantic', 'safetensors') or (\n"
        "            name.startswith('qeffect_lm.') and not name.startswith(allowed)):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import qeffect_lm.contract as c\n"
        "[getattr(c, name) for name in c.__all__]\n"
        "c.Guard(['a']).edge('a', 'a')\n"
        "print(len(dir(c)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(contract.__all__)


def test_the_errors_do_not_bring_torch_along():
    code = "import sys, qeffect_lm.contract.errors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
