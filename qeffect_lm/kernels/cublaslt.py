"""cuBLASLt through ctypes: products that accumulate in place, in a workspace that has a name.

What torch's own functions lack is W: FP8 x FP8 (or BF16 x BF16) → float32 with ``out = out + a @ b.T`` in place, no temporary
and no allocation. For one path, F and I take it too. The API is NVIDIA's cuBLAS documentation, section "cuBLASLt".

The configuration (algorithm) of each shape is the committed table's (:mod:`qeffect_lm.kernels.tables`), or where that has none
the heuristic's first answer, looked up once and kept: no timing decides. cuBLAS gives the same bits for the same configuration
and number of multiprocessors, as long as streams do not share a workspace: each has its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qeffect_lm.errors import QEffectError
from qeffect_lm.kernels import launched, tables
from qeffect_lm.kernels.cublaslt_api import (
    COMPUTE_32F,
    DESC_A_SCALE,
    DESC_B_SCALE,
    DESC_FAST_ACCUM,
    DESC_TRANSA,
    DESC_TRANSB,
    FP8,
    ONE,
    PREFERENCE_ALIGNMENTS,
    PREFERENCE_WORKSPACE,
    STATUS,
    TYPES,
    WORKSPACE_BYTES,
    ZERO,
    Algo,
    Heuristic,
    Operand,
    Plan,
    alignment,
    check,
    library_path,
    operand,
    pointer,
    result,
    usual,
)


@dataclass(frozen=True)
class Candidate:
    """One of the heuristic's answers: an algorithm that the library can take up again under the same version."""

    algorithm: bytes
    workspace_bytes: int
    waves: float


