"""Moments in bfloat16: what is stored, that updates use the exact ones, the kernel, capture, resume, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.optim.muon import Muon
from tests.unit.interpreted import kernels_run, reference  # noqa: F401
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
)

BF16 = torch.bfloat16


def make(moments: torch.dtype | None = BF16, **change: Any) -> AdamW:
    return AdamW(make_flat(param_dtype=BF16, moment_dtype=moments), **{**SETTINGS, "schedule": SCHEDULE, "chunk": 50, **change})


@pytest.mark.parametrize("fused", [False, True])
def test_moments_are_rounded_when_stored_and_exact_in_the_update(fused: bool) -> None:
    """Each step against the formula in float64 from the stored moments: they are its values to nearest even (within one
    float32 rounding of a tie), and the master moves by the unrounded ones."""
    if fused:
        optimizer = make()
    else:
        with reference():
            optimizer = make()
    assert optimizer._fused is fused
    flat, beta1, beta2 = optimizer.flat, 0.9, 0.95
    for step in range(6):
        m = {name: flat.moment1(name).double() for name in SHAPES}
        v = {name: flat.moment2(name).double() for name in SHAPES}
        w = {name: flat.master(name).double() for name in SHAPES}
        norm = load(flat, step)
        grads = {name: flat.grad(name).double() * min(1.0, 1.0 / (float(norm) + 1e-6)) for name in SHAPES}
        optimizer.step_(norm, YES)
        lr = SCHEDULE.closed_form(step)
        for name, g in grads.items():
            new_m, new_v = beta1 * m[name] + (1 - beta1) * g, beta2 * v[name] + (1 - beta2) * g * g
            for stored, exact in ((flat.moment1(name), new_m), (flat.moment2(name), new_v)):
                close = [(exact * (1 + sign * 2**-21)).float().to(BF16) for sign in (-1, 1)]
                assert stored.dtype is BF16 and ((stored == close[0]) | (stored == close[1])).all()
                assert (stored == exact.float().to(BF16)).float().mean() > 0.98
            root = (new_v / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
            keep = 1 - lr * 0.1 if name != "norm" else 1.0
            wanted = keep * w[name] - lr * (new_m / (1 - beta1 ** (step + 1))) / root
            torch.testing.assert_close(flat.master(name).double(), wanted, rtol=3e-7, atol=3e-8)


def test_kernel_and_operations_agree() -> None:
    """12 steps: stored moments differ in the last bit at most where a float32 rounding meets a tie; masters within that."""
    fused = make()
    with reference():
        plain = make()
        run(plain, range(12))
    run(fused, range(12))
    for name in SHAPES:
        for one, other in ((fused.flat.moment1, plain.flat.moment1), (fused.flat.moment2, plain.flat.moment2)):
            torch.testing.assert_close(one(name), other(name), rtol=2**-7, atol=0)
        torch.testing.assert_close(fused.flat.master(name), plain.flat.master(name), rtol=0, atol=1e-4)


def test_close_to_wide_moments_and_not_equal() -> None:
    """12 steps at a rate of 1e-2: an update changes by a few times 2^-9 of itself."""
    with reference():
        narrow, wide = make(), make(None)
        for optimizer in (narrow, wide):
            run(optimizer, range(12))
    for name in SHAPES:
        away = (narrow.flat.master(name) - wide.flat.master(name)).abs().max()
        assert 0 < away < 12 * 1e-2 * 2**-6


def test_capture_skip_and_resume() -> None:
    with reference():
        assert_capture_equals_eager(make)
        assert_skip_keeps_every_byte(make())
        assert_resumes(make)
    assert_skip_keeps_every_byte(make())


def test_memory_is_half_and_the_state_says_its_type() -> None:
    wide, narrow = make_flat(), make_flat(moment_dtype=BF16)
    assert wide.moment1_buffer.dtype is torch.float32 and narrow.moment2_buffer.dtype is BF16
    specs = [ParamSpec("w", (1 << 12, 16), True)]
    sizes = [FlatBuffers(specs, moment_dtype=dtype).bytes() for dtype in (None, BF16)]
    assert sizes[0] - sizes[1] == 2 * 2 * (1 << 16)
    types = {item.name: item.tensor.dtype for item in narrow.logical_tensors()}
    assert types["moment1/qkv"] is types["moment2/norm"] is BF16 and types["master/qkv"] is torch.float32


def test_shards_update_as_the_whole_does() -> None:
    """Two replicas' shards with narrow moments: their pieces are the whole's bytes; Muon refuses to be cut."""
    flats = [make_flat(param_dtype=BF16, moment_dtype=BF16)]
    with reference():
        whole = AdamW(flats[0], **SETTINGS, schedule=SCHEDULE)
        run(whole, range(3))
        for rank in range(2):
            specs = [ParamSpec(name, shape, name != "norm") for name, shape in SHAPES.items()]
            flat = FlatBuffers(specs, param_dtype=BF16, moment_dtype=BF16, shard=Shard(2, rank, 1 << 20))
            for name in SHAPES:
                flat.fill_(name, make_flat().master(name))
            mine = AdamW(flat, **SETTINGS, schedule=SCHEDULE)
            run(mine, range(3))
            for name in SHAPES:
                for start, stop in flat.own_parts(name):
                    span = flat.entry(name).offset
                    views = flat.views(slice(span + start, span + stop))
                    assert torch.equal(views.moment2, flats[0].moment2(name).flatten()[start:stop])
                    assert torch.equal(views.master, flats[0].master(name).flatten()[start:stop])
            with pytest.raises(UsageError, match="optim.zero=0"):
                Muon(flat, {"down": ((1, 0, 8),)}, momentum=0.9)
