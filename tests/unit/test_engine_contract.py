"""The contract at work in the engine: tiny models, float32, delayed FP8 scaling, eagerly and from captured graphs."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.actions import Kind
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import GradSlotError, StaleWeightError
from qeffect_lm.contract.ledger import Mode
from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.contract.trace import read_trace
from qeffect_lm.errors import QEffectError
from qeffect_lm.fp8.quantise import E4M3, E5M2
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.graphs.host_replay import HostReplayGraph
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.runtime.loop import NonFiniteError, Parts, train
from tests.tiny import Batch, batch, config, differing
from tests.unit.engine_support import BACKENDS, FP8_LINEARS, TINY, assert_as_reference, make, part, reference, step, tensors

NORMS = ("attention_norm.weight", "mlp_norm.weight")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- scaling -----------------------------------------------------------------------------------------------


def enlarge_activations(assembly: Assembly, factor: float) -> dict[str, torch.Tensor]:
    """Multiply the norms' weights, so that what linears read becomes larger; returns the old weights."""
    kept = {}
    for name in assembly.flat.names:
        if name.endswith(NORMS):
            kept[name] = assembly.flat.param(name).clone()
            assembly.flat.param(name).mul_(factor)
    assert len(kept) == 4
    return kept


def put_back(assembly: Assembly, kept: dict[str, torch.Tensor]) -> None:
    for name, values in kept.items():
        assembly.flat.param(name).copy_(values)


def test_an_evaluation_on_huge_inputs_leaves_no_trace(backend):
    """S6, V3: before the first step and between steps, with activations a thousand times larger: training is
    bitwise as if it had not run. The control: a training step on such activations does move the histories.
    """
    assembly = make(backend)
    results, losses = [], []
    for number in range(4):
        generator = torch.get_rng_state()
        kept = enlarge_activations(assembly, 1000.0)
        losses.append(assembly.evaluator.run(batch(50)))
        assert assembly.evaluator.run(batch(50)) == losses[-1]
        put_back(assembly, kept)
        assert assembly.evaluator.run(batch(50)) != losses[-1]
        assert torch.equal(torch.get_rng_state(), generator)
        results.append(step(assembly, number))
    assert all(math.isfinite(loss) for loss in losses) and len(set(losses)) == 4
    assert_as_reference(assembly, results, 0, 1, 2, 3)
    before = assembly.timeline.history[:, 0].clone()
    enlarge_activations(assembly, 1000.0)
    step(assembly, 4)
    inputs = [i for i, role in enumerate(assembly.timeline.roles) if role.name.endswith(("qkv.input", "gate_up.input"))]
    assert (assembly.timeline.history[inputs, 0] > 500 * before[inputs]).all()


def inject(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, where: str, value: float) -> dict[str, torch.Tensor]:
    """Make one gradient, or one weight (returned, to be put back), not finite."""
    if where == "weight":
        name = "layers.1.mlp_norm.weight"
        kept = {name: assembly.flat.param(name).clone()}
        assembly.flat.param(name)[3] = value
        return kept
    reduce = assembly.engine.end.reduce_

    def poisoned() -> None:
        assembly.flat.grad("layers.0.mlp.down.weight")[1, 2] = value
        reduce()

    monkeypatch.setattr(assembly.engine.end, "reduce_", poisoned)
    return {}


