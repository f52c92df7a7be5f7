"""Rotary position embedding (Su et al. 2021) on the fused qkv matrix, and the way back.

``qkv`` is ``[batch * sequence, kv_heads, group + 2, head_dim]``: per KV head its query heads, then k, then v. The forward
rotates q and k where they lie. The backward gathers dq, dk and dv from wherever attention left them, rotates back, and writes
the fused layout, in FP8 where the projection takes it so: nothing is concatenated or copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.fp8.quantise import Quantised
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.quantise import Outputs
from qeffect_lm.kernels.tile import SCALARS, emit, magnitude, merge_amax, store_inverse


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
def _rope_kernel(qkv, cos, sin, period, kv_heads, group, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One token: its q and k heads, numbered without the v heads."""
    token = tl.program_id(0)
    lane, c, s = _tables(cos, sin, token % period, half, HALF)
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
def _rope_backward_kernel(
    dq, dk, dv, cos, sin, out, sequence, period, kv_heads, group, half,
    q_batch, q_kv, q_head, q_token, k_batch, k_kv, k_token, v_batch, v_kv, v_token,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token: all rows of its fused gradient."""
    token = tl.program_id(0)
    position, batch = token % sequence, (token // sequence).to(tl.int64)
    lane, c, s = _tables(cos, sin, token % period, half, HALF)
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


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _rope_backward_quantise_kernel(
    dq, dk, dv, cos, sin, scale, rows, columns, amax, scale_inv, pitch, tokens, sequence, period,
    kv_heads, group, half,
    q_batch, q_kv, q_head, q_token, k_batch, k_kv, k_token, v_batch, v_kv, v_token,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AMAX: tl.constexpr, E5M2: tl.constexpr,
    TILE_M: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of ``TILE_M`` tokens: rotated back if it is a q or a k, rounded to its dtype, both halves quantised."""
    factor = tl.load(scale)
    head = tl.program_id(0) % (kv_heads * (group + 2))
    kv, place = (head // (group + 2)).to(tl.int64), head % (group + 2)
    token = (tl.program_id(0) // (kv_heads * (group + 2))) * TILE_M + tl.arange(0, TILE_M)
    lane = tl.arange(0, HALF)
    mask = (token < tokens)[:, None] & (lane < half)[None, :]
    batch, position = (token // sequence).to(tl.int64), (token % sequence).to(tl.int64)
    is_q, turned = place < group, place <= group
    start = tl.where(is_q, dq + kv * q_kv + place * q_head, tl.where(turned, dk + kv * k_kv, dv + kv * v_kv))
    of_batch = tl.where(is_q, q_batch, tl.where(turned, k_batch, v_batch))
    of_token = tl.where(is_q, q_token, tl.where(turned, k_token, v_token))
    source = start + (batch * of_batch + position * of_token)[:, None] + lane[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    angle = (token % period)[:, None] * half + lane[None, :]
    c = tl.load(cos + angle, mask=mask & turned, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask & turned, other=0.0).to(tl.float32)
    back_first, back_second = _rotated(first, second, c, s, True)
    first, second = tl.where(turned, back_first, first), tl.where(turned, back_second, second)
    column, width = head * 2 * half + lane, kv_heads * (group + 2) * 2 * half
    first, second = first.to(dq.dtype.element_ty).to(tl.float32), second.to(dq.dtype.element_ty).to(tl.float32)
    if AMAX:
        merge_amax(amax, tl.maximum(magnitude(first, mask), magnitude(second, mask)))
    emit(first, token, column, mask, factor, rows, columns, pitch, width, ROWS, COLUMNS, E5M2)
    emit(second, token, column + half, mask, factor, rows, columns, pitch, width, ROWS, COLUMNS, E5M2)
    store_inverse(tl.program_id(0), factor, scale_inv)


def _shape(heads: int, half: int) -> dict[str, int]:
    blocks = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(half)}
    return {**blocks, "num_warps": min(max(blocks["HEADS"] * blocks["HALF"] // 512, 1), 8)}


def heads(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q ``[batch, kv_heads, group, sequence, head_dim]``, k and v ``[batch, kv_heads, sequence, head_dim]``: views of ``qkv``
    ``[batch, sequence, kv_heads, group + 2, head_dim]``."""
    turned = qkv.permute(0, 2, 3, 1, 4)
    return turned[:, :, :-2], turned[:, :, -2], turned[:, :, -1]


def rotate_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q and k of ``qkv`` ``[batch, sequence, kv_heads, group + 2, head_dim]`` (contiguous) in place.

    ``cos`` and ``sin`` are ``[sequence, head_dim // 2]``, or of every token ``[batch * sequence, head_dim // 2]``. Computed in
    float32, rounded once.
    """
    batch, sequence, kv_heads, parts, head_dim = qkv.shape
    launched("rope", qkv, cos, sin)
    _rope_kernel[(batch * sequence,)](
        qkv, cos, sin, cos.shape[0], kv_heads, parts - 2, head_dim // 2, **_shape(kv_heads * (parts - 1), head_dim // 2)
    )


def gather(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """d(qkv) ``[batch, sequence, kv_heads, group + 2, head_dim]`` of the rotation in :func:`rotate_`.

    ``dq`` is ``[batch, kv_heads, group, sequence, head_dim]``, ``dk`` and ``dv`` ``[batch, kv_heads, sequence, head_dim]``, of
    any strides.
    """
    batch, kv_heads, group, sequence, head_dim = dq.shape
    dq, dk, dv = _dense_lanes(dq, dk, dv)
    out = torch.empty(batch, sequence, kv_heads, group + 2, head_dim, dtype=dq.dtype, device=dq.device)
    strides = (*dq.stride()[:4], *dk.stride()[:3], *dv.stride()[:3])
    launched("rope_backward", dq, dk, dv, cos, sin, out)
    _rope_backward_kernel[(batch * sequence,)](
        dq, dk, dv, cos, sin, out, sequence, cos.shape[0], kv_heads, group, head_dim // 2, *strides,
        **_shape(kv_heads * (group + 2), head_dim // 2),
    )  # fmt: skip
    return out


def backward_quantise(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, outputs: Outputs
) -> Quantised:
    """What :func:`gather` makes, as the matrix ``[batch * sequence, kv_heads * (group + 2) * head_dim]``, straight to FP8."""
    batch, kv_heads, group, sequence, head_dim = dq.shape
    dq, dk, dv = _dense_lanes(dq, dk, dv)
    strides = (*dq.stride()[:4], *dk.stride()[:3], *dv.stride()[:3])
    launched("rope_backward_quantise", dq, dk, dv, cos, sin, *outputs.pointers())
    tile = tables.tile("rope_backward", batch * sequence, kv_heads * (group + 2) * head_dim)
    switches = {name: value for name, value in outputs.switches(tile).items() if name != "TILE_K"}
    grid = (triton.cdiv(batch * sequence, tile.rows) * kv_heads * (group + 2),)
    _rope_backward_quantise_kernel[grid](
        dq, dk, dv, cos, sin, *outputs.pointers(), outputs.pitch,
        batch * sequence, sequence, cos.shape[0], kv_heads, group, head_dim // 2, *strides,
        HALF=triton.next_power_of_2(head_dim // 2), **switches,
    )  # fmt: skip
    return outputs.quantised()


def _dense_lanes(*heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part if part.stride(-1) == 1 else part.contiguous() for part in heads)
