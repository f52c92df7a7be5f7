"""Quantise once: both layouts that the three GEMMs need, and the amax, in one function.

Formats are those of Micikevicius et al. 2022: E4M3 (largest value 448) for inputs and weights, E5M2 (57344) for output
gradients; together Transformer Engine's ``HYBRID``. Casts saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qeffect_lm import kernels


@dataclass(frozen=True)
class Format:
    """An FP8 storage format."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("E5M2", torch.float8_e5m2, 57344.0)


@dataclass(frozen=True)
class Quantised:
    """A matrix in FP8 with the inverse of the scale it was quantised with.

    ``rows`` is ``[m, k]`` as given, ``columns`` its transpose ``[k, m]``, both contiguous (the operands of an FP8 GEMM must
    be contiguous along the summed dimension); either may be absent. ``scale_inv`` is a 0-dim float32 *copy*: a later commit
    of the live scale does not change it.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    scale_inv: torch.Tensor


@dataclass(frozen=True)
class Place:
    """Storages to quantise into instead of new ones.

    ``columns`` ``[k, m]`` may be part of something wider: its rows have any distance, each is contiguous. ``scale_inv`` is
    0-dim float32.
    """

    columns: torch.Tensor
    scale_inv: torch.Tensor


def quantise(
    x: torch.Tensor,
    scale: torch.Tensor,
    fmt: Format,
    *,
    rows: bool = True,
    columns: bool = True,
    amax_out: torch.Tensor | None = None,
    rows_out: torch.Tensor | None = None,
    columns_out: torch.Tensor | None = None,
    scale_inv_out: torch.Tensor | None = None,
) -> Quantised:
    """Quantise ``x`` ``[m, k]`` (any float dtype) as ``saturate(x * scale)``.

    On a GPU one kernel reads ``x`` once and writes all of it; it equals what stands here bit for bit (of a NaN, up to its
    sign: GPUs make every NaN positive).

    Args:
        scale: 0-dim float32.
        rows, columns: which layouts to make.
        amax_out: 0-dim float32 slot that is max-merged with ``max |x|`` (a NaN wins and stays visible).
        rows_out, columns_out, scale_inv_out: storages to write into instead of new ones (a slot's); the rows of
            ``columns_out`` may lie apart, each contiguous.
    """
    if kernels.quantises(x):
        from qeffect_lm.kernels import quantise as kernel

        outputs = kernel.Outputs(
            x.shape,
            scale,
            fmt,
            rows=rows,
            columns=columns,
            amax_out=amax_out,
            rows_out=rows_out,
            columns_out=columns_out,
            scale_inv_out=scale_inv_out,
        )
        return kernel.quantise(x, outputs)
    wide = x.float()
    if amax_out is not None:
        torch.maximum(amax_out, wide.abs().amax(), out=amax_out)
    q = (wide * scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    made = transposed(q, columns_out) if columns else None
    return Quantised(_placed(q if rows else None, rows_out), made, _scale_inv(scale, scale_inv_out))


def transposed(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The columns ``[k, m]`` of FP8 ``rows`` ``[m, k]``: the same bytes; into ``out``, whose rows may lie apart, where it is
    given."""
    if kernels.usable(rows):
        from qeffect_lm.kernels import transpose as kernel

        columns = rows.new_empty(rows.shape[1], rows.shape[0]) if out is None else out
        if kernel.takes(rows, columns):
            kernel.transpose(rows, columns)
            return columns
    turned = rows.view(torch.uint8).t()
    if out is None:
        return turned.contiguous().view(rows.dtype)
    out.view(torch.uint8).copy_(turned)
    return out


def _placed(made: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor | None:
    if made is None or out is None:
        return made
    out.view(torch.uint8).copy_(made.view(torch.uint8))
    return out


def _scale_inv(scale: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return scale.reciprocal() if out is None else torch.reciprocal(scale, out=out)


def current_scale(x: torch.Tensor, fmt: Format, margin: int = 0) -> torch.Tensor:
    """The scale that puts ``max |x|`` at the format's edge (0-dim float32).

    1 where the amax is 0, too small to invert, or NaN (a NaN stays a NaN in FP8). 0 where the amax is infinite: the
    whole tensor then dequantises to NaN, since no amax slot would tell of an infinity that the cast saturated.
    """
    return scale_of_amax(x.abs().amax().float(), fmt, margin)


def scale_of_amax(amax: torch.Tensor, fmt: Format, margin: int = 0) -> torch.Tensor:
    """The same of ``max |x|`` itself, float32 of any shape; 1 for EMPTY, too."""
    scale = fmt.max / amax / 2.0**margin
    return torch.where(torch.isfinite(scale) & (amax > 0), scale, torch.ones_like(scale))


def underflow(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """``[2]`` int64: how many of the non-zero values of ``x`` :func:`quantise` makes zero (those up to half of the format's
    smallest number, which round to even), and how many non-zero ones there are."""
    smallest = torch.finfo(fmt.dtype).tiny * torch.finfo(fmt.dtype).eps
    nonzero = x != 0
    lost = nonzero & (x.abs().float() * scale <= smallest / 2)
    return torch.stack([lost.sum(), nonzero.sum()])


def dequantise(q: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Float32 values of an FP8 tensor: exact up to the one rounding of the product with ``scale_inv``."""
    return q.float().mul_(scale_inv)
