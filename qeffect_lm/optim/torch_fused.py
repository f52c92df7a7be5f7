"""AdamW by torch's fused kernel, ``torch._fused_adamw_``: what ``torch.optim.AdamW(fused=True)`` runs, on CPU too.

The function takes the step count, the learning rate and the flag of a skipped step as tensors, so nothing is read on the
host by us, and a skipped step returns before it writes. It divides gradients by ``grad_scale`` in place, which is how they
are clipped.
"""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers

REMEDY = "set optim.backend=native"


class TorchAdamW(Optimizer):
    """Raises UsageError where gradients or moments have another dtype than the masters, or this torch lacks the function."""

    def __init__(self, flat: FlatBuffers, **settings: Any) -> None:
        super().__init__(flat, **settings)
        wide = flat.master_buffer.dtype
        if flat.moment1_buffer.dtype != wide or flat.grad_buffer.dtype != wide:
            raise UsageError(f"optim.backend=torch keeps moments in the masters' type: set optim.moments=float32, or {REMEDY}")
        if not hasattr(torch, "_fused_adamw_"):
            raise UsageError(f"torch {torch.__version__} has no fused AdamW (torch._fused_adamw_): {REMEDY}")
        # The kernel reads the rate as float32 on a GPU; a CPU takes it as it is.
        rate = torch.float32 if flat.device.type == "cuda" else torch.float64

        def scalar(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((), dtype=dtype, device=flat.device)

        self._rate, self._number, self._skip = scalar(rate), scalar(torch.float32), scalar(torch.float32)
        self._grad_scale = None if self.clip_norm is None else scalar(torch.float32)

    def _update(self) -> None:
        self._rate.copy_(self.lr)
        self._number.copy_(self._count)
        self._skip.copy_(self.skipped)
        if self._grad_scale is not None:
            torch.div(self._one, self.clip_factor, out=self._bias1)
            self._grad_scale.copy_(self._bias1)
        for views, decay in self.pieces:
            torch._fused_adamw_(
                [views.master],
                [views.grad],
                [views.moment1],
                [views.moment2],
                [],
                [self._number],
                lr=self._rate,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=self._grad_scale,
                found_inf=self._skip,
            )
        self.flat.gather()
