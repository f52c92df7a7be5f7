"""Norm, SwiGLU, rotary embedding and cross-entropy kernels against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qeffect_lm.fp8.quantise import E4M3, E5M2, dequantise, quantise
from qeffect_lm.layers.rope import apply_rope, rope_tables
from tests.unit.interpreted import DEVICE, INTERPRETED, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import random
from tests.unit.test_kernels_quantise import SPECIAL, same, scalar

DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# One rounding to the dtype, relative to the value itself.
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def within(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | float, terms: float = 0.0) -> None:
    """``got`` is ``want`` (float64) after one rounding to its dtype and ``terms`` float32 roundings of ``size``."""
    bound = HALF_STEP[got.dtype] * want.abs() + terms * 2.0**-24 * size
    error = (got.double() - want).abs()
    assert got.shape == want.shape and (error <= bound).all(), (error / bound).max()


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


FEW = settings(max_examples=4, phases=[Phase.generate])  # the interpreter takes milliseconds per program


@DTYPE
@FEW
@given(shape=st.tuples(st.integers(1, 30), st.integers(1, 200)), residual=st.booleans(), seed=st.integers(0, 99))
def test_norm(dtype, shape, residual, seed):
    """Forward within a dozen float32 roundings of float64; dx and dweight within as many as their sums have terms."""
    from qeffect_lm.kernels import norm

    m, k = shape
    x = random(m, k, seed=seed, dtype=dtype, scale=3.0).to(DEVICE)
    weight = random(k, seed=seed + 1, dtype=dtype).to(DEVICE)
    dy, extra = (random(m, k, seed=seed + n, dtype=dtype).to(DEVICE) for n in (2, 3))
    wide_x, wide_w = x.double().requires_grad_(), weight.double().requires_grad_()
    want = exact_norm(wide_x, wide_w, 1e-5)
    y, rstd = norm.forward(x, weight, 1e-5)
    within(y, want.detach(), want.detach().abs(), 12)
    if INTERPRETED:
        assert torch.equal(rstd, norm.inverse_rms(x, 1e-5))
    else:  # one kernel compiled twice: multiplications and additions may be fused differently
        assert torch.allclose(rstd, norm.inverse_rms(x, 1e-5), rtol=2**-22, atol=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "RUNS", 8)  # runs of several rows, as in training, and programs without a row
        dweight = torch.full((k,), math.nan, device=DEVICE)
        dx = norm.backward(x, weight, rstd, dy, extra if residual else None, (dweight, 0))
        twice = dweight.clone()
        assert torch.equal(dx, norm.backward(x, weight, rstd, dy, extra if residual else None, (twice, 1)))
        assert torch.equal(twice, 2 * dweight)
        assert torch.equal(dx, norm.backward(x, weight, rstd, dy, extra if residual else None))
        narrow = torch.full((k,), math.nan, dtype=torch.bfloat16, device=DEVICE)  # a main gradient in bfloat16: one rounding
        norm.backward(x, weight, rstd, dy, None, (narrow, 0))
        assert torch.equal(narrow, dweight.bfloat16())
        before = random(k, seed=seed + 4, dtype=torch.bfloat16, scale=9.0).to(DEVICE)
        norm.backward(x, weight, rstd, dy, None, (narrow.copy_(before), 1))
        assert torch.equal(narrow, (dweight + before).bfloat16())
    want_dx, want_dw = torch.autograd.grad((want * dy.double()).sum(), (wide_x, wide_w))
    normed = (wide_x * rstd.double()[:, None]).detach().abs()
    terms = (dy.double() * weight.double()).abs()
    size = (terms + normed * (terms * normed).mean(dim=-1, keepdim=True)) * rstd.double()[:, None]
    if residual:
        want_dx, size = want_dx + extra.double(), size + extra.double().abs()
    within(dx, want_dx, size, 24 + math.log2(k + 1))
    within(dweight, want_dw, (dy.double().abs() * normed).sum(dim=0), 12 + m / 8 + 8)


@pytest.mark.parametrize("shape", [(70, 130), (64, 64), (3, 96)])
def test_norm_quantised_is_the_norm_then_quantised(shape):
    """Equal bytes and equal amax: fusing changes no number."""
    from qeffect_lm.kernels import norm
    from qeffect_lm.kernels.quantise import Outputs

    x = random(*shape, seed=7, dtype=torch.bfloat16, scale=5.0).to(DEVICE)
    weight = random(shape[1], seed=8, dtype=torch.bfloat16).to(DEVICE)
    y, rstd = norm.forward(x, weight, 1e-5)
    slots = scalar(-1.0), scalar(-1.0)
    outputs = Outputs(shape, scalar(37.0), E4M3, rows=True, columns=True, amax_out=slots[0])
    got = norm.quantise(x, weight, rstd, outputs)
    same(got, quantise(y, scalar(37.0), E4M3, amax_out=slots[1]))
    assert slots[0].item() == slots[1].item() == y.float().abs().max().item()


@pytest.mark.parametrize(("shape", "rows"), [((70, 130), 16), ((64, 64), 8), ((3, 96), 4)])
def test_norm_of_whole_rows_is_the_same(shape, rows, monkeypatch):
    """One launch gives the bytes of two, statistics, amax and inverse scale included (compiled, the statistics may differ in
    their last bits: another order of summation)."""
    from qeffect_lm.kernels import norm, tables
    from qeffect_lm.kernels.quantise import Outputs

    x = random(*shape, seed=7, dtype=torch.bfloat16, scale=5.0).to(DEVICE)
    weight = random(shape[1], seed=8, dtype=torch.bfloat16).to(DEVICE)
    results = []
    for cut in (None, tables.Tile(rows, shape[1], 4)):
        monkeypatch.setattr(tables, "norm_rows", lambda m, k, cut=cut: cut)
        slot = scalar(-1.0)
        outputs = Outputs(shape, scalar(37.0), E4M3, rows=True, columns=True, amax_out=slot)
        results.append((*norm.forward_quantise(x, weight, 1e-5, outputs), slot))
    (two, rstd, amax), (one, rstd_too, amax_too) = results
    assert torch.allclose(rstd, rstd_too, rtol=2**-21, atol=0) and (rstd > 0).all()
    if INTERPRETED:
        same(one, two)
        assert torch.equal(rstd, rstd_too) and amax.item() == amax_too.item() > 0
    else:
        differing = (one.rows.view(torch.uint8) != two.rows.view(torch.uint8)).double().mean().item()
        assert differing < 0.01 and torch.equal(one.rows.view(torch.uint8).t(), one.columns.view(torch.uint8))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def near_quantised(got, exact: torch.Tensor, scale: float, fmt, amax: torch.Tensor) -> None:
    """FP8 of float64 ``exact`` after a rounding to bfloat16: half a step of each format, a little for the function."""
    digits, smallest = {"E4M3": (3, 2.0**-9), "E5M2": (2, 2.0**-16)}[fmt.name]
    values = dequantise(got.rows, got.scale_inv).double()
    clipped = exact.clamp(-fmt.max / scale, fmt.max / scale)
    bound = clipped.abs() * (2.0 ** -(digits + 1) + 2.0**-8) + smallest / scale * 0.51
    assert ((values - clipped).abs() <= bound).all(), ((values - clipped).abs() / bound).max()
    assert torch.equal(got.rows.view(torch.uint8).t(), got.columns.view(torch.uint8)) and got.columns.is_contiguous()
    largest = exact.abs().max().item()
    assert abs(amax.item() - largest) <= 2.0**-8 * largest + 1e-30


@FEW
@given(shape=st.tuples(st.integers(1, 140), st.integers(1, 140)), seed=st.integers(0, 99))
def test_swiglu(shape, seed):
    """The activation and d(gate_up), rounded to bfloat16 and quantised, against float64; zero, large and negative gates."""
    from qeffect_lm.kernels import swiglu
    from qeffect_lm.kernels.quantise import Outputs

    m, f = shape
    x = random(m, 2 * f, seed=seed, dtype=torch.bfloat16, scale=4.0).to(DEVICE)
    x[0, 0], x[-1, f - 1] = 0.0, -90.0
    dy = random(m, f, seed=seed + 1, dtype=torch.bfloat16).to(DEVICE)
    wide = x.double().requires_grad_()
    want = silu(wide[:, :f]) * wide[:, f:]
    slot = scalar(-1.0)
    outputs = Outputs((m, f), scalar(20.0), E4M3, rows=True, columns=True, amax_out=slot)
    near_quantised(swiglu.quantise(x, outputs), want.detach(), 20.0, E4M3, slot)
    (dx,) = torch.autograd.grad((want * dy.double()).sum(), wide)
    slot = scalar(-1.0)
    outputs = Outputs((m, 2 * f), scalar(900.0), E5M2, rows=True, columns=True, amax_out=slot)
    near_quantised(swiglu.backward_quantise(x, dy, outputs), dx, 900.0, E5M2, slot)


@FEW
@given(shape=st.tuples(st.integers(1, 140), st.integers(1, 140)), seed=st.integers(0, 99))
def test_swiglu_activation_again(shape, seed):
    """The backward kernel makes the transposed activation with the bytes that the forward kernel gave it, from F's own copy of
    the scale, and d(gate_up) as without it. S5: the live scale moved on meanwhile."""
    from qeffect_lm.kernels import swiglu
    from qeffect_lm.kernels.quantise import Outputs

    m, f = shape
    x = random(m, 2 * f, seed=seed, dtype=torch.bfloat16, scale=4.0).to(DEVICE)
    dy = random(m, f, seed=seed + 1, dtype=torch.bfloat16).to(DEVICE)
    live, kept = scalar(20.0), scalar(0.0)
    forward = swiglu.quantise(x, Outputs((m, f), live, E4M3, rows=True, columns=True, amax_out=None), kept)
    live.fill_(3.0)
    assert kept.item() == 20.0

    def backward(activation):
        outputs = Outputs((m, 2 * f), scalar(900.0), E5M2, rows=True, columns=True, amax_out=scalar(-1.0))
        return swiglu.backward_quantise(x, dy, outputs, activation)

    activation = swiglu.Activation.like(x, kept)
    activation.columns.view(torch.uint8).fill_(0x55)
    same(backward(activation), backward(None))
    assert torch.equal(activation.columns.view(torch.uint8), forward.columns.view(torch.uint8))


def test_swiglu_shows_non_finite_values():
    """An infinity or a NaN in gate, up or dY reaches the amax."""
    from qeffect_lm.kernels import swiglu
    from qeffect_lm.kernels.quantise import Outputs

    for column, value in ((1, math.nan), (1, math.inf), (5, math.inf), (6, math.nan)):
        x = random(3, 8, seed=column, dtype=torch.bfloat16).to(DEVICE)
        x[1, column] = value
        slots = scalar(-1.0), scalar(-1.0)
        forward, backward = (
            Outputs((3, n), scalar(1.0), E4M3, rows=True, columns=False, amax_out=slot)
            for n, slot in zip((4, 8), slots, strict=True)
        )
        swiglu.quantise(x, forward)
        swiglu.backward_quantise(x, torch.ones(3, 4, dtype=torch.bfloat16, device=DEVICE), backward)
        assert not math.isfinite(slots[0].item()) and not math.isfinite(slots[1].item())


@DTYPE
@FEW
@given(
    batch=st.integers(1, 3),
    sequence=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.sampled_from([1, 4, 6, 16]),
    seed=st.integers(0, 99),
)
def test_rope(dtype, batch, sequence, kv_heads, group, half, seed):
    """q and k turn in place, v keeps its bytes; the gradient turns back, from any strides, into the fused layout."""
    from qeffect_lm.kernels import rope

    cos, sin = (table.to(DEVICE) for table in rope_tables(sequence, 2 * half, 100.0, torch.float32))
    fused = random(batch, sequence, kv_heads, group + 2, 2 * half, seed=seed, dtype=dtype).to(DEVICE)
    before = fused.clone()
    rope.rotate_(fused, cos, sin)
    heads = before.double().permute(0, 2, 3, 1, 4)
    want = apply_rope(heads[:, :, : group + 1], cos.double(), sin.double())
    size = heads.abs().max()
    within(fused.permute(0, 2, 3, 1, 4)[:, :, : group + 1], want, size, 3)
    assert torch.equal(fused[:, :, :, -1], before[:, :, :, -1])

    dq = random(batch, kv_heads, group, sequence, 2 * half, seed=seed + 1, dtype=dtype).to(DEVICE)
    dk = random(sequence, kv_heads, batch, 2 * half, seed=seed + 2, dtype=dtype).to(DEVICE).permute(2, 1, 0, 3)
    dv = random(batch, 2 * half, kv_heads, sequence, seed=seed + 3, dtype=dtype).to(DEVICE).permute(0, 2, 3, 1)
    got = rope.gather(dq, dk, dv, cos, sin)
    assert got.is_contiguous() and got.shape == fused.shape
    turned = torch.cat([dq, dk[:, :, None]], dim=2).double()
    back = apply_rope(turned, cos.double(), -sin.double())
    within(got.permute(0, 2, 3, 1, 4)[:, :, : group + 1], back, turned.abs().max(), 3)
    assert torch.equal(got.permute(0, 2, 3, 1, 4)[:, :, -1], dv)


@pytest.mark.parametrize(
    ("batch", "sequence", "kv_heads", "group", "half"), [(1, 70, 2, 1, 16), (2, 9, 1, 3, 6), (3, 32, 2, 2, 4)]
)
def test_rope_backward_quantised_is_the_gather_then_quantised(batch, sequence, kv_heads, group, half):
    """Equal bytes and equal amax, from any strides."""
    from qeffect_lm.kernels import rope
    from qeffect_lm.kernels.quantise import Outputs

    cos, sin = (table.to(DEVICE) for table in rope_tables(sequence, 2 * half, 100.0, torch.bfloat16))
    dq = random(batch, kv_heads, group, sequence, 2 * half, seed=1, dtype=torch.bfloat16).to(DEVICE)
    dk = random(sequence, kv_heads, batch, 2 * half, seed=2, dtype=torch.bfloat16).to(DEVICE).permute(2, 1, 0, 3)
    dv = random(batch, 2 * half, kv_heads, sequence, seed=3, dtype=torch.bfloat16).to(DEVICE).permute(0, 2, 3, 1)
    matrix = rope.gather(dq, dk, dv, cos, sin).view(batch * sequence, -1)
    slots = scalar(-1.0), scalar(-1.0)
    outputs = Outputs(matrix.shape, scalar(900.0), E5M2, rows=True, columns=True, amax_out=slots[0])
    same(rope.backward_quantise(dq, dk, dv, cos, sin, outputs), quantise(matrix, scalar(900.0), E5M2, amax_out=slots[1]))
    assert slots[0].item() == slots[1].item() == matrix.float().abs().max().item()


@DTYPE
@pytest.mark.parametrize("vocab", [5, 4096, 9001])
def test_cross_entropy(dtype, vocab):
    """Losses and gradients against float64; masked tokens have neither; logits far apart, and -inf, are no trouble."""
    from qeffect_lm.kernels import loss

    m = 6
    logits = random(m, vocab, seed=vocab, dtype=dtype, scale=4.0).to(DEVICE)
    logits[0, 2], logits[1, 3], logits[2] = 300.0, -math.inf, -200.0
    targets = torch.tensor([2, 1, 0, vocab - 1, 4, 0], device=DEVICE)
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.5], device=DEVICE)
    wide = logits.double().requires_grad_()
    want = (torch.logsumexp(wide, dim=-1) - wide.gather(1, targets[:, None])[:, 0]) * mask.double()
    losses, lse = loss.forward(logits, targets, mask)
    size = wide.detach().nan_to_num(neginf=0.0).abs().amax(dim=-1) + math.log(vocab)
    within(losses, want.detach(), size, 4 + math.log2(vocab))
    grad = loss.backward_(logits, targets, mask, lse, scalar(3.0), scalar(7.0))
    assert grad is logits
    (want_grad,) = torch.autograd.grad(want.sum() * 3.0 / 7.0, wide)
    # exp of a difference of float32 numbers up to size: their rounding is its relative error
    within(grad, want_grad, (want_grad.abs() + 1e-30) * size[:, None] + 1e-3 * mask.double()[:, None], 8 + math.log2(vocab))
    assert (grad[4] == 0).all()


def test_cross_entropy_shows_a_nan():
    from qeffect_lm.kernels import loss

    logits = random(2, 9, seed=1, dtype=torch.bfloat16).to(DEVICE)
    logits[1, 4] = SPECIAL[2]
    losses, _ = loss.forward(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.ones(2, device=DEVICE))
    assert math.isfinite(losses[0].item()) and math.isnan(losses[1].item())
