"""The kernels on a real GPU: the CPU suite's checks compiled, products against float64, reproducibility, capture.

    python -m pytest -q tests/gpu/test_kernels_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from qeffect_lm import kernels
from qeffect_lm.fp8.quantise import E4M3, E5M2, dequantise, quantise
from tests.unit.interpreted import kernels_run  # noqa: F401
from tests.unit.layer_harness import random

# The same checks as on CPU, there interpreted, here compiled.
from tests.unit.test_kernels_fused import (  # noqa: F401
    test_activation_for_w_is_made_in_i,
    test_attention_as_one_node_equals_its_parts,
    test_block_as_the_reference,
    test_evaluation_reads_and_leaves_nothing,
    test_fp8_operands_alone_leave_the_fused_layers,
    test_frozen_half_of_an_mlp,
    test_quantised_by_each_rank_then_gathered,
    test_residual_inside,
)
from tests.unit.test_kernels_layers import (  # noqa: F401
    test_cross_entropy,
    test_cross_entropy_shows_a_nan,
    test_norm,
    test_norm_of_whole_rows_is_the_same,
    test_norm_quantised_is_the_norm_then_quantised,
    test_rope,
    test_rope_backward_quantised_is_the_gather_then_quantised,
    test_swiglu,
    test_swiglu_activation_again,
    test_swiglu_shows_non_finite_values,
)
from tests.unit.test_kernels_quantise import (  # noqa: F401
    test_amax_ignores_what_lies_beyond_the_matrix,
    test_equals_the_reference,
    test_every_bfloat16,
    test_weight_refresh,
    test_writes_into_given_storages,
)
from tests.unit.test_kernels_transpose import (  # noqa: F401
    launches,
    test_equals_torch,
    test_large_ones,
    test_what_does_not_come_in_pairs,
    test_whole_tiles,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def library():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    from qeffect_lm.kernels.cublaslt import CublasLt

    made = CublasLt("cuda")
    yield made
    made.close()


def on_gpu(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=dtype, scale=scale).cuda()


def operands(m: int, n: int, k: int, a_fmt=E4M3, scales: tuple[float, float] = (7.3, 113.0)):
    a = quantise(on_gpu(m, k, seed=1, scale=3.0), torch.tensor(scales[0], device="cuda"), a_fmt, columns=False)
    b = quantise(on_gpu(n, k, seed=2, scale=0.2), torch.tensor(scales[1], device="cuda"), E4M3, columns=False)
    return a.rows, a.scale_inv, b.rows, b.scale_inv


def test_this_gpu_takes_the_kernels():
    assert kernels.usable(torch.zeros(2, 2, device="cuda")), "Triton is missing"


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(4096, 1024), (2048, 4100), (1000, 3000)])
def test_quantise_equals_the_cpu(fmt, shape):
    """Large matrices: the bytes of the torch reference on CPU, specials included (NaN up to its sign)."""
    x = random(*shape, seed=3, dtype=torch.bfloat16, scale=50.0)
    x[::97, 5], x[3, ::101], x[::51, 7], x[4] = float("inf"), -float("inf"), float("nan"), -0.0
    slots = [torch.tensor(-1.0), torch.tensor(-1.0, device="cuda")]
    wide = x.float()
    q = (wide * 3.7).clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    got = quantise(x.cuda(), torch.tensor(3.7, device="cuda"), fmt, amax_out=slots[1])
    rows, columns = got.rows.view(torch.uint8).cpu(), got.columns.view(torch.uint8).cpu()
    nan = x.isnan()
    assert torch.equal(rows[~nan], q[~nan]) and torch.equal(columns, rows.t()) and (rows[nan] & 0x7F == 0x7F).all()
    assert slots[1].isnan()
    assert got.scale_inv.item() == torch.tensor(3.7).reciprocal().item()


# ---- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("a_fmt", "fast"), [(E4M3, True), (E4M3, False), (E5M2, False)], ids=["F", "W of E4M3", "I and W"])
@pytest.mark.parametrize(("m", "n", "k"), [(1024, 3072, 1024), (2048, 2048, 4096), (48, 64, 32), (7, 128, 256)])
def test_products_against_float64(library, m, n, k, a_fmt, fast, out_dtype):
    """Within the hardware's bound of float64.

    Hopper aligns the terms of a 32-long step, and the running sum, to the largest of them and keeps 13 bits below it: each of
    the k products loses at most 2**-13 of the largest one, and the running sum, at most the sum of magnitudes S, 2**-13 of S a
    step: k / 32 times, or 4 times until the sum moves to float32.
    """
    a, a_inv, b, b_inv = operands(m, n, k, a_fmt)
    out = torch.full((m, n), torch.nan, dtype=out_dtype, device="cuda")
    library.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, fast_accumulation=fast)
    wide_a, wide_b = dequantise(a, a_inv).double(), dequantise(b, b_inv).double()
    want, magnitudes = wide_a @ wide_b.t(), wide_a.abs() @ wide_b.abs().t()
    largest = wide_a.abs().amax(dim=1)[:, None] * wide_b.abs().amax(dim=1)
    steps = k / 32 if fast else 4
    bound = 2.0**-13 * (k * largest + steps * magnitudes) + (k / 128 + 4) * 2.0**-24 * magnitudes
    if out_dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * want.abs()
    error = (out.double() - want).abs()
    assert (error <= bound).all(), (error / bound).max().item()
    assert (error.norm() / want.norm()).item() < (2e-2 if fast else 5e-3)


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_products_as_torch(library, a_fmt):
    """``torch._scaled_mm`` of the same operands, the same accumulation: a binding that swapped scales, operands or the
    accumulation flag would be far off."""
    a, a_inv, b, b_inv = operands(256, 512, 1024, a_fmt)
    for fast in (True, False):
        want = torch._scaled_mm(a, b.t(), scale_a=a_inv, scale_b=b_inv, out_dtype=torch.bfloat16, use_fast_accum=fast)
        out = torch.empty(256, 512, dtype=torch.bfloat16, device="cuda")
        library.matmul(out, a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, fast_accumulation=fast)
        torch.testing.assert_close(out, want, rtol=2.0**-7, atol=2.0**-8 * want.abs().mean().item())


@pytest.mark.parametrize(("m", "n", "k"), [(3072, 1024, 2048), (1024, 4096, 1024), (64, 96, 32)])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_weight_gradient_in_place(library, kind, m, n, k):
    """beta 0 forgets a NaN; beta 1 adds in place. With scales that are powers of two the sum has one rounding, float32's, so it
    is ``out + product`` bit for bit. Neighbours in the flat buffer keep their bytes."""
    scales = {}
    if kind == "fp8":
        a, a_inv, b, b_inv = operands(m, n, k, E5M2, scales=(8.0, 0.25))
        scales = {"a_scale_inv": a_inv, "b_scale_inv": b_inv}
    else:  # as the unquantised layers retain them: transposed views
        a, b = on_gpu(k, m, seed=1).t(), on_gpu(k, n, seed=2).t()
    flat = torch.full((3, m, n), 7.0, device="cuda")
    out = flat[1].fill_(torch.nan)
    library.matmul(out, a, b, beta=0, **scales)
    product = out.clone()
    exact = a.double() @ b.double().t() * (1.0 if not scales else (a_inv * b_inv).item())
    assert torch.isfinite(out).all() and ((out.double() - exact).norm() / exact.norm()).item() < 5e-3
    seed = on_gpu(m, n, seed=9, dtype=torch.float32, scale=10.0)
    out.copy_(seed)
    library.matmul(out, a, b, beta=1, **scales)
    assert torch.equal(out, seed + product)
    assert (flat[0] == 7).all() and (flat[2] == 7).all()


def test_weight_gradient_is_reproducible_and_allocates_nothing(library):
    a, a_inv, b, b_inv = operands(4096, 1024, 2048, E5M2)
    out = torch.zeros(4096, 1024, device="cuda")
    results = []
    for _ in range(20):
        out.fill_(1.5)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        library.matmul(out, a, b, beta=1, a_scale_inv=a_inv, b_scale_inv=b_inv)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        results.append(out.clone())
    assert allocated == 0 and all(torch.equal(results[0], result) for result in results[1:])


# ---- reproducibility and capture ---------------------------------------------------------------------------


def test_norm_and_loss_gradients_are_reproducible():
    from qeffect_lm.kernels import loss, norm

    x, dy, weight = on_gpu(2048, 1024, seed=1), on_gpu(2048, 1024, seed=2), on_gpu(1024, seed=3)
    _, rstd = norm.forward(x, weight, 1e-5)

    def norm_grads() -> tuple[torch.Tensor, torch.Tensor]:
        dweight = torch.full((1024,), 0.5, device="cuda")
        return norm.backward(x, weight, rstd, dy, dy, (dweight, 1)), dweight

    first = norm_grads()
    logits, targets, mask = on_gpu(512, 32000, seed=4), torch.arange(512, device="cuda"), torch.ones(512, device="cuda")
    losses = loss.forward(logits, targets, mask)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, norm_grads(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(losses, loss.forward(logits, targets, mask), strict=True))


def test_capture(library):
    """F, I and W of a norm and a linear by the kernels, captured once, replayed on three other inputs: eager's bytes, on the
    same stream and on another one, twice each. W allocates nothing while it is captured."""
    from qeffect_lm.kernels import norm
    from qeffect_lm.kernels.quantise import Outputs

    tokens, inputs, outputs = 512, 256, 384
    x, dy, norm_weight = on_gpu(tokens, inputs, seed=1), on_gpu(tokens, outputs, seed=2), on_gpu(inputs, seed=3)
    scales = [torch.tensor(value, device="cuda") for value in (11.0, 60.0, 500.0)]
    amax = torch.full((3,), -1.0, device="cuda")
    w = quantise(on_gpu(outputs, inputs, seed=4, dtype=torch.float32), scales[1], E4M3, amax_out=amax[1])
    grad, dweight = torch.zeros(outputs, inputs, device="cuda"), torch.zeros(inputs, device="cuda")
    allocations = []

    def work() -> list[torch.Tensor]:
        rstd = norm.inverse_rms(x, 1e-5)
        places = Outputs((tokens, inputs), scales[0], E4M3, rows=True, columns=True, amax_out=amax[0])
        qx = norm.quantise(x, norm_weight, rstd, places)
        y = torch.empty(tokens, outputs, dtype=torch.bfloat16, device="cuda")
        library.matmul(y, qx.rows, w.rows, a_scale_inv=qx.scale_inv, b_scale_inv=w.scale_inv, fast_accumulation=True)
        qy = quantise(dy, scales[2], E5M2, amax_out=amax[2])
        d = torch.empty(tokens, inputs, dtype=torch.bfloat16, device="cuda")
        library.matmul(d, qy.rows, w.columns, a_scale_inv=qy.scale_inv, b_scale_inv=w.scale_inv)
        dx = norm.backward(x, norm_weight, rstd, d, None, (dweight, 1))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        library.matmul(grad, qy.columns, qx.columns, beta=1, a_scale_inv=qy.scale_inv, b_scale_inv=qx.scale_inv)
        allocations.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
        return [qx.rows.view(torch.uint8), qx.columns.view(torch.uint8), y, qy.rows.view(torch.uint8), d, dx]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = work()
    assert allocations[-1] == 0
    names = ["qx rows", "qx columns", "y", "qy rows", "d", "dx", "amax", "grad", "dweight"]

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return captured

    def state(run, on: torch.cuda.Stream) -> dict[str, torch.Tensor]:
        torch.cuda.synchronize()
        with torch.cuda.stream(on):
            amax.fill_(-1.0)
            grad.fill_(0.25)
            dweight.fill_(-3.0)
            kept = {name: t.clone() for name, t in zip(names, (*run(), amax, grad, dweight), strict=True)}
        torch.cuda.synchronize()  # the caller compares on another stream
        return kept

    def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, tuple[int, float]]:
        """How many elements of what differ, and by how much at most."""
        pairs = {name: (got[name].double(), want[name].double()) for name in names if not torch.equal(got[name], want[name])}
        return {name: (int((a != b).sum()), (a - b).abs().max().item()) for name, (a, b) in pairs.items()}

    before = None
    for seed in (10, 20, 30):
        x.copy_(on_gpu(tokens, inputs, seed=seed))
        dy.copy_(on_gpu(tokens, outputs, seed=seed + 1))
        default = torch.cuda.current_stream()
        want = state(work, default)
        runs = {"eager again": (work, default), "eager on the side": (work, stream), "replay": (replay, default)}
        runs |= {"replay on the side": (replay, stream), "replay again": (replay, default)}
        found = {name: differing(state(*run), want) for name, run in runs.items()}
        assert found == dict.fromkeys(found, {})
        assert want["amax"][0] > 0 and want["amax"][1] == -1 and want["amax"][2] > 0 and want["y"].abs().sum() > 0
        assert before is None or set(differing(want, before)) == set(names)
        before = want


def test_quantise_float32_of_whole_tiles():
    """Matrices of whole tiles in float32: what vectorised loads and the transposed copy make of them."""
    for shape in ((384, 256), (256, 384), (64, 64), (128, 64), (512, 1024)):
        x = random(*shape, seed=4, dtype=torch.float32)
        got = quantise(x.cuda(), torch.tensor(60.0, device="cuda"), E4M3)
        q = (x * 60.0).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).view(torch.uint8)
        wrong = (got.rows.view(torch.uint8).cpu() != q).nonzero(), (got.columns.view(torch.uint8).cpu() != q.t()).nonzero()
        assert [len(places) for places in wrong] == [0, 0], (shape, wrong[0][:8].tolist(), wrong[1][:8].tolist())
