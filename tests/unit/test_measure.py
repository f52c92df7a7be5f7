"""A step measured against its plan: times from a made-up clock, leases, bytes; nothing measured where nothing is reported."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.actions import Kind
from pipeline.measure import Meter, saved_tensors
from pipeline.simulate import peak_activations, simulate
from qeffect_lm.app.assemble import assemble
from qeffect_lm.graphs.register import storage_id
from qeffect_lm.runtime.loop import Parts, train
from qeffect_lm.runtime.metrics import StepMetrics
from tests.tiny import batch, config
from tests.unit.in_process import Ranks


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is one second after the last: each piece of work takes one, and one passes between two."""
    seconds = count()
    monkeypatch.setattr("pipeline.measure.time.perf_counter", lambda: float(next(seconds)))


def measured(assembly: Any, t_comm: float = 0.0) -> tuple[Any, dict[str, Any]]:
    meter = Meter(assembly.engine, assembly.register.knows, t_comm)
    watch = meter.start()
    float(assembly.engine.step(0, batch(0)).loss)
    return watch, meter.report(watch)


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_on_one_rank_by_a_made_up_clock(backend, monkeypatch):
    """Four microbatches of one chunk: twelve pieces of work in 23 seconds, eleven of them idle; the plan foretells none."""
    assembly = assemble(config(graphs__backend=backend, pipeline__w_delay=0))
    assembly.prepare(batch(0))
    ticking(monkeypatch)
    watch, report = measured(assembly)
    assert [action.kind for action, _, _ in watch.marks] == [a.kind for a in assembly.engine.actions if a.is_compute]
    assert watch.times() == {(kind, 0): [1.0] * 4 for kind in (Kind.F, Kind.I, Kind.W)}
    assert report["bubble"] == 11 / 23 and report["bubble_per_rank"] == [11 / 23] and report["bubble_predicted"] == 0.0
    assert report["peak_leases"] == report["peak_leases_predicted"] == [1]
    assert assembly.engine.watch is None


SEND = 1.0
"""Seconds of a send, in the plan's eyes: so long that no schedule hides it, however fast the machine is."""


@pytest.mark.parametrize(
    ("schedule", "chunks", "backend"),
    [("zb-v", 2, "eager"), ("zb-h2", None, "host_replay"), ("interleaved-1f1b", 2, "eager"), ("gpipe", None, "eager")],
)
def test_a_pipeline_against_its_plan(schedule, chunks, backend, monkeypatch):
    """All ranks report the same; leases are the plan's; bytes are the slots' and what the plan holds of the measured sizes."""
    keys = {"schedule": schedule, "chunks": chunks, "microbatches": 5}
    ranks = Ranks(config(parallel__pp=2, pipeline=keys, graphs__backend=backend), monkeypatch)
    ranks.prepare(batch(0, 5))
    meters = {part.mesh.rank: Meter(part.engine, part.register.knows, SEND) for part in ranks.parts}
    watches = {rank: meter.start() for rank, meter in meters.items()}
    ranks.step(0, batch(0, 5))
    reports = ranks.each(lambda part: meters[part.mesh.rank].report(watches[part.mesh.rank]))
    assert reports[0] == reports[1]
    report, plan = reports[0], ranks.parts[0].plan

    times = watches[0].times() | watches[1].times()
    number = plan.placement.num_chunks
    means = [[sum(v) / len(v) for v in (times[kind, chunk] for chunk in range(number))] for kind in (Kind.F, Kind.I, Kind.W)]
    assert report["bubble_predicted"] == pytest.approx(simulate(plan, *means, SEND).bubble, rel=1e-9)
    assert report["bubble_predicted"] != pytest.approx(simulate(plan, *means, 0.0).bubble, rel=1e-9)
    assert 0 < report["bubble"] < 1 and all(0 <= bubble < 1 for bubble in report["bubble_per_rank"])
    assert report["peak_leases"] == report["peak_leases_predicted"] == [plan.peak_leases(rank)[1] for rank in range(2)]
    if schedule == "gpipe":
        assert report["peak_leases"] == [5, 5]
    for rank, meter in meters.items():
        stages = ranks.parts[rank].engine.stages.values()
        slots = sum(t.nbytes for stage in stages for slot in stage.slots for t in slot.tensors().values())
        m_b, m_w = ([sizes.get(chunk, 0) for chunk in range(number)] for sizes in (meter.sizes.m_b, meter.sizes.m_w))
        assert all(0 < m_w[c] <= m_b[c] for c in plan.placement.chunks(rank))
        held = peak_activations(plan.actions, m_b, m_w)[rank]
        assert report["peak_activation_bytes_predicted"][rank] == slots + held
        if backend == "eager":
            assert report["peak_activation_bytes"][rank] == slots + held
        else:  # pools keep what their graphs made, temporaries included
            assert report["peak_activation_bytes"][rank] > slots + held


