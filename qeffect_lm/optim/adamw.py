"""AdamW on flat masters, gated by a device flag (Loshchilov & Hutter, arXiv:1711.05101; torch.optim.AdamW's
formula).

Everything that changes between steps is a device tensor: step counter, learning rate, clip factor, flag.
Nothing is read back to the host and no branch depends on a value, so the step can be captured. Every element
goes through the same sequence of single IEEE operations (multiply, add, subtract, divide, root, select);
fused forms such as ``addcmul`` or ``lerp`` are not used, because their vector body may round differently
from their scalar tail, which would make an update depend on where in the flat buffer a parameter lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers

CPU_CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22
"""Elements updated at a time: bounds the scratch; keeps it in the cache of a CPU, and launches few on an
accelerator. Results do not depend on it."""


@dataclass(frozen=True)
class _Chunk:
    """Views of one piece of one segment; ``a``, ``b``, ``c`` are scratch of the same length, ``low`` too, in the moments'
    dtype (None where that is the master's)."""

    master: torch.Tensor
    grad: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    low: torch.Tensor | None
    decay: bool


class AdamW(Optimizer):
    """The framework's own AdamW: one kernel per segment on a GPU, elementwise operations chunk by chunk elsewhere."""

    def __init__(self, flat: FlatBuffers, *, chunk: int | None = None, **settings: Any) -> None:
        super().__init__(flat, **settings)
        default = CPU_CHUNK if flat.device.type == "cpu" else DEVICE_CHUNK
        # On a GPU one kernel updates a segment and casts its parameters.
        self._fused = flat.master_buffer.dtype is torch.float32 and kernels.usable(flat.grad_buffer)
        self._chunks = [] if self._fused else self._make_chunks(default if chunk is None else chunk)

    def _make_chunks(self, size: int) -> list[_Chunk]:
        flat = self.flat
        size = max(1, min(size, flat.grad_buffer.numel()))
        wide, low_dtype = flat.master_buffer.dtype, flat.moment1_buffer.dtype
        scratch = torch.zeros(3, size, dtype=wide, device=flat.device)
        low = torch.zeros(size, dtype=low_dtype, device=flat.device) if low_dtype != wide else None
        chunks: list[_Chunk] = []
        for views, decay in self.pieces:
            for start in range(0, views.master.numel(), size):
                part = slice(start, start + size)
                length = views.master[part].numel()
                a, b, c = (scratch[row, :length] for row in range(3))
                chunks.append(
                    _Chunk(
                        master=views.master[part],
                        grad=views.grad[part],
                        moment1=views.moment1[part],
                        moment2=views.moment2[part],
                        a=a,
                        b=b,
                        c=c,
                        low=None if low is None else low[:length],
                        decay=decay != 0.0,
                    )
                )
        return chunks

    def _update(self) -> None:
        if self._fused:
            self._update_fused()
            if self.muon is not None and self.flat.separate_params:
                self.muon.gather_()
            return
        for chunk in self._chunks:
            self._update_chunk(chunk)
        self.flat.gather()

    def _update_fused(self) -> None:
        from qeffect_lm.kernels.optimizer import adamw

        scalars = (self._apply, self._clip, self._keep, self._step_size, self._root_bias2)
        for views, decay in self.pieces:
            adamw(
                views.master,
                views.grad,
                views.moment1,
                views.moment2,
                views.param,
                scalars,
                betas=self.betas,
                eps=self.eps,
                clip=self.clip_norm is not None,
                decay=decay != 0.0,
            )

    def _update_chunk(self, chunk: _Chunk) -> None:
        """One chunk; a, b, c hold in turn the gradient, the new moments, the update and the new master."""
        beta1, beta2 = self.betas
        a, b, c = chunk.a, chunk.b, chunk.c
        a.copy_(chunk.grad)
        if self.clip_norm is not None:
            a.mul_(self._clip)
        b.copy_(chunk.moment1)  # b = beta1 m + (1 - beta1) g
        b.mul_(beta1)
        torch.mul(a, 1.0 - beta1, out=c)
        b.add_(c)
        a.mul_(a)  # c = beta2 v + (1 - beta2) g^2
        a.mul_(1.0 - beta2)
        c.copy_(chunk.moment2)
        c.mul_(beta2)
        c.add_(a)
        self._store(chunk, b, chunk.moment1)
        self._store(chunk, c, chunk.moment2)
        c.sqrt_()  # b = lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps)
        c.div_(self._root_bias2)
        c.add_(self.eps)
        b.div_(c)
        b.mul_(self._step_size)
        if chunk.decay:
            torch.mul(chunk.master, self._keep, out=a)
            a.sub_(b)
        else:
            torch.sub(chunk.master, b, out=a)
        torch.where(self._apply, a, chunk.master, out=chunk.master)

    def _store(self, chunk: _Chunk, value: torch.Tensor, moment: torch.Tensor) -> None:
        """The new moment, rounded to nearest even where moments are narrower; the update goes on with ``value`` itself.

        A select, not a multiplication by the flag: NaN * 0 is NaN, and -0 + 0 is +0.
        """
        if chunk.low is not None:
            chunk.low.copy_(value)
            value = chunk.low
        torch.where(self._apply, value, moment, out=moment)
