"""What a router makes of its logits (:mod:`qeffect_lm.layers.router`), and the way back to their gradient.

A program takes whole rows, so a token's numbers do not depend on where it lies. A row's sums have one order, and so have those
over tokens, which the number of tokens alone cuts into runs; there are no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched

_WARPS, _RUNS = 4, 128  # of a program; the most that sums over tokens are cut into
_TAKEN = tl.constexpr(-(2**31))  # ranks below all numbers
_NAN = tl.constexpr(2**31 - 1)  # above all numbers
_ANYWHERE = ["mask", "divisor", "statistics", "told"]  # where they lie changes no kernel


@triton.jit
def _rows(logits, token, tokens, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr):
    """``[tokens here, COLUMNS]``: -inf behind the experts, zeros of tokens that are not there."""
    column = tl.arange(0, COLUMNS)[None, :]
    at = token.to(tl.int64)[:, None] * EXPERTS + column
    x = tl.load(logits + at, mask=(token < tokens)[:, None] & (column < EXPERTS), other=0.0)
    return tl.where(column < EXPERTS, x, float("-inf"))


@triton.jit
def _softmax(x):
    """Probabilities of rows, and logsumexp."""
    peak = tl.max(x, axis=1)
    powers = tl.exp(x - peak[:, None])
    total = tl.sum(powers, axis=1)
    return tl.div_rn(powers, total[:, None]), peak + tl.log(total)


@triton.jit
def _ranked(x):
    """Whole numbers in the order of ``x``, of which both zeros are equal and a NaN is the largest."""
    bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & _NAN))


@triton.jit
def _choose_kernel(
    logits, weights, numbers, tokens,
    K: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, COLUMNS)[None, :]
    x = _rows(logits, token, tokens, EXPERTS, COLUMNS)
    probabilities, _ = _softmax(x)
    order = _ranked(x)  # what is behind the experts comes after all of them: of equal ones the lowest number is taken
    place = tl.full((TILE, COLUMNS), K, tl.int32)
    for j in tl.static_range(K):
        largest = tl.max(order, axis=1)[:, None]
        mine = column == tl.min(tl.where(order == largest, column, COLUMNS), axis=1)[:, None]
        place, order = tl.where(mine, j, place), tl.where(mine, _TAKEN, order)
    chosen = place < K
    if NORMALISE:
        probabilities = tl.div_rn(probabilities, tl.sum(tl.where(chosen, probabilities, 0.0), axis=1)[:, None])
    at, mask = token.to(tl.int64)[:, None] * K + place, chosen & (token < tokens)[:, None]
    tl.store(weights + at, probabilities, mask=mask)
    tl.store(numbers + at, tl.broadcast_to(column, (TILE, COLUMNS)).to(tl.int64), mask=mask)


@triton.jit
def _part_of(mask, divisor, token, tokens, MASKED: tl.constexpr):
    """Whether tokens are valid, as numbers, and their part of a mean over the step."""
    inside = token < tokens
    valid = inside.to(tl.float32)
    if MASKED:
        valid = tl.load(mask + token, mask=inside, other=0.0)
    return valid, tl.div_rn(valid, tl.load(divisor).to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _sums_kernel(
    logits, numbers, mask, divisor, sums, tokens, steps,
    MASKED: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    run, column = tl.program_id(0), tl.arange(0, COLUMNS)
    counts, mean = tl.zeros((TILE, COLUMNS), tl.float32), tl.zeros((TILE, COLUMNS), tl.float32)
    valid_tokens, squares = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for begin in range(run * steps * TILE, (run + 1) * steps * TILE, TILE):
        token = begin + tl.arange(0, TILE)
        valid, part = _part_of(mask, divisor, token, tokens, MASKED)
        probabilities, size = _softmax(_rows(logits, token, tokens, EXPERTS, COLUMNS))
        for j in tl.static_range(K):
            number = tl.load(numbers + token.to(tl.int64) * K + j, mask=token < tokens, other=0).to(tl.int32)
            counts += tl.where(number[:, None] == column[None, :], valid[:, None], 0.0)
        mean += probabilities * part[:, None]
        squares += size * size * part
        valid_tokens += valid
    out, inside = sums + run * (2 + 2 * EXPERTS), column < EXPERTS
    tl.store(out, tl.sum(valid_tokens))
    tl.store(out + 1 + column, tl.sum(counts, axis=0), mask=inside)
    tl.store(out + 1 + EXPERTS + column, tl.sum(mean, axis=0), mask=inside)
    tl.store(out + 1 + 2 * EXPERTS, tl.sum(squares))


@triton.jit
def _record(statistics, sums, share, column, EXPERTS: tl.constexpr, ADDS: tl.constexpr):
    """Both losses and the valid tokens of each expert, over what is there or added to it."""
    inside = column < EXPERTS
    counts = tl.load(sums + 1 + column, mask=inside, other=0.0).to(tl.float64)
    mean = tl.load(sums + 1 + EXPERTS + column, mask=inside, other=0.0)
    balance = (EXPERTS * tl.sum(share * mean)).to(tl.float64)
    z = tl.load(sums + 1 + 2 * EXPERTS).to(tl.float64)
    if ADDS:
        balance += tl.load(statistics)
        z += tl.load(statistics + 1)
        counts += tl.load(statistics + 2 + column, mask=inside, other=0.0)
    tl.store(statistics, balance)
    tl.store(statistics + 1, z)
    tl.store(statistics + 2 + column, counts, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _backward_kernel(
    logits, numbers, d_weights, mask, divisor, sums, told, statistics, d_logits, tokens, balance, z,
    NORMALISE: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, RECORD: tl.constexpr, ADDS: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, COLUMNS)
    inside = token < tokens
    probabilities, size = _softmax(_rows(logits, token, tokens, EXPERTS, COLUMNS))
    chosen, grads = tl.zeros((TILE, COLUMNS), tl.int1), tl.zeros((TILE, COLUMNS), tl.float32)
    for j in tl.static_range(K):
        at = token.to(tl.int64) * K + j
        mine = tl.load(numbers + at, mask=inside, other=0).to(tl.int32)[:, None] == column[None, :]
        grads = tl.where(mine, tl.load(d_weights + at, mask=inside, other=0.0)[:, None], grads)
        chosen = chosen | mine
    if NORMALISE:
        best = tl.where(chosen, probabilities, 0.0)
        total = tl.sum(best, axis=1)
        shift = tl.div_rn(tl.sum(grads * best, axis=1), total)
        grads = tl.where(chosen, tl.div_rn(grads - shift[:, None], total[:, None]), 0.0)
    if LOSSES:
        _, part = _part_of(mask, divisor, token, tokens, MASKED)
        everywhere = tl.load(told + 1 + column, mask=column < EXPERTS, other=0.0)
        share = tl.div_rn(everywhere, tl.maximum(tl.load(told), 1.0))
        grads += balance * share[None, :] * part[:, None]
        if RECORD:
            if tl.program_id(0) == 0:
                _record(statistics, sums, share, column, EXPERTS, ADDS)
    made = probabilities * (grads - tl.sum(grads * probabilities, axis=1)[:, None])
    if LOSSES:
        made += (z * size * part)[:, None] * probabilities
    at = token.to(tl.int64)[:, None] * EXPERTS + column[None, :]
    tl.store(d_logits + at, made, mask=inside[:, None] & (column < EXPERTS)[None, :])


@dataclass(frozen=True)
class Losses:
    """Of both losses, what the gradient of logits takes.

    Attributes:
        mask: float32 ``[tokens]``, 0 where a token does not count; None: all do.
        divisor: 0-dim, the step's number of valid tokens.
        sums: what :func:`sums` gave.
        told: its first ``1 + experts``, over all ranks that have parts of the microbatch's tokens.
        balance, z: what the balance loss's gradient of a probability is multiplied with, and the z-loss's of logsumexp.
        statistics: float64 ``[2 + experts]``; None: nobody asks.
        adds: they are added to what is there.
    """

    mask: torch.Tensor | None
    divisor: torch.Tensor
    sums: torch.Tensor
    told: torch.Tensor
    balance: float
    z: float
    statistics: torch.Tensor | None
    adds: bool


def _cut(experts: int) -> dict[str, Any]:
    columns = max(triton.next_power_of_2(experts), 4)
    return {"EXPERTS": experts, "TILE": max(512 // columns, 4), "COLUMNS": columns, "num_warps": _WARPS}


def choose(logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 ``logits`` ``[tokens, experts]`` → the probabilities of each token's ``top_k`` largest, ``normalise``: divided by
    their sum, float32 ``[tokens, top_k]``, and their numbers, int64; of equal ones the lowest first, a NaN before all numbers
    (the weights of its token are NaN)."""
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    cut = _cut(experts)
    weights = torch.empty(tokens, top_k, device=logits.device)
    numbers = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    launched("router", logits, weights, numbers, normalise)
    _choose_kernel[(triton.cdiv(tokens, cut["TILE"]),)](logits, weights, numbers, tokens, K=top_k, NORMALISE=normalise, **cut)
    return weights, numbers


