"""A whole step as one graph: the same bits and the same account as a graph for each action, and the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from pipeline.actions import Kind
from pipeline.capture import capture_step
from pipeline.effects import rank_program
from pipeline.program import BEGIN, COMPLETE, END
from qeffect_lm.contract.errors import (
    CaptureError,
    ContractViolation,
    GradSlotError,
    LeaseError,
    ScaleOrderError,
    StaleWeightError,
    StreamOrderError,
)
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Mode, Scope
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.errors import QEffectError
from qeffect_lm.fp8.cache import LAYOUTS
from qeffect_lm.graphs.host_replay import HostReplay, _Operation
from qeffect_lm.graphs.register import Rule, storage_id
from tests import tiny
from tests.fault_list import FAULTS
from tests.faults import Injected, Place
from tests.tiny import assert_moved, batch, config, differing, local_plan
from tests.unit.effects_recorder import Recorder, words

STEP = {"graphs__backend": "host_replay", "graphs__scope": "step"}
FP8 = {"recipe": "delayed", "history": 2}
MICROBATCHES = 3
SMALL = {
    "model__num_layers": 1,
    "model__vocab_size": 32,
    "data__seq_len": 8,
    "model__dropout": 0.1,
    "pipeline__microbatches": MICROBATCHES,
}


def settings(window: str = "step", **more):
    return config(**{**SMALL, "precision__fp8": {**FP8, "window": window}, **more})


def data(step: int):
    return batch(step, MICROBATCHES, sequence=8, vocab=32)


def train(chosen, steps, **more):
    return tiny.train(chosen, steps, **{"batches": data, **more})


long = pytest.mark.long


@pytest.mark.parametrize(
    ("chunks", "window", "optimizer"),
    [
        (1, "step", "inside"),
        (2, "microbatch", "outside"),
        pytest.param(1, "microbatch", "inside", marks=long),
        pytest.param(1, "step", "outside", marks=long),
        pytest.param(1, "microbatch", "outside", marks=long),
        *(pytest.param(3, w, o, marks=long) for w in ("step", "microbatch") for o in ("inside", "outside")),
    ],
)
def test_equals_eager(window, chunks, optimizer):
    """Promise 1 for whole steps: losses, norms, scales at every step, all state, and the ledger's counters."""
    plan = local_plan(chunks, MICROBATCHES, window)
    more = {"model__num_layers": chunks}
    eager = train(settings(window, **more), 4, plan=plan)
    whole = train(settings(window, **STEP, graphs__optimizer=optimizer, **more), 4, plan=plan)
    assert_moved(eager)
    captured = whole.assembly.engine.captured
    assert captured is not None and captured.step is not None and not captured.actions
    assert len(captured.graphs()) == (1 if optimizer == "inside" else 1 + len(whole.assembly.engine.end_work()))
    assert (whole.losses, whole.norms) == (eager.losses, eager.norms)
    assert all(torch.equal(a, b) for a, b in zip(whole.scales, eager.scales, strict=True))
    assert differing(whole.tensors, eager.tensors) == []
    assert whole.assembly.ledger.state() == eager.assembly.ledger.state()


def test_replayed_steps_see_new_data_and_nothing_of_the_code():
    """Control: other data gives other bits; a flag that changes after the capture gives the same."""
    a = train(settings(**STEP), 3)
    b = train(settings(**STEP), 3, batches=lambda step: data(step + 100))
    assert differing(a.tensors, b.tensors) != []
    c = train(settings(**STEP), 3, between=lambda assembly, step: _switch_dropout_off(assembly))
    assert differing(a.tensors, c.tensors) == []


def _switch_dropout_off(assembly) -> None:
    for stage in assembly.engine.stages.values():
        for module in stage.chunk.modules():
            if hasattr(module, "p"):
                module.p = 0.0


