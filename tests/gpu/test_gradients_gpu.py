"""Main gradients in bfloat16 and tied embeddings on GPUs: captured equals eager, two GPUs equal one, products round once.

python -m pytest -q tests/gpu/test_gradients_gpu.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise
from qeffect_lm.kernels.cublaslt import CublasLt
from tests.gpu.test_engine_gpu import data
from tests.gpu.test_step_graph_gpu import _mesh, settings, two_gpus
from tests.helpers import run_distributed
from tests.tiny import Trained, assert_moved, differing, local_plan, merged, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"precision__main_grads": "bfloat16"},
    "tied": {"model__tie_word_embeddings": True},
    "both": {"precision__main_grads": "bfloat16", "model__tie_word_embeddings": True},
}


@lru_cache
def trained(variant: str, graphs: str = "eager", chunks: int = 1) -> Trained:
    plan = local_plan(chunks, 4)
    return train(settings(graphs, **VARIANTS[variant]), STEPS, plan=plan, batches=data)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("graphs", "chunks"), [("action", 1), ("step", 1), ("eager", 3)])
def test_captured_equals_eager(variant, graphs, chunks):
    """Losses, norms, all logical tensors and the main gradients of the last step."""
    eager, other = trained(variant), trained(variant, graphs, chunks)
    assert_moved(eager)
    assert (other.losses, other.norms) == (eager.losses, eager.norms)
    assert differing(other.tensors, eager.tensors) == []
    flats = [run.assembly.flat for run in (eager, other)]
    assert flats[0].gradient_names and set(flats[0].gradient_names) == set(flats[1].gradient_names)
    assert differing(*({name: flat.grad(name) for name in flat.gradient_names} for flat in flats)) == []
    assert flats[0].grad_buffer.dtype is (torch.float32 if variant == "tied" else torch.bfloat16)


@pytest.mark.parametrize("beta", [0, 1])
def test_roundings_of_a_product_into_bfloat16(beta):
    """FP8 operands of small integers and scales of 1: the product is exact in float32. Overwriting rounds once; adding rounds
    the product, the sum, or both (cuBLASLt does not say), each by half a unit in the last place, 2^-8, at most."""
    generator = torch.Generator("cuda").manual_seed(3)

    def small(rows: int, cols: int, fmt: Any) -> Any:
        values = torch.randint(-3, 4, (rows, cols), device="cuda", generator=generator).bfloat16()
        return quantise(values, torch.ones((), device="cuda"), fmt, columns=False)

    dy, x = small(256, 512, E5M2), small(128, 512, E4M3)
    before = torch.randn(256, 128, device="cuda", generator=generator).mul_(100).bfloat16()
    out = before.clone() if beta else torch.full_like(before, torch.nan)
    CublasLt("cuda").matmul(out, dy.rows, x.rows, beta=beta, a_scale_inv=dy.scale_inv, b_scale_inv=x.scale_inv)
    exact = dy.rows.float().double() @ x.rows.float().double().t()
    if not beta:
        assert torch.equal(out, exact.float().bfloat16()) and not torch.equal(out.double(), exact)
        return
    wanted = exact + before.double()
    allowed = 2.0**-8 * (exact.abs() + wanted.abs()) * (1 + 2.0**-8)
    apart = (out.double() - wanted).abs()
    assert bool((apart <= allowed).all()) and float(apart.max()) > 0 and float((out - before).abs().max()) > 1


def _train(rank: int, world: int, graphs: str, schedule: str, variant: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh = _mesh(rank, world)
    more = {"parallel__pp": world, "pipeline__schedule": schedule, "pipeline__w_delay": 0, **VARIANTS[variant]}
    run = train(settings(graphs, **more), STEPS, mesh=mesh, batches=data)
    state = {name: tensor.cpu() for name, tensor in run.tensors.items()}
    run.assembly.release()
    return run.losses, state


@two_gpus
@pytest.mark.parametrize(("graphs", "schedule"), [("eager", "1f1b"), ("action", "zb-h1"), ("step", "1f1b"), ("body", "zb-v")])
def test_two_gpus_equal_one(graphs, schedule):
    """Gradient and new parameter of tied embeddings over NCCL, in a graph too; the copy has the parameter's bytes."""
    one = trained("both")
    results = run_distributed(_train, 2, graphs, schedule, "both", timeout=200, init=False)
    assert [losses for losses, _ in results] == [one.losses] * 2
    assert differing(merged([state for _, state in results]), {n: t.cpu() for n, t in one.tensors.items()}) == []
    copy = "param/embedding.weight"
    if schedule != "zb-v":
        assert torch.equal(results[0][1][copy].view(torch.int16), results[1][1][copy].view(torch.int16))