def sums(logits: torch.Tensor, numbers: torch.Tensor, mask: torch.Tensor | None, divisor: torch.Tensor) -> torch.Tensor:
    """Over a microbatch's valid tokens, float32 ``[2 + 2 experts]``: how many there are, and how many each expert got; parts of
    means over the step, of each expert's probability and of logsumexp squared."""
    logits, (tokens, experts) = logits.contiguous(), logits.shape
    cut = _cut(experts)
    steps = triton.cdiv(tokens, cut["TILE"] * _RUNS)
    runs = triton.cdiv(tokens, cut["TILE"] * steps)
    made = torch.empty(runs, 2 + 2 * experts, device=logits.device)
    launched("router_sums", logits, numbers, mask, divisor, made)
    _sums_kernel[(runs,)](
        logits, numbers, divisor if mask is None else mask, divisor, made, tokens, steps,
        MASKED=mask is not None, K=numbers.shape[1], **cut,
    )  # fmt: skip
    return made.sum(dim=0)


def backward(
    logits: torch.Tensor, numbers: torch.Tensor, d_weights: torch.Tensor, losses: Losses | None, *, normalise: bool
) -> torch.Tensor:
    """The gradient ``d_weights`` of :func:`choose`'s weights, and both losses' → that of ``logits``, float32 ``[tokens,
    experts]``; the losses' values into their statistics."""
    logits, d_weights = logits.contiguous(), d_weights.contiguous()
    tokens, cut = logits.shape[0], _cut(logits.shape[1])
    made, none = torch.empty_like(logits), d_weights
    said = Losses(None, none, none, none, 0.0, 0.0, None, False) if losses is None else losses
    statistics = said.statistics
    launched(
        "router_backward", logits, numbers, d_weights, said.mask, said.divisor, said.sums, said.told, statistics, made,
        normalise, losses is None, said.balance, said.z, said.adds,
    )  # fmt: skip
    _backward_kernel[(triton.cdiv(tokens, cut["TILE"]),)](
        logits, numbers, d_weights, none if said.mask is None else said.mask, said.divisor, said.sums, said.told,
        none if statistics is None else statistics, made, tokens, said.balance, said.z,
        NORMALISE=normalise, LOSSES=losses is not None, MASKED=said.mask is not None, RECORD=statistics is not None,
        ADDS=said.adds, K=numbers.shape[1], **cut,
    )  # fmt: skip
    return made