@pytest.mark.parametrize(
    ("window", "optimizer"),
    [
        ("microbatch", "inside"),
        pytest.param("step", "outside", marks=long),
        pytest.param("step", "inside", marks=long),
        pytest.param("microbatch", "outside", marks=long),
    ],
)
def test_a_trace_tells_the_plans_program(window, optimizer, tmp_path):
    """Mode trace: the ledger hears every operation of the rank's program, in its order, as with graphs of actions."""
    told = settings(
        window, **STEP, graphs__optimizer=optimizer, contract__mode="trace", contract__trace_file=str(tmp_path / "trace.jsonl")
    )
    run = train(told, 2)
    recorder = Recorder(run.assembly)
    run.assembly.engine.step(2, data(2))
    program = rank_program(run.assembly.plan, 0)
    assert words(recorder.ops) == words(op for op in program if op.kind != COMPLETE)
    assert program[0].kind == BEGIN and program[-1].kind == END
    quiet = train(settings(window, **STEP, graphs__optimizer=optimizer), 3)
    assert quiet.assembly.ledger.state() == run.assembly.ledger.state()
    assert differing(quiet.tensors, run.tensors) == []


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    return train(settings(**STEP), 1).assembly


@pytest.fixture
def engine(shared):
    """One for all refusals, since each leaves it as it was; in the end it still trains."""
    yield shared.engine
    shared.engine.step(1, data(1))


def refused(engine, error: type[ContractViolation], match: str) -> None:
    """The step is refused before the graph runs, and the next one is clean."""
    graph = engine.captured.step.graph
    runs = []
    inner, graph.replay = graph.replay, lambda: runs.append(1)
    with pytest.raises(error, match=match):
        engine.step(1, data(1))
    assert runs == []
    graph.replay = inner
    assert engine._broken is None


def test_stale_cache(engine):
    now = engine.ledger.versions.versions["layers.0.mlp.down.weight"]
    engine.ledger.versions.bump(["layers.0.mlp.down.weight"])
    refused(engine, StaleWeightError, f"the step's graph needs 'layers.0.mlp.down.weight' at version {now + 1}")
    engine.account_refresh()


def test_a_cache_of_another_epoch(engine):
    name, now = "layers.0.mlp.down.weight", engine.ledger.weight_epoch()
    engine.ledger.versions.refreshed(name, epoch=now - 1, layouts=LAYOUTS)
    refused(engine, StaleWeightError, f"the step's graph needs {name!r} quantised with the scale of epoch {now}")
    engine.account_refresh()


def test_a_microbatch_under_way(engine, monkeypatch):
    def begin(step, inner=engine.ledger.begin_step):
        inner(step)
        engine.ledger.leases.open(0, 77, Slot("I", 0, 0), Slot("W", 0, 0))

    monkeypatch.setattr(engine.ledger, "begin_step", begin)
    refused(engine, LeaseError, "while a microbatch of the step is under way")


def test_a_window_that_is_not_new(engine, monkeypatch):
    def begin(step, inner=engine.ledger.begin_step):
        inner(step)
        engine.ledger.timeline.begin(("F", 0, 0), Direction.FORWARD)

    monkeypatch.setattr(engine.ledger, "begin_step", begin)
    refused(engine, ScaleOrderError, r"needs a new window: \('F', 0, 0\) has contributed")


def test_a_gradient_that_was_written_before(engine, monkeypatch):
    def begin(step, inner=engine.ledger.begin_step):
        inner(step)
        engine.ledger.grads.write("layers.0.mlp.down.weight", 0)

    monkeypatch.setattr(engine.ledger, "begin_step", begin)
    refused(engine, GradSlotError, "writer 2 of 'layers.0.mlp.down.weight' has beta 0")


def test_work_on_another_stream_that_nobody_ordered(engine):
    """To the stream clock the graph is one launch of all that its actions touch."""
    ledger = engine.ledger
    buffer = next(buffer for buffer, access in engine.captured.step.accesses if access != Access.READ)
    ledger.wait("side", ledger.record("compute"))
    ledger.launch("side", [(buffer, Access.READ)], "somebody")
    refused(engine, StreamOrderError, r"the step's graph \(write on stream 'compute'\) is not ordered after somebody")


def test_a_replaced_storage(engine):
    name, parameter = next(iter(engine.stages[0].chunk.named_parameters()))
    old, parameter.data = parameter.data, parameter.data.clone()
    refused(engine, CaptureError, "was replaced since the capture")
    parameter.data = old


@pytest.mark.parametrize("border", ["x", "out"])
def test_a_replaced_slot(engine, border):
    slot = engine.stages[0].slots[0]
    old = getattr(slot, border)
    setattr(slot, border, old.clone())
    refused(engine, CaptureError, f"'chunk0/slot0/{border}' was replaced since the capture")
    setattr(slot, border, old)


