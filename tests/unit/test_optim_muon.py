"""Muon: against a plain reference, what it does to singular values, the skip, capture, resume, and that AdamW has the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.muon import Muon
from tests.tiny import differing
from tests.unit.optim_support import (
    SCHEDULE,
    SETTINGS,
    SHAPES,
    YES,
    assert_capture_equals_eager,
    assert_resumes,
    assert_skip_keeps_every_byte,
    load,
    make_flat,
    run,
    state,
)

# Two groups of (2 query, 1 key, 1 value) heads of 3 rows; a wide matrix.
QKV = ((2, 0, 6), (2, 6, 9), (2, 9, 12))
MATRICES = {"qkv": QKV, "down": ((1, 0, 8),)}


def make(dtype: torch.dtype = torch.float32, flat: FlatBuffers | None = None, **change: Any) -> AdamW:
    flat = make_flat(dtype) if flat is None else flat
    return AdamW(flat, **{**SETTINGS, "schedule": SCHEDULE, "muon": Muon(flat, MATRICES, momentum=0.95), **change})


def rows(block: tuple[int, int, int], count: int) -> list[int]:
    groups, first, last = block
    return [start + row for start in range(0, count, count // groups) for row in range(first, last)]


def newton_schulz(g: torch.Tensor) -> torch.Tensor:
    x = g / (g.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(g.T).T
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


def test_equals_the_formula() -> None:
    """8 steps in float64 with clipping, decay and Nesterov, per logical matrix: a few roundings apart, amplified by five
    iterations."""
    optimizer = make(torch.float64)
    w = {name: optimizer.flat.master(name).clone() for name in MATRICES}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    for step in range(8):
        norm = load(optimizer.flat, step)
        lr, clip = SCHEDULE.closed_form(step), min(1.0, 1.0 / (float(norm) + 1e-6))
        for name, blocks in MATRICES.items():
            grad = optimizer.flat.grad(name) * clip
            m[name] = 0.95 * m[name] + grad
            for block in blocks:
                at = rows(block, w[name].shape[0])
                update = newton_schulz((grad + 0.95 * m[name])[at])
                scale = 0.2 * math.sqrt(max(update.shape))
                w[name][at] = w[name][at] * (1 - lr * 0.1) - lr * scale * update
        optimizer.step_(norm, YES)
    for name in MATRICES:
        torch.testing.assert_close(optimizer.flat.master(name), w[name], rtol=0, atol=1e-13)
        torch.testing.assert_close(optimizer.flat.moment1(name), m[name], rtol=1e-13, atol=1e-15)
        assert not optimizer.flat.moment2(name).any(), "kept in the format, not used"


def test_an_update_has_singular_values_near_one_and_adamw_s_size() -> None:
    """Jordan's coefficients bring them between 0.6 and 1.25; the root mean square of a step is about 0.2 lr."""
    optimizer = make(schedule=Schedule(1.0, 10), weight_decay=0.0)
    before = {name: optimizer.flat.master(name).clone() for name in MATRICES}
    optimizer.step_(load(optimizer.flat, 0), YES)
    for name, blocks in MATRICES.items():
        for block in blocks:
            at = rows(block, SHAPES[name][0])
            step = (before[name] - optimizer.flat.master(name))[at]
            values = torch.linalg.svdvals(step / (0.2 * math.sqrt(max(step.shape))))
            assert 0.6 < values.min() and values.max() < 1.25, values
            assert 0.14 < float(step.square().mean().sqrt()) < 0.26


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_adamw_has_the_rest(decay: float) -> None:
    """Bitwise what AdamW alone makes of embedding and norm; the matrices differ."""
    muon, plain = make(weight_decay=decay), make(weight_decay=decay, muon=None)
    for optimizer in (muon, plain):
        run(optimizer, range(6))
    different = differing(state(muon), state(plain))
    parts = ("master", "moment1", "moment2")
    assert different == sorted(f"{part}/{name}" for part in parts for name in MATRICES)


def test_a_matrix_does_not_depend_on_its_place() -> None:
    """Another order of parameters, so other offsets and segments: the same bits."""
    results = []
    for order in ("embedding qkv norm down", "down qkv embedding norm", "qkv down norm embedding"):
        optimizer = make(flat=make_flat(order=tuple(order.split())))
        run(optimizer, range(5))
        results.append(state(optimizer))
    assert differing(results[0], results[1]) == differing(results[0], results[2]) == []


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_capture_skip_and_resume(moments: torch.dtype) -> None:
    def made() -> AdamW:
        return make(flat=make_flat(param_dtype=torch.bfloat16, moment_dtype=moments))

    assert_capture_equals_eager(made)
    assert_skip_keeps_every_byte(made())
    assert_resumes(made)


def test_zero_gradients_move_nothing_but_by_decay() -> None:
    optimizer = make(weight_decay=0.0)
    before = optimizer.flat.master("down").clone()
    optimizer.flat.grad_buffer.zero_()
    optimizer.step_(torch.zeros((), dtype=torch.float64), YES)
    assert torch.equal(before, optimizer.flat.master("down"))


def test_wrong_settings_are_named() -> None:
    flat = make_flat()
    with pytest.raises(UsageError, match="muon_momentum is 1.0"):
        Muon(flat, MATRICES, momentum=1.0)
    for blocks in ([(2, 0, 6), (2, 6, 9)], [(2, 0, 6), (2, 5, 12)], [(5, 0, 4)], [(1, 0, 12), (2, 0, 12)]):
        with pytest.raises(ValueError, match="do not cover"):
            Muon(flat, {"qkv": blocks}, momentum=0.9)
    with pytest.raises(ValueError, match="do not cover"):
        Muon(flat, {"norm": [(1, 0, 8)]}, momentum=0.9)
