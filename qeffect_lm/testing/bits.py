"""The checks of :mod:`qeffect_lm.testing.check` that compare bits: state, order, replay, checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from checkpoint import SingleProcess, load_into, open_checkpoint, save_checkpoint
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.graphs.backend import Graph
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import Rule
from qeffect_lm.state import LogicalTensor, Role
from qeffect_lm.testing.harness import Harness, Microbatch
from qeffect_lm.testing.sample import COUNT, Sample, same
from qeffect_lm.testing.watch import LayerCheckError, NamedRegister, Watch, tensors_of


def check_state(sample: Sample) -> str:
    harness = sample.fresh(sample.dtype)
    other = tensors_of(sample.build(sample.dtype))
    for key, held in tensors_of(harness.module).items():
        if held.kind != "parameter" and not same(held.tensor, other[key].tensor):
            raise LayerCheckError(
                f"{sample.name}: the {held.kind} {key!r} differs between two instances, and no checkpoint holds it: make it a "
                "parameter, or compute it from the sizes"
            )
    watch = Watch(sample.name, harness.module)
    sample.prepare(harness)
    m = [sample.microbatch(harness, number) for number in range(2)]
    watch.check("F")
    with harness.step():
        for action, work in (("F", harness.forward), ("I", harness.input_grad), ("W", harness.weight_grad)):
            for each in m:
                work(each)
            watch.check(action)
    return "state: F, I and W change nothing that is not declared"


def check_order(sample: Sample) -> str:
    """All F, all I, all W; each microbatch by itself; and interleaved, as pipelines do."""
    each = [(action, number) for number in range(COUNT) for action in "FIW"]
    phases = [(action, number) for action in "FIW" for number in range(COUNT)]
    mixed = [("F", 0), ("F", 1), ("I", 0), ("F", 2), ("I", 1), ("W", 0), ("I", 2), ("W", 1), ("W", 2)]
    results = []
    for order in (phases, each, mixed):
        harness = sample.harness(sample.dtype)
        microbatches = [sample.microbatch(harness, number) for number in range(COUNT)]
        with harness.step():
            for action, number in order:
                {"F": harness.forward, "I": harness.input_grad, "W": harness.weight_grad}[action](microbatches[number])
        results.append(_results(sample, harness, microbatches))
    for other, how in ((results[1], "one by one"), (results[2], "interleaved")):
        for name, tensor in results[0].items():
            if not same(tensor, other[name]):
                raise LayerCheckError(
                    f"{sample.name}: {name} differs when microbatches run {how}: it depends on what ran before (a random draw "
                    "that is not keyed, state that is shared)"
                )
    return "order: the same bits for all F first, one microbatch after the other, and interleaved"


def _results(sample: Sample, harness: Harness, microbatches: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    found = {f"the output of microbatch {m.number}": m.out.clone() for m in microbatches}
    if sample.tokens is None:
        found |= {f"dx of microbatch {m.number}": m.dx.clone() for m in microbatches}
    found |= {f"the gradient of {name}": grad.clone() for name, grad in harness.grads.items()}
    return found | {"an open amax": harness.timeline.open_amax.clone()}


# ---- replay ----------------------------------------------------------------------------------------------------


def check_replay(sample: Sample) -> str:
    captured = sample.harness(sample.dtype)
    m = sample.microbatch(captured, 0, seed=10)
    try:
        graphs = _capture(sample, captured, m)
    except CaptureError as error:
        raise LayerCheckError(f"{sample.name}: it cannot be captured: {error}") from error
    for step in (1, 2):
        eager = sample.harness(sample.dtype, seed=step + 1)
        others = [sample.microbatch(eager, number, seed=100 * step) for number in range(2)]
        _copy_state(captured, eager)
        replayed: list[dict[str, torch.Tensor]] = []
        with eager.step():
            for beta, other in enumerate(others):
                m.slot.x.copy_(other.slot.x)
                m.slot.dy.copy_(other.slot.dy)
                m.slot.context.key.copy_(other.slot.context.key)
                for kind in ("F", f"I{beta}", f"W{beta}"):
                    graphs[kind].replay()
                for work in (eager.forward, eager.input_grad, eager.weight_grad):
                    work(other)
                want, got = _results(sample, eager, [other]), _results(sample, captured, [m])
                for (name, tensor), mine in zip(want.items(), got.values(), strict=True):
                    if not same(tensor, mine):
                        raise LayerCheckError(
                            f"{sample.name}: replayed with other inputs, {name} is not what eager work gives: the capture "
                            "froze something that changes"
                        )
                replayed.append(got)
        if sample.tokens is None and all(same(a, b) for a, b in zip(replayed[0].values(), replayed[1].values(), strict=True)):
            raise LayerCheckError(f"{sample.name}: two microbatches with different inputs gave the same: it ignores its input")
    return "replay: F, I and W captured once and replayed with other inputs, weights and keys equal eager work, bit for bit"


def _copy_state(captured: Harness, eager: Harness) -> None:
    """The eager one's parameters and scales, in place, and the caches made from them."""
    with torch.no_grad():
        for name, parameter in captured.parameters.items():
            parameter.copy_(eager.parameters[name])
        captured.timeline.scale.copy_(eager.timeline.scale)
        captured.refresh()
        captured.timeline.open_amax.copy_(eager.timeline.open_amax)


