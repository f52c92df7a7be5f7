"""Logical tensors: the vocabulary in which components and checkpoints speak about saved state.

A component (parameters, optimizer, scale timeline, ...) lists its state as :class:`LogicalTensor` items over its
*live* storages. A checkpoint writes them by logical name, and a restore copies into the same storages in place, so
addresses that a captured graph has baked stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch


class Role(StrEnum):
    """What a saved tensor is; written to the manifest."""

    PARAM = "param"
    MASTER = "master"
    MOMENT = "moment"
    SCALE = "scale"
    AMAX_HISTORY = "amax_history"
    AMAX_OPEN = "amax_open"
    CACHED_WEIGHT = "cached_weight"
    COUNTER = "counter"
    RNG = "rng"
    GRADIENT = "gradient"  # in no checkpoint: what is told of a step (checkpoint.record)
    STATISTIC = "statistic"  # of a guard: a run whose checkpoint lacks it, since the guard was off, begins it anew


EXPERT_REPLICAS = ("dp", "cp")  # the axes over which ranks hold an expert alike; over ep and tp experts are spread


@dataclass(frozen=True)
class LogicalTensor:
    """One rank's piece of one logical tensor.

    ``name`` is unique per logical tensor and says nothing about the layout, e.g.
    ``master/layers.0.attention.qkv.weight``. ``tensor`` is the live local storage (contiguous view), of any dtype.
    ``global_shape`` is the logical, unpadded shape and ``start`` the first index of this piece per dimension.
    ``axes`` names, per dimension, the mesh axis that cuts it (``"tp"``, ``"ep"``, ...) or None. ``replicated`` names
    the axes over which every rank holds the same bytes; only coordinate 0 of those writes. ``per_rank`` marks state
    that belongs to a rank and not to the model (its name then holds the coordinates). ``copy`` marks a piece that another
    rank, along an axis that cuts the tensor, holds too and writes.
    """

    name: str
    tensor: torch.Tensor
    role: Role
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    axes: tuple[str | None, ...]
    replicated: tuple[str, ...] = field(default=("dp", "ep", "cp", "tp"))
    per_rank: bool = False
    copy: bool = False

    @staticmethod
    def whole(name: str, tensor: torch.Tensor, role: Role, **kwargs: object) -> LogicalTensor:
        """A tensor that one pipeline stage holds entire (not cut along any dimension)."""
        shape = tuple(tensor.shape)
        return LogicalTensor(name, tensor, role, shape, (0,) * len(shape), (None,) * len(shape), **kwargs)  # type: ignore[arg-type]
