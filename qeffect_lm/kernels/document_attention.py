"""Causal attention of grouped queries among the tokens of one document, several documents to a row (Triton).

The tiling is FlashAttention-2's (Dao 2023): a block of queries passes over the keys with a running maximum and sum; the
backward has one kernel for dq and one for dk and dv, each result summed by one program in a fixed order, so it repeats bit for
bit. Blocks of keys before the first document of a block of queries, and of queries after the last document of a block of keys,
are left out: the time is that of the documents, not of the row.

``qkv`` is the fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]`` (per KV head its query heads, then k, then
v), contiguous; ``starts`` int32 ``[batch, sequence]`` says where each token's document begins in its row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from qeffect_lm import kernels
from qeffect_lm.kernels import launched

LARGEST_HEAD = 256
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _seen(query, key, start, sequence, window, WINDOW: tl.constexpr):
    """Which keys (across) the queries (down) see."""
    mask = (key[None, :] <= query[:, None]) & (key[None, :] >= start[:, None]) & (query < sequence)[:, None]
    if WINDOW:
        mask = mask & (key[None, :] > query[:, None] - window)
    return mask


@triton.jit
def _rows(base, place, token_stride, sequence, lane, head_dim):
    """Rows ``place`` of a head at ``base``: [rows, LANES]; zeros outside."""
    mask = (place < sequence)[:, None] & (lane < head_dim)[None, :]
    return tl.load(base + place.to(tl.int64)[:, None] * token_stride + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    qkv, starts, y, lse, sequence, kv_heads, group, head_dim, scale, window,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query head's block of ``M`` queries."""
    head = tl.program_id(1)
    batch, kv, place = head // (kv_heads * group), (head // group) % kv_heads, head % group
    token_stride = kv_heads * (group + 2) * head_dim
    row = qkv + batch.to(tl.int64) * sequence * token_stride + kv * (group + 2) * head_dim
    lane, query = tl.arange(0, LANES), tl.program_id(0) * M + tl.arange(0, M)
    q = _rows(row + place * head_dim, query, token_stride, sequence, lane, head_dim)
    start = tl.load(starts + batch.to(tl.int64) * sequence + query, mask=query < sequence, other=sequence)
    first, stop = tl.min(start, axis=0), tl.minimum((tl.program_id(0) + 1) * M, sequence)
    if WINDOW:
        first = tl.maximum(first, tl.program_id(0) * M - window + 1)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    out = tl.zeros([M, LANES], dtype=tl.float32)
    for block in range(first // N * N, stop, N):
        key = block + tl.arange(0, N)
        k = _rows(row + group * head_dim, key, token_stride, sequence, lane, head_dim)
        v = _rows(row + (group + 1) * head_dim, key, token_stride, sequence, lane, head_dim)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where(_seen(query, key, start, sequence, window, WINDOW), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf is no number
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, axis=1)
        out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    inside = query < sequence
    total = tl.where(inside, total, 1.0)
    target = y + ((batch.to(tl.int64) * sequence + query)[:, None] * kv_heads * group + kv * group + place) * head_dim
    tl.store(
        target + lane[None, :], (out / total[:, None]).to(y.dtype.element_ty), mask=inside[:, None] & (lane < head_dim)[None, :]
    )
    tl.store(lse + head.to(tl.int64) * sequence + query, tl.where(inside, top, 0.0) + tl.log2(total), mask=inside)


@triton.jit
def _dq_kernel(
    qkv, starts, dy, lse, delta, dqkv, sequence, kv_heads, group, head_dim, scale, window,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one query head's block of ``M`` queries."""
    head = tl.program_id(1)
    batch, kv, place = head // (kv_heads * group), (head // group) % kv_heads, head % group
    token_stride = kv_heads * (group + 2) * head_dim
    at = batch.to(tl.int64) * sequence * token_stride + kv * (group + 2) * head_dim
    row = qkv + at
    lane, query = tl.arange(0, LANES), tl.program_id(0) * M + tl.arange(0, M)
    inside = query < sequence
    q = _rows(row + place * head_dim, query, token_stride, sequence, lane, head_dim)
    wanted = dy + (batch.to(tl.int64) * sequence * kv_heads * group + kv * group + place) * head_dim
    d = _rows(wanted, query, kv_heads * group * head_dim, sequence, lane, head_dim)
    start = tl.load(starts + batch.to(tl.int64) * sequence + query, mask=inside, other=sequence)
    peak = tl.load(lse + head.to(tl.int64) * sequence + query, mask=inside, other=0.0)
    mean = tl.load(delta + head.to(tl.int64) * sequence + query, mask=inside, other=0.0)
    first, stop = tl.min(start, axis=0), tl.minimum((tl.program_id(0) + 1) * M, sequence)
    if WINDOW:
        first = tl.maximum(first, tl.program_id(0) * M - window + 1)
    dq = tl.zeros([M, LANES], dtype=tl.float32)
    for block in range(first // N * N, stop, N):
        key = block + tl.arange(0, N)
        k = _rows(row + group * head_dim, key, token_stride, sequence, lane, head_dim)
        v = _rows(row + (group + 1) * head_dim, key, token_stride, sequence, lane, head_dim)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
        seen = _seen(query, key, start, sequence, window, WINDOW)
        weight = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
        d_weight = tl.dot(d, tl.trans(v), input_precision=PRECISION)
        d_score = weight * (d_weight - mean[:, None])
        dq += tl.dot(d_score.to(k.dtype), k, input_precision=PRECISION)
    target = dqkv + at + place * head_dim + query.to(tl.int64)[:, None] * token_stride + lane[None, :]
    tl.store(target, (dq * scale).to(dqkv.dtype.element_ty), mask=inside[:, None] & (lane < head_dim)[None, :])


@triton.jit
def _dkv_kernel(
    qkv, starts, ends, dy, lse, delta, dqkv, sequence, kv_heads, group, head_dim, scale, window,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one KV head's block of ``N`` keys, summed over its query heads and their queries, in this order."""
    batch, kv = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    token_stride = kv_heads * (group + 2) * head_dim
    at = batch.to(tl.int64) * sequence * token_stride + kv * (group + 2) * head_dim
    row = qkv + at
    lane, key = tl.arange(0, LANES), tl.program_id(0) * N + tl.arange(0, N)
    k = _rows(row + group * head_dim, key, token_stride, sequence, lane, head_dim)
    v = _rows(row + (group + 1) * head_dim, key, token_stride, sequence, lane, head_dim)
    end = tl.load(ends + batch.to(tl.int64) * sequence + key, mask=key < sequence, other=0)
    stop = tl.max(end, axis=0)
    if WINDOW:
        stop = tl.minimum(stop, (tl.program_id(0) + 1) * N - 1 + window)
    dk, dv = tl.zeros([N, LANES], dtype=tl.float32), tl.zeros([N, LANES], dtype=tl.float32)
    for place in range(0, group):
        head = (batch * kv_heads + kv) * group + place
        wanted = dy + (batch.to(tl.int64) * sequence * kv_heads * group + kv * group + place) * head_dim
        for block in range(tl.program_id(0) * N // M * M, stop, M):
            query = block + tl.arange(0, M)
            inside = query < sequence
            q = _rows(row + place * head_dim, query, token_stride, sequence, lane, head_dim)
            d = _rows(wanted, query, kv_heads * group * head_dim, sequence, lane, head_dim)
            start = tl.load(starts + batch.to(tl.int64) * sequence + query, mask=inside, other=sequence)
            peak = tl.load(lse + head.to(tl.int64) * sequence + query, mask=inside, other=0.0)
            mean = tl.load(delta + head.to(tl.int64) * sequence + query, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
            seen = _seen(query, key, start, sequence, window, WINDOW)
            weight = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
            dv += tl.dot(tl.trans(weight.to(d.dtype)), d, input_precision=PRECISION)
            d_weight = tl.dot(d, tl.trans(v), input_precision=PRECISION)
            d_score = weight * (d_weight - mean[:, None])
            dk += tl.dot(tl.trans(d_score.to(q.dtype)), q, input_precision=PRECISION)
    target = dqkv + at + group * head_dim + key.to(tl.int64)[:, None] * token_stride + lane[None, :]
    mask = (key < sequence)[:, None] & (lane < head_dim)[None, :]
    tl.store(target, (dk * scale).to(dqkv.dtype.element_ty), mask=mask)
    tl.store(target + head_dim, dv.to(dqkv.dtype.element_ty), mask=mask)


class DocumentAttention:
    """Attention of rows with the documents of ``starts``, as :class:`~qeffect_lm.kernels.cudnn_attention.CudnnAttention` is of
    whole rows. It keeps nothing but ``starts``, which graphs read where it lies.

    Args:
        window: a token sees itself and so many tokens less one before it; None: all of its document before it.
    """

    def __init__(self, starts: torch.Tensor, window: int | None = None) -> None:
        self.starts, self.window = starts, window

    def takes(self, qkv: torch.Tensor) -> bool:
        """Whether the kernels compute this: any dtype of theirs, heads of up to 256."""
        return kernels.usable(qkv) and qkv.shape[-1] <= LARGEST_HEAD

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention with scale ``head_dim ** -0.5``.

        Returns:
            y as ``[batch, sequence, kv_heads, group, head_dim]``, and each query's float32 logarithm of the sum of
            exponentials, to the base 2, as ``[batch, kv_heads, group, sequence]``; both contiguous.
        """
        qkv = qkv.contiguous()
        batch, sequence, kv_heads, parts, head_dim = qkv.shape
        y = torch.empty(batch, sequence, kv_heads, parts - 2, head_dim, dtype=qkv.dtype, device=qkv.device)
        lse = torch.empty(batch, kv_heads, parts - 2, sequence, dtype=torch.float32, device=qkv.device)
        launched("document_attention", qkv, self.starts, y, lse)
        tile = _tile(qkv)
        grid = triton.cdiv(sequence, tile["M"]), batch * kv_heads * (parts - 2)
        _forward_kernel[grid](qkv, self.starts, y, lse, *self._sizes(qkv), **tile, WINDOW=self.window is not None)
        return y, lse

    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """d(qkv), the same bytes every time; ``y`` and ``lse`` are what :meth:`forward` gave, ``dy`` has y's shape."""
        qkv, dy = qkv.contiguous(), dy.contiguous()
        batch, sequence, kv_heads, parts, _ = qkv.shape
        delta = (dy.float() * y.float()).sum(-1).permute(0, 2, 3, 1).contiguous()
        ends = torch.searchsorted(self.starts, self.starts, right=True, out_int32=True)
        dqkv = torch.empty_like(qkv)
        launched("document_attention_backward", qkv, self.starts, ends, dy, lse, delta, dqkv)
        tile, window = _tile(qkv, backward=True), self.window is not None
        rest = lse, delta, dqkv, *self._sizes(qkv)
        grid = triton.cdiv(sequence, tile["M"]), batch * kv_heads * (parts - 2)
        _dq_kernel[grid](qkv, self.starts, dy, *rest, **tile, WINDOW=window)
        grid = triton.cdiv(sequence, tile["N"]), batch * kv_heads
        _dkv_kernel[grid](qkv, self.starts, ends, dy, *rest, **tile, WINDOW=window)
        return dqkv

    def _sizes(self, qkv: torch.Tensor) -> tuple[int, int, int, int, float, int]:
        _, sequence, kv_heads, parts, head_dim = qkv.shape
        return sequence, kv_heads, parts - 2, head_dim, head_dim**-0.5, self.window or 0


def _tile(qkv: torch.Tensor, backward: bool = False) -> dict[str, Any]:
    """Blocks that fit a Hopper SM's shared memory and registers; fixed by dtype and head, so nothing is chosen by timing."""
    lanes = max(16, triton.next_power_of_2(qkv.shape[-1]))
    wide = qkv.dtype not in (torch.bfloat16, torch.float16)
    large = lanes > 128 or wide
    m, n = (32, 32) if large and backward else (64, 32) if large else (64, 64) if backward else (128, 64)
    return {
        "M": m,
        "N": n,
        "LANES": lanes,
        "PRECISION": "ieee",
        "num_warps": 4 if m * lanes < 64 * 128 else 8,
        "num_stages": 1 if large else 2,
    }
