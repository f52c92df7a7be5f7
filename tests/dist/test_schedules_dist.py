"""Every schedule trains to one process's bits: losses, norms, gradients and all state, on every placement.

Most cells run their ranks as threads of one process (tests/unit/in_process.py), some as gloo processes. The models have uneven
chunks, a chunk without parameters where there are more chunks than layers, FP8, dropout, and a frozen parameter.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pipeline.schedules import SCHEDULES
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.tiny import assert_moved, batch, config, differing, merged, train
from tests.unit.in_process import Ranks

STEPS = 3
LAYERS = 5
ALL = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev", "interleaved-1f1b/2", "interleaved-1f1b/3")


def settings(microbatches: int, **more: Any) -> dict[str, Any]:
    """FP8 layers, the last one in high precision, with dropout."""
    return {
        "model__num_layers": LAYERS,
        "model__dropout": 0.1,
        "precision__fp8__high_precision_last": 1,
        "pipeline__microbatches": microbatches,
        "pipeline__w_delay": 0,
    } | more


def cell(name: str, pp: int, microbatches: int, backend: str, **more: Any) -> dict[str, Any]:
    """The settings of one cell: ``name`` is a schedule, with its chunks per rank after a slash; ``backend`` may say
    ``host_replay/step`` (a whole step is one graph) or ``host_replay/body`` (with the optimizer outside)."""
    schedule, _, chunks = name.partition("/")
    number = pp * (int(chunks) if chunks else {"linear": 1}.get(SCHEDULES[schedule].shape, 2))
    layers = [0] * number
    for layer in range(LAYERS):  # uneven; a chunk in the middle stays empty where there are more chunks than layers
        layers[[0, -1, 1, -1, number // 2][layer] % number] += 1
    own = {"pipeline__chunks": int(chunks)} if chunks else {}
    backend, _, scope = backend.partition("/")
    if scope:
        own |= {"graphs__scope": "step", "graphs__optimizer": "inside" if scope == "step" else "outside"}
    own |= {"pipeline__schedule": schedule, "pipeline__stage_layers": layers, "graphs__backend": backend}
    return settings(microbatches, **own, parallel__pp=pp, **more)


def gradients(assembly: Assembly) -> dict[str, torch.Tensor]:
    return {f"gradient/{name}": assembly.flat.grad(name).clone() for name in assembly.flat.trainable_names}


def data(microbatches: int) -> Any:
    return lambda step: batch(step, microbatches)


@cache
def reference(microbatches: int) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """One process, GPipe, eager; and its held-out loss afterwards."""
    run = train(config(**settings(microbatches, pipeline__schedule="gpipe")), STEPS, batches=data(microbatches))
    assert_moved(run)
    moved = gradients(run.assembly)
    assert all(bool((gradient != 0).any()) for gradient in moved.values())
    held_out = run.assembly.evaluator.run(batch(99))
    return run.losses, run.norms, {**run.tensors, **moved}, held_out


def tensors(assembly: Assembly) -> dict[str, torch.Tensor]:
    items = ((item.name, item.tensor) for item in assembly.logical_tensors())
    return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in items} | gradients(assembly)


def check_threads(chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """P4 too: evaluation before the first step, in the middle and at the end changes nothing, and is one process's."""
    microbatches = chosen["pipeline__microbatches"]
    losses, norms, state, held_out = reference(microbatches)
    ranks = Ranks(config(**chosen), monkeypatch)
    ranks.prepare(batch(0, microbatches))
    ranks.each(lambda part: part.evaluator.run(batch(99)))
    for step in range(STEPS):
        results = ranks.step(step, batch(step, microbatches))
        assert {float(result.loss) for result in results} == {losses[step]}  # P7: equal on every rank
        assert {float(result.grad_norm) for result in results} == {norms[step]}
        held = ranks.each(lambda part: part.evaluator.run(batch(99)))
    assert set(held) == {held_out}
    assert differing(merged([tensors(part) for part in ranks.parts]), state) == []
    return ranks


EXECUTIONS = [(1, "host_replay"), (2, "eager"), (3, "host_replay"), (5, "host_replay/step"), (7, "eager")]
SOME = [
    ("zb-v", 2, 4, "host_replay"),
    ("zb-v", 3, 2, "eager"),
    ("dualpipev", 2, 3, "eager"),
    ("interleaved-1f1b/3", 2, 5, "eager"),
    ("interleaved-1f1b/2", 3, 4, "host_replay"),
    ("zb-h2", 3, 1, "eager"),
    ("zb-v", 2, 3, "host_replay/step"),
    ("1f1b", 3, 4, "host_replay/body"),
]


@pytest.mark.parametrize(("name", "pp", "microbatches", "backend"), SOME)
def test_a_schedule_equals_one_process(name, pp, microbatches, backend, monkeypatch):
    """P1: m = 1, m below the number of ranks, m not divisible by ranks or chunks. G6: uneven and empty chunks."""
    check_threads(cell(name, pp, microbatches, backend), monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("microbatches", "backend"), EXECUTIONS)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ALL)
def test_every_schedule_equals_one_process(name, pp, microbatches, backend, monkeypatch):
    monkeypatch.setattr("tests.unit.in_process.SECONDS", 300.0)
    check_threads(cell(name, pp, microbatches, backend), monkeypatch)


def _train(rank: int, world: int, chosen: dict[str, Any]) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    run = train(config(**chosen), STEPS, mesh=mesh, batches=data(chosen["pipeline__microbatches"]))
    return run.losses, run.norms, {**run.tensors, **gradients(run.assembly)}, run.assembly.evaluator.run(batch(99))


def check_processes(name: str, pp: int, microbatches: int, backend: str) -> None:
    results = run_distributed(_train, pp, cell(name, pp, microbatches, backend), timeout=400)
    losses, norms, state, held_out = reference(microbatches)
    assert all((result[0], result[1], result[3]) == (losses, norms, held_out) for result in results)
    assert differing(merged([result[2] for result in results]), state) == []


def test_a_schedule_over_gloo():
    """Real messages where the previous and the next peer are the same rank, and a rank hands over to itself."""
    check_processes("zb-v", 2, 3, "host_replay")


def test_whole_steps_over_gloo():
    """A replayed step sends and receives anew, and waits where the engine would."""
    check_processes("zb-h1", 2, 3, "host_replay/step")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 3), (3, 2), (4, 5)])
@pytest.mark.parametrize("name", ALL)
def test_every_schedule_over_gloo(name, pp, microbatches):
    check_processes(name, pp, microbatches, "host_replay" if pp == 3 else "eager")


def test_the_comparison_can_fail(monkeypatch):
    """Control: another seed of dropout and data gives other bits on the same placement."""
    with pytest.raises(AssertionError):
        check_threads(cell("zb-v", 2, 4, "eager", run__seed=7), monkeypatch)
