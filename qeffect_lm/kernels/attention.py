"""The way back through causal attention with grouped queries, the same bytes at every run.

Two passes, as FlashAttention-2 (Dao 2023) arranges them, but apart: one program per block of queries sums its dq over the keys,
one per block of keys sums dk and dv over the queries that see it (of all heads of its group). Every sum has one owner and one
order, so there are no atomics and no float32 buffer of dq. The price is that the probabilities are made twice: 7 products of
blocks instead of 5. Blocks with the most work start first.

``qkv`` is the fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]`` (per KV head its query heads, then k, then
v), and the gradient has its layout.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched, tables

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _dq_over_keys(
    dq, q, dy, peak, delta, k, v, stride, rows, lanes, first, last, sequence, exponent,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, with the part of the keys from ``first`` to before ``last``."""
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        at = key.to(tl.int64)[:, None] * stride + lanes[None, :]
        inside = (key < sequence)[:, None]
        keys = tl.load(k + at, mask=inside, other=0.0) if MASKED else tl.load(k + at)
        values = tl.load(v + at, mask=inside, other=0.0) if MASKED else tl.load(v + at)
        p = tl.exp2(tl.dot(q, tl.trans(keys)) * exponent - peak[:, None])
        if MASKED:
            p = tl.where(rows[:, None] >= key[None, :], p, 0.0)
        ds = p * (tl.dot(dy, tl.trans(values)) - delta[:, None])
        dq = tl.dot(ds.to(keys.dtype), keys, dq)
    return dq


