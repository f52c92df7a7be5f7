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

import torch

from qeffect_lm import kernels
from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.state import LogicalTensor, Role

NORM_EPS = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""

CPU_CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22
"""Elements updated at a time: bounds the scratch; keeps it in the cache of a CPU, and launches few on an
accelerator. Results do not depend on it."""


@dataclass(frozen=True)
class _Chunk:
    """Views of one piece of one segment; ``a``, ``b``, ``c`` are scratch of the same length."""

    master: torch.Tensor
    grad: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    decay: bool


class AdamW:
    """One optimizer over one rank's :class:`FlatBuffers`.

    Owned 0-dim device tensors: ``step`` (int64, successful steps so far), ``lr`` (float64, of the last
    attempted step), ``clip_factor`` (float64) and ``skipped`` (bool, the last attempt changed nothing).
    ``clip_norm`` is a limit on the global L2 norm, or None for no clipping.

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
        chunk: int | None = None,
    ) -> None:
        _check(betas, eps, weight_decay, clip_norm)
        self.flat = flat
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.clip_norm = clip_norm
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
        default = CPU_CHUNK if flat.device.type == "cpu" else DEVICE_CHUNK
        # On a GPU one kernel updates a segment and casts its parameters; elsewhere elementwise operations go chunk by chunk.
        self._fused = dtype is torch.float32 and flat.grad_buffer.dtype is torch.float32 and kernels.usable(flat.grad_buffer)
        self._chunks = [] if self._fused else self._make_chunks(default if chunk is None else chunk)

    def _make_chunks(self, size: int) -> list[_Chunk]:
        flat = self.flat
        size = max(1, min(size, flat.grad_buffer.numel()))
        scratch = torch.zeros(3, size, dtype=flat.master_buffer.dtype, device=flat.device)
        chunks: list[_Chunk] = []
        for segment, decay in ((flat.decay_range, True), (flat.no_decay_range, False)):
            for start in range(segment.start, segment.stop, size):
                piece = slice(start, min(start + size, segment.stop))
                length = piece.stop - piece.start
                a, b, c = (scratch[row, :length] for row in range(3))
                chunks.append(
                    _Chunk(
                        master=flat.master_buffer[piece],
                        grad=flat.grad_buffer[piece],
                        moment1=flat.moment1_buffer[piece],
                        moment2=flat.moment2_buffer[piece],
                        a=a,
                        b=b,
                        c=c,
                        decay=decay and self.weight_decay != 0.0,
                    )
                )
        return chunks

    def step_(self, total_norm: torch.Tensor, finite: torch.Tensor) -> None:
        """Update masters and moments from the main gradients, then refresh the parameters.

        ``total_norm`` is the 0-dim float64 global gradient norm, ``finite`` the 0-dim bool or uint8 vote of
        all ranks. When it is 0, masters, moments, parameters and step counter keep their bytes, whatever the
        gradients hold, and the learning rate does not advance.
        """
        self._update_scalars(total_norm, finite)
        if self._fused:
            self._update_fused()
        else:
            for chunk in self._chunks:
                self._update_chunk(chunk)
            self.flat.gather()
        self.step.add_(self._apply)

    def logical_tensors(self) -> list[LogicalTensor]:
        """The optimizer's own saved state (the buffers list theirs): ``optimizer/step``, equal on every
        rank."""
        replicated = ("dp", "pp", "tp", "ep")
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

    def _update_fused(self) -> None:
        from qeffect_lm.kernels.optimizer import adamw

        flat = self.flat
        separate = flat.param_buffer.data_ptr() != flat.master_buffer.data_ptr()
        scalars = (self._apply, self._clip, self._keep, self._step_size, self._root_bias2)
        for segment, decay in ((flat.decay_range, True), (flat.no_decay_range, False)):
            adamw(
                flat.master_buffer[segment],
                flat.grad_buffer[segment],
                flat.moment1_buffer[segment],
                flat.moment2_buffer[segment],
                flat.param_buffer[segment] if separate else None,
                scalars,
                betas=self.betas,
                eps=self.eps,
                clip=self.clip_norm is not None,
                decay=decay and self.weight_decay != 0.0,
            )

    def _update_chunk(self, chunk: _Chunk) -> None:
        """One chunk; a, b, c hold in turn the gradient, the new moments, the update and the new master."""
        beta1, beta2 = self.betas
        a, b, c = chunk.a, chunk.b, chunk.c
        a.copy_(chunk.grad)
        if self.clip_norm is not None:
            a.mul_(self._clip)
        torch.mul(chunk.moment1, beta1, out=b)  # b = beta1 m + (1 - beta1) g
        torch.mul(a, 1.0 - beta1, out=c)
        b.add_(c)
        a.mul_(a)  # c = beta2 v + (1 - beta2) g^2
        a.mul_(1.0 - beta2)
        torch.mul(chunk.moment2, beta2, out=c)
        c.add_(a)
        # A select, not a multiplication by the flag: NaN * 0 is NaN, and -0 + 0 is +0.
        torch.where(self._apply, b, chunk.moment1, out=chunk.moment1)
        torch.where(self._apply, c, chunk.moment2, out=chunk.moment2)
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
