"""Stages that are sharded or replicated by torch's FSDP2 (``fully_shard``, ``replicate``), whose gradients W makes.

FSDP takes gradients in hooks of autograd. In a pipelined step it is told to hold them back, as torch's own schedules do;
here what W adds after the last such hook is folded in by hand, in the data type of the reduction, and the reduction comes
after the last W. Parameters must stay gathered from F to W: ``reshard_after_forward=False``, which trainers choose for
pipelines anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from qeffect_lm.errors import QEffectError, UsageError


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def check(module: nn.Module, stage: int) -> None:
    """Raises: UsageError: only parts of the stage are FSDP modules, so that nobody reduces them together."""
    if is_sharded(module) and not isinstance(module, FSDPModule):
        raise UsageError(f"stage {stage} has FSDP modules and is none itself: call fully_shard on the stage's module, too")


def hold_back(module: nn.Module) -> None:
    """Before a step's work: hooks of autograd keep gradients, and reduce nothing."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def fold(module: nn.Module) -> None:
    """After a W: what it made joins what is held back, in the reduction's data type."""
    if isinstance(module, FSDPModule):
        for parameter in _parameters(module):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce(stage: Any) -> None:
    """After the last W: reduce and shard, by torch's own way to do so from a schedule.

    Raises:
        QEffectError: this torch's stages have none.
    """
    if not isinstance(stage.submod, FSDPModule):
        return
    if not hasattr(stage, "perform_reduce_grad"):
        raise QEffectError(f"stages of torch {torch.__version__} cannot reduce for FSDP from a schedule: use 2.11 or newer")
    stage.perform_reduce_grad(1)


def _parameters(module: FSDPModule) -> Iterator[Any]:
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    for one in state._state_ctx.all_states:
        groups = getattr(one, "_fsdp_param_groups", None)
        if groups is None:
            groups = [one._fsdp_param_group] if one._fsdp_param_group is not None else []
        for group in groups:
            yield from group.fsdp_params


def whole(weight: torch.Tensor) -> torch.Tensor:
    """All of a weight that may be sharded; collective over its shards where there are several."""
    weight = weight.detach()
    if isinstance(weight, DTensor):
        return weight.to_local() if weight.device_mesh.size() == 1 else weight.full_tensor()
    return weight
