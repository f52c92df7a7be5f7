"""The optimizer's two passes over all parameters: squared sums for the norm, and AdamW with the cast of the parameters.

Both are memory-bound: the sums read each gradient once, the update reads and writes each buffer once. Every element goes
through one compiled sequence of operations wherever it lies, so an update does not depend on a parameter's place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched

_LANES, _SUM_WARPS = 2048, 8
_BLOCK, _WARPS = 2048, 8


@triton.jit
def _block_sums_kernel(grads, starts, lengths, sums, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """One block: each lane adds its elements in ascending order, then the lanes are added by a tree; all in float64."""
    block = tl.program_id(0)
    start = tl.load(starts + block)
    length = tl.load(lengths + block)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.float64)
    for first in range(0, BLOCK, LANES):
        at = first + lane
        value = tl.load(grads + start + at, mask=at < length, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + block, tl.sum(total, axis=0))


def block_sums(grads: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, sums: torch.Tensor, block: int) -> None:
    """``sums[i]`` (float64) = squared sum of ``grads[starts[i] : starts[i] + lengths[i]]``, each at most ``block`` long.

    Bits depend on the values alone: not on where a block starts, nor on how many there are.
    """
    launched("block_sums", grads, starts, lengths, sums, block)
    _block_sums_kernel[(starts.numel(),)](grads, starts, lengths, sums, BLOCK=block, LANES=_LANES, num_warps=_SUM_WARPS)


@triton.jit
def _adamw_kernel(
    master, grad, moment1, moment2, param, apply, clip, keep, step_size, root_bias2, n,
    beta1, beta2, one_minus_beta1, one_minus_beta2, eps,
    CLIP: tl.constexpr, DECAY: tl.constexpr, CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(apply) != 0:  # a skipped step writes nothing, whatever the gradients hold
        mask = at < n
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        if CLIP:
            g = g * tl.load(clip)
        m = tl.load(moment1 + at, mask=mask, other=0.0).to(tl.float32) * beta1 + g * one_minus_beta1
        v = tl.load(moment2 + at, mask=mask, other=0.0).to(tl.float32) * beta2 + g * g * one_minus_beta2
        tl.store(moment1 + at, m.to(moment1.dtype.element_ty), mask=mask)
        tl.store(moment2 + at, v.to(moment2.dtype.element_ty), mask=mask)
        root = tl.div_rn(tl.sqrt_rn(v), tl.load(root_bias2)) + eps
        update = tl.div_rn(m, root) * tl.load(step_size)
        w = tl.load(master + at, mask=mask, other=0.0)
        if DECAY:
            w = w * tl.load(keep)
        w = w - update
        tl.store(master + at, w, mask=mask)
        if CAST:
            tl.store(param + at, w.to(param.dtype.element_ty), mask=mask)


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    param: torch.Tensor | None,
    scalars: tuple[torch.Tensor, ...],
    *,
    betas: tuple[float, float],
    eps: float,
    clip: bool,
    decay: bool,
) -> None:
    """One segment of flat float32 buffers ``[n]``, in place; gradients may be bfloat16, moments too (rounded to nearest even
    when stored).

    Args:
        param: the compute-dtype parameters to refresh; None where they are the masters.
        scalars: 0-dim tensors: apply (bool; False changes no byte), clip factor, 1 - lr * decay, lr / bias1, sqrt(bias2).
        clip, decay: whether gradients are clipped and masters decayed at all.
    """
    n = master.numel()
    if n == 0:
        return
    apply, *factors = scalars
    launched("adamw", master, grad, moment1, moment2, param, *scalars, betas, eps, clip, decay)
    beta1, beta2 = betas
    _adamw_kernel[(triton.cdiv(n, _BLOCK),)](
        master, grad, moment1, moment2, master if param is None else param, apply.view(torch.uint8), *factors, n,
        beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps,
        CLIP=clip, DECAY=decay, CAST=param is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