def sizes(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {storage_id(t): size for t in tensors if (size := t.untyped_storage().nbytes()) > 8}


def test_what_autograd_keeps_is_found_whole(monkeypatch):
    """The walk over the graph finds the storages that torch's own hooks see saved, no more and no fewer.

    Left out are single numbers: where a Python scalar was saved, looking at it makes a tensor of 8 bytes.
    """
    assembly = assemble(config(model__dropout=0.1))
    assembly.prepare(batch(0))
    stage = assembly.engine.stages[0]
    forward = stage.forward
    compared: list[tuple[dict[int, int], dict[int, int]]] = []

    def watched(slot: Any, scope: Any) -> None:
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.detach())
            return packed[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(slot, scope)
        found = list(saved_tensors(slot.saved[1]))
        compared.append((sizes(found), sizes(packed)))

    monkeypatch.setattr(stage, "forward", watched)
    assembly.engine.step(0, batch(0))
    assert len(compared) == 4
    for walked, seen in compared:
        assert walked == seen and len(seen) > 20


def test_only_reported_steps_are_watched():
    """log_every 3 of 7 steps, the first and the last: four watches, each read once after its step."""
    assembly = assemble(config())
    assembly.prepare(batch(0))
    events: list[str] = []
    reported: list[StepMetrics] = []
    numbers = iter(range(99))

    def watch() -> Any:
        events.append("watch")
        return lambda: (events.append("read"), lambda: {"bubble": 0.5, "peak_leases": [1, 2]})[1]

    def step(number: int, data: Any) -> Any:
        events.append(str(number + 1))
        return assembly.engine.step(number, data)

    parts = Parts(
        next_batch=lambda: batch(next(numbers)), step=step, evaluate=lambda: None, save=lambda step, tokens: None,
        epoch=lambda: None, stop=lambda: None, report=reported.append, watch=watch,
    )  # fmt: skip
    train(config(train__steps=7, train__log_every=3), parts, 0, 0)
    assert events == ["watch", "1", "read", "2", "watch", "3", "read", "4", "5", "watch", "6", "read", "watch", "7", "read"]
    assert [m.step for m in reported] == [1, 3, 6, 7]
    assert all(StepMetrics.from_json(m.to_json()).extra == {"bubble": 0.5, "peak_leases": [1, 2]} for m in reported)


@pytest.mark.parametrize("patient", [False, True])
def test_when_a_step_is_reported(patient):
    """Patiently: once the next is launched, and before a save; what an error leaves is told with what is known by then."""
    events: list[str] = []

    def said(text: str, value: Any = None) -> Any:
        events.append(text)
        return value

    def step(number: int, data: Any) -> Any:
        said(f"run {number + 1}")
        if number == 3:
            raise ValueError("broken")
        return SimpleNamespace(loss=1.0, grad_norm=1.0, lr=1e-3, skipped=False, reason=0)

    parts = Parts(
        next_batch=lambda: batch(0), step=step, evaluate=lambda: None, save=lambda step, _: said(f"save {step}"),
        epoch=lambda: None, stop=lambda: None, watch=lambda: lambda: said("read", lambda: said("finish", {"bubble": 0.5})),
        report=lambda metrics: said(f"report {metrics.step} {metrics.extra}"), patient=patient,
    )  # fmt: skip
    with pytest.raises(ValueError, match="broken"):
        train(config(train__steps=7, checkpoint__every=2), parts, 0, 0)
    told = [["finish", f"report {number} {{'bubble': 0.5}}"] for number in (1, 2, 3)]
    if patient:
        wanted = [["run 1", "read", "run 2"], told[0], ["read"], told[1], ["save 2", "run 3", "read", "run 4", "report 3 {}"]]
    else:
        wanted = [["run 1", "read"], told[0], ["run 2", "read"], told[1], ["save 2", "run 3", "read"], told[2], ["run 4"]]
    assert events == [event for part in wanted for event in part]