@triton.jit
def _attention_dq_kernel(
    qkv, y, dy, lse, delta, dqkv, sequence, heads, kv_heads, scale, exponent,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: ``delta`` (what the softmax subtracts, for the other pass too) and dq."""
    head = tl.program_id(0) % heads
    block = tl.cdiv(sequence, BLOCK_M) - 1 - tl.program_id(0) // heads
    batch, h = head // (kv_heads * GROUP), head % (kv_heads * GROUP)
    kv, place = h // GROUP, h % GROUP
    stride = kv_heads * (GROUP + 2) * HEAD
    start = batch.to(tl.int64) * sequence * stride + kv * (GROUP + 2) * HEAD
    rows, lanes = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, HEAD)
    valid = rows < sequence
    at = start + place * HEAD + rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    at_y = ((batch.to(tl.int64) * sequence + rows) * (kv_heads * GROUP) + h)[:, None] * HEAD + lanes[None, :]
    q = tl.load(qkv + at, mask=valid[:, None], other=0.0)
    grad = tl.load(dy + at_y, mask=valid[:, None], other=0.0)
    result = tl.load(y + at_y, mask=valid[:, None], other=0.0)
    subtracted = tl.sum(grad.to(tl.float32) * result.to(tl.float32), axis=1)
    of_row = head.to(tl.int64) * sequence + rows
    tl.store(delta + of_row, subtracted, mask=valid)
    peak = tl.load(lse + of_row, mask=valid, other=0.0) * _LOG2_E
    k, v = qkv + start + GROUP * HEAD, qkv + start + (GROUP + 1) * HEAD
    dq = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    diagonal = block * BLOCK_M
    dq = _dq_over_keys(
        dq, q, grad, peak, subtracted, k, v, stride, rows, lanes, 0, diagonal, sequence, exponent, False, BLOCK_N
    )
    last = min(diagonal + BLOCK_M, sequence)
    dq = _dq_over_keys(
        dq, q, grad, peak, subtracted, k, v, stride, rows, lanes, diagonal, last, sequence, exponent, True, BLOCK_N
    )
    tl.store(dqkv + at, (dq * scale).to(dqkv.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _dk_dv_over_queries(
    dk, dv, keys, values, q, dy, lse, delta, stride, stride_y, key, lanes, first, last, sequence, exponent,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, with the part of one head's queries from ``first`` to before ``last``."""
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        valid = rows < sequence
        wide = rows.to(tl.int64)[:, None]
        queries = tl.load(q + wide * stride + lanes[None, :], mask=valid[:, None], other=0.0)
        grad = tl.load(dy + wide * stride_y + lanes[None, :], mask=valid[:, None], other=0.0)
        peak = tl.load(lse + rows, mask=valid, other=0.0) * _LOG2_E  # beyond the sequence the gradient is zero, and adds so
        subtracted = tl.load(delta + rows, mask=valid, other=0.0)
        p = tl.exp2(tl.dot(keys, tl.trans(queries)) * exponent - peak[None, :])
        if MASKED:
            p = tl.where(rows[None, :] >= key[:, None], p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = p * (tl.dot(values, tl.trans(grad)) - subtracted[None, :])
        dk = tl.dot(ds.to(queries.dtype), queries, dk)
    return dk, dv


@triton.jit
def _attention_dk_dv_kernel(
    qkv, dy, lse, delta, dqkv, sequence, kv_heads_of_all, kv_heads, scale, exponent,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of keys of one KV head: dk and dv, over the queries of its group, head after head."""
    which, block = tl.program_id(0) % kv_heads_of_all, tl.program_id(0) // kv_heads_of_all
    batch, kv = which // kv_heads, which % kv_heads
    stride, stride_y = kv_heads * (GROUP + 2) * HEAD, kv_heads * GROUP * HEAD
    start = batch.to(tl.int64) * sequence * stride + kv * (GROUP + 2) * HEAD
    start_y = batch.to(tl.int64) * sequence * stride_y + kv * GROUP * HEAD
    key, lanes = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, HEAD)
    inside = (key < sequence)[:, None]
    at = start + GROUP * HEAD + key.to(tl.int64)[:, None] * stride + lanes[None, :]
    keys = tl.load(qkv + at, mask=inside, other=0.0)
    values = tl.load(qkv + at + HEAD, mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD], dtype=tl.float32)
    diagonal = block * BLOCK_N
    below = min(diagonal + BLOCK_N, sequence)
    for place in range(GROUP):
        q, grad = qkv + start + place * HEAD, dy + start_y + place * HEAD
        row = (which * GROUP + place).to(tl.int64) * sequence
        dk, dv = _dk_dv_over_queries(
            dk, dv, keys, values, q, grad, lse + row, delta + row, stride, stride_y, key, lanes,
            diagonal, below, sequence, exponent, True, BLOCK_M,
        )  # fmt: skip
        dk, dv = _dk_dv_over_queries(
            dk, dv, keys, values, q, grad, lse + row, delta + row, stride, stride_y, key, lanes,
            diagonal + BLOCK_N, sequence, sequence, exponent, False, BLOCK_M,
        )  # fmt: skip
    tl.store(dqkv + at, (dk * scale).to(dqkv.dtype.element_ty), mask=inside)
    tl.store(dqkv + at + HEAD, dv.to(dqkv.dtype.element_ty), mask=inside)


def takes(qkv: torch.Tensor) -> bool:
    """Whether the kernels compute this: 16-bit, a head size that is a power of two from 16 to 128."""
    head_dim = qkv.shape[-1]
    return qkv.dtype in (torch.bfloat16, torch.float16) and 16 <= head_dim <= 128 and not head_dim & (head_dim - 1)


def backward(qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """d(qkv) of causal attention with scale ``head_dim ** -0.5``, in the layout of ``qkv``.

    Args:
        qkv: ``[batch, sequence, kv_heads, group + 2, head_dim]``, contiguous.
        y, dy: the result and its gradient, ``[batch, sequence, kv_heads, group, head_dim]``.
        lse: float32 logarithm of each query's sum of exponentials, natural, ``[batch, kv_heads, group, sequence]``.
    """
    batch, sequence, kv_heads, parts, head_dim = qkv.shape
    group = parts - 2
    y, lse, dy = y.contiguous(), lse.contiguous(), dy.contiguous()
    delta, dqkv = torch.empty_like(lse), torch.empty_like(qkv)
    scale = head_dim**-0.5
    factors = scale, scale * math.log2(math.e)
    launched("attention_backward", qkv, y, lse, dy, delta, dqkv)
    queries, keys = tables.attention("dq", sequence, head_dim), tables.attention("dk_dv", sequence, head_dim)
    heads = batch * kv_heads * group
    _attention_dq_kernel[(triton.cdiv(sequence, queries.m) * heads,)](
        qkv, y, dy, lse, delta, dqkv, sequence, heads, kv_heads, *factors,
        GROUP=group, HEAD=head_dim, **queries.switches(),
    )  # fmt: skip
    _attention_dk_dv_kernel[(triton.cdiv(sequence, keys.n) * batch * kv_heads,)](
        qkv, dy, lse, delta, dqkv, sequence, batch * kv_heads, kv_heads, *factors,
        GROUP=group, HEAD=head_dim, **keys.switches(),
    )  # fmt: skip
    return dqkv
