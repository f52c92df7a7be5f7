"""What :mod:`qeffect_lm.kernels.cublaslt` says to the library: enumerations, structures, and matrices as cuBLAS sees them.

The numbers are the enumerations of ``cublasLt.h``, ``library_types.h`` and ``cublas_api.h``, which NVIDIA keeps stable.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper

COMPUTE_32F, OP_N, OP_T = 68, 0, 1
DESC_TRANSA, DESC_TRANSB, DESC_A_SCALE, DESC_B_SCALE, DESC_FAST_ACCUM = 3, 4, 17, 18, 25
PREFERENCE_WORKSPACE, PREFERENCE_ALIGNMENTS = 1, (5, 6, 7, 8)  # of A, B, C, D
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STATUS = {
    1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch", 11: "mapping error",
    13: "execution failed", 14: "internal error", 15: "not supported",
}  # fmt: skip
ONE, ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", Algo),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Operand:
    """A matrix as cuBLAS sees it: column-major ``[rows, cols]`` with leading dimension ``ld``, transposed or not."""

    dtype: torch.dtype
    rows: int
    cols: int
    ld: int
    op: int


@dataclass
class Plan:
    """One shape's descriptors and configuration; ``layouts`` are those of cuBLAS's A, B, C and D."""

    desc: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    algo: Algo = field(default_factory=Algo)


def library_path() -> str:
    """The cuBLASLt that torch loaded, so that both are one library; else the name of torch's CUDA version's."""
    loaded = re.findall(r"\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    return loaded[0] if loaded else f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def alignment(tensor: torch.Tensor) -> int:
    """Largest power of two up to 256 that divides the address: configurations may rely on it."""
    address = tensor.data_ptr() | 256
    return address & -address


def usual(matrix: torch.Tensor) -> bool:
    """Whether ``matrix`` lies as the table's products do: dense, at a multiple of 256 bytes."""
    lines = matrix.shape[0] if matrix.stride(1) == 1 else matrix.shape[1]
    return alignment(matrix) == 256 and matrix.numel() == lines * max(matrix.stride())


def operand(matrix: torch.Tensor, *, summed_first: bool) -> Operand:
    """``matrix`` ``[length, k]`` as an operand that cuBLAS reads as ``[k, length]`` (its B), or transposed from it (its A)."""
    length, k = matrix.shape
    if matrix.stride(1) == 1:  # in memory: k runs fastest
        return Operand(matrix.dtype, k, length, matrix.stride(0), OP_T if summed_first else OP_N)
    return Operand(matrix.dtype, length, k, matrix.stride(1), OP_N if summed_first else OP_T)


def result(matrix: torch.Tensor) -> Operand:
    """``matrix`` ``[m, n]`` as C or D."""
    return Operand(matrix.dtype, matrix.shape[1], matrix.shape[0], matrix.stride(0), OP_N)


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor) -> None:
    (m, k), (n, other) = a.shape, b.shape
    if k != other or tuple(out.shape) != (m, n) or out.stride(1) != 1:
        raise ValueError(f"{list(a.shape)} x {list(b.shape)} does not give {list(out.shape)} with strides {out.stride()}")
    if added.shape != out.shape or added.dtype is not out.dtype or added.stride(1) != 1:
        raise ValueError(f"a residual {added.dtype} {list(added.shape)} is not added to {out.dtype} {list(out.shape)}")
    if a.dtype not in FP8:
        if 1 not in a.stride() or 1 not in b.stride():
            raise ValueError("an operand must be contiguous along one of its dimensions")
        return
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError("FP8 operands must be contiguous along the summed dimension")
    if k % 16 or n % 16:
        raise ValueError(
            f"FP8 products on a GPU need multiples of 16, not a sum over {k} into {n} columns: choose hidden sizes and tokens "
            "per microbatch (batch x sequence) divisible by 16"
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("two E5M2 operands: the hardware multiplies E5M2 by E4M3 only")