def _capture(sample: Sample, harness: Harness, m: Microbatch) -> dict[str, Graph]:
    """F, and I and W for both betas, over the microbatch's slot."""
    register = _register(sample, harness, m)
    backend, leases = HostReplay(), harness.ledger.leases
    graphs: dict[str, Graph] = {}

    def record(name: str, beta: int | None, work: Callable) -> None:
        def inside() -> None:
            with harness.ledger.action(name[0], 0, m.number, beta=beta, slots=m.slots) as scope:
                work(scope)

        graphs[name] = backend.capture(f"{sample.name} {name}", inside, register=register, shares=list(graphs.values()))

    with harness.recording():
        record("F", None, lambda scope: harness.stage.forward(m.slot, scope))
        left = leases.payloads(0, m.number)
        for beta in (0, 1):
            leases.put_back(0, m.number, left)
            record(f"I{beta}", beta, lambda scope, keep=beta == 0: harness.stage.input_grad(m.slot, scope, keep=keep))
            record(f"W{beta}", beta, lambda scope: harness.stage.weight_grad(m.slot, scope))
    return graphs


def _register(sample: Sample, harness: Harness, m: Microbatch) -> NamedRegister:
    register = NamedRegister(sample.name, harness.module)
    for name, parameter in harness.parameters.items():
        register.add(name, parameter, owner="layer", rule=Rule.CONSTANT)
    for name, buffer in harness.module.named_buffers():
        register.add(f"buffer {name}", buffer, owner="layer", rule=Rule.CONSTANT)
    for name, grad in harness.grads.items():
        register.add(f"gradient of {name}", grad, owner="gradients", rule=Rule.SCRATCH)
    for name, tensor in m.slot.tensors().items():
        register.add(f"slot {name}", tensor, owner="stage", rule=Rule.CONSTANT if name == "anchor" else Rule.SCRATCH)
    register.add("divisor", harness.divisor, owner="engine")
    for name, tensor in harness.cache.tensors():
        register.add(f"cache {name}", tensor, owner="cache", rule=Rule.CONSTANT)
    register.add_object("timeline", harness.timeline)
    return register


# ---- checkpoint ------------------------------------------------------------------------------------------------


def check_round_trip(sample: Sample) -> str:
    first, second = (sample.harness(sample.dtype, seed=seed) for seed in (1, 2))
    x = sample.input(7, first.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), 1, _logical(first), {}, SingleProcess(), {})
        load_into(open_checkpoint(path), _logical(second))
    with torch.no_grad():
        second.timeline.scale.copy_(first.timeline.scale)
        second.refresh()
    if not same(sample.output(first, x), sample.output(second, x)):
        why = "it holds state besides them"
        raise LayerCheckError(f"{sample.name}: with parameters from a checkpoint it gives another output: {why}")
    return "checkpoint: parameters saved and loaded into another instance give the same output, bit for bit"


def _logical(harness: Harness) -> list[LogicalTensor]:
    return [LogicalTensor.whole(name, p.detach(), Role.PARAM) for name, p in harness.parameters.items()]
