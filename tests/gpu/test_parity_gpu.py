"""The matrix of ``tools.parity --device cuda``, its smallest cells: lock step, a killed run, float64; two ranks on two GPUs.

    python -m pytest -q tests/gpu/test_parity_gpu.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpoint import GroupCommunicator, SingleProcess
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed
from tools.proofs import double, lockstep
from tools.proofs.cells import Cell

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
STEPS = 20


@pytest.mark.parametrize(
    "cell",
    [
        Cell("1f1b", "step", 256, 4, dropout=0.1),
        Cell("zb-h1@3", "microbatch", 256, 4),
        Cell("zb-v@2", "step", 256, 4, scope="step"),
    ],
    ids=lambda cell: cell.name.replace(" ", "-"),
)
def test_lock_step(cell):
    report = lockstep.check(cell, Mesh({}), SingleProcess(), "cuda", STEPS)
    assert report["ok"] and report["skipped"] == 1, report


@pytest.mark.parametrize("hidden", [256, 1024])
def test_float64_reference(hidden):
    report = double.check(Cell("1f1b", "step", hidden, 2), "cuda", os.cpu_count() or 1)
    assert report["ok"], report


def _two_ranks(rank: int, world: int) -> list[dict[str, Any]]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    wanted = [Cell("1f1b", "step", 256, 4, 2), Cell("zb-v", "microbatch", 256, 4, 2), Cell("zb-v", "step", 256, 4, 2, "step")]
    return [lockstep.check(cell, mesh, GroupCommunicator(), "cuda", STEPS) for cell in wanted]


@two_gpus
def test_lock_step_on_two_gpus():
    for report in run_distributed(_two_ranks, 2, timeout=300, init=False)[0]:
        assert report["ok"], report
