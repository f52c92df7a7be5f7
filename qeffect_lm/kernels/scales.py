"""The scales of groups (:func:`qeffect_lm.fp8.grouped.group_scales`): one launch for all groups of a linear, whatever their
number. It takes their amax, finds their roles in the timeline's tensors by number, and writes scales and inverses.

Each step is rounded as torch rounds it, so the bits are the reference's: 448 / amax is there a reciprocal times 448.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.fp8.grouped import Scales
from qeffect_lm.fp8.quantise import Format
from qeffect_lm.kernels import launched

GROUPS, ENTRIES, WARPS = 8, (16, 256), 4  # of a program: groups, and entries of their histories at a time (least, most)


@triton.jit
def _scale_of_amax(amax, LARGEST: tl.constexpr, MARGIN: tl.constexpr):
    """:func:`qeffect_lm.fp8.quantise.scale_of_amax`, with ``MARGIN`` as the power of two.

    A quotient, not a product with 1/2 to 1/8: the assembler makes one instruction (FMUL.D2 to D8) of two plain products, and
    what overflows between them, and is 1 therefore, does not in it.
    """
    scale = tl.div_rn(tl.div_rn(1.0, amax) * LARGEST, MARGIN)
    return tl.where((amax > 0) & (scale < float("inf")), scale, 1.0)


@triton.jit
def _has_amax(history, row, inside, length, TILE_G: tl.constexpr, TILE_H: tl.constexpr):
    """Whether the largest entry of each row is above zero, which with a NaN among them it is not."""
    found = tl.zeros((TILE_G, TILE_H), tl.int32)
    for begin in range(0, length, TILE_H):
        entry = begin + tl.arange(0, TILE_H)
        mask = inside[:, None] & (entry < length)[None, :]
        past = tl.load(history + row[:, None] * length + entry[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.where(past != past, 2, tl.where(past > 0, 1, 0)))
    return tl.max(found, axis=1) == 1


@triton.jit
def _scales_kernel(
    amax, role_rows, held, history, open_amax, scale, scale_inv, count, length,
    HELD: tl.constexpr, MERGE: tl.constexpr, LARGEST: tl.constexpr, MARGIN: tl.constexpr,
    TILE_G: tl.constexpr, TILE_H: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * TILE_G + tl.arange(0, TILE_G)
    inside = group < count
    here = tl.load(amax + group, mask=inside, other=1.0)
    made = _scale_of_amax(here, LARGEST, MARGIN)
    if HELD:
        row = tl.load(role_rows + group, mask=inside, other=0)
        seen = _has_amax(history, row, inside, length, TILE_G, TILE_H)
        made = tl.where(seen, tl.load(held + row, mask=inside, other=1.0), made)
        if MERGE:  # plainly: a role is one group's, and a direction's work is one stream's
            slot = tl.load(open_amax + row, mask=inside, other=0.0)
            stays = (slot >= here) | (slot != slot)  # not where amax is a NaN
            tl.store(open_amax + row, tl.where(stays, slot, here), mask=inside)
    tl.store(scale + group, made, mask=inside)
    tl.store(scale_inv + group, tl.div_rn(1.0, made), mask=inside)


def current(amax: torch.Tensor, fmt: Format, margin: int) -> Scales:
    """Of ``amax`` ``[groups]`` float32 alone."""
    return _launched(amax, fmt, margin, (amax,) * 4, held=False, merge=False)


def held(amax: torch.Tensor, fmt: Format, timeline: ScaleTimeline, role_rows: torch.Tensor, *, merge: bool) -> Scales:
    """The timeline's, where a role has had an amax; with ``merge`` ``amax`` goes into the open slots.

    Args:
        role_rows: ``[groups]`` int64, the row of each group's role in the timeline's tensors.
    """
    state = role_rows, timeline.scale, timeline.history, timeline.open_amax
    return _launched(amax, fmt, timeline.margin, state, held=True, merge=merge)


def _launched(
    amax: torch.Tensor, fmt: Format, margin: int, state: tuple[torch.Tensor, ...], *, held: bool, merge: bool
) -> Scales:
    """``state``: the roles' rows, and of the timeline scales, histories and open slots; not read unless ``held``."""
    amax = amax.contiguous()
    made = Scales(torch.empty_like(amax), torch.empty_like(amax))
    length = state[2].shape[1] if held else 1
    launched("group_scales", amax, *state, made.scale, made.scale_inv, fmt.name, margin, merge)
    _scales_kernel[(triton.cdiv(amax.shape[0], GROUPS),)](
        amax, *state, made.scale, made.scale_inv, amax.shape[0], length,
        HELD=held, MERGE=merge, LARGEST=fmt.max, MARGIN=2.0**margin,
        TILE_G=GROUPS, TILE_H=min(max(triton.next_power_of_2(length), ENTRIES[0]), ENTRIES[1]), num_warps=WARPS,
    )  # fmt: skip
    return made
