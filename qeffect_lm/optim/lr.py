"""Learning-rate schedules: linear, cosine and warm-up-stable-decay (WSD), with linear warm-up.

Conventions. ``step`` counts the optimizer steps *completed before* this one, so the first step is 0; a
skipped step does not count, and its successor uses the same rate. With peak ``lr``, ``W`` warm-up steps,
``T`` total steps and floor ``lr * min_lr_ratio``:

* warm-up, ``step < W``: ``lr * (step + 1) / W``; the first step runs at ``lr / W``, the last of the warm-up
  at ``lr``;
* decay, with ``x = (step - W) / (T - W)``: ``linear`` goes down in x, ``cosine`` as ``(1 + cos(pi x)) / 2``
  (Loshchilov & Hutter, SGDR, arXiv:1608.03983); without warm-up the first step runs at ``lr``;
* ``wsd`` (Hu et al., MiniCPM, arXiv:2404.06395) stays at ``lr`` until ``T - D`` and then falls linearly;
  ``D = wsd_decay_steps``, by default a fifth of ``T`` (Hägele et al., arXiv:2405.18392);
* from ``step = T`` on, also when ``W >= T``: the floor, exactly.

On the device the rate is looked up in a table of ``T + 1`` float64 values made by
:meth:`Schedule.closed_form` and indexed by the device's step counter: it equals the closed form exactly, on
every kind of device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qeffect_lm.errors import UsageError

KINDS = ("linear", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule as a pure function of the optimizer step. Raises UsageError for impossible
    settings."""

    lr: float
    total_steps: int
    kind: str = "linear"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    wsd_decay_steps: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"optim.schedule is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if self.total_steps < 1:
            raise UsageError(f"train.steps is {self.total_steps}; a schedule needs at least 1 step")
        if self.warmup_steps < 0:
            raise UsageError(f"optim.warmup_steps is {self.warmup_steps}; it must be 0 or more")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UsageError(f"optim.lr is {self.lr}; it must be finite and not negative")
        if not 0 <= self.min_lr_ratio <= 1:
            raise UsageError(f"optim.min_lr_ratio is {self.min_lr_ratio}; it must lie between 0 and 1")
        if self.kind == "wsd" and self.wsd_decay_steps is not None:
            room = self.total_steps - self.warmup_steps
            if not 1 <= self.wsd_decay_steps <= max(room, 1):
                raise UsageError(
                    f"optim.wsd_decay_steps is {self.wsd_decay_steps}; it must be 1 or more and at most "
                    f"train.steps - optim.warmup_steps = {self.total_steps} - {self.warmup_steps} = {room}, "
                    f"or null for the default"
                )

    @property
    def decay_start(self) -> int:
        """The first step of the decay: the warm-up's end, or for WSD the end of the stable phase."""
        if self.kind != "wsd":
            return self.warmup_steps
        decay = self.wsd_decay_steps if self.wsd_decay_steps is not None else max(1, self.total_steps // 5)
        return max(self.warmup_steps, self.total_steps - decay)

    def closed_form(self, step: int) -> float:
        """The rate of the optimizer step that follows ``step`` completed ones (plain Python floats)."""
        if step >= self.total_steps:
            return self.lr * self.min_lr_ratio
        if step < self.warmup_steps:
            return self.lr * ((step + 1) / self.warmup_steps)
        if step < self.decay_start:
            return self.lr
        x = (step - self.decay_start) / (self.total_steps - self.decay_start)
        shape = 0.5 * (1.0 + math.cos(math.pi * x)) if self.kind == "cosine" else 1.0 - x
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape)

    def on_device(self, device: torch.device | str) -> DeviceSchedule:
        """The same function over a device counter."""
        return DeviceSchedule(self, device)


class DeviceSchedule:
    """A schedule whose step is a device tensor: no host read, and capturable."""

    def __init__(self, schedule: Schedule, device: torch.device | str) -> None:
        values = [schedule.closed_form(step) for step in range(schedule.total_steps + 1)]
        self.table = torch.tensor(values, dtype=torch.float64, device=device)
        self._index = torch.zeros(1, dtype=torch.int64, device=device)

    def write_(self, step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the rate for the 0-dim int64 ``step`` into the 0-dim float64 ``out``; returns ``out``."""
        self._index.copy_(step)
        self._index.clamp_(max=self.table.numel() - 1)
        torch.index_select(self.table, 0, self._index, out=out.view(1))
        return out
