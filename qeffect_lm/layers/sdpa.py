"""Causal attention of grouped queries: by cuDNN where it takes the case, through ``library`` or else torch's SDPA.

``library`` is :class:`~qeffect_lm.kernels.cudnn_attention.CudnnAttention`, whose backward repeats bit for bit. torch asks cuDNN
for no such backward: under ``torch.use_deterministic_algorithms(True)`` its SDPA does without cuDNN and takes FlashAttention-2,
which is slower. For a caller that is an autograd node itself both are torch's operators, called as SDPA calls them: the forward
runs once, and its own outputs are saved. Whatever else SDPA chooses computes the forward again in the backward.

``qkv`` is the fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]``, rotated. Parts of it are ``q`` ``[batch,
kv_heads, group, sequence, head_dim]``, ``k`` and ``v`` ``[batch, kv_heads, sequence, head_dim]``, and the result is ``[batch,
sequence, kv_heads, group, head_dim]``, of any strides. torch gets one sequence as a batch of KV heads, each with its queries:
grouped rows then need no copy (their query heads have no common stride).
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionLibrary(Protocol):
    """Kernels for a caller that is an autograd node itself: :class:`~qeffect_lm.kernels.cudnn_attention.CudnnAttention`, or
    :class:`~qeffect_lm.kernels.document_attention.DocumentAttention`."""

    def takes(self, qkv: torch.Tensor) -> bool: ...
    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Saved:
    """What the backward of :func:`forward` needs besides qkv and the result.

    Args:
        tensors: the rows' log-sum-exp where the library ran; where one of torch's kernels did, its log-sum-exp, generator state
            (two) and cumulative lengths (of q, of k; None for dense operands); nothing where the forward is computed again.
        kernel: which of torch's kernels ran, CUDNN_ATTENTION or FLASH_ATTENTION; None: the library, or whatever SDPA chose.
        lengths: the longest sequence of q and of k, as that kernel gave them.
    """

    tensors: tuple[torch.Tensor | None, ...] = ()
    kernel: SDPBackend | None = None
    lengths: tuple[int, int] = (0, 0)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that autograd differentiates."""
    return _result(q, _attend(*_operands(q, k, v)))


def forward(qkv: torch.Tensor, library: AttentionLibrary | None = None) -> tuple[torch.Tensor, Saved]:
    """Attention for a caller that is an autograd node itself."""
    if library is not None and library.takes(qkv):
        y, lse = library.forward(qkv)
        return y, Saved((lse,))
    q, k, v = _parts(qkv)
    heads = _operands(q, k, v)
    causal = _causal(heads[0])
    if _by_cudnn(*heads):
        kernel = SDPBackend.CUDNN_ATTENTION
        made = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal, False)
    elif _by_flash(*heads):
        kernel = SDPBackend.FLASH_ATTENTION
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(*heads, 0.0, causal, False)
    else:
        return _result(q, _chosen_by_torch(*heads)), Saved()
    y, lse, cumulative_q, cumulative_k, longest_q, longest_k, seed, offset, _ = made
    return _result(q, y), Saved((lse, seed, offset, cumulative_q, cumulative_k), kernel, (longest_q, longest_k))


def backward(
    dy: torch.Tensor, qkv: torch.Tensor, y: torch.Tensor, saved: Saved, library: AttentionLibrary | None = None
) -> _Heads:
    """Gradients of q, k and v in their shapes, of any strides; ``y`` and ``saved`` are what :func:`forward` gave."""
    if library is not None and len(saved.tensors) == 1:
        assert saved.tensors[0] is not None
        return _parts(library.backward(qkv, y, saved.tensors[0], dy))
    q, k, v = _parts(qkv)
    heads = _operands(q, k, v)
    wanted = _as_operand(dy)
    if saved.kernel is None:
        leaves = [part.detach().requires_grad_() for part in heads]
        with torch.enable_grad():
            again = _chosen_by_torch(leaves[0], leaves[1], leaves[2])
        dq, dk, dv = torch.autograd.grad(again, leaves, wanted)
    else:
        aten = torch.ops.aten
        lse, seed, offset, *cumulative = saved.tensors
        made, lengths, how = (wanted, *heads, _as_operand(y), lse), (*cumulative, *saved.lengths), (0.0, _causal(heads[0]))
        if saved.kernel is SDPBackend.CUDNN_ATTENTION:
            grads = aten._scaled_dot_product_cudnn_attention_backward(*made, seed, offset, None, *lengths, *how)
        else:
            grads = aten._scaled_dot_product_flash_attention_backward.default(*made, *lengths, *how, seed, offset)
        dq, dk, dv = grads
    if q.shape[0] == 1:
        return dq[None], dk.transpose(0, 1), dv.transpose(0, 1)
    return dq.unflatten(1, q.shape[1:3]), dk, dv


def _parts(qkv: torch.Tensor) -> _Heads:
    from qeffect_lm.kernels import rope

    return rope.heads(qkv)


def _operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Heads:
    """torch's ``[batch, heads, sequence, head_dim]``. No select: its gradient would be a zeroed copy."""
    batch, kv_heads, group, sequence, head_dim = q.shape
    if batch == 1:
        return q.squeeze(0), k.transpose(0, 1), v.transpose(0, 1)
    return q.reshape(batch, kv_heads * group, sequence, head_dim), k, v


def _as_operand(y: torch.Tensor) -> torch.Tensor:
    """A result (or its gradient) as torch's ``[batch, heads, sequence, head_dim]``."""
    heads = y.permute(0, 2, 3, 1, 4)
    return heads.squeeze(0) if y.shape[0] == 1 else heads.flatten(1, 2)


def _result(q: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.view(q.shape).permute(0, 3, 1, 2, 4)


def _causal(q: torch.Tensor) -> bool:
    return q.shape[2] > 1


def _by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether cuDNN computes this, backward included; a warning where it does not on a GPU."""
    if not q.is_cuda:
        return False
    taken = can_use_cudnn_attention(_asked(q, k, v), False)
    if not taken:
        warnings.warn(f"cuDNN does not take this attention (q {list(q.shape)}, {q.dtype}): a slower kernel runs", stacklevel=3)
    return taken


def _by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether SDPA without cuDNN computes this by FlashAttention-2, its first choice, backward included. SDPA pads heads whose
    size 8 does not divide, so those are left to it."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8:
        return False
    return can_use_flash_attention(_asked(q, k, v), False)


def _asked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> SDPAParams:
    """What torch is asked whether it computes it, with a backward."""
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    return SDPAParams(leaves[0], leaves[1], leaves[2], None, 0.0, _causal(q), q.shape[1] != k.shape[1])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if _by_cudnn(q, k, v) else nullcontext():
        return _chosen_by_torch(q, k, v)


def _chosen_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=_causal(q), enable_gqa=q.shape[1] != k.shape[1])
