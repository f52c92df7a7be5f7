"""Several ranks on one GPU: collectives over gloo, through the host. The kernels and layers are those of many GPUs; what NCCL
does, and graphs that hold collectives, need more of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.parallel.mesh import Mesh


def shared_gpu(rank: int, **sizes: int) -> Mesh:
    """This process's mesh, in a group of gloo alone; the first GPU is current. (gloo sends and receives no tensors of a GPU: no
    pipeline stages.)"""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    mesh = Mesh(sizes, rank)
    mesh.create_groups()
    return mesh


# At the tiny models' usual rate eight steps of training carry the rounding of a sum in another order to 0.1 of a loss (on a CPU
# too); at this one to 0.003.
GENTLY: dict[str, Any] = {"optim__lr": 1e-3}


def assert_near(losses: list[float], alone: list[float]) -> None:
    """Losses of a layout are one rank's, up to the rounding of sums in another order; trained :data:`GENTLY`."""
    assert losses == pytest.approx(alone, abs=1e-2) and losses[0] == pytest.approx(alone[0], abs=5e-3)
    assert len(set(losses)) == len(losses)
