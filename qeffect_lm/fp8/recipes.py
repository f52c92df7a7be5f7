"""Recipes: how a linear's three tensors get their scales.

``delayed``: scales from the timeline's history, one epoch behind. ``current``: each tensor's own amax, no history. A linear
without a recipe computes in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from qeffect_lm.contract.ledger import Scope
from qeffect_lm.contract.timeline import EMPTY, Direction, ScaleRole, ScaleTimeline
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format, Place, Quantised, current_scale, quantise, underflow

FORMATS: dict[str, Format] = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}


def roles_of(layer: str) -> list[ScaleRole]:
    """The three roles of a linear under delayed scaling."""
    return [
        ScaleRole(f"{layer}.{kind}", Direction.BACKWARD if kind == "grad_output" else Direction.FORWARD, fmt.max)
        for kind, fmt in FORMATS.items()
    ]


class Quantiser(Protocol):
    """Makes FP8 of ``x``: :func:`~qeffect_lm.fp8.quantise.quantise`, or a kernel that applies a norm first, say."""

    def __call__(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        fmt: Format,
        /,
        *,
        columns: bool,
        amax_out: torch.Tensor | None,
        columns_out: torch.Tensor | None = None,
        scale_inv_out: torch.Tensor | None = None,
    ) -> Quantised: ...


class Recipe(Protocol):
    """Quantises a linear's operands; ``scope`` is None where nothing may be recorded (evaluation).

    ``scales_first``: the scale is known before the tensor is, so that the quantisation can be part of the kernel that makes it.
    """

    name: str
    scales_first: bool

    def operand(
        self,
        layer: str,
        kind: str,
        x: torch.Tensor,
        scope: Scope | None,
        *,
        columns: bool = True,
        quantiser: Quantiser = quantise,
        into: Place | None = None,
        scale: torch.Tensor | None = None,
    ) -> Quantised:
        """Quantise an input (``kind`` ``input``) or an output gradient (``grad_output``) ``[tokens, features]``.

        Another ``quantiser`` than the plain one, and ``into`` (storages for the columns and the inverse scale), only where
        ``scales_first``. ``scale``: what :meth:`held_scale` gave; None: the current one.
        """
        ...

    def held_scale(self, layer: str, kind: str) -> torch.Tensor | None:
        """The scale that an operand is quantised with now, for quantising it once more later in the step; None where that needs
        none. A copy where the scale could roll in between."""
        ...

    def weight(self, layer: str, weight: torch.Tensor) -> Quantised:
        """Quantise a weight ``[out, in]`` for the cache; delayed: with the current epoch's scale, its amax into the window."""
        ...

    def observe(self, layer: str, kind: str, x: torch.Tensor) -> None:
        """Calibration: record ``max |x|`` and quantise nothing."""
        ...

    def roles(self, layer: str) -> Sequence[ScaleRole]:
        """The timeline roles a layer needs."""
        ...


class DelayedScaling:
    """Scales from the timeline."""

    name = "delayed"
    scales_first = True

    def __init__(self) -> None:
        self._timeline: ScaleTimeline | None = None
        self.counts: dict[str, torch.Tensor] | None = None  # while underflow is sampled: role → values lost, and non-zero ones

    def bind(self, timeline: ScaleTimeline) -> None:
        """Give the recipe its timeline, once all layers named their roles."""
        self._timeline = timeline

    @property
    def timeline(self) -> ScaleTimeline:
        assert self._timeline is not None, "bind() comes before the first quantisation"
        return self._timeline

    def operand(
        self,
        layer: str,
        kind: str,
        x: torch.Tensor,
        scope: Scope | None,
        *,
        columns: bool = True,
        quantiser: Quantiser = quantise,
        into: Place | None = None,
        scale: torch.Tensor | None = None,
    ) -> Quantised:
        role = f"{layer}.{kind}"
        slot = None
        if scope is not None:
            scope.read_scale(role)
            scope.report_amax(role)
            slot = self.timeline.slot_of(role)
        outs = {} if into is None else {"columns_out": into.columns, "scale_inv_out": into.scale_inv}
        scale = self.timeline.scale_of(role) if scale is None else scale
        return quantiser(x, scale, FORMATS[kind], columns=columns, amax_out=slot, **outs)

    def held_scale(self, layer: str, kind: str) -> torch.Tensor:
        scale = self.timeline.scale_of(f"{layer}.{kind}")
        return scale if self.timeline.window == "step" else scale.clone()

    def weight(self, layer: str, weight: torch.Tensor) -> Quantised:
        role = f"{layer}.weight"
        self.timeline.slot_of(role).fill_(EMPTY)  # a refresh replaces what an earlier one in this window reported
        return quantise(weight, self.timeline.scale_of(role), E4M3, amax_out=self.timeline.slot_of(role))

    def observe(self, layer: str, kind: str, x: torch.Tensor) -> None:
        role = f"{layer}.{kind}"
        slot = self.timeline.slot_of(role)
        if self.counts is not None:
            self.counts[role] = underflow(x.detach(), self.timeline.scale_of(role), FORMATS[kind])
            return
        torch.maximum(slot, x.detach().abs().amax().float(), out=slot)

    def roles(self, layer: str) -> Sequence[ScaleRole]:
        return roles_of(layer)


class CurrentScaling:
    """Each tensor is scaled by its own amax (just-in-time scaling)."""

    name = "current"
    scales_first = False

    def __init__(self, margin: int = 0) -> None:
        self.margin = margin

    def operand(
        self,
        layer: str,
        kind: str,
        x: torch.Tensor,
        scope: Scope | None,
        *,
        columns: bool = True,
        quantiser: Quantiser = quantise,
        into: Place | None = None,
        scale: torch.Tensor | None = None,
    ) -> Quantised:
        assert quantiser is quantise and into is None, "a tensor's own amax is known only once it is made"
        fmt = FORMATS[kind]
        return quantise(x, current_scale(x, fmt, self.margin), fmt, columns=columns)

    def held_scale(self, layer: str, kind: str) -> None:
        return None  # the same tensor has the same amax

    def weight(self, layer: str, weight: torch.Tensor) -> Quantised:
        return quantise(weight, current_scale(weight, E4M3, self.margin), E4M3)

    def observe(self, layer: str, kind: str, x: torch.Tensor) -> None:
        return None

    def roles(self, layer: str) -> Sequence[ScaleRole]:
        return ()