@pytest.mark.parametrize("where", ["gradient", "weight"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(backend, where, value, monkeypatch):
    """S8: masters, moments, optimizer step, scales and histories keep their bytes, the open window is
    cleared; the next step is sound, bitwise as if the skipped one had never been.
    """
    assembly = make(backend)
    results = [step(assembly, 0), step(assembly, 1)]
    before, counters = tensors(assembly), assembly.ledger.state()
    with monkeypatch.context() as patch:
        kept = inject(assembly, patch, where, value)
        loss, norm, skipped = step(assembly, 9)
        put_back(assembly, kept)
    assert skipped and not math.isfinite(norm)
    after = tensors(assembly)
    unchanged = ("master/", "moment1/", "moment2/", "optimizer/", "scale/", "amax_history/", "cached_weight")
    assert differing(part(before, *unchanged), part(after, *unchanged)) == []
    assert len(part(after, *unchanged)) > 50 and int(after["optimizer/step"]) == 2
    for name, slot in part(after, "amax_open/").items():
        assert (float(slot) > 0 and math.isfinite(slot)) if name.endswith(".weight") else float(slot) == EMPTY
    assert torch.isfinite(assembly.timeline.history).all()
    timeline, versions = assembly.ledger.state()["timeline"], assembly.ledger.state()["weights"]["versions"]
    assert timeline["epochs"] == {d: e + 1 for d, e in counters["timeline"]["epochs"].items()}
    assert versions == {name: version + 1 for name, version in counters["weights"]["versions"].items()}
    results.append(step(assembly, 2))
    wanted, state, _ = reference(0, 1, 2)
    assert results == wanted and differing(tensors(assembly), state) == []


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_the_policy_decides_whether_such_a_step_stops_the_run(policy, monkeypatch):
    """S8: ``raise`` at the next host read, with nothing updated; ``skip`` reports the step and goes on."""
    settings = config(**TINY, optim__nonfinite=policy, train__steps=3)
    assembly = assemble(settings)
    assembly.prepare(batch(0))
    before = part(tensors(assembly), "master/", "moment", "scale/", "optimizer/")
    inject(assembly, monkeypatch, "gradient", math.inf)
    batches, metrics = iter(range(9)), []
    parts = Parts(
        next_batch=lambda: batch(next(batches)),
        step=assembly.engine.step,
        evaluate=lambda: None,
        save=lambda step, tokens: None,
        epoch=lambda: None,
        stop=lambda: None,
        report=metrics.append,
    )
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"step 1: .* not finite .* nothing was updated"):
            train(settings, parts, 0, 0)
    else:
        assert train(settings, parts, 0, 0).step == 3
        assert [m.skipped for m in metrics] == [True] * 3
    assert differing(part(tensors(assembly), "master/", "moment", "scale/", "optimizer/"), before) == []


# ---- ownership ---------------------------------------------------------------------------------------------


def flat_counts(assembly: Assembly) -> dict[str, Any]:
    """What must not grow from step to step."""
    gc.collect()
    ledger, engine = assembly.ledger, assembly.engine
    clocks = ledger.streams._streams.values()
    return {
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "leases": ledger.leases.counts(),
        "slots": len(ledger.leases._slots),
        "pending": len(engine._pending),
        "events": len(engine._events),
        "buffers": len(ledger.streams.buffers),
        "ranges": sum(len(ranges) for ranges in ledger.streams._buffers.values()),
        "clocks": sum(len(state.clock) + len(state.overlays) for state in clocks),
        "readers": len(ledger.timeline._readers),
        "reported": sum(len(reported) for reported in ledger.timeline._reported.values()),
        "epochs": len(ledger.versions._epochs),
        "present": len(ledger.versions._present),
        "groups": len(ledger.grads._group_writes),
    }


def test_fifty_steps_leave_nothing_behind(backend, monkeypatch):
    """L6: leases, live tensors, pending transfers and the ledger's books are flat; a payload dies with its
    step.
    """
    assembly = make(backend, pipeline__microbatches=2)
    alive: list[weakref.ref] = []
    retain = assembly.ledger.leases.retain

    def watched(chunk: int, microbatch: int, layer: str, payload: Any) -> Any:
        alive.extend(weakref.ref(tensor) for tensor in payload.tensors())
        return retain(chunk, microbatch, layer, payload)

    monkeypatch.setattr(assembly.ledger.leases, "retain", watched)
    first: dict[str, Any] = {}
    results = []
    for number in range(52):
        results.append(assembly.engine.step(number, batch(number, 2)).loss)
        assert len(alive) == (2 * (2 * FP8_LINEARS + 1) if backend == "eager" else 0)  # FP8 with inverse scales; the head
        assert all(ref() is None for ref in alive)
        alive.clear()
        assert assembly.ledger.leases.counts() == {"groups": 0, "slots": 0}
        if number == 2:
            first = flat_counts(assembly)
    assert len({loss.data_ptr() for loss in results}) == 1
    last = flat_counts(assembly)
    assert last.pop("objects") < first.pop("objects") + 200  # four a step would already be more
    assert last == first


class Sudden(Exception):
    """Something went wrong in the middle."""


def break_at(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, action: str, when: str) -> None:
    """Raise before, inside or after one action of the plan."""
    engine = assembly.engine
    target = next(one for one in engine.actions if str(one) == action)
    handler = engine._handlers[target.kind]

    def broken(current: Any) -> None:
        if current != target:
            handler(current)
        elif when == "inside":
            with monkeypatch.context() as patch:
                _break_inside(engine, target, patch)
                handler(current)
        else:
            if when == "after":
                handler(current)
            raise Sudden(action)

    monkeypatch.setitem(engine._handlers, target.kind, broken)


def _break_inside(engine: Any, target: Any, patch: pytest.MonkeyPatch) -> None:
    """In eager: in the third linear that the action touches; from a graph: after half of its operations."""
    if engine.captured is not None:
        graph, summary = engine.captured.actions[engine.plan.graph_key(target)]
        half = HostReplayGraph("half", graph._operations[: len(graph._operations) // 2], [], [])

        class Broken:
            def replay(self) -> None:
                half.replay()
                raise Sudden(str(target))

        patch.setitem(engine.captured.actions, engine.plan.graph_key(target), (Broken(), summary))
        return
    method = {Kind.F: "product", Kind.I: "input_grad", Kind.W: "weight_grad"}[target.kind]
    original, calls = getattr(SplitLinear, method), []

    def third(*args: Any) -> Any:
        calls.append(1)
        result = original(*args)
        if len(calls) == 3:
            raise Sudden(str(target))
        return result

    patch.setattr(SplitLinear, method, third)


POSITIONS = [
    ("0F0", "before"),
    ("0F2", "inside"),
    ("0I1", "inside"),
    ("0W1", "inside"),
    ("0W3", "after"),
    ("REDUCE", "before"),
    ("REDUCE", "after"),
]


@pytest.mark.parametrize(("action", "when"), POSITIONS)
def test_an_exception_in_the_middle_of_a_step(backend, action, when, monkeypatch):
    """L7: on another batch, then a clean step: bitwise equal to a process where it never happened, twice
    over.
    """
    assembly = make(backend)
    results = []
    for number in range(3):
        if number:
            with monkeypatch.context() as patch:
                break_at(assembly, patch, action, when)
                with pytest.raises(Sudden, match=action):
                    step(assembly, 70 + number)
            assert assembly.ledger.leases.counts() == {"groups": 0, "slots": 0}
            assert assembly.engine._pending == {} and assembly.engine._events == {}
            assert all(slot.saved is None for stage in assembly.engine.stages.values() for slot in stage.slots)
        results.append(step(assembly, number))
    assert_as_reference(assembly, results, 0, 1, 2)


def test_an_exception_while_the_optimizer_runs_needs_a_restart(backend, monkeypatch):
    """L7: what may be half-updated is not trained on: the next step says so and what to do."""
    assembly = make(backend)
    step(assembly, 0)
    with monkeypatch.context() as patch:
        break_at(assembly, patch, "COMMIT", "before")
        with pytest.raises(Sudden):
            step(assembly, 1)
    for _ in range(2):
        with pytest.raises(QEffectError, match="step 1 failed while the optimizer ran.* restart from the last checkpoint"):
            step(assembly, 1)


# ---- weight versions ---------------------------------------------------------------------------------------


def load_other_weights(assembly: Assembly) -> None:
    """Other weights into the same storages, through the raw buffer."""
    other = assemble(config(**TINY, run__seed=4321))
    assembly.flat.master_buffer.copy_(other.flat.master_buffer)
    assembly.ledger.versions.bump()


def test_other_weights_in_the_same_storages(backend):
    """V1, V2: without a refresh the first F raises; after it, replay equals eager with the new weights, and
    neither is what the stale caches would have given.
    """
    results: dict[str, list[Any]] = {}
    for how in (backend, "eager", "stale"):
        assembly = make("eager" if how == "stale" else how)
        step(assembly, 0)
        load_other_weights(assembly)
        if how == "stale":
            assembly.ledger.mode = Mode.OFF
        else:
            with pytest.raises(StaleWeightError, match="0F0 needs .*cache holds version 1, the parameter is at 2") as caught:
                step(assembly, 1)
            assert caught.value.place["microbatch"] == 0 and caught.value.place["layer"] == "layers.0.attention.qkv.weight"
            assembly.rebuild_caches()
        results[how] = [step(assembly, 1), tensors(assembly)]
        if how != "stale":
            results[how][0] = [results[how][0], step(assembly, 2)]
            results[how][1] = tensors(assembly)
    assert results[backend][0] == results["eager"][0]
    assert differing(results[backend][1], results["eager"][1]) == []
    assert results["stale"][0] != results["eager"][0][0]


def test_a_weight_is_cast_once_a_step(backend, monkeypatch):
    """V3, V5: casts per step equal the number of FP8 weights, by the ledger's count and by the casts
    themselves.
    """
    assembly = make(backend)
    made: Counter[str] = Counter()
    weight = DelayedScaling.weight
    monkeypatch.setattr(DelayedScaling, "weight", lambda *args: made.update([args[1]]) or weight(*args))
    names = set(assembly.cache.names)
    assert len(names) == FP8_LINEARS and assembly.ledger.versions.casts == dict.fromkeys(names, 1)
    assembly.evaluator.run(batch(50))
    for number in range(3):
        step(assembly, number)
        assembly.evaluator.run(batch(50))
        assert assembly.ledger.versions.casts == dict.fromkeys(names, number + 2)
    assert set(assembly.ledger.versions.caches) == names
    captured = assembly.engine.captured
    if captured is None:
        assert made == {assembly.cache.layer_of(name): 3 for name in names}
        return
    assert not made
    assert casts_to_fp8(captured.end["refresh"]) == {E4M3.dtype: FP8_LINEARS}
    for key, (graph, _) in captured.actions.items():
        formats = {Kind.F: [E4M3.dtype], Kind.I: [E5M2.dtype], Kind.W: []}[key.kind]
        assert casts_to_fp8(graph) == dict.fromkeys(formats, FP8_LINEARS)


def casts_to_fp8(graph: Any) -> dict[torch.dtype, int]:
    """How many casts from float32 the graph's tape has, by format."""
    copies = [op.args[:2] for op in graph._operations if op.run is torch.ops.aten.copy_.default]
    return dict(Counter(a.dtype for a, b in copies if a.dtype in (E4M3.dtype, E5M2.dtype) and b.dtype is torch.float32))


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [7.0, math.nan])
def test_what_was_in_the_main_gradients_is_gone(backend, value):
    """G1: the first writer has beta 0, in eager and replay, for weights (W), norms and the embedding (I)."""
    assembly = make(backend)
    results = []
    for number in range(3):
        for name in assembly.flat.trainable_names:
            assembly.flat.grad(name).fill_(value)
        results.append(step(assembly, number))
        for name in assembly.flat.trainable_names:
            assert not (assembly.flat.grad(name) == 7.0).any() and torch.isfinite(assembly.flat.grad(name)).all()
    assert_as_reference(assembly, results, 0, 1, 2)


def test_the_gradient_is_proportional_to_the_number_of_microbatches(backend):
    """G2: one microbatch k times under the same divisor gives k times its gradient."""
    one = batch(5, 1)
    losses, grads = {}, {}
    for count in (1, 2, 5):
        assembly = assemble(config(**TINY, graphs__backend=backend, pipeline__microbatches=count))
        repeated = [tensor.expand(count, *tensor.shape[1:]).contiguous() for tensor in (one.inputs, one.targets, one.loss_mask)]
        many = Batch(*repeated, tokens=one.tokens)
        assembly.prepare(many)
        losses[count] = float(assembly.engine.step(0, many).loss)
        grads[count] = {name: assembly.flat.grad(name).clone() for name in assembly.flat.trainable_names}
    assert all(grad.abs().max() > 0 for grad in grads[1].values())
    for count in (2, 5):
        assert losses[count] == pytest.approx(count * losses[1], rel=1e-12)
        for name, grad in grads[count].items():
            torch.testing.assert_close(grad, count * grads[1][name], rtol=1e-5, atol=1e-8)
    twice = {name: 2 * grad for name, grad in grads[1].items()}
    assert differing(grads[2], twice) in ([], ["embedding.weight"])  # whose rows are added token by token


def test_the_optimizer_does_not_run_on_incomplete_gradients(backend):
    """A writer the plan does not have: named, before anything is updated."""
    assembly = make(backend)
    before = tensors(assembly)
    begin = assembly.ledger.grads.begin_step

    def begin_and_write() -> None:
        begin()
        assembly.ledger.grads.report_empty("head.weight")

    assembly.ledger.grads.begin_step = begin_and_write  # type: ignore[method-assign]
    with pytest.raises(GradSlotError, match="'head.weight' with 5 of 4 contributions"):
        step(assembly, 0)
    assert differing(part(tensors(assembly), "master/", "moment"), part(before, "master/", "moment")) == []


# ---- modes -------------------------------------------------------------------------------------------------


def test_mode_off_trains_the_same(backend):
    """The contract computes nothing: bitwise the same training and counters without its checks."""
    assembly = make(backend, contract__mode="off")
    results = [step(assembly, number) for number in range(4)]
    assert_as_reference(assembly, results, 0, 1, 2, 3)
    assert assembly.ledger.streams.buffers == ()


def test_mode_trace_trains_the_same_and_writes_all_of_it(backend, tmp_path: Path):
    """Every action of every step is there, in the plan's order, with its layers and gradients, and every edge."""
    path = tmp_path / "trace.jsonl"
    assembly = make(backend, contract__mode="trace", contract__trace_file=str(path))
    results = [step(assembly, number) for number in range(3)]
    assert_as_reference(assembly, results, 0, 1, 2)
    (run,), remarks = read_trace(path)
    effects = Counter(record["effect"] for record in run.records)
    assert remarks == [] and run.about["rank"] == 0 and run.about["world"] == 1
    counted = [effects[name] for name in ("begin_step", "end_step", "refresh", "commit", "bump", "capture")]
    assert counted == [3, 3, 4, 4, 3, int(backend == "host_replay")]
    plan = [str(action) for action in assembly.engine.actions if action.is_compute]
    acts = [r for r in run.records if r["effect"] == ("replay" if backend == "host_replay" else "action")]
    assert [f"{r['chunk']}{r['kind']}{r['microbatch']}" for r in acts] == plan * 3
    assert all(len(r["layers"]) == FP8_LINEARS + 1 for r in acts)
    written = [name for r in acts[: len(plan)] for name in r["grads"]]
    assert sorted(written) == sorted(4 * list(assembly.flat.trainable_names))
    launched = [r["who"] for r in run.records if r["effect"] == "launch" and r["who"] in plan]
    assert list(dict.fromkeys(launched)) == plan
    between = {(r["source"], r["stream"]) for r in run.records if r["effect"] == "wait"}
    assert {("compute", "collective"), ("collective", "compute")} <= between
