"""A stage: one chunk of the model over fixed slots, and its three pieces of work.

Everything a microbatch needs at the stage's border lies in its I-slot, in storages that never move: the input ``x`` (receives
land there), the output, the output's gradient ``dy`` (received) and the input's gradient ``dx``. Captured graphs are
captured over them; eager execution runs the same functions over the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from qeffect_lm.contract.ledger import Scope
from qeffect_lm.layers.base import autograd_parameters, named_parameters, split_layers
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.joined import JoinedBuffers, JoinedPlace
from qeffect_lm.layers.moe import mixtures


@dataclass
class MicrobatchSlot:
    """An I-slot's storages.

    ``x`` is ``[batch, sequence]`` int64 on the first chunk, else ``[batch, sequence, hidden]``, or where tokens are cut
    ``[tokens of this rank, hidden]``; ``out``, ``dy`` and ``dx``
    have the activations' shape; on the last chunk ``out`` is the 0-dim loss and ``dy`` a constant one.
    """

    x: torch.Tensor
    out: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor | None
    context: LayerContext
    saved: tuple[torch.Tensor, torch.Tensor] | None = field(default=None)  # autograd's leaf and output, F → I

    def tensors(self) -> dict[str, torch.Tensor]:
        """The slot's storages by name, for the register."""
        named = {
            "x": self.x,
            "out": self.out,
            "dy": self.dy,
            "dx": self.dx,
            "key": self.context.key,
            "targets": self.context.targets,
            "loss_mask": self.context.loss_mask,
            "starts": self.context.starts,
            "row_losses": self.context.row_losses,
            "anchor": self.context.anchor,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class BorderShape:
    """Shapes at a stage's border. ``share``: activations are cut along tokens, and a rank has one of so many parts."""

    batch: int
    sequence: int
    hidden: int
    dtype: torch.dtype
    share: int = 1

    @property
    def activation(self) -> tuple[int, ...]:
        if self.share > 1:
            return self.batch * self.sequence // self.share, self.hidden
        return self.batch, self.sequence, self.hidden


class Stage:
    """A chunk with ``i_slots`` slots.

    Args:
        chunk: called with ``(x, context)``.
        index: its global stage number.
        first, last: whether it takes token ids, and whether it gives the loss.
        divisor: 0-dim, the step's number of valid tokens.
        main_grads: trainable parameter name → main-gradient view.
        w_slots: how many, a multiple of ``coalesce_w``; they have storages of their own where that is above 1.
        coalesce_w: how many microbatches' W of one weight are one product.
        documents: rows hold several documents that do not see each other.
        row_losses: the last stage keeps each row's loss.
    """

    def __init__(
        self,
        chunk: nn.Module,
        index: int,
        *,
        first: bool,
        last: bool,
        i_slots: int,
        shape: BorderShape,
        divisor: torch.Tensor,
        main_grads: dict[str, torch.Tensor],
        device: torch.device | str = "cpu",
        w_slots: int = 0,
        coalesce_w: int = 1,
        documents: bool = False,
        row_losses: bool = False,
    ) -> None:
        self.documents, self.row_losses = documents, row_losses and last
        self.chunk, self.index, self.first, self.last = chunk, index, first, last
        self.shape, self.divisor, self.device = shape, divisor, torch.device(device)
        self.masked = last or bool(mixtures(chunk))  # its losses count valid tokens only: the last chunk's, and routers'
        self._split = split_layers(chunk)
        self._cheap = list(autograd_parameters(chunk))
        self._main_grads = main_grads
        self._gradients = tuple(name for name, parameter in named_parameters(chunk) if parameter.requires_grad)
        self.joined: JoinedBuffers | None = None
        if coalesce_w > 1:
            self.joined = JoinedBuffers(self._split, w_slots, coalesce_w, shape.batch * shape.sequence, self.device)
        self.slots = [self.make_slot() for _ in range(i_slots)]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients this chunk makes."""
        return self._gradients

    def activation(self) -> torch.Tensor:
        """A new buffer for what goes over the stage's border."""
        return torch.zeros(self.shape.activation, dtype=self.shape.dtype, device=self.device)

    def make_slot(self, phase: Phase = Phase.TRAIN) -> MicrobatchSlot:
        """Allocate a slot's storages."""
        shape, device, activation = self.shape, self.device, self.activation
        tokens = (shape.batch, shape.sequence)
        wide = torch.float64 if shape.dtype is torch.float64 else torch.float32
        context = LayerContext(
            phase,
            key=torch.zeros((), dtype=torch.int64, device=device),
            divisor=self.divisor,
            targets=torch.zeros(tokens, dtype=torch.int64, device=device) if self.last else None,
            loss_mask=torch.zeros(tokens, device=device) if self.last or (self.masked and phase is not Phase.EVAL) else None,
            starts=torch.zeros(tokens, dtype=torch.int32, device=device) if self.documents else None,
            row_losses=torch.zeros(shape.batch, dtype=torch.float64, device=device) if self.row_losses else None,
            anchor=torch.zeros((), device=device, requires_grad=True) if self.first else None,
            grid=tokens if shape.share > 1 else None,
        )
        slot = MicrobatchSlot(
            x=torch.zeros(tokens, dtype=torch.int64, device=device) if self.first else activation(),
            out=torch.zeros((), dtype=wide, device=device) if self.last else activation(),
            dy=torch.ones((), dtype=wide, device=device) if self.last else activation(),
            dx=None if self.first else activation(),
            context=context,
        )
        context.border = (slot.x, slot.dy)
        return slot

    def place(self, scope: Scope | None) -> JoinedPlace | None:
        """Where the running action's W-slot lies, if W of several microbatches is one product."""
        if self.joined is None or scope is None:
            return None
        assert scope.slots is not None, "an action says which W-slot it runs over"
        return self.joined.place(scope.slots[1].index)

    # ---- the three pieces of work: device work and scope calls only, safe to capture --------------------------

    def forward(self, slot: MicrobatchSlot, scope: Scope | None) -> None:
        """F: ``x`` → ``out``; autograd's state stays in the slot until I."""
        slot.context.scope, slot.context.joined = scope, self.place(scope)
        leaf = slot.x.detach()
        if not self.first:
            leaf.requires_grad_()
        out = self.chunk(leaf, slot.context)
        with torch.no_grad():
            slot.out.copy_(out)
        slot.saved = (leaf, out)

    def input_grad(self, slot: MicrobatchSlot, scope: Scope | None, *, keep: bool = False) -> None:
        """I: ``dy`` → ``dx``, output gradients into the leases, cheap parameters' gradients into their slots.

        ``keep`` leaves autograd's state in place, so that I can be captured once more with another beta.
        """
        assert slot.saved is not None, "F of this slot comes first"
        leaf, out = slot.saved
        slot.context.scope, slot.context.joined, slot.context.again = scope, self.place(scope), keep
        source = slot.context.anchor if self.first else leaf
        assert source is not None
        training = slot.context.training
        wanted = [source, *(parameter for _, parameter in self._cheap)] if training else [source]
        grads: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
        if out.requires_grad:
            seed = slot.dy.to(out.dtype) if self.last else slot.dy
            grads = torch.autograd.grad(out, wanted, seed, retain_graph=keep, allow_unused=True)
        with torch.no_grad():
            if slot.dx is not None:
                slot.dx.zero_() if grads[0] is None else slot.dx.copy_(grads[0])
            if training:
                assert scope is not None
                for (name, _), grad in zip(self._cheap, grads[1:], strict=True):
                    _accumulate(self._main_grads[name], grad, scope.write_grad(name))
        if not keep:
            slot.saved = None

    def weight_grad(self, slot: MicrobatchSlot, scope: Scope) -> None:
        """W: the deferred weight gradients, straight into their main gradients. Reads leases, not the I-slot."""
        context = LayerContext(Phase.TRAIN, key=slot.context.key, scope=scope, joined=self.place(scope))
        with torch.no_grad():
            for layer in self._split:
                layer.weight_grad(context)

    @torch.no_grad()
    def evaluate(self, slot: MicrobatchSlot) -> None:
        """Forward in evaluation: reads scales, records nothing, retains nothing."""
        slot.context.scope = slot.context.joined = None
        slot.out.copy_(self.chunk(slot.x, slot.context))


def _accumulate(view: torch.Tensor, grad: torch.Tensor | None, beta: int) -> None:
    """A cheap parameter's gradient into its slot; None (an unused parameter) counts as zeros."""
    if beta == 0:
        view.zero_() if grad is None else view.copy_(grad)
    elif grad is not None:
        view.add_(grad.to(torch.promote_types(view.dtype, grad.dtype)))  # a narrow sum is rounded once
