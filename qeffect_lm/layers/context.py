"""What a layer gets besides its input: the phase, the running action's scope, the microbatch's keys and targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from qeffect_lm.contract.ledger import Scope
    from qeffect_lm.fp8.grouped import GroupPlace
    from qeffect_lm.fp8.quantise import Place
    from qeffect_lm.layers.joined import JoinedPlace
    from qeffect_lm.layers.kv_cache import KVCache


class Phase(StrEnum):
    """TRAIN records amax and retains for W; EVAL reads scales and writes nothing; CALIBRATE computes in high precision
    and records amax, nothing else."""

    TRAIN = "train"
    EVAL = "eval"
    CALIBRATE = "calibrate"


@dataclass
class Rerun:
    """A piece of F that I runs once more (:mod:`qeffect_lm.layers.recompute`), as the layers in it see it.

    Attributes:
        tail: its last linear, whose product I does not need again; None: all of it runs.
        scales: layer → the scale that F quantised its input with, or None; of groups their scales with the inverses.
        first: F is running; False: I is, right before it goes back through the piece.
    """

    tail: Any = None
    scales: dict[str, Any] = field(default_factory=dict)
    first: bool = True


@dataclass
class LayerContext:
    """Context of one microbatch in one slot. The engine swaps ``scope`` for each action; a backward reads it when it runs.

    Attributes:
        scope: effects of the running action (None in evaluation and calibration).
        key: 0-dim int64, the random key of (seed, step, the microbatch's place over all replicas).
        targets: ``[batch, sequence]`` int64, on the last stage.
        loss_mask: ``[batch, sequence]`` float32, 0 where a target does not count.
        divisor: 0-dim float, the DP-global number of valid tokens of the step.
        starts: ``[batch, sequence]`` int32, where each token's document begins in its row, rising; tokens before it are not
        seen
            and positions count from it. None: a row is one document.
        row_losses: ``[batch]`` float64, on the last stage, where the loss layer leaves each row's sum; None: nobody asks.
        grid: (batch, sequence) of the microbatch where activations between products are cut along tokens, ``[tokens of this
            rank, features]`` (:mod:`qeffect_lm.parallel.tensor`); None: they have that shape themselves.
        cache: keys and values of the sequences that this pass continues (generation).
        border: the stage's received buffers (input and output gradient), reused before W of the microbatch.
        joined: the W-slot's place among other microbatches' operands, where W of several is one product.
        again: I of this F will be taken once more (capture does, once per beta), so it must leave what F left.
        rerun: given to layers whose F runs again in I; F then keeps nothing for I or W, and only F reports amax and retains.
        anchor: 0-dim float that requires grad; makes autograd reach an embedding, whose input has no gradient.
    """

    phase: Phase
    key: torch.Tensor
    scope: Scope | None = None
    targets: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    row_losses: torch.Tensor | None = None
    anchor: torch.Tensor | None = None
    grid: tuple[int, int] | None = None
    cache: KVCache | None = None
    border: tuple[torch.Tensor, ...] = ()
    joined: JoinedPlace | None = None
    again: bool = False
    rerun: Rerun | None = None

    def place_of(self, layer: str, kind: str) -> Place | None:
        """Where ``layer`` quantises its ``input`` or ``grad_output`` to; None: into storages of its own."""
        return None if self.joined is None else self.joined.of(layer, kind)

    def group_place_of(self, layer: str, kind: str) -> GroupPlace | None:
        """The same for a linear of groups."""
        return None if self.joined is None else self.joined.of_groups(layer, kind)

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy if it lies in a border buffer of the stage: those are written again while W still waits."""
        storages = {buffer.untyped_storage()._cdata for buffer in self.border}
        return tensor.clone() if tensor.untyped_storage()._cdata in storages else tensor

    def grid_of(self, x: torch.Tensor) -> tuple[int, int]:
        """(batch, sequence) of the microbatch of which ``x`` is an activation."""
        return (x.shape[0], x.shape[1]) if self.grid is None else self.grid

    @property
    def training(self) -> bool:
        return self.phase is Phase.TRAIN

    def active_scope(self) -> Scope:
        """The running action's scope (only in TRAIN)."""
        assert self.scope is not None, "a training layer runs inside an action"
        return self.scope
