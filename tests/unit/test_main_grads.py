"""Main gradients in bfloat16 (``precision.main_grads``): each microbatch's part is added in float32 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.stage import _accumulate
from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import resident_bytes
from qeffect_lm.app.optimizer import grad_dtype
from qeffect_lm.config import Config
from qeffect_lm.fp8.gemm import accumulate_mm, accumulate_scaled_mm
from qeffect_lm.fp8.quantise import E4M3, E5M2, dequantise, quantise
from qeffect_lm.layers.embedding import scatter_
from tests.tiny import Batch, assert_moved, batch, config, differing, local_plan, train
from tests.unit.layer_harness import random

NARROW: dict[str, Any] = {"precision__main_grads": "bfloat16", "precision__dtype": "bfloat16"}
PLAIN: dict[str, Any] = {"precision__fp8__recipe": "none", "optim__clip_norm": None}


def rounded_once(out: torch.Tensor, part: torch.Tensor, beta: int) -> torch.Tensor:
    return (part + out.float() if beta else part).bfloat16()


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "fp8"])
def test_a_product_is_rounded_once(dtype, beta):
    """Operands as they are stored, the product in float32, whatever was there gone with beta 0."""
    out = random(24, 16, seed=3, dtype=torch.bfloat16, scale=30.0)
    before = out.clone()
    if not beta:
        out.fill_(math.nan)
    if dtype is None:
        dy, x = (
            quantise(random(24, 40, seed=1), torch.tensor(3.0), E5M2),
            quantise(random(16, 40, seed=2), torch.tensor(7.0), E4M3),
        )
        accumulate_scaled_mm(out, dy.rows, dy.scale_inv, x.rows, x.scale_inv, beta)
        part = dequantise(dy.rows, dy.scale_inv) @ dequantise(x.rows, x.scale_inv).t()
    else:
        a, b = random(24, 40, seed=1, dtype=dtype), random(16, 40, seed=2, dtype=dtype)
        accumulate_mm(out, a, b, beta)
        part = a.float() @ b.float().t()
    assert torch.equal(out, rounded_once(before, part, beta))
    assert not torch.equal(part, part.bfloat16().float())


@pytest.mark.parametrize("beta", [0, 1])
def test_a_scatter_is_rounded_once(beta):
    """A thousand tokens on one row: added one by one in bfloat16 they would stop counting at 256."""
    rows = torch.zeros(1000, dtype=torch.int64)
    out = torch.full((3, 2), 24.0 if beta else math.nan, dtype=torch.bfloat16)
    scatter_(out, rows, torch.ones(1000, 2), beta)
    assert out[0].tolist() == [1024.0 if beta else 1000.0] * 2
    assert out[1:].flatten().tolist() == [24.0 if beta else 0.0] * 4


def test_a_cheap_parameter_is_rounded_once():
    """A float32 bias gradient: rounding it before it is added would give 256."""
    view = torch.full((1,), 256.0, dtype=torch.bfloat16)
    _accumulate(view, torch.tensor([1.0 + 2.0**-10]), 1)
    assert view.item() == 258.0


@pytest.mark.parametrize("more", [{}, {"graphs__scope": "step"}, PLAIN], ids=["fp8", "one graph", "bfloat16"])
def test_captured_equals_eager(more):
    """Six steps, bit for bit, gradients included."""
    plain = {key: value for key, value in more.items() if not key.startswith("graphs")}
    eager = train(config(**NARROW, **plain))
    assert_moved(eager)
    other = train(config(**NARROW, **more, graphs__backend="host_replay"))
    assert (other.losses, other.norms) == (eager.losses, eager.norms) and differing(other.tensors, eager.tensors) == []
    grads = eager.assembly.flat.grad_buffer
    assert grads.dtype is torch.bfloat16 and torch.equal(grads, other.assembly.flat.grad_buffer)
    assert train(config(**plain, precision__dtype="bfloat16")).norms != eager.norms


def test_schedules_and_stages_agree():
    eager = train(config(**NARROW), 3)
    for settings, plan in (({}, local_plan(2, 4)), ({}, local_plan(3, 4)), ({"pipeline__schedule": "gpipe"}, None)):
        other = train(config(**NARROW, **settings), 3, plan=plan)
        assert other.norms == eager.norms and differing(other.tensors, eager.tensors) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_distance_to_float32_is_bounded(dtype):
    """With m microbatches of parts P_i, every element lies within ``m u sum |P_i|`` of the float32 sum, u = 2^-8: the first
    part is rounded, then each partial sum. (The parts, of one microbatch each under the same divisor, have the same bits in
    both; the float32 sum's own roundings are a 2^16th of that, and the factor 1.02 is for the second order.)"""
    m = 4
    settings = {"precision__dtype": dtype, **PLAIN}
    wide, narrow = (train(config(**settings, precision__main_grads=kind), 1).assembly.flat for kind in ("float32", "bfloat16"))
    whole = batch(0)
    sums = {name: torch.zeros_like(wide.grad(name)) for name in wide.trainable_names}
    for i in range(m):

        def one(step: int, i: int = i) -> Batch:
            return Batch(*(t[i : i + 1] for t in (whole.inputs, whole.targets, whole.loss_mask)), whole.tokens)

        part = train(config(**settings, pipeline__microbatches=1, pipeline__w_delay=0), 1, batches=one).assembly.flat
        for name, total in sums.items():
            total.add_(part.grad(name).abs())
    moved = 0
    for name, total in sums.items():
        apart = (narrow.grad(name).float() - wide.grad(name)).abs()
        assert bool((apart <= 1.02 * m * 2.0**-8 * total).all()), name
        moved += int((apart > 0).sum())
    assert moved > 0.5 * sum(total.numel() for total in sums.values())


def test_types_and_memory():
    """Half the bytes; float64 stays as it is; the dry run counts them."""
    assert grad_dtype(config(**NARROW)) is torch.bfloat16 and grad_dtype(config()) is torch.float32
    assert grad_dtype(config(precision__dtype="float64", **PLAIN)) is torch.float64
    narrow, wide = (held(config(precision__dtype="bfloat16", precision__main_grads=kind)) for kind in ("bfloat16", "float32"))
    assert narrow == wide / 2 > 0


def held(settings: Config) -> int:
    """Bytes of gradients that the dry run tells."""
    return resident_bytes(Layout(settings), make_plan(settings), 0, "cpu")["main gradients"]