def test_what_was_captured_unchecked_is_not_replayed_under_the_ledger():
    """Mode off checks nothing while a step is captured, and replays rely on that check: another mode needs a new capture."""
    assembly = train(settings(**STEP, contract__mode="off"), 1).assembly
    assembly.ledger.mode = Mode.ENFORCE
    with pytest.raises(CaptureError, match="captured in mode off, so nobody checked what it holds: capture it again"):
        assembly.engine.step(1, data(1))
    assembly.rebuild_caches()
    assembly.capture()
    assembly.engine.step(1, data(1))


LAST = MICROBATCHES - 1
UNSEEN = {  # nothing of the step itself trips over these: the fault, its settings, where, and what is said
    "refresh": ("refresh skipped", "step", "inside", "needs 'layers.0.attention.qkv.weight' at version 2"),
    "forward commit": ("commit F skipped", "microbatch", "outside", "ends at forward epoch 5, its plan's commits lead to 6"),
    "backward commit": ("commit I skipped", "microbatch", "outside", "ends at backward epoch 5, its plan's commits lead to 6"),
    "last W": ("drop W", "step", "outside", "a lease is retained: W did not run"),
}


@pytest.mark.parametrize("name", list(UNSEEN))
def test_what_only_the_next_step_would_find_is_found_at_capture(name):
    """Replays take the captured step for the plan's: a piece that did not run would be missing in each, and told as done."""
    fault, window, optimizer, words = UNSEEN[name]
    run = train(settings(window), 1)
    engine = run.assembly.engine
    with Injected(engine, FAULTS[fault], Place(-1, LAST)), pytest.raises(ContractViolation, match=words):
        capture_step(engine, HostReplay(), run.assembly.register, optimizer=optimizer == "inside")
    assert engine.captured is None
    engine.step(1, data(1))
    assert differing(run.tensors, train(settings(window), 2).tensors) == []


def test_a_weight_gradient_that_a_layer_forgets_is_found_at_capture(monkeypatch):
    """With the optimizer outside the count of writers is taken before it: each replay would tell the plan's."""
    run = train(settings(), 1)
    engine = run.assembly.engine
    monkeypatch.setattr("qeffect_lm.contract.ledger.Scope.write_grad", _all_but_the_last(Scope.write_grad))
    with pytest.raises(GradSlotError, match="with 2 of 3 contributions"):
        capture_step(engine, HostReplay(), run.assembly.register, optimizer=False)


def _all_but_the_last(write):
    def some(scope, name):
        return scope.beta if name.endswith("down.weight") and scope.microbatch == LAST else write(scope, name)

    return some


@pytest.mark.parametrize("fault", ["edge", "commit", "lease"])
def test_a_plan_that_breaks_the_contract_is_refused_while_it_is_captured(fault, monkeypatch):
    """The step that is captured is checked like any other; afterwards the engine trains on eagerly, as if nothing was."""
    run = train(settings(), 1)
    engine = run.assembly.engine
    if fault == "edge":
        monkeypatch.setattr(engine.streams, "edge", lambda source, target: None)
    elif fault == "commit":
        monkeypatch.setattr(engine.ledger, "commit", lambda *_, **__: None)
    else:
        monkeypatch.setattr(engine.stages[0], "_split", engine.stages[0]._split[1:])  # a layer whose W never runs
    with pytest.raises(ContractViolation):
        capture_step(engine, HostReplay(), run.assembly.register)
    monkeypatch.undo()
    assert engine.captured is None
    engine.step(1, data(1))
    assert differing(run.tensors, train(settings(), 2).tensors) == []


# ---- a step that fails -------------------------------------------------------------------------------------


def failing(engine, place: float) -> Callable[[], None]:
    """Have the step's graph raise after this part of its operations; call what is returned to mend it."""
    graph = engine.captured.step.graph
    whole = graph._operations

    def lost() -> None:
        raise RuntimeError("the device is lost")

    cut = int(place * len(whole))
    graph._operations = [*whole[:cut], _Operation(lost, (), {}, ()), *whole[cut:]]

    def mend() -> None:
        graph._operations = whole

    return mend


