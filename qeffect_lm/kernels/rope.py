"""Rotary position embedding (Su et al. 2021) on the fused qkv matrix, and the way back.

``qkv`` is ``[batch * sequence, kv_heads, group + 2, head_dim]``: per KV head its query heads, then k, then v. The forward
rotates q and k where they lie. The backward gathers dq, dk and dv from wherever attention left them, rotates back, and writes
the fused layout: nothing is concatenated or copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched


@triton.jit
def _rotated(first, second, cos, sin, BACK: tl.constexpr):
    if BACK:
        return first * cos + second * sin, second * cos - first * sin
    else:
        return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _tables(cos, sin, position, half, HALF: tl.constexpr):
    lane = tl.arange(0, HALF)
    c = tl.load(cos + position * half + lane, mask=lane < half, other=0.0).to(tl.float32)
    s = tl.load(sin + position * half + lane, mask=lane < half, other=0.0).to(tl.float32)
    return lane, c[None, :], s[None, :]


@triton.jit
def _rotate_kernel(qkv, cos, sin, sequence, kv_heads, group, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One token: its q and k heads, numbered without the v heads."""
    token = tl.program_id(0)
    lane, c, s = _tables(cos, sin, token % sequence, half, HALF)
    head = tl.arange(0, HEADS)
    kv, place = head // (group + 1), head % (group + 1)
    at = (token.to(tl.int64) * kv_heads * (group + 2) + kv * (group + 2) + place) * (2 * half)
    pointers = qkv + at[:, None] + lane[None, :]
    mask = (kv < kv_heads)[:, None] & (lane < half)[None, :]
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + half, mask=mask, other=0.0).to(tl.float32)
    first, second = _rotated(first, second, c, s, False)
    tl.store(pointers, first.to(qkv.dtype.element_ty), mask=mask)
    tl.store(pointers + half, second.to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    dq, dk, dv, cos, sin, out, sequence, kv_heads, group, half,
    q_batch, q_kv, q_head, q_token, k_batch, k_kv, k_token, v_batch, v_kv, v_token,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: all rows of its fused gradient."""
    token = tl.program_id(0)
    position, batch = token % sequence, (token // sequence).to(tl.int64)
    lane, c, s = _tables(cos, sin, position, half, HALF)
    head = tl.arange(0, HEADS)
    kv, place = head // (group + 2), head % (group + 2)
    is_q, is_k = (place < group), (place == group)
    at_q = batch * q_batch + position.to(tl.int64) * q_token + kv * q_kv + place * q_head
    at_k = batch * k_batch + position.to(tl.int64) * k_token + kv * k_kv
    at_v = batch * v_batch + position.to(tl.int64) * v_token + kv * v_kv
    source = tl.where(is_q, dq + at_q, tl.where(is_k, dk + at_k, dv + at_v))[:, None] + lane[None, :]
    mask = (kv < kv_heads)[:, None] & (lane < half)[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    back_first, back_second = _rotated(first, second, c, s, True)
    turned = (is_q | is_k)[:, None]
    target = out + ((token.to(tl.int64) * kv_heads * (group + 2) + head) * (2 * half))[:, None] + lane[None, :]
    tl.store(target, tl.where(turned, back_first, first).to(out.dtype.element_ty), mask=mask)
    tl.store(target + half, tl.where(turned, back_second, second).to(out.dtype.element_ty), mask=mask)


def _shape(heads: int, half: int) -> dict[str, int]:
    blocks = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(half)}
    return {**blocks, "num_warps": min(max(blocks["HEADS"] * blocks["HALF"] // 512, 1), 8)}


def rotate_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q and k of ``qkv`` ``[batch, sequence, kv_heads, group + 2, head_dim]`` (contiguous) in place.

    ``cos`` and ``sin`` are ``[sequence, head_dim // 2]``. Computed in float32, rounded once.
    """
    batch, sequence, kv_heads, parts, head_dim = qkv.shape
    launched("rope", qkv, cos, sin)
    _rotate_kernel[(batch * sequence,)](
        qkv, cos, sin, sequence, kv_heads, parts - 2, head_dim // 2, **_shape(kv_heads * (parts - 1), head_dim // 2)
    )


def gather(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """d(qkv) ``[batch, sequence, kv_heads, group + 2, head_dim]`` of the rotation in :func:`rotate_`.

    ``dq`` is ``[batch, kv_heads, group, sequence, head_dim]``, ``dk`` and ``dv`` ``[batch, kv_heads, sequence, head_dim]``, of
    any strides.
    """
    batch, kv_heads, group, sequence, head_dim = dq.shape
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    out = torch.empty(batch, sequence, kv_heads, group + 2, head_dim, dtype=dq.dtype, device=dq.device)
    strides = (*dq.stride()[:4], *dk.stride()[:3], *dv.stride()[:3])
    launched("rope_backward", dq, dk, dv, cos, sin, out)
    _gather_kernel[(batch * sequence,)](
        dq, dk, dv, cos, sin, out, sequence, kv_heads, group, head_dim // 2, *strides,
        **_shape(kv_heads * (group + 2), head_dim // 2),
    )  # fmt: skip
    return out
