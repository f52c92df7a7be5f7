"""The engine on a real GPU: captured equals eager bit for bit, one answer for all plans, faults trapped on real streams.

    python -m pytest -q tests/gpu/test_engine_gpu.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pipeline.plan import Plan
from qeffect_lm.contract.errors import StaleWeightError, StreamOrderError
from tests.gpu.captures import assert_same_captures
from tests.gpu.one_gpu import GENTLY
from tests.tiny import Batch, Trained, assert_moved, batch, config, differing, local_plan, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS, MICROBATCHES = 12, 4
SHAPE = {
    "run__device": "cuda",
    "model__hidden_size": 256,
    "model__num_heads": 4,
    "model__num_kv_heads": 4,
    "model__ffn_size": 512,
    "model__dropout": 0.1,
    "precision__dtype": "bfloat16",
    "precision__fp8": {"recipe": "delayed", "history": 4},
    "data__seq_len": 128,
}


def data(step: int) -> Batch:
    return batch(step, MICROBATCHES, 2, 128)


@lru_cache
def trained(backend: str, window: str = "step", plan: str = "1f1b", steps: int = STEPS) -> Trained:
    settings: dict[str, Any] = {**SHAPE, "graphs__backend": backend}
    settings["precision__fp8"] = {"recipe": "delayed", "history": 4, "window": window}
    made: Plan | None = None if plan == "1f1b" else local_plan(int(plan), MICROBATCHES, window)
    return train(config(**settings), steps, plan=made, batches=data)


@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("plan", ["1f1b", "3"])
def test_captured_equals_eager(window, plan):
    """Promise 1, over several roll-overs of the history: losses, norms, every scale, every logical tensor."""
    eager, captured = (trained(backend, window, plan) for backend in ("eager", "cuda_graphs"))
    assert captured.assembly.engine.captured is not None and eager.assembly.engine.captured is None
    assert_moved(eager)
    assert captured.losses == eager.losses and captured.norms == eager.norms
    assert all(torch.equal(a, b) for a, b in zip(captured.scales, eager.scales, strict=True))
    assert differing(captured.tensors, eager.tensors) == []
    other = train(config(**SHAPE, run__seed=5), 2, batches=data)
    assert differing(other.tensors, trained("eager", steps=2).tensors) != []


def test_one_answer_for_all_plans():
    """Promise 3: one stage or three, in another order, the same bits."""
    one, three = trained("cuda_graphs"), trained("cuda_graphs", plan="3")
    assert one.losses == three.losses and differing(one.tensors, three.tensors) == []


def test_captured_again_gives_the_same_graphs():
    """Ten captures, one fingerprint, and no memory grows."""
    assert_same_captures(trained("cuda_graphs").assembly, times=10)


@pytest.mark.parametrize("backend", ["eager", "cuda_graphs"])
def test_faults_are_trapped_on_real_streams(backend):
    """A missing edge and a stale cache: named, at the first illegal action, whatever the timing."""
    run = train(config(**SHAPE, graphs__backend=backend), 1, batches=data)
    engine = run.assembly.engine
    edge = engine.streams.edge
    engine.streams.edge = lambda source, target: None if target == "collective" else edge(source, target)  # type: ignore[method-assign]
    with pytest.raises(StreamOrderError, match="REDUCE"):
        engine.step(1, data(1))
    engine.streams.edge = edge  # type: ignore[method-assign]
    engine._broken = None
    engine.step(2, data(2))
    run.assembly.ledger.versions.bump()
    with pytest.raises(StaleWeightError):
        engine.step(3, data(3))


def test_evaluation_leaves_no_trace():
    with_evaluation = train(
        config(**SHAPE, graphs__backend="cuda_graphs"),
        4,
        batches=data,
        between=lambda assembly, step: print(assembly.evaluator.run(data(99))),
    )
    without = train(config(**SHAPE, graphs__backend="cuda_graphs"), 4, batches=data)
    assert with_evaluation.losses == without.losses and differing(with_evaluation.tensors, without.tensors) == []


def test_a_model_in_float32():
    """FP8 layers between float32 ones: what they learn is a CPU's, up to the bits of an FP8 sum that Hopper drops."""
    settings = {**SHAPE, **GENTLY, "precision__dtype": "float32", "model__dropout": 0.0}
    made, want = (train(config(**{**settings, "run__device": device}), 4, batches=data) for device in ("cuda", "cpu"))
    assert_moved(made)
    assert made.losses == pytest.approx(want.losses, rel=1e-2) and made.norms == pytest.approx(want.norms, rel=5e-2)
