"""Scaled FP8 products: the exact dequantised product on CPU, cuBLASLt on a GPU.

An FP8 value is exact in float32, so each operand is dequantised with one rounding (times its inverse scale) and the product
is a float32 GEMM with float32 accumulation. Against float64 this stays within the usual bound of a length-k float32 sum,
``(k + 2) * 2**-24 * sum |a||b|``. (``torch._scaled_mm`` on CPU computes the same values, five times slower.)

On a GPU the tensor cores multiply FP8 directly (:class:`qeffect_lm.kernels.cublaslt.CublasLt`). Hopper keeps about 14 bits of a
running FP8 sum and, unless fast accumulation is on, moves it to float32 registers at short intervals. F takes fast
accumulation, I and W do not, as in Transformer Engine.

Operand layouts are those of the hardware: both contiguous along the summed dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qeffect_lm import kernels
from qeffect_lm.fp8.quantise import dequantise

if TYPE_CHECKING:
    from qeffect_lm.kernels.cublaslt import CublasLt

GPU_DTYPES = (torch.bfloat16, torch.float16)  # beside FP8, what cuBLASLt accumulates in place


def scaled_mm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    library: CublasLt | None = None,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``(a * a_scale_inv) @ (b * b_scale_inv).T``; FP8 ``a`` ``[m, k]``, ``b`` ``[n, k]`` → ``[m, n]`` in ``out_dtype``.

    ``residual`` ``[m, n]`` in ``out_dtype`` is added by the product itself, which then is not written out first. ``library``:
    the device's products, for tensors on a GPU; ``fast_accumulation`` matters there only.
    """
    if kernels.on_gpu(a):
        out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
        _bound(library).matmul(
            out, a, b, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv, residual=residual, fast_accumulation=fast_accumulation
        )
        return out
    product = torch.mm(dequantise(a, a_scale_inv), dequantise(b, b_scale_inv).t())
    if residual is not None:
        product.add_(residual)
    return product if out_dtype is torch.float32 else product.to(out_dtype)


def mm(a: torch.Tensor, b: torch.Tensor, *, library: CublasLt | None = None) -> torch.Tensor:
    """``a @ b.T`` in a's dtype; ``a`` ``[m, k]``, ``b`` ``[n, k]``, each contiguous along one of its dimensions.

    16-bit operands on a GPU go to ``library``: torch's own products would keep a workspace for each stream that nobody can
    name, plan or give back.
    """
    if kernels.on_gpu(a) and a.dtype in GPU_DTYPES and library is not None:
        out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
        library.matmul(out, a, b)
        return out
    return torch.mm(a, b.t())


def accumulate_mm(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: int, *, library: CublasLt | None = None
) -> None:
    """``out = beta * out + a @ b.T`` straight into ``out`` (a main-gradient view), no temporary and no zero-fill.

    ``beta`` is 0 (what ``out`` held, NaN included, is gone) or 1. ``a`` ``[m, k]``, ``b`` ``[n, k]``, ``out`` ``[m, n]``; the
    product is made in ``out``'s dtype, or for bfloat16 in float32, and then the sum is rounded (cuBLASLt may round product and
    sum). 16-bit operands on a GPU go in as they are: their products are exact in float32. (Where no such product exists, as of
    a CPU or of float32 into bfloat16, there is a temporary.)
    """
    if kernels.on_gpu(a) and a.dtype in GPU_DTYPES:
        _bound(library).matmul(out, a, b, beta=beta)
        return
    if out.dtype is torch.bfloat16:
        product = torch.mm(a.float(), b.float().t())
        out.copy_(product.add_(out) if beta else product)
        return
    a, b = a.to(out.dtype), b.to(out.dtype)
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
    *,
    library: CublasLt | None = None,
) -> None:
    """As :func:`accumulate_mm`, for FP8 operands; ``out`` is float32, bfloat16 or (on CPU) float64."""
    if kernels.on_gpu(a):
        _bound(library).matmul(out, a, b, beta=beta, a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv)
        return
    accumulate_mm(out, dequantise(a, a_scale_inv), dequantise(b, b_scale_inv), beta)


def _bound(library: CublasLt | None) -> CublasLt:
    if library is None:
        raise RuntimeError("no products were bound for this GPU: call layers.linear.bind_products(module, CublasLt(device))")
    return library
