"""The optimizers on a GPU: backends against native, Muon, narrow moments and the gate; a CUDA graph against eager; resumes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim import apex_adam
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.build import make_optimizer
from qeffect_lm.optim.muon import Muon
from qeffect_lm.optim.spikes import SpikeGate
from tests.tiny import differing
from tests.unit.optim_support import SCHEDULE, SETTINGS, SHAPES, load, make_flat, state

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
MATRICES = {"qkv": ((2, 0, 6), (2, 6, 9), (2, 9, 12)), "down": ((1, 0, 8),)}


def have(backend: str) -> bool:
    if backend == "te":
        return find_spec("transformer_engine") is not None
    if backend == "apex":
        try:
            apex_adam.check_installed()
        except UsageError:
            return False
    return True


def cases() -> list[Any]:
    found = []
    for backend in ("native", "torch", "te", "apex"):
        for moments in (None, BF16) if backend in ("native", "te") else (None,):
            marks = () if have(backend) else pytest.mark.skip(f"{backend} is not installed")
            found.append(pytest.param(backend, moments, marks=marks, id=f"{backend}-{'bfloat16' if moments else 'float32'}"))
    return found


def make(backend: str, moments: torch.dtype | None = None, muon: bool = False) -> Optimizer:
    flat = make_flat(param_dtype=BF16, moment_dtype=moments, device=DEVICE)
    part = Muon(flat, MATRICES, momentum=0.95) if muon else None
    return make_optimizer(backend, flat, **SETTINGS, schedule=SCHEDULE, muon=part)


def eager(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        norm = load(optimizer.flat, step)
        if step % 4 == 2:
            optimizer.flat.grad_buffer.fill_(float("nan"))
        optimizer.step_(norm, torch.tensor(step % 4 != 2, device=DEVICE))


@pytest.mark.parametrize(("backend", "moments"), cases())
def test_within_a_bound_of_native_and_the_same_every_time(backend: str, moments: torch.dtype | None) -> None:
    """20 steps with skips: 20 units in the last place of float32 of a parameter's largest element; with bfloat16 moments a
    stored bit may differ, so masters are within a few updates' 2^-8."""
    one, two, native = make(backend, moments), make(backend, moments), make("native", moments)
    for optimizer in (one, two, native):
        eager(optimizer, range(20))
    assert differing(state(one), state(two)) == [] and int(one.step) == 15
    for name in SHAPES:
        for mine, other in ((one.flat.master, native.flat.master), (one.flat.moment1, native.flat.moment1),
                            (one.flat.moment2, native.flat.moment2)):  # fmt: skip
            unit = 2**-23 if moments is None else 2**-10
            away = (mine(name).double() - other(name).double()).abs().max()
            assert float(away) <= 20 * unit * max(float(other(name).abs().max()), 1e-20), name
        assert torch.equal(one.flat.param(name), one.flat.master(name).to(BF16))


def captured(optimizer: Optimizer, norm: torch.Tensor, finite: torch.Tensor) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step_(norm, finite)  # the flag is 0
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step_(norm, finite)
    return graph


def assert_graph_equals_eager(make: Callable[[], Optimizer]) -> None:
    plain, taped = make(), make()
    norm, finite = torch.zeros((), dtype=torch.float64, device=DEVICE), torch.zeros((), dtype=torch.bool, device=DEVICE)
    load(taped.flat, 0)
    before = state(taped)
    graph = captured(taped, norm, finite)
    assert differing(before, state(taped)) == []
    for step in range(9):
        eager(plain, range(step, step + 1))
        norm.copy_(load(taped.flat, step))
        finite.fill_(step % 4 != 2)
        graph.replay()
        assert differing(state(plain), state(taped)) == [], step
    assert int(taped.step) == 7 and "master/qkv" in differing(before, state(taped))


@pytest.mark.parametrize(("backend", "moments"), cases())
@pytest.mark.parametrize("muon", [False, True])
def test_a_cuda_graph_equals_eager(backend: str, moments: torch.dtype | None, muon: bool) -> None:
    """Clip, rate, counter and skip are live in a replay."""
    assert_graph_equals_eager(lambda: make(backend, moments, muon))


@pytest.mark.parametrize(("backend", "moments"), cases())
def test_a_resume_is_bitwise(backend: str, moments: torch.dtype | None) -> None:
    through, first, second = (make(backend, moments, muon=True) for _ in range(3))
    eager(through, range(10))
    eager(first, range(5))
    saved = state(first)
    for item in [*second.flat.logical_tensors(), *second.logical_tensors()]:
        item.tensor.copy_(saved[item.name])
    eager(second, range(5, 10))
    assert differing(state(through), state(second)) == []


def test_muon_brings_singular_values_near_one() -> None:
    """In bfloat16 too."""
    optimizer = make("native", muon=True)
    before = optimizer.flat.master("down").clone()
    optimizer.step_(load(optimizer.flat, 0), torch.tensor(True, device=DEVICE))
    lr = float(optimizer.lr)
    step = before * (1 - lr * 0.1) - optimizer.flat.master("down")
    values = torch.linalg.svdvals(step / (lr * 0.2 * 20**0.5))
    assert 0.55 < values.min() and values.max() < 1.3, values
    assert torch.equal(optimizer.flat.param("down"), optimizer.flat.master("down").to(BF16))


def test_the_gate_decides_without_a_host_read() -> None:
    """Any read of the device would raise; verdicts are the CPU's."""
    gates = SpikeGate(5.0, 4, DEVICE), SpikeGate(5.0, 4)
    verdicts = []
    for step in range(12):
        loss, norm = (9.0, 0.7) if step == 9 else (4.0 + 0.1 * (step % 3), 0.7 + 0.02 * (step % 2))
        values = [torch.tensor(v, dtype=torch.float64) for v in (loss, norm)]
        inputs = [v.to(DEVICE) for v in values], torch.tensor(True, device=DEVICE)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ok = gates[0].check_(*inputs[0], inputs[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        verdicts.append(bool(ok))
        assert verdicts[-1] is bool(gates[1].check_(*values, torch.tensor(True)))
    assert verdicts.index(False) == 9 and sum(verdicts) == 11
