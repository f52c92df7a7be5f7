"""Small flat buffers with gradients on both sides of the clip limit, for tests of the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qeffect_lm.graphs import HiddenStateRegister, HostReplay
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.optim.lr import Schedule
from tests.tiny import differing

SHAPES = {"embedding": (21, 8), "qkv": (24, 8), "norm": (8,), "down": (8, 20)}
NO_DECAY = {"norm"}
YES, NO = torch.tensor(True), torch.tensor(False)
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
SCHEDULE = Schedule(1e-2, 30, "cosine", 5)


def make_flat(dtype: torch.dtype = torch.float32, order: tuple[str, ...] = tuple(SHAPES), **kwargs: Any) -> FlatBuffers:
    flat = FlatBuffers(
        [ParamSpec(name, SHAPES[name], name not in NO_DECAY) for name in order],
        **{"master_dtype": dtype, "param_dtype": dtype, "grad_dtype": dtype, **kwargs},
    )
    for name in SHAPES:
        generator = torch.Generator().manual_seed(len(name))
        flat.master(name).copy_(torch.randn(SHAPES[name], generator=generator, dtype=torch.float64))
    flat.gather()
    return flat


def load(flat: FlatBuffers, step: int) -> torch.Tensor:
    """Fill the gradients of a step; returns their global norm."""
    generator = torch.Generator().manual_seed(100 + step)
    total = torch.zeros((), dtype=torch.float64)
    for name, shape in SHAPES.items():
        grad = 10.0 ** (step % 5 - 2) * torch.randn(shape, generator=generator)
        total += grad.double().square().sum()
        flat.grad(name).copy_(grad)
    return total.sqrt().to(flat.device)


def state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    items = [*optimizer.flat.logical_tensors(), *optimizer.logical_tensors()]
    return {item.name: item.tensor.clone() for item in items}


def run(optimizer: Optimizer, steps: range, skip: Callable[[int], bool] = lambda step: step % 4 == 2) -> None:
    """Eager steps; every fourth is skipped, with gradients that are not finite."""
    for step in steps:
        norm, bad = load(optimizer.flat, step), skip(step)
        if bad:
            optimizer.flat.grad_buffer.fill_(float("nan"))
            norm = norm * float("nan")
        optimizer.step_(norm, NO if bad else YES)


def assert_capture_equals_eager(make: Callable[[], Optimizer], steps: int = 9) -> None:
    """Captured by HostReplay and replayed, against eager: rate, clip factor, skip and counter stay live."""
    eager, taped = make(), make()
    norm, finite = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)
    register = HiddenStateRegister({"norm": norm, "finite": finite})
    register.add_object("flat", taped.flat)
    register.add_object("optimizer", taped)
    before = state(taped)
    graph = HostReplay().capture("optimizer", lambda: taped.step_(norm, finite), register=register)
    assert differing(before, state(taped)) == [], "the capture ran with the flag at 0"
    for step in range(steps):
        load(eager.flat, step)
        norm.copy_(load(taped.flat, step))
        finite.fill_(step % 4 != 2)
        eager.step_(norm, finite)
        graph.replay()
        assert differing(state(eager), state(taped)) == [], step
        assert torch.equal(eager.lr, taped.lr) and torch.equal(eager.clip_factor, taped.clip_factor)
        assert bool(taped.skipped) is (step % 4 == 2)
    register.check_addresses()
    assert int(taped.step) == steps - len(range(2, steps, 4))
    assert all(not torch.equal(before[name], value) for name, value in state(taped).items() if name.startswith("master/"))


def assert_resumes(make: Callable[[], Optimizer]) -> None:
    """Saved after 5 steps, loaded into a fresh one, 5 more: the bytes of 10 in one go."""
    through, first = make(), make()
    run(through, range(10))
    run(first, range(5))
    saved = state(first)
    second = make()
    for item in [*second.flat.logical_tensors(), *second.logical_tensors()]:
        item.tensor.copy_(saved[item.name])
    run(second, range(5, 10))
    assert differing(state(through), state(second)) == []
    assert differing(state(through), saved) != []


def assert_skip_keeps_every_byte(optimizer: Optimizer) -> None:
    run(optimizer, range(2))
    before = state(optimizer)
    run(optimizer, range(2, 3))
    assert bool(optimizer.skipped) and differing(before, state(optimizer)) == []
    run(optimizer, range(3, 4))
    assert int(optimizer.step) == 3 and "master/norm" in differing(before, state(optimizer))
