"""Experts over ranks on GPUs: two ranks that share one GPU, eager; the static form in graphs, with a group of one; over NCCL on
two GPUs, captured against eager.

python -m pytest -q tests/gpu/test_expert_parallel_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.app.assemble import assemble
from qeffect_lm.layers.moe import mixtures
from qeffect_lm.parallel import expert
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.mesh import Mesh
from tests.gpu.one_gpu import shared_gpu
from tests.gpu.test_engine_gpu import data
from tests.gpu.test_step_graph_gpu import settings, two_gpus
from tests.helpers import run_distributed
from tests.tiny import Batch, differing, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 6
MOE = {"num_experts": 8, "aux_loss_coef": 0.05, "z_loss_coef": 0.01}
MIXTRAL: dict[str, Any] = {"model__family": "mixtral", "model__moe": MOE, "model__num_layers": 2}
GRAPHS = ("eager", "action", "step", "body")


def half(step: int, rank: int) -> Batch:
    """A rank's two of the step's four microbatches, every other one."""
    every, mine = data(step), slice(rank, None, 2)
    return Batch(every.inputs[mine], every.targets[mine], every.loss_mask[mine], every.tokens)


def _shared(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    mesh, reads, told = shared_gpu(rank, ep=world), expert.host_reads, []
    for more in variants:
        for static in (False, True):
            expert.host_reads = (lambda tensor: False) if static else reads
            chosen = settings("eager", parallel__ep=world, **MIXTRAL, **{"pipeline__microbatches": 2}, **more)
            run = train(chosen, STEPS, mesh=mesh, batches=lambda step: half(step, rank))
            told.append((run.losses, run.norms, {name: tensor.cpu() for name, tensor in run.tensors.items()}))
            run.assembly.release()
    return told


def test_two_ranks_on_one_gpu() -> None:
    """The kernels over rows of other ranks: both agree in losses and norms, which are near one rank's; with padding, as a graph
    has it, the same bits as without."""
    variants: list[dict[str, Any]] = [{"model__dropout": 0.1}, {"model__dropout": 0.0, "model__recompute": "full"}]
    ranks = run_distributed(_shared, 2, variants, timeout=400, init=False)
    for number, more in enumerate(variants):
        for rank in ranks:
            exact, static = rank[2 * number : 2 * number + 2]
            assert exact[:2] == static[:2] == ranks[0][2 * number][:2] and differing(exact[2], static[2]) == []
        one = train(settings("eager", **MIXTRAL, **more), STEPS, batches=data)
        losses = ranks[0][2 * number][0]
        assert losses[0] == pytest.approx(one.losses[0], abs=5e-3) and losses[:3] == pytest.approx(one.losses[:3], abs=0.05)
        assert len(set(losses)) == STEPS


def _alone(rank: int, world: int) -> list[Any]:
    """Every way to execute, with rows that go through all-to-all to this rank itself, and plainly."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    told = []
    for graphs in (None, *GRAPHS):
        assembly = assemble(settings(graphs or "eager", **MIXTRAL))
        if graphs is not None:
            for stage in assembly.engine.stages.values():
                for moe in mixtures(stage.chunk):
                    moe.parallel = ExpertParallel(1, 0, group=dist.group.WORLD)
        assembly.prepare(data(0))
        numbers = []
        for step in range(STEPS):
            result = assembly.engine.step(step, data(step))
            numbers.append((float(result.loss), float(result.grad_norm)))
        state = {item.name: item.tensor.cpu() for item in assembly.logical_tensors()}
        state = {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in state.items()}
        told.append((numbers, state))
        assembly.release()
    dist.destroy_process_group()
    return told


def test_graphs_with_a_group_of_one() -> None:
    """The static form over NCCL in graphs of actions and of steps, captured once for all routings: the bits of exact splits,
    and of a rank that exchanges nothing."""
    (told,) = run_distributed(_alone, 1, timeout=400, init=False)
    for numbers, state in told[1:]:
        assert numbers == told[0][0] and differing(state, told[0][1]) == []
    assert len({loss for loss, _ in told[0][0]}) == STEPS


def _nccl(rank: int, world: int, sizes: dict[str, int]) -> list[Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh(sizes, rank)
    mesh.create_groups()
    own, told = mesh.size("samples"), []
    for graphs in GRAPHS:
        layout = {f"parallel__{axis}": size for axis, size in sizes.items()}
        chosen = settings(graphs, **layout, **MIXTRAL, **{"pipeline__microbatches": 4 // own})
        run = train(chosen, STEPS, mesh=mesh, batches=data if own == 1 else lambda step: half(step, rank))
        told.append((run.losses, run.norms, {name: tensor.cpu() for name, tensor in run.tensors.items()}))
        run.assembly.release()
    return told


@two_gpus
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}], ids=str)
def test_two_gpus(sizes: dict[str, int]) -> None:
    """All ways to execute agree bit for bit on each rank, both ranks in losses and norms; the first losses are near one GPU's
    (a token next to the border of two experts goes to the other one, and training carries it on)."""
    ranks = run_distributed(_nccl, 2, sizes, timeout=600, init=False)
    for place in range(len(GRAPHS)):
        assert ranks[0][place][:2] == ranks[1][place][:2] == ranks[0][0][:2], GRAPHS[place]
        for rank in ranks:
            assert differing(rank[place][2], rank[0][2]) == [], GRAPHS[place]
    one = train(settings("eager", **MIXTRAL), STEPS, batches=data)
    assert ranks[0][0][0][:3] == pytest.approx(one.losses[:3], abs=0.05)