class CublasLt:
    """cuBLASLt on one device, with one workspace per stream.

    Made by whoever assembles the layers, and given to them: it owns descriptors, configurations and workspaces. Inside a
    capture a shape or a stream that was not seen before is an error: asking and allocating do not belong into a graph.

    Args:
        algorithms: product name → algorithm; None: the committed table's for this GPU and version.
    """

    def __init__(self, device: torch.device | str, algorithms: Mapping[str, bytes] | None = None) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._lib = ctypes.CDLL(library_path())
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self._plans: dict[tuple[object, ...], Plan] = {}
        self.workspaces: dict[int, torch.Tensor] = {}  # stream → uint8 storage: library scratch, named for the register
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()  # makes the device's context
            self._call("cublasLtCreate", ctypes.byref(self._handle))
        self.version = int(self._lib.cublasLtGetVersion())
        if algorithms is None:
            on_gpu = self.device.type == "cuda"
            algorithms = tables.algorithms(torch.cuda.get_device_name(self.device), self.version) if on_gpu else {}
        self._algorithms = dict(algorithms)

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
            residual: ``[m, n]`` in out's dtype, in another storage, added by the library; with beta 0 only.

        Raises:
            ValueError: shapes or layouts that the library does not take, with what to change.
            QEffectError: cuBLASLt refuses or fails; or a new shape inside a capture.
        """
        if a.dtype in FP8 and (a_scale_inv is None or b_scale_inv is None):
            raise ValueError("FP8 operands need their inverse scales")  # else the pointers of an earlier call would serve
        if residual is not None and beta:
            raise ValueError("a product adds to its output or to a residual, not to both")
        added = out if residual is None else residual
        factor = ONE if beta or residual is not None else ZERO
        launched("product", out, a, b, beta, a_scale_inv, b_scale_inv, residual, fast_accumulation)
        plan = self._plan(out, a, b, added, fast_accumulation, a_scale_inv, b_scale_inv)
        stream = torch.cuda.current_stream(self.device)
        workspace = self.workspace(stream)
        self._set_scales(plan, a_scale_inv, b_scale_inv)
        layout_a, layout_b, layout_c, layout_d = plan.layouts
        self._call(
            "cublasLtMatmul", self._handle, plan.desc, ctypes.byref(ONE),
            pointer(b), layout_a, pointer(a), layout_b,
            ctypes.byref(factor), pointer(added), layout_c, pointer(out), layout_d,
            ctypes.byref(plan.algo), pointer(workspace), ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip

    def candidates(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        count: int,
        *,
        a_scale_inv: torch.Tensor | None = None,
        b_scale_inv: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        fast_accumulation: bool = False,
    ) -> list[Candidate]:
        """Up to ``count`` of the heuristic's answers for a product of :meth:`matmul`, the first first."""
        added = out if residual is None else residual
        with torch.cuda.device(self.device):
            plan = self._described(out, a, b, added, fast_accumulation, a_scale_inv, b_scale_inv)
            try:
                found = self._heuristics(plan, out, a, b, added, count)
            finally:
                self._destroy(plan)
        return [Candidate(bytes(h.algo), h.workspace_size, h.waves_count) for h in found]

    def choose(self, algorithms: Mapping[str, bytes]) -> None:
        """Take these algorithms from now on (for measuring); graphs captured before keep theirs."""
        self._algorithms = dict(algorithms)
        self._forget_plans()

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
    ) -> Plan:
        key = (
            a.shape, b.shape, a.stride(), b.stride(), added.stride(), out.stride(), a.dtype, b.dtype, out.dtype,
            fast_accumulation, alignment(a), alignment(b), alignment(added), alignment(out),
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            check(out, a, b, added)
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
    ) -> Plan:
        plan = self._described(out, a, b, added, fast_accumulation, a_scale_inv, b_scale_inv)
        name = tables.product_name(out, a, b, added is not out, fast_accumulation)
        chosen = self._algorithms.get(name)
        if chosen is None or not all(usual(matrix) for matrix in (out, a, b, added)):
            plan.algo = self._heuristics(plan, out, a, b, added, 1)[0].algo
            return plan
        plan.algo = Algo.from_buffer_copy(chosen)
        checked = Heuristic()
        self._call(
            "cublasLtMatmulAlgoCheck", self._handle, plan.desc, *plan.layouts, ctypes.byref(plan.algo), ctypes.byref(checked)
        )
        if checked.state or checked.workspace_size > WORKSPACE_BYTES:
            raise QEffectError(
                f"kernels/tables.json has an algorithm for {name} that this GPU does not take; bench kernels --tune renews it"
            )
        return plan

    def _described(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        added: torch.Tensor,
        fast_accumulation: bool,
        a_scale_inv: torch.Tensor | None,
        b_scale_inv: torch.Tensor | None,
    ) -> Plan:
        """Descriptors and layouts, without an algorithm yet."""
        # Row-major out[m, n] is column-major out.T[n, m] = b @ a.T: cuBLAS's A is our b, its B our a.
        first, second = operand(b, summed_first=True), operand(a, summed_first=False)
        desc = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), COMPUTE_32F, TYPES[torch.float32])
        self._set(desc, DESC_TRANSA, ctypes.c_int32(first.op))
        self._set(desc, DESC_TRANSB, ctypes.c_int32(second.op))
        if a.dtype in FP8:
            self._set(desc, DESC_FAST_ACCUM, ctypes.c_int8(fast_accumulation))
        layouts = [self._layout(operand) for operand in (first, second, result(added), result(out))]
        plan = Plan(desc, (layouts[0], layouts[1], layouts[2], layouts[3]))
        self._set_scales(plan, a_scale_inv, b_scale_inv)
        return plan

    def _heuristics(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor, count: int
    ) -> list[Heuristic]:
        """The heuristic's first ``count`` answers, or as many as there are (one at least, or a QEffectError)."""
        results, number = (Heuristic * count)(), ctypes.c_int()
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            self._prefer(preference, PREFERENCE_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
            for attribute, tensor in zip(PREFERENCE_ALIGNMENTS, (b, a, added, out), strict=True):
                self._prefer(preference, attribute, ctypes.c_uint32(alignment(tensor)))
            self._call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.desc, *plan.layouts,
                preference, ctypes.c_int(count), results, ctypes.byref(number),
            )  # fmt: skip
        finally:
            self._lib.cublasLtMatmulPreferenceDestroy(preference)
        found = [results[place] for place in range(number.value) if not results[place].state]
        if not found:
            what = f"{list(a.shape)} x {list(b.shape)}, {a.dtype} x {b.dtype}"
            raise QEffectError(f"cuBLASLt {self.version} has no kernel for {what} on this GPU")
        return found

    def _set_scales(self, plan: Plan, a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None) -> None:
        for attribute, scale in ((DESC_A_SCALE, b_scale_inv), (DESC_B_SCALE, a_scale_inv)):
            if scale is not None:
                self._set(plan.desc, attribute, pointer(scale))

    def _prefer(self, preference: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)

    def _set(self, desc: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", desc, attribute, ctypes.byref(value), size)

    def _layout(self, operand: Operand) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), TYPES[operand.dtype],
            ctypes.c_uint64(operand.rows), ctypes.c_uint64(operand.cols), ctypes.c_int64(operand.ld),
        )  # fmt: skip
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise QEffectError(f"{name}: status {status} ({STATUS.get(status, 'unknown')})")

    @staticmethod
    def _outside_capture(problem: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise QEffectError(f"{problem}: run this work once before it is captured")

    def close(self) -> None:
        """Free descriptors and workspaces; graphs that use them must be gone."""
        self._forget_plans()
        self.workspaces.clear()
        if self._handle:
            self._lib.cublasLtDestroy(self._handle)
            self._handle = ctypes.c_void_p()


    def _forget_plans(self) -> None:
        for plan in self._plans.values():
            self._destroy(plan)
        self._plans.clear()

    def _destroy(self, plan: Plan) -> None:
        for layout in plan.layouts:
            self._lib.cublasLtMatrixLayoutDestroy(layout)
        self._lib.cublasLtMatmulDescDestroy(plan.desc)
