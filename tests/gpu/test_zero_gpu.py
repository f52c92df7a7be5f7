"""Shared optimizer state over NCCL: two replicas on two GPUs have the bits of replicas that share nothing, however captured.

    python -m pytest -q tests/gpu/test_zero_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.parallel.mesh import Mesh
from tests.dist.test_zero import items_of, whole
from tests.gpu.test_step_graph_gpu import settings
from tests.helpers import run_distributed
from tests.tiny import batch, differing, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

VARIANTS = [("eager", 0, 64.0), *((graphs, 1, 0.26) for graphs in ("eager", "action", "step", "body")), ("step", 1, 64.0)]


def _replica(rank: int, world: int) -> list[Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()

    def data(step: int) -> Any:
        mine = batch(10 * step + rank, 4, 2, 128)
        mine.tokens *= world
        return mine

    told = []
    for graphs, zero, mib in VARIANTS:
        more = {"parallel__dp": world, "optim__zero": zero, "parallel__bucket_mib": mib}
        run = train(settings(graphs, **more), 6, mesh=mesh, batches=data)
        items = [(name, shape, start, tensor.cpu()) for name, shape, start, tensor in items_of(run.assembly)]
        told.append(((run.losses, run.norms, run.skipped), items, run.assembly.flat.bytes()))
        run.assembly.release()
    return told


def test_two_replicas_over_nccl() -> None:
    ranks = run_distributed(_replica, 2, timeout=400, init=False)
    states = [whole([told[number][1] for told in ranks]) for number in range(len(VARIANTS))]
    for number, variant in enumerate(VARIANTS):
        assert ranks[0][number][0] == ranks[1][number][0] == ranks[0][0][0], variant
        assert differing(states[0], states[number]) == [], variant
        assert number == 0 or ranks[0][number][2] < ranks[0][0][2]
    assert all(norm > 0 for norm in ranks[0][0][0][1]) and not any(ranks[0][0][0][2])
