"""What every optimizer over flat buffers shares: the scalars of a step on the device, the segments, the saved counter.

Whoever updates the elements (:mod:`qeffect_lm.optim.adamw`, Transformer Engine's, apex's or torch's kernels), the state is
the same: moments in the :class:`FlatBuffers`, one step counter. Everything that changes between steps is a device tensor,
nothing is read back to the host, and no branch depends on a value: a step can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers, Views
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.muon import Factors, Muon
from qeffect_lm.state import LogicalTensor, Role

NORM_EPS = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(frozen=True)
class Segment:
    """A contiguous range of elements, and whether weight decay applies to it."""

    span: slice
    decay: bool


def segments(flat: FlatBuffers, without: Collection[str] = ()) -> list[Segment]:
    """The elements of all trainable parameters except ``without``, in few ranges (padding included); none is empty."""
    found: list[Segment] = []
    for kind, whole, decay in (("decay", flat.decay_range, True), ("no_decay", flat.no_decay_range, False)):
        entries = [(name, entry) for name, entry in flat.entries.items() if entry.segment == kind]
        ends = [*(entry.offset for _, entry in entries), whole.stop][1:]
        start = whole.start
        for (name, entry), end in zip(entries, ends, strict=False):
            if name in without:
                found.append(Segment(slice(start, entry.offset), decay))
                start = end
        found.append(Segment(slice(start, whole.stop), decay))
    return [segment for segment in found if segment.span.stop > segment.span.start]


class Optimizer(ABC):
    """AdamW over one rank's :class:`FlatBuffers`, or Muon for some matrices and AdamW for the rest.

    Owned 0-dim device tensors: ``step`` (int64, successful steps so far), ``lr`` (float64, of the last
    attempted step), ``clip_factor`` (float64) and ``skipped`` (bool, the last attempt changed nothing).
    ``clip_norm`` is a limit on the global L2 norm, or None for no clipping. ``muon`` updates its matrices; the
    subclass updates :attr:`pieces`, which is all the rest.

    Raises UsageError for hyperparameters outside their range.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float | None,
        schedule: Schedule,
        muon: Muon | None = None,
    ) -> None:
        _check(betas, eps, weight_decay, clip_norm)
        self.flat = flat
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
        self.muon = muon
        # What this rank updates of the segments, with the weight decay per learning rate.
        self.pieces: list[tuple[Views, float]] = [
            (flat.views(span), weight_decay if segment.decay else 0.0)
            for segment in segments(flat, () if muon is None else muon.names)
            for span in flat.owned(segment.span)
        ]
        self._schedule = schedule.on_device(flat.device)
        dtype = flat.master_buffer.dtype

        def scalar(value: float, scalar_dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.full((), value, dtype=scalar_dtype, device=flat.device)

        self.step = scalar(0, torch.int64)
        self.lr = scalar(schedule.closed_form(0))
        self.clip_factor = scalar(1.0)
        self.skipped = scalar(0, torch.bool)
        self._apply = scalar(1, torch.bool)
        # Constants are tensors too, so that a division is one (by a Python number, CUDA multiplies by 1/x).
        self._one, self._beta1, self._beta2 = scalar(1.0), scalar(betas[0]), scalar(betas[1])
        self._max_norm = scalar(clip_norm if clip_norm is not None else 0.0)
        self._count, self._bias1, self._bias2, self._decay64 = scalar(0), scalar(0), scalar(0), scalar(0)
        # What the elementwise part multiplies with, rounded once to the master's dtype.
        self._clip, self._step_size, self._root_bias2, self._keep = (scalar(1.0, dtype) for _ in range(4))

    def step_(self, total_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Update masters and moments from the main gradients, then refresh the parameters.

        ``total_norm`` is the 0-dim float64 global gradient norm, ``finite`` the 0-dim bool or uint8 vote of
        all ranks. When it is 0, masters, moments, parameters and step counter keep their bytes, whatever the
        gradients hold, and the learning rate does not advance. Gradients are scratch afterwards.
        """
        self._update_scalars(total_norm, finite)
        if self.muon is not None:
            keep = self._keep if self.weight_decay != 0.0 else None
            clip = self._clip if self.clip_norm is not None else None
            self.muon.update_(Factors(self._apply, clip, keep, self.lr))
        self._update()
        self.step.add_(self._apply)

    @abstractmethod
    def _update(self) -> None:
        """Update :attr:`pieces` with the scalars of this step, and refresh all parameters."""

    def logical_tensors(self) -> list[LogicalTensor]:
        """The optimizer's own saved state (the buffers list theirs): ``optimizer/step``, equal on every
        rank."""
        replicated = ("pp", "dp", "ep", "cp", "tp")
        return [LogicalTensor.whole("optimizer/step", self.step, Role.COUNTER, replicated=replicated)]

    def _update_scalars(self, total_norm: torch.Tensor, finite: torch.Tensor) -> None:
        torch.ne(finite, 0, out=self._apply)
        torch.logical_not(self._apply, out=self.skipped)
        self._schedule.write_(self.step, self.lr)
        if self.clip_norm is not None:
            torch.add(total_norm, NORM_EPS, out=self.clip_factor)
            torch.div(self._max_norm, self.clip_factor, out=self.clip_factor)
            self.clip_factor.clamp_(max=1.0)
            self._clip.copy_(self.clip_factor)
        self._count.copy_(self.step)
        self._count.add_(1.0)
        torch.pow(self._beta1, self._count, out=self._bias1)
        torch.sub(self._one, self._bias1, out=self._bias1)
        torch.div(self.lr, self._bias1, out=self._bias1)
        self._step_size.copy_(self._bias1)
        torch.pow(self._beta2, self._count, out=self._bias2)
        torch.sub(self._one, self._bias2, out=self._bias2)
        torch.sqrt(self._bias2, out=self._bias2)
        self._root_bias2.copy_(self._bias2)
        torch.mul(self.lr, self.weight_decay, out=self._decay64)
        torch.sub(self._one, self._decay64, out=self._decay64)
        self._keep.copy_(self._decay64)


def _check(betas: tuple[float, float], eps: float, weight_decay: float, clip_norm: float | None) -> None:
    for key, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise UsageError(f"optim.{key} is {beta}; it must be at least 0 and below 1")
    if not eps > 0:
        # eps 0 would divide 0 by 0 in the padding and wherever a gradient was always 0.
        raise UsageError(f"optim.eps is {eps}; it must be greater than 0")
    if not weight_decay >= 0:
        raise UsageError(f"optim.weight_decay is {weight_decay}; it must be 0 or more")
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"optim.clip_norm is {clip_norm}; it must be greater than 0, or null (no clipping)")
