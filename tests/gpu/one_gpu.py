"""Several ranks on one GPU: collectives over gloo, through the host. The kernels and layers are those of many GPUs; what NCCL
does, and graphs that hold collectives, need more of them."""

from __future__ import annotations

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
