"""Scaled FP8 products, reference arithmetic: the exact dequantised product.

An FP8 value is exact in float32, so each operand is dequantised with one rounding (times its inverse scale) and the product
is a float32 GEMM with float32 accumulation. Against float64 this stays within the usual bound of a length-k float32 sum,
``(k + 2) * 2**-24 * sum |a||b|``. (``torch._scaled_mm`` on CPU computes the same values, five times slower.)

Operand layouts are those of the hardware: both contiguous along the summed dimension.
"""

from __future__ import annotations

import torch

from qeffect_lm.fp8.quantise import dequantise


def scaled_mm(
    a: torch.Tensor, a_scale_inv: torch.Tensor, b: torch.Tensor, b_scale_inv: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """``(a * a_scale_inv) @ (b * b_scale_inv).T``; FP8 ``a`` ``[m, k]``, ``b`` ``[n, k]`` → ``[m, n]`` in ``out_dtype``."""
    product = torch.mm(dequantise(a, a_scale_inv), dequantise(b, b_scale_inv).t())
    return product if out_dtype is torch.float32 else product.to(out_dtype)


def accumulate_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int) -> None:
    """``out = beta * out + a @ b.T`` straight into ``out`` (a main-gradient view), no temporary and no zero-fill.

    ``beta`` is 0 (what ``out`` held, NaN included, is gone) or 1. ``a`` ``[m, k]``, ``b`` ``[n, k]``, ``out`` ``[m, n]``,
    all of one dtype.
    """
    if beta == 0:
        torch.mm(a, b.t(), out=out)
    else:
        out.addmm_(a, b.t())


def accumulate_scaled_mm(
    out: torch.Tensor,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    beta: int,
) -> None:
    """As :func:`accumulate_mm`, for FP8 operands; the product is made in ``out``'s dtype, float32 or float64."""
    wide_a, wide_b = dequantise(a, a_scale_inv).to(out.dtype), dequantise(b, b_scale_inv).to(out.dtype)
    accumulate_mm(out, wide_a, wide_b, beta)
