"""Where tokens' rows go (:mod:`qeffect_lm.layers.moe`): rows sorted by group, which is a counting sort, stable.

A row's place is how many rows smaller groups have, and how many rows of its own group come before it. Programs take blocks of
rows. Few rows are counted by every program itself, in one launch; of many each block's are counted first, in a launch of its
own, so that no program walks over all of them. All numbers are whole and have one order: there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.kernels import launched

_WARPS = 8
_ALONE = 2**16  # rows times groups up to which one launch does
_BLOCKS = 128  # of many rows: about as many as an H200 has multiprocessors


# ---- sort by group ---------------------------------------------------------------------------------------------


@triton.jit
def _hits(numbers, row, rows, GROUPS: tl.constexpr):
    """``[rows here, GROUPS]`` int32, 1 where a row is of a group; of rows that are not there all zeros."""
    number = tl.load(numbers + row, mask=row < rows, other=GROUPS).to(tl.int32)
    return (number[:, None] == tl.arange(0, GROUPS)[None, :]).to(tl.int32)


@triton.jit
def _counts_kernel(numbers, counts, rows, length, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Of each block of ``length`` rows, how many are of each group."""
    first = tl.program_id(0) * length
    found = tl.zeros((GROUPS,), tl.int32)
    for begin in range(first, first + length, STEP):
        found += tl.sum(_hits(numbers, begin + tl.arange(0, STEP), rows, GROUPS), axis=0)
    tl.store(counts + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), found)


@triton.jit
def _places_kernel(
    numbers, counts, offsets, of_row, order, inverse, rows, length, count, blocks,
    ALONE: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    group, first = tl.arange(0, GROUPS), block * length
    every = tl.zeros((GROUPS,), tl.int32)
    before = tl.zeros((GROUPS,), tl.int32)
    for begin in range(0, rows if ALONE else blocks, SPAN):
        at = begin + tl.arange(0, SPAN)
        if ALONE:
            found, earlier = _hits(numbers, at, rows, GROUPS), at < first
        else:
            where = counts + at[:, None] * GROUPS + group[None, :]
            found, earlier = tl.load(where, mask=(at < blocks)[:, None], other=0), at < block
        every += tl.sum(found, axis=0)
        before += tl.sum(tl.where(earlier[:, None], found, 0), axis=0)
    starts = tl.cumsum(every, 0) - every
    if block == 0:
        tl.store(offsets + group, starts, mask=group < count)
        tl.store(offsets + count, rows)
    free = starts + before  # the place of each group's next row
    for begin in range(first, first + length, STEP):
        row = begin + tl.arange(0, STEP)
        hits = _hits(numbers, row, rows, GROUPS)
        place = tl.sum(hits * (free[None, :] + tl.cumsum(hits, 0) - 1), axis=1)
        inside = row < rows
        tl.store(inverse + row, place.to(tl.int64), mask=inside)
        tl.store(order + place, row.to(tl.int64), mask=inside)
        tl.store(of_row + place, tl.sum(hits * group[None, :], axis=1).to(tl.int64), mask=inside)
        free += tl.sum(hits, axis=0)


def by_group(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort int64 ``numbers`` ``[rows]``, each below ``count``, stably → where each number begins, int32 ``[count + 1]``; the
    sorted numbers, the row that each was, and the inverse of that, int64 ``[rows]``."""
    numbers = numbers.contiguous()
    rows, groups = numbers.shape[0], max(triton.next_power_of_2(count), 4)
    alone = rows * groups <= _ALONE
    step, span = min(2**13 // groups, 256), min(2**14 // groups, 2048 if alone else 128)
    length = step if alone else step * triton.cdiv(rows, step * _BLOCKS)
    blocks = max(triton.cdiv(rows, length), 1)  # of no rows too the offsets are written
    counts = numbers if alone else torch.empty(blocks, groups, dtype=torch.int32, device=numbers.device)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=numbers.device)
    of_row, order, inverse = (torch.empty_like(numbers) for _ in range(3))
    launched("by_group", numbers, counts, offsets, of_row, order, inverse)
    cut = {"GROUPS": groups, "STEP": step, "num_warps": _WARPS}
    if not alone:
        _counts_kernel[(blocks,)](numbers, counts, rows, length, **cut)
    _places_kernel[(blocks,)](
        numbers, counts, offsets, of_row, order, inverse, rows, length, count, blocks, ALONE=alone, SPAN=span, **cut
    )
    return offsets, of_row, order, inverse
