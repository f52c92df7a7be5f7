"""Context parallelism on a GPU: the kernels of a rank's queries against the whole row's keys, and two ranks that share one GPU.

python -m pytest -q tests/gpu/test_context_parallel_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.mesh import Mesh
from tests.gpu.one_gpu import GENTLY, assert_near, shared_gpu
from tests.gpu.test_engine_gpu import data
from tests.gpu.test_step_graph_gpu import settings, two_gpus
from tests.helpers import run_distributed
from tests.tiny import Batch, differing, same_bits, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 8
GRAPHS = ("eager", "action", "step", "body")


def masked(qkv: torch.Tensor, starts: torch.Tensor, window: int | None) -> torch.Tensor:
    """Float64, all of a row: ``[batch, row, kv_heads, group, head_dim]``."""
    at = torch.arange(qkv.shape[1], device=qkv.device)
    mask = (at[None] <= at[:, None]) & (at >= starts[:, :, None])
    if window is not None:
        mask = mask & (at[None] > at[:, None] - window)
    q, k, v = qkv[:, :, :, :-2].double(), qkv[:, :, :, -2].double(), qkv[:, :, :, -1].double()
    scores = torch.einsum("bqkgd,bskd->bkgqs", q, k) * qkv.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bkgqs,bskd->bqkgd", weights, v)


@pytest.mark.parametrize(("size", "window", "packed"), [(2, None, False), (2, None, True), (4, 300, True), (8, None, True)])
def test_queries_of_two_runs(size: int, window: int | None, packed: bool) -> None:
    """bfloat16, chunks of 1024 to 256 queries against up to 4096 keys: result and gradients within bfloat16's roundings of
    float64, the same bits twice; the ranks' dk and dv, in float32, add up to the whole."""
    from qeffect_lm.kernels import document_attention as kernel

    row, generator = 4096, torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(1, row, 2, 5, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(1, row, 2, 3, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    starts = torch.zeros(1, row, dtype=torch.int32, device="cuda")
    if packed:
        for start in (700, 1023, 2500, 2501, 3900):
            starts[:, start:] = start
    leaf = qkv.double().requires_grad_()
    want = masked(leaf, starts, window)
    (wanted,) = torch.autograd.grad(want, leaf, dy.double())
    total, bound = torch.zeros(1, row, 2, 2, 64, device="cuda", dtype=torch.float64), 0.02 * float(wanted.abs().max())
    for rank in range(size):
        cp = ContextParallel(size, rank)
        at, (first, second), half = cp.positions(row // size, qkv.device), cp.runs(row), row // size // 2
        mine, kv, here = qkv[:, at], qkv[:, :, :, -2:].contiguous(), starts[:, at]
        queries = kernel.Queries(half, first.start, second.start - half)
        q, made = mine[:, :, :, :-2], []
        y, lse = kernel.forward(q, kv, here, queries, window)
        for _ in range(2):
            dqkv, dkv = torch.zeros_like(mine), torch.empty_like(kv, dtype=torch.float32)
            kernel.backward(q, kv, here, queries, window, y, lse, dy[:, at], dqkv[:, :, :, :-2], dkv)
            made.append((dqkv, dkv))
        assert same_bits(made[0][0], made[1][0]) and same_bits(made[0][1], made[1][1])
        torch.testing.assert_close(y.double(), want.detach()[:, at], rtol=0, atol=0.02)
        torch.testing.assert_close(dqkv[:, :, :, :-2].double(), wanted[:, at][:, :, :, :-2], rtol=0, atol=bound)
        total += dkv.double()
    torch.testing.assert_close(total, wanted[:, :, :, -2:], rtol=0, atol=bound)


def packed_data(step: int) -> Batch:
    """Documents of all lengths; they cross the cuts."""
    made = data(step)
    rows, row = made.inputs.shape[:2], made.inputs.shape[2]
    begins = torch.rand(*rows, row, generator=torch.Generator().manual_seed(step)) < 0.05
    begins[..., 0] = True
    starts = torch.where(begins, torch.arange(row), 0).cummax(-1).values.int()
    mask = made.loss_mask.clone()
    mask[..., :-1][begins[..., 1:]] = 0
    return replace(made, starts=starts, loss_mask=mask, tokens=int(mask.sum()))


RESET = {"data__documents": "reset"}


def _shared(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    mesh = shared_gpu(rank, cp=world)
    told = []
    for more in variants:
        batches = packed_data if "data__documents" in more else data
        run = train(settings("eager", **GENTLY, parallel__cp=world, **more), STEPS, mesh=mesh, batches=batches)
        told.append((run.losses, run.norms))
        run.assembly.release()
    return told


def test_two_ranks_on_one_gpu() -> None:
    """Both ranks agree bit for bit in losses and norms, which are near one rank's: attention as a part of one node, alone,
    recomputed, of documents."""
    variants: list[dict[str, Any]] = [
        {}, {"model__dropout": 0.1}, {"model__recompute": "selective"}, {"model__recompute": "full", **RESET},
    ]  # fmt: skip
    first, second = run_distributed(_shared, 2, variants, timeout=300, init=False)
    assert first == second
    assert first[2] == first[0], "what is made again has the same bits"
    for (losses, _), more in zip(first, variants, strict=True):
        batches = packed_data if "data__documents" in more else data
        one = train(settings("eager", **GENTLY, **more), STEPS, batches=batches)
        assert_near(losses, one.losses)


def _runs(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    """Every way to execute each variant; bytes of FP8 are told as such."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"cp": world}, rank)
    mesh.create_groups()
    told = []
    for more in variants:
        batches = packed_data if "data__documents" in more else data
        for graphs in GRAPHS:
            run = train(settings(graphs, **GENTLY, parallel__cp=world, **more), STEPS, mesh=mesh, batches=batches)
            told.append((run.losses, run.norms, {name: tensor.cpu() for name, tensor in run.tensors.items()}))
            run.assembly.release()
    return told


@two_gpus
def test_two_gpus() -> None:
    """Over NCCL all ways to execute agree bit for bit on each rank, both ranks in losses and norms, near one GPU's."""
    variants: list[dict[str, Any]] = [{}, {"model__dropout": 0.1, "model__recompute": "selective", **RESET}]
    ranks = run_distributed(_runs, 2, variants, timeout=600, init=False)
    for number, more in enumerate(variants):
        first = number * len(GRAPHS)
        for place in range(first, first + len(GRAPHS)):
            assert ranks[0][place][:2] == ranks[1][place][:2] == ranks[0][first][:2], GRAPHS[place - first]
            for rank in ranks:
                assert differing(rank[place][2], rank[first][2]) == [], GRAPHS[place - first]
        one = train(settings("eager", **GENTLY, **more), STEPS, batches=packed_data if "data__documents" in more else data)
        assert_near(ranks[0][first][0], one.losses)