@pytest.mark.parametrize(("place", "mode"), [(0.0, "enforce"), (0.5, "trace"), pytest.param(1.0, "off", marks=long)])
def test_a_graph_with_the_optimizer_that_fails_is_the_last(place, mode, tmp_path):
    """How far it came nobody knows: the optimizer may have run, so the engine takes no other step."""
    told = {"contract__mode": mode, "contract__trace_file": str(tmp_path / "trace.jsonl")}
    engine = train(settings(**STEP, **told), 1).assembly.engine
    mend = failing(engine, place)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step(1, data(1))
    mend()
    with pytest.raises(QEffectError, match="step 1 failed while the optimizer ran.*restart from the last checkpoint"):
        engine.step(1, data(1))


@pytest.mark.parametrize("fault", ["bump", "commit", "gradients"])
def test_an_account_that_leaves_something_out(fault, monkeypatch):
    """The same checks at the end of a replayed step as of an eager one, though its account was one piece."""
    engine = train(settings(**STEP), 1).assembly.engine
    if fault == "bump":
        monkeypatch.setattr(engine.ledger.versions, "bump", lambda *names: None)
        words = "STEP writes each parameter once and says so"
    elif fault == "gradients":
        monkeypatch.setattr(engine.ledger.grads, "write_counts", lambda counts: None)
        words = "with 0 of 3 contributions"
    else:
        monkeypatch.setattr(engine.ledger, "commit", lambda *_, **__: None)
        words = "its plan's commits lead to 3"
    with pytest.raises(ContractViolation, match=words):
        engine.step(1, data(1))


@pytest.mark.parametrize(
    "graphs", [pytest.param({}, marks=long), {**STEP, "graphs__optimizer": "outside"}], ids=["eager", "step"]
)
def test_scratch_means_nothing_between_steps(graphs):
    """What a capture leaves in it, evaluation and the next step never read; whatever a checkpoint saves is no scratch."""

    def scribble(assembly, step):
        kept = {storage_id(entry.tensor) for entry in assembly.register.under(Rule.RESTORED, Rule.GUARDED)}
        assert all(storage_id(item.tensor) in kept for item in assembly.logical_tensors())
        for _ in range(2):
            for entry in assembly.register.under(Rule.SCRATCH):
                entry.tensor.fill_(float("nan") if entry.tensor.dtype.is_floating_point else 5)
            held_out.append(assembly.evaluator.run(data(77)))

    held_out: list[float] = []
    run = train(settings(**graphs), 3, between=scribble)
    sound = train(settings(), 3)
    assert differing(run.tensors, sound.tensors) == [] and run.losses == sound.losses
    assert held_out[-1] == sound.assembly.evaluator.run(data(77))


@pytest.mark.parametrize("window", [pytest.param("step", marks=long), "microbatch"])
@pytest.mark.parametrize("scope", ["eager", "step"])
def test_a_step_that_fails_before_the_optimizer_leaves_nothing(window, scope):
    """Window ``microbatch`` has rolled scales by then: they are put back, and the step can be run again."""
    graphs = {**STEP, "graphs__optimizer": "outside"} if scope == "step" else {}
    run = train(settings(window, **graphs), 2)
    engine = run.assembly.engine
    before, told = run.tensors, run.assembly.ledger.state()
    if scope == "step":
        mend = failing(engine, 0.8)
    else:
        mend = partial(engine._handlers.update, dict(engine._handlers))

        def lost(action, run=engine._handlers[Kind.W]):
            if action.microbatch == LAST:
                raise RuntimeError("the device is lost")
            run(action)

        engine._handlers[Kind.W] = lost
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step(2, data(2))
    mend()
    assert differing(run.tensors, before) == [] and run.assembly.ledger.state() == told
    engine.step(2, data(2))
    sound = train(settings(window), 3)
    assert differing(run.tensors, sound.tensors) == [] and sound.assembly.ledger.state() == run.assembly.ledger.state()


def test_captured_again_gives_the_same_graph():
    """The older graph is given up, the fingerprint is equal, and training goes on with the same bits."""
    run = train(settings(**STEP), 1)
    before = run.assembly.graph_fingerprint()
    old = run.assembly.engine.captured
    run.assembly.capture()
    assert run.assembly.graph_fingerprint() == before and run.assembly.engine.captured is not old
    assert old.step.graph.pool_bytes == 0
    run.assembly.engine.step(1, data(1))
    assert differing(run.tensors, train(settings(**STEP), 2).tensors) == []
    other = train(settings(**STEP, graphs__optimizer="outside"), 1)
    assert other.assembly.graph_fingerprint() != before
