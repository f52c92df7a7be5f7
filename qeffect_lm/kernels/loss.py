"""Cross-entropy on logits as they are: no float32 copy of them, forward or backward."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched

_BLOCK, _WARPS, _RUN = 4096, 8, 8  # a lane loads 16 bytes of 16-bit logits at a time
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _cross_entropy_kernel(logits, targets, mask, lse, losses, vocab: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """One token: logsumexp in one pass, then ``mask * (lse - logit of the target)``.

    A lane keeps the maximum and the rescaled sum of all ``RUN`` neighbours that it loads at a time, so that the rescaling takes
    one exponential a run, not one an element.
    """
    token = tl.program_id(0)
    line = logits + token.to(tl.int64) * vocab
    column = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    top = tl.full([BLOCK // RUN], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(line + start + column, mask=start + column < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf is no number
        total = total * tl.exp2((top - base) * _LOG2_E) + tl.sum(tl.exp2((x - base[:, None]) * _LOG2_E), axis=1)
        top = higher
    peak = tl.max(top, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    result = base + tl.log(tl.sum(total * tl.exp2((top - base) * _LOG2_E), axis=0))
    hit = tl.load(line + tl.load(targets + token)).to(tl.float32)
    tl.store(lse + token, result)
    tl.store(losses + token, (result - hit) * tl.load(mask + token))


@triton.jit
def _cross_entropy_backward_kernel(logits, targets, mask, lse, dloss, divisor, grads, vocab, BLOCK: tl.constexpr):
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = token.to(tl.int64) * vocab + column
    inside = column < vocab
    x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(mask + token) * tl.div_rn(tl.load(dloss).to(tl.float32), tl.load(divisor).to(tl.float32))
    probability = tl.exp2((x - tl.load(lse + token)) * _LOG2_E)
    grad = (probability - (column == tl.load(targets + token)).to(tl.float32)) * factor
    tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=inside)


def forward(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits`` ``[m, vocab]``, ``targets`` int64 ``[m]``, ``mask`` float32 ``[m]`` → (losses, logsumexp), float32 ``[m]``."""
    m, vocab = logits.shape
    losses, lse = torch.empty(m, device=logits.device), torch.empty(m, device=logits.device)
    launched("cross_entropy", logits, targets, mask, lse, losses)
    _cross_entropy_kernel[(m,)](logits, targets, mask, lse, losses, vocab, BLOCK=_BLOCK, RUN=_RUN, num_warps=_WARPS)
    return losses, lse


def backward_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    divisor: torch.Tensor,
) -> torch.Tensor:
    """The gradient ``[m, vocab]``, written over the logits: the largest activation, and nobody reads them after this."""
    m, vocab = logits.shape
    grid = (m, triton.cdiv(vocab, _BLOCK))
    launched("cross_entropy_backward", logits, targets, mask, lse, dloss, divisor)
    _cross_entropy_backward_kernel[grid](
        logits, targets, mask, lse, dloss, divisor, logits, vocab, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return logits
