"""A whole step as one CUDA graph: equal to eager bit for bit on one GPU and over NCCL on two; a lost peer is named.

    python -m pytest -q tests/gpu/test_step_graph_gpu.py
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.contract.errors import StaleWeightError
from qeffect_lm.parallel.mesh import Mesh
from tests.gpu.captures import assert_same_captures
from tests.gpu.test_engine_gpu import SHAPE, data
from tests.helpers import run_distributed, start_distributed
from tests.tiny import Trained, assert_moved, config, differing, local_plan, merged, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEPS = 12
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "action": {"graphs__backend": "cuda_graphs"},
    "step": {"graphs__backend": "cuda_graphs", "graphs__scope": "step"},
    "body": {"graphs__backend": "cuda_graphs", "graphs__scope": "step", "graphs__optimizer": "outside"},
}


def settings(graphs: str, window: str = "step", **more: Any) -> Any:
    fp8 = {"recipe": "delayed", "history": 4, "window": window}
    return config(**{**SHAPE, "precision__fp8": fp8, **GRAPHS[graphs], **more})


@lru_cache
def trained(graphs: str, window: str, chunks: int) -> Trained:
    return train(settings(graphs, window), STEPS, plan=local_plan(chunks, 4, window), batches=data)


@pytest.mark.parametrize("graphs", ["step", "body"])
@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_equals_eager(chunks, window, graphs):
    eager, whole = trained("eager", window, chunks), trained(graphs, window, chunks)
    assert_moved(eager)
    captured = whole.assembly.engine.captured
    assert captured is not None and captured.step is not None
    assert (whole.losses, whole.norms) == (eager.losses, eager.norms)
    assert all(torch.equal(a, b) for a, b in zip(whole.scales, eager.scales, strict=True))
    assert differing(whole.tensors, eager.tensors) == []
    assert whole.assembly.ledger.state() == eager.assembly.ledger.state()


def test_captured_again():
    """Five captures: one fingerprint, and no memory grows."""
    assert_same_captures(train(settings("step"), 2, batches=data).assembly)


def test_a_stale_cache_is_refused_before_the_graph_runs():
    run = train(settings("step"), 2, batches=data)
    before = run.tensors
    run.assembly.ledger.versions.bump()
    with pytest.raises(StaleWeightError, match="the step's graph"):
        run.assembly.engine.step(2, data(2))
    assert differing(before, run.tensors) == []


# ---- two GPUs ------------------------------------------------------------------------------------------------------


def _mesh(rank: int, world: int) -> Mesh:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    return mesh


def _train(rank: int, world: int, graphs: str, schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = _mesh(rank, world)
    chosen = settings(graphs, parallel__pp=world, pipeline__schedule=schedule, pipeline__w_delay=0)
    run = train(chosen, STEPS, mesh=mesh, batches=data)
    state = {name: tensor.cpu() for name, tensor in run.tensors.items()}
    run.assembly.release()
    return run.losses, state


@two_gpus
@pytest.mark.parametrize(("graphs", "schedule"), [("step", "1f1b"), ("step", "zb-v"), ("body", "zb-h1"), ("action", "zb-v")])
def test_two_gpus_equal_one(graphs, schedule):
    """Transfers and collectives inside of the graph: one GPU's losses and state."""
    one = trained("eager", "step", 1)
    results = run_distributed(_train, 2, graphs, schedule, timeout=150, init=False)
    assert [losses for losses, _ in results] == [one.losses] * 2
    assert differing(merged([state for _, state in results]), {n: t.cpu() for n, t in one.tensors.items()}) == []


def _die(rank: int, world: int) -> None:
    mesh = _mesh(rank, world)
    chosen = settings("step", parallel__pp=world, pipeline__w_delay=0, launch__timeout_seconds=10.0)

    def die(assembly: Any, step: int) -> None:
        if rank == 1 and step == 2:
            os._exit(7)

    began = time.monotonic()
    try:
        train(chosen, STEPS, mesh=mesh, batches=data, between=die)
    finally:
        print(f"ended after {time.monotonic() - began:.0f} s", flush=True)


@two_gpus
def test_a_lost_peer_ends_the_step():
    """The other rank waits inside of its graph; the watchdog ends it with the peer's name."""
    results = start_distributed(_die, 2, timeout=120, init=False).wait(check=False)
    assert [result.returncode for result in results] == [1, 7]
    assert "the graph of step 3 is not done after 10 s: rank 1 was lost" in results[0].output
