"""Causal attention of grouped queries among the tokens of one document, several documents to a row (Triton).

The tiling is FlashAttention-2's (Dao 2023): a block of queries passes over the keys with a running maximum and sum; the
backward has one kernel for dq and one for dk and dv, each result summed by one program in a fixed order, so it repeats bit for
bit. Blocks of keys before the first document of a block of queries, and of queries after the last document of a block of keys,
are left out: the time is that of the documents, not of the row.

The queries may be fewer than the keys: two runs of a row's places, one after the other (:class:`Queries`), as a rank of context
parallelism has them (:mod:`qeffect_lm.parallel.context`). The keys begin with the row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from qeffect_lm import kernels
from qeffect_lm.kernels import launched

LARGEST_HEAD = 256
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _seen(place, key, start, inside, window, WINDOW: tl.constexpr):
    """Which keys (across) the queries (down) see."""
    mask = (key[None, :] <= place[:, None]) & (key[None, :] >= start[:, None]) & inside[:, None]
    if WINDOW:
        mask = mask & (key[None, :] > place[:, None] - window)
    return mask


@triton.jit
def _place(query, half, low, high):
    """The place in its row of a query by number."""
    return query + tl.where(query < half, low, high)


@triton.jit
def _rows(base, row, stride, inside, lane, head_dim):
    """Rows of a head at ``base``: [rows, LANES]; zeros outside."""
    mask = inside[:, None] & (lane < head_dim)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * stride + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    q, k, v, starts, y, lse, queries, keys, half, low, high, kv_heads, group, head_dim, scale, window,
    q_batch, q_token, q_kv, k_batch, k_token, k_kv,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query head's block of ``M`` queries."""
    head = tl.program_id(1)
    batch, kv, part = (head // (kv_heads * group)).to(tl.int64), (head // group) % kv_heads, head % group
    at_k = batch * k_batch + kv * k_kv
    lane, query = tl.arange(0, LANES), tl.program_id(0) * M + tl.arange(0, M)
    inside = query < queries
    place = _place(query, half, low, high)
    mine = _rows(q + batch * q_batch + kv * q_kv + part * head_dim, query, q_token, inside, lane, head_dim)
    start = tl.load(starts + batch * queries + query, mask=inside, other=keys)
    first = tl.min(start, axis=0)
    stop = _place(tl.minimum((tl.program_id(0) + 1) * M, queries) - 1, half, low, high) + 1
    if WINDOW:
        first = tl.maximum(first, _place(tl.program_id(0) * M, half, low, high) - window + 1)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    out = tl.zeros([M, LANES], dtype=tl.float32)
    for block in range(first // N * N, stop, N):
        key = block + tl.arange(0, N)
        there_k = _rows(k + at_k, key, k_token, key < keys, lane, head_dim)
        there_v = _rows(v + at_k, key, k_token, key < keys, lane, head_dim)
        scores = tl.dot(mine, tl.trans(there_k), input_precision=PRECISION) * (scale * _LOG2_E)
        scores = tl.where(_seen(place, key, start, inside, window, WINDOW), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf is no number
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, axis=1)
        out = out * shrink[:, None] + tl.dot(weight.to(there_v.dtype), there_v, input_precision=PRECISION)
        top = higher
    total = tl.where(inside, total, 1.0)
    target = y + ((batch * queries + query)[:, None] * kv_heads * group + kv * group + part) * head_dim
    tl.store(
        target + lane[None, :], (out / total[:, None]).to(y.dtype.element_ty), mask=inside[:, None] & (lane < head_dim)[None, :]
    )
    tl.store(lse + head.to(tl.int64) * queries + query, tl.where(inside, top, 0.0) + tl.log2(total), mask=inside)


@triton.jit
def _dq_kernel(
    q, k, v, starts, dy, lse, delta, dq, queries, keys, half, low, high, kv_heads, group, head_dim, scale, window,
    q_batch, q_token, q_kv, k_batch, k_token, k_kv,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one query head's block of ``M`` queries."""
    head = tl.program_id(1)
    batch, kv, part = (head // (kv_heads * group)).to(tl.int64), (head // group) % kv_heads, head % group
    at_q, at_k = batch * q_batch + kv * q_kv + part * head_dim, batch * k_batch + kv * k_kv
    lane, query = tl.arange(0, LANES), tl.program_id(0) * M + tl.arange(0, M)
    inside = query < queries
    place = _place(query, half, low, high)
    mine = _rows(q + at_q, query, q_token, inside, lane, head_dim)
    wanted = dy + (batch * queries * kv_heads * group + kv * group + part) * head_dim
    d = _rows(wanted, query, kv_heads * group * head_dim, inside, lane, head_dim)
    start = tl.load(starts + batch * queries + query, mask=inside, other=keys)
    peak = tl.load(lse + head.to(tl.int64) * queries + query, mask=inside, other=0.0)
    mean = tl.load(delta + head.to(tl.int64) * queries + query, mask=inside, other=0.0)
    first = tl.min(start, axis=0)
    stop = _place(tl.minimum((tl.program_id(0) + 1) * M, queries) - 1, half, low, high) + 1
    if WINDOW:
        first = tl.maximum(first, _place(tl.program_id(0) * M, half, low, high) - window + 1)
    sums = tl.zeros([M, LANES], dtype=tl.float32)
    for block in range(first // N * N, stop, N):
        key = block + tl.arange(0, N)
        there_k = _rows(k + at_k, key, k_token, key < keys, lane, head_dim)
        there_v = _rows(v + at_k, key, k_token, key < keys, lane, head_dim)
        scores = tl.dot(mine, tl.trans(there_k), input_precision=PRECISION) * (scale * _LOG2_E)
        seen = _seen(place, key, start, inside, window, WINDOW)
        weight = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
        d_weight = tl.dot(d, tl.trans(there_v), input_precision=PRECISION)
        d_score = weight * (d_weight - mean[:, None])
        sums += tl.dot(d_score.to(there_k.dtype), there_k, input_precision=PRECISION)
    target = dq + at_q + query.to(tl.int64)[:, None] * q_token + lane[None, :]
    tl.store(target, (sums * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (lane < head_dim)[None, :])


@triton.jit
def _dkv_kernel(
    q, k, v, starts, ends, dy, lse, delta, dk, dv, queries, keys, half, low, high, kv_heads, group, head_dim, scale, window,
    q_batch, q_token, q_kv, k_batch, k_token, k_kv,
    M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one KV head's block of ``N`` keys, summed over its query heads and their queries, in this order."""
    batch, kv = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    at_q, at_k = batch * q_batch + kv * q_kv, batch * k_batch + kv * k_kv
    lane, key = tl.arange(0, LANES), tl.program_id(0) * N + tl.arange(0, N)
    mine_k = _rows(k + at_k, key, k_token, key < keys, lane, head_dim)
    mine_v = _rows(v + at_k, key, k_token, key < keys, lane, head_dim)
    # Queries from the block's first key on, by number; up to the last that one of its keys' documents has.
    block_start = tl.program_id(0) * N
    after = tl.where(block_start < low + half, tl.maximum(block_start - low, 0), tl.maximum(block_start - high, half))
    stop = tl.max(tl.load(ends + batch * keys + key, mask=key < keys, other=0), axis=0)
    if WINDOW:
        reach = (tl.program_id(0) + 1) * N - 1 + window  # no place from here on sees the block
        lower = tl.minimum(tl.maximum(reach - low, 0), half)
        stop = tl.minimum(stop, tl.where(reach > half + high, reach - high, lower))
    sums_k, sums_v = tl.zeros([N, LANES], dtype=tl.float32), tl.zeros([N, LANES], dtype=tl.float32)
    for part in range(0, group):
        head = (batch * kv_heads + kv) * group + part
        wanted = dy + (batch * queries * kv_heads * group + kv * group + part) * head_dim
        for block in range(after // M * M, stop, M):
            query = block + tl.arange(0, M)
            inside = query < queries
            place = _place(query, half, low, high)
            there = _rows(q + at_q + part * head_dim, query, q_token, inside, lane, head_dim)
            d = _rows(wanted, query, kv_heads * group * head_dim, inside, lane, head_dim)
            start = tl.load(starts + batch * queries + query, mask=inside, other=keys)
            peak = tl.load(lse + head * queries + query, mask=inside, other=0.0)
            mean = tl.load(delta + head * queries + query, mask=inside, other=0.0)
            scores = tl.dot(there, tl.trans(mine_k), input_precision=PRECISION) * (scale * _LOG2_E)
            seen = _seen(place, key, start, inside, window, WINDOW)
            weight = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
            sums_v += tl.dot(tl.trans(weight.to(d.dtype)), d, input_precision=PRECISION)
            d_weight = tl.dot(d, tl.trans(mine_v), input_precision=PRECISION)
            d_score = weight * (d_weight - mean[:, None])
            sums_k += tl.dot(tl.trans(d_score.to(there.dtype)), there, input_precision=PRECISION)
    target = at_k + key.to(tl.int64)[:, None] * k_token + lane[None, :]
    mask = (key < keys)[:, None] & (lane < head_dim)[None, :]
    tl.store(dk + target, (sums_k * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + target, sums_v.to(dv.dtype.element_ty), mask=mask)


class Queries(NamedTuple):
    """Which places of a row queries have: the first ``half`` of them ``low`` more than their numbers, the others ``high``."""

    half: int
    low: int = 0
    high: int = 0


def forward(
    q: torch.Tensor, kv: torch.Tensor, starts: torch.Tensor, queries: Queries, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with scale ``head_dim ** -0.5``.

    Args:
        q: ``[batch, queries, kv_heads, group, head_dim]``, its two last dimensions dense.
        kv: ``[batch, keys, kv_heads, 2, head_dim]``, k and v; the last dimension dense.
        starts: int32 ``[batch, queries]``, contiguous: the place where each query's document begins in its row, rising.
        queries: their places.
        window: a token sees itself and so many tokens less one before it; None: all of its document before it.

    Returns:
        y, of q's shape, and each query's float32 logarithm of the sum of exponentials, to the base 2, as ``[batch, kv_heads,
        group, queries]``; both contiguous.
    """
    batch, count, kv_heads, group, _ = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, kv_heads, group, count, dtype=torch.float32, device=q.device)
    launched("document_attention", q, kv, starts, y, lse)
    tile = _tile(q)
    grid = triton.cdiv(count, tile["M"]), batch * kv_heads * group
    k, v = kv.unbind(3)
    _forward_kernel[grid](q, k, v, starts, y, lse, *_sizes(q, k, queries, window), **tile, WINDOW=window is not None)
    return y, lse


def backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    starts: torch.Tensor,
    queries: Queries,
    window: int | None,
    y: torch.Tensor,
    lse: torch.Tensor,
    dy: torch.Tensor,
    dq: torch.Tensor,
    dkv: torch.Tensor,
) -> None:
    """Gradients into ``dq`` and ``dkv``, of the strides of ``q`` and ``kv``, the same bytes every time; ``y`` and ``lse`` are
    what :func:`forward` gave, ``dy`` has y's shape. ``dkv`` may be wider than ``kv``."""
    dy = dy.contiguous()
    batch, count, kv_heads, group, _ = q.shape
    keys = kv.shape[1]
    assert dq.stride() == q.stride() and dkv.stride() == kv.stride()
    delta = (dy.float() * y.float()).sum(-1).permute(0, 2, 3, 1).contiguous()
    places = torch.arange(keys, dtype=torch.int32, device=q.device).expand(batch, keys).contiguous()
    ends = torch.searchsorted(starts, places, right=True, out_int32=True)
    launched("document_attention_backward", q, kv, starts, ends, dy, lse, delta, dq, dkv)
    tile, sizes = _tile(q, backward=True), _sizes(q, kv.select(3, 0), queries, window)
    (k, v), (dk, dv) = kv.unbind(3), dkv.unbind(3)
    grid = triton.cdiv(count, tile["M"]), batch * kv_heads * group
    _dq_kernel[grid](q, k, v, starts, dy, lse, delta, dq, *sizes, **tile, WINDOW=window is not None)
    grid = triton.cdiv(keys, tile["N"]), batch * kv_heads
    _dkv_kernel[grid](q, k, v, starts, ends, dy, lse, delta, dk, dv, *sizes, **tile, WINDOW=window is not None)


def takes(q: torch.Tensor) -> bool:
    """Whether the kernels compute this: any dtype of theirs, heads of up to 256."""
    return kernels.usable(q) and q.shape[-1] <= LARGEST_HEAD


class DocumentAttention:
    """Attention of rows with the documents of ``starts``, as :class:`~qeffect_lm.kernels.cudnn_attention.CudnnAttention` is of
    whole rows. It keeps nothing but ``starts``, which graphs read where it lies.

    ``qkv`` is the fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]`` (per KV head its query heads, then k,
    then v), contiguous; ``starts`` int32 ``[batch, sequence]`` says where each token's document begins in its row.

    Args:
        window: a token sees itself and so many tokens less one before it; None: all of its document before it.
    """

    def __init__(self, starts: torch.Tensor, window: int | None = None) -> None:
        self.starts, self.window = starts, window

    def takes(self, qkv: torch.Tensor) -> bool:
        return takes(qkv)

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """y and the rows' statistics, as :func:`forward` gives them."""
        qkv = qkv.contiguous()
        return forward(qkv[:, :, :, :-2], qkv[:, :, :, -2:], self.starts, Queries(qkv.shape[1]), self.window)

    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """d(qkv), the same bytes every time; ``y`` and ``lse`` are what :meth:`forward` gave, ``dy`` has y's shape."""
        qkv = qkv.contiguous()
        dqkv = torch.empty_like(qkv)
        (q, kv), (dq, dkv) = ((part[:, :, :, :-2], part[:, :, :, -2:]) for part in (qkv, dqkv))
        backward(q, kv, self.starts, Queries(qkv.shape[1]), self.window, y, lse, dy, dq, dkv)
        return dqkv


def _sizes(q: torch.Tensor, k: torch.Tensor, queries: Queries, window: int | None) -> tuple[int | float, ...]:
    """The kernels' numbers, strides of q and of k at their end."""
    _, count, kv_heads, group, head_dim = q.shape
    return (
        *(count, k.shape[1], *queries, kv_heads, group, head_dim, head_dim**-0.5, window or 0),
        *(*q.stride()[:3], *k.stride()[:3]),
    )


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
