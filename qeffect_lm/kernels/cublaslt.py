"""cuBLASLt through ctypes: products that accumulate in place, in a workspace that has a name.

What torch's own functions lack is W: FP8 x FP8 (or BF16 x BF16) → float32 with ``out = out + a @ b.T`` in place, no temporary
and no allocation. For one path, F and I take it too. The API is NVIDIA's cuBLAS documentation, section "cuBLASLt"; the numbers
below are the enumerations of ``cublasLt.h``, ``library_types.h`` and ``cublas_api.h``, which NVIDIA keeps stable.

The configuration of each shape is the heuristic's first answer, asked once and kept: no timing decides. cuBLAS gives the same
bits for the same configuration and number of multiprocessors, as long as streams do not share a workspace: each has its own.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qeffect_lm.errors import QEffectError
from qeffect_lm.kernels import launched

WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper

_COMPUTE_32F, _OP_N, _OP_T = 68, 0, 1
_DESC_TRANSA, _DESC_TRANSB, _DESC_A_SCALE, _DESC_B_SCALE, _DESC_FAST_ACCUM = 3, 4, 17, 18, 25
_PREFERENCE_WORKSPACE, _PREFERENCE_ALIGNMENTS = 1, (5, 6, 7, 8)  # of A, B, C, D
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_STATUS = {
    1: "not initialised", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch", 11: "mapping error",
    13: "execution failed", 14: "internal error", 15: "not supported",
}  # fmt: skip
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class _Operand:
    """A matrix as cuBLAS sees it: column-major ``[rows, cols]`` with leading dimension ``ld``, transposed or not."""

    dtype: torch.dtype
    rows: int
    cols: int
    ld: int
    op: int


@dataclass
class _Plan:
    """One shape's descriptors and configuration; ``layouts`` are those of cuBLAS's A, B, C and D."""

    desc: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    algo: _Algo = field(default_factory=_Algo)


class CublasLt:
    """cuBLASLt on one device, with one workspace per stream.

    Made by whoever assembles the layers, and given to them: it owns descriptors, configurations and workspaces. Inside a
    capture a shape or a stream that was not seen before is an error: asking and allocating do not belong into a graph.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._lib = ctypes.CDLL(library_path())
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self.workspaces: dict[int, torch.Tensor] = {}  # stream → uint8 storage: library scratch, named for the register
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # makes the device's context
            self._call("cublasLtCreate", ctypes.byref(self._handle))

    def workspace(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """``stream``'s workspace, allocated at the first request."""
        found = self.workspaces.get(stream.cuda_stream)
        if found is None:
            self._outside_capture(f"stream {stream.cuda_stream:#x} has no cuBLASLt workspace")
            found = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self.workspaces[stream.cuda_stream] = found
        return found

    def matmul(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: int = 0,
        a_scale_inv: torch.Tensor | None = None,
        b_scale_inv: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> None:
        """``out = beta * out + (a * a_scale_inv) @ (b * b_scale_inv).T``, accumulated in float32, on the current stream.

        Args:
            out: ``[m, n]``, float32, bfloat16 or float16; rows contiguous.
            a, b: ``[m, k]`` and ``[n, k]``. FP8: both contiguous along k; otherwise along either dimension.
            beta: 0 (what ``out`` held, NaN included, is gone) or 1 (in place).
            a_scale_inv, b_scale_inv: 0-dim float32 on the device, for FP8.
            residual: ``[m, n]`` in out's dtype, in another storage, added before the one rounding; with beta 0 only.

        Raises:
            ValueError: shapes or layouts that the library does not take, with what to change.
            QEffectError: cuBLASLt refuses or fails; or a new shape inside a capture.
        """
        if a.dtype in _FP8 and (a_scale_inv is None or b_scale_inv is None):
            raise ValueError("FP8 operands need their inverse scales")  # else the pointers of an earlier call would serve
        if residual is not None and beta:
            raise ValueError("a product adds to its output or to a residual, not to both")
        added = out if residual is None else residual
        factor = _ONE if beta or residual is not None else _ZERO
        launched("product", out, a, b, beta, a_scale_inv, b_scale_inv, residual, fast_accumulation)
        plan = self._plan(out, a, b, added, fast_accumulation, a_scale_inv, b_scale_inv)
        stream = torch.cuda.current_stream(self.device)
        workspace = self.workspace(stream)
        self._set_scales(plan, a_scale_inv, b_scale_inv)
        layout_a, layout_b, layout_c, layout_d = plan.layouts
        self._call(
            "cublasLtMatmul", self._handle, plan.desc, ctypes.byref(_ONE),
            _pointer(b), layout_a, _pointer(a), layout_b,
            ctypes.byref(factor), _pointer(added), layout_c, _pointer(out), layout_d,
            ctypes.byref(plan.algo), _pointer(workspace), ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip

    # ---- plans -------------------------------------------------------------------------------------------------

    def _plan(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        added: torch.Tensor,
        fast_accumulation: bool,
        a_scale_inv: torch.Tensor | None,
        b_scale_inv: torch.Tensor | None,
    ) -> _Plan:
        key = (
            a.shape, b.shape, a.stride(), b.stride(), added.stride(), out.stride(), a.dtype, b.dtype, out.dtype,
            fast_accumulation, _alignment(a), _alignment(b), _alignment(added), _alignment(out),
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            _check(out, a, b, added)
            self._outside_capture(f"no configuration yet for {list(a.shape)} x {list(b.shape)} in {a.dtype}")
            with torch.cuda.device(self.device):
                plan = self._new_plan(out, a, b, added, fast_accumulation, a_scale_inv, b_scale_inv)
            self._plans[key] = plan
        return plan

    def _new_plan(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        added: torch.Tensor,
        fast_accumulation: bool,
        a_scale_inv: torch.Tensor | None,
        b_scale_inv: torch.Tensor | None,
    ) -> _Plan:
        # Row-major out[m, n] is column-major out.T[n, m] = b @ a.T: cuBLAS's A is our b, its B our a.
        first, second = _operand(b, summed_first=True), _operand(a, summed_first=False)
        desc = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), _COMPUTE_32F, _TYPES[torch.float32])
        self._set(desc, _DESC_TRANSA, ctypes.c_int32(first.op))
        self._set(desc, _DESC_TRANSB, ctypes.c_int32(second.op))
        if a.dtype in _FP8:
            self._set(desc, _DESC_FAST_ACCUM, ctypes.c_int8(fast_accumulation))
        layouts = [self._layout(operand) for operand in (first, second, _result(added), _result(out))]
        plan = _Plan(desc, (layouts[0], layouts[1], layouts[2], layouts[3]))
        self._set_scales(plan, a_scale_inv, b_scale_inv)
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            self._prefer(preference, _PREFERENCE_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
            for attribute, tensor in zip(_PREFERENCE_ALIGNMENTS, (b, a, added, out), strict=True):
                self._prefer(preference, attribute, ctypes.c_uint32(_alignment(tensor)))
            plan.algo = self._first_heuristic(plan, preference, f"{list(a.shape)} x {list(b.shape)}, {a.dtype} x {b.dtype}")
        finally:
            self._lib.cublasLtMatmulPreferenceDestroy(preference)
        return plan

    def _first_heuristic(self, plan: _Plan, preference: ctypes.c_void_p, what: str) -> _Algo:
        found, count = _Heuristic(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.desc, *plan.layouts,
            preference, ctypes.c_int(1), ctypes.byref(found), ctypes.byref(count),
        )  # fmt: skip
        if count.value < 1 or found.state:
            raise QEffectError(f"cuBLASLt {self._lib.cublasLtGetVersion()} has no kernel for {what} on this GPU")
        return found.algo

    def _set_scales(self, plan: _Plan, a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None) -> None:
        for attribute, scale in ((_DESC_A_SCALE, b_scale_inv), (_DESC_B_SCALE, a_scale_inv)):
            if scale is not None:
                self._set(plan.desc, attribute, _pointer(scale))

    def _prefer(self, preference: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)

    def _set(self, desc: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", desc, attribute, ctypes.byref(value), size)

    def _layout(self, operand: _Operand) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[operand.dtype],
            ctypes.c_uint64(operand.rows), ctypes.c_uint64(operand.cols), ctypes.c_int64(operand.ld),
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise QEffectError(f"{name}: status {status} ({_STATUS.get(status, 'unknown')})")

    @staticmethod
    def _outside_capture(problem: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise QEffectError(f"{problem}: run this work once before it is captured")

    def close(self) -> None:
        """Free descriptors and workspaces; graphs that use them must be gone."""
        for plan in self._plans.values():
            for layout in plan.layouts:
                self._lib.cublasLtMatrixLayoutDestroy(layout)
            self._lib.cublasLtMatmulDescDestroy(plan.desc)
        self._plans.clear()
        self.workspaces.clear()
        if self._handle:
            self._lib.cublasLtDestroy(self._handle)
            self._handle = ctypes.c_void_p()


def library_path() -> str:
    """The cuBLASLt that torch loaded, so that both are one library; else the name of torch's CUDA version's."""
    loaded = re.findall(r"\S*/libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    return loaded[0] if loaded else f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _alignment(tensor: torch.Tensor) -> int:
    """Largest power of two up to 256 that divides the address: configurations may rely on it."""
    address = tensor.data_ptr() | 256
    return address & -address


def _operand(matrix: torch.Tensor, *, summed_first: bool) -> _Operand:
    """``matrix`` ``[length, k]`` as an operand that cuBLAS reads as ``[k, length]`` (its B), or transposed from it (its A)."""
    length, k = matrix.shape
    if matrix.stride(1) == 1:  # in memory: k runs fastest
        return _Operand(matrix.dtype, k, length, matrix.stride(0), _OP_T if summed_first else _OP_N)
    return _Operand(matrix.dtype, length, k, matrix.stride(1), _OP_N if summed_first else _OP_T)


def _result(matrix: torch.Tensor) -> _Operand:
    """``matrix`` ``[m, n]`` as C or D."""
    return _Operand(matrix.dtype, matrix.shape[1], matrix.shape[0], matrix.stride(0), _OP_N)


def _check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor) -> None:
    (m, k), (n, other) = a.shape, b.shape
    if k != other or tuple(out.shape) != (m, n) or out.stride(1) != 1:
        raise ValueError(f"{list(a.shape)} x {list(b.shape)} does not give {list(out.shape)} with strides {out.stride()}")
    if added.shape != out.shape or added.dtype is not out.dtype or added.stride(1) != 1:
        raise ValueError(f"a residual {added.dtype} {list(added.shape)} is not added to {out.dtype} {list(out.shape)}")
    if a.dtype not in _FP8:
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
