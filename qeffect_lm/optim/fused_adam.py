"""AdamW by a ``FusedAdam`` class: Transformer Engine's and NVIDIA apex's have one interface.

Used of it, as both document: ``FusedAdam(params, lr, bias_correction, betas, eps, adam_w_mode, capturable=True)``, whose
parameter groups hold ``lr`` and ``step`` as device tensors, whose ``state`` holds ``exp_avg`` and ``exp_avg_sq``, and
``step(grad_scaler=...)``, which multiplies gradients by the reciprocal of the scale and, where the scaler found an infinity,
writes nothing. The parameters are our flat masters, state and gradients views of our flat buffers: a checkpoint is the same
whoever ran the update. The count of steps is ours; it is written into the groups before every step.
"""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.errors import UsageError
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers

REMEDY = "set optim.backend=native"


class _Scaler:
    """What ``step`` asks of a gradient scaler: the flag of a step to be skipped, and the scale (float32, ``[1]``)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.skip = torch.zeros(1, dtype=torch.float32, device=device)
        self.scale = torch.ones(1, dtype=torch.float32, device=device)

    def _check_inf_per_device(self, optimizer: object) -> dict[torch.device, torch.Tensor]:
        return {self.device: self.skip}

    def _get_scale_async(self) -> torch.Tensor:
        return self.scale


class FusedAdamW(Optimizer):
    """Drives a ``FusedAdam`` over flat buffers.

    Args:
        fused: the class.
        name: of the library, for messages.
        narrow: constructor arguments for bfloat16 moments; None: the class keeps float32 ones only.

    Raises:
        UsageError: dtypes that the class does not take; a class with another interface.
    """

    def __init__(
        self, flat: FlatBuffers, *, fused: type, name: str, narrow: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(flat, **settings)
        self._name = name
        moments = flat.moment1_buffer.dtype
        if flat.master_buffer.dtype is not torch.float32 or flat.grad_buffer.dtype is not torch.float32:
            raise UsageError(f"{name}'s FusedAdam takes float32 masters and gradients: {REMEDY}")
        if moments is not torch.float32 and narrow is None:
            raise UsageError(f"{name}'s FusedAdam keeps float32 moments: set optim.moments=float32, or {REMEDY}")
        device = flat.grad_buffer.device  # with its number
        self._scaler = _Scaler(device)
        self._rate = torch.zeros((), dtype=torch.float32, device=device)
        self._numbers: list[torch.Tensor] = []
        self._flag: torch.Tensor | None = None
        self._fused: Any = None
        if self.pieces:
            self._make(fused, {} if moments is torch.float32 else narrow or {})

    def _make(self, fused: type, narrow: dict[str, Any]) -> None:
        groups, moments = [], []
        for views, decay in self.pieces:
            parameter = torch.nn.Parameter(views.master)
            parameter.grad = views.grad
            groups.append({"params": [parameter], "weight_decay": decay})
            moments.append({"exp_avg": views.moment1, "exp_avg_sq": views.moment2})
        common = {"lr": 0.0, "bias_correction": True, "betas": self.betas, "eps": self.eps, "adam_w_mode": True}
        try:
            made: Any = fused(groups, **common, capturable=True, **narrow)
            self._flag = made._dummy_overflow_buf  # what the last step of the class found; part of how it counts
            scales = made._scales if narrow else None
        except (TypeError, AttributeError) as error:
            raise UsageError(f"this {self._name} has a FusedAdam of another interface ({error}): {REMEDY}") from error
        for group, state in zip(made.param_groups, moments, strict=True):
            number = torch.zeros(1, dtype=torch.int32, device=self._rate.device)
            group["lr"], group["step"] = self._rate, number
            self._numbers.append(number)
            made.state[group["params"][0]] = state
            if scales is not None:  # none is applied to bfloat16, but the class looks them up
                scales[group["params"][0]] = dict.fromkeys(state, self._scaler.scale)
        self._fused = made

    def _update(self) -> None:
        scaler, flat = self._scaler, self.flat
        self._rate.copy_(self.lr)
        scaler.skip.copy_(self.skipped)
        if self.clip_norm is not None:
            torch.div(self._one, self.clip_factor, out=self._bias1)
            scaler.scale.copy_(self._bias1)
        if self._flag is not None:
            self._flag.zero_()
            for number in self._numbers:
                number.copy_(self.step)  # the class counts up before it updates
            buffers = (flat.master_buffer, flat.grad_buffer, flat.moment1_buffer, flat.moment2_buffer)
            scalars = (self._rate, scaler.skip, scaler.scale, self._flag, *self._numbers)
            kernels.launched(f"{self._name} FusedAdam", *buffers, *scalars, self.betas, self.eps, self.weight_decay)
            with torch.no_grad():
                self._fused.step(grad_scaler=scaler)
        flat.gather()
