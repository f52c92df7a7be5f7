"""A whole step as one graph: the same bits and the same account as a graph for each action, and the same refusals."""

from __future__ import annotations

import pytest
import torch

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
)
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.graphs.host_replay import HostReplay
from tests.tiny import assert_moved, batch, config, differing, local_plan, train
from tests.unit.effects_recorder import Recorder, words

STEP = {"graphs__backend": "host_replay", "graphs__scope": "step"}
FP8 = {"recipe": "delayed", "history": 3}


def settings(window: str = "step", **more):
    return config(precision__fp8={**FP8, "window": window}, model__dropout=0.1, **more)


@pytest.mark.parametrize("optimizer", ["inside", "outside"])
@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_equals_eager(window, chunks, optimizer):
    """Promise 1 for whole steps: losses, norms, scales at every step, all state, and the ledger's counters."""
    plan = local_plan(chunks, 4, window)
    eager = train(settings(window), 5, plan=plan)
    whole = train(settings(window, **STEP, graphs__optimizer=optimizer), 5, plan=plan)
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
    b = train(settings(**STEP), 3, batches=lambda step: batch(step + 100, 4))
    assert differing(a.tensors, b.tensors) != []
    c = train(settings(**STEP), 3, between=lambda assembly, step: _switch_dropout_off(assembly))
    assert differing(a.tensors, c.tensors) == []


def _switch_dropout_off(assembly) -> None:
    for stage in assembly.engine.stages.values():
        for module in stage.chunk.modules():
            if hasattr(module, "p"):
                module.p = 0.0


@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("optimizer", ["inside", "outside"])
def test_a_trace_tells_the_plans_program(window, optimizer, tmp_path):
    """Mode trace: the ledger hears every operation of the rank's program, in its order, as with graphs of actions."""
    told = settings(
        window, **STEP, graphs__optimizer=optimizer, contract__mode="trace", contract__trace_file=str(tmp_path / "trace.jsonl")
    )
    run = train(told, 2)
    recorder = Recorder(run.assembly)
    run.assembly.engine.step(2, batch(2, 4))
    program = rank_program(run.assembly.plan, 0)
    assert words(recorder.ops) == words(op for op in program if op.kind != COMPLETE)
    assert program[0].kind == BEGIN and program[-1].kind == END
    quiet = train(settings(window, **STEP, graphs__optimizer=optimizer), 3)
    assert quiet.assembly.ledger.state() == run.assembly.ledger.state()
    assert differing(quiet.tensors, run.tensors) == []


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    return train(settings(**STEP), 1).assembly.engine


def refused(engine, error: type[ContractViolation], match: str) -> None:
    """The step is refused before the graph runs, and the next one is clean."""
    graph = engine.captured.step.graph
    runs = []
    inner, graph.replay = graph.replay, lambda: runs.append(1)
    with pytest.raises(error, match=match):
        engine.step(1, batch(1, 4))
    assert runs == []
    graph.replay = inner


def test_stale_cache(engine):
    engine.ledger.versions.bump(["layers.0.mlp.down.weight"])
    refused(engine, StaleWeightError, "the step's graph needs 'layers.0.mlp.down.weight' at version 2")


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


def test_a_replaced_storage(engine):
    name, parameter = next(iter(engine.stages[0].chunk.named_parameters()))
    old, parameter.data = parameter.data, parameter.data.clone()
    refused(engine, CaptureError, "was replaced since the capture")
    parameter.data = old
    engine.step(1, batch(1, 4))


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
    engine.step(1, batch(1, 4))
    assert differing(run.tensors, train(settings(), 2).tensors) == []


def test_captured_again_gives_the_same_graph(engine):
    """The older graph is given up, the fingerprint is equal, and training goes on with the same bits."""
    run = train(settings(**STEP), 1)
    before = run.assembly.graph_fingerprint()
    old = run.assembly.engine.captured
    run.assembly.capture()
    assert run.assembly.graph_fingerprint() == before and run.assembly.engine.captured is not old
    assert old.step.graph.pool_bytes == 0
    run.assembly.engine.step(1, batch(1, 4))
    assert differing(run.tensors, train(settings(**STEP), 2).tensors) == []
    other = train(settings(**STEP, graphs__optimizer="outside"), 1)
    assert other.assembly.graph_fingerprint() != before
