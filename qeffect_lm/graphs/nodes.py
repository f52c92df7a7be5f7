"""What a captured CUDA graph will launch: its nodes in order, with launch shapes, as lines of text.

Two captures of the same work give the same lines, in this process or after a restart, because nothing that differs between
processes enters them: no address, no handle. What a capture chose does: which kernel a library took, over how many blocks, in
which order, waiting for which earlier nodes. Read through the CUDA driver's graph interface
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html), which torch has loaded already.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any

from qeffect_lm.contract.errors import CaptureError

KERNEL, MEMCPY, MEMSET, CHILD = 0, 1, 2, 4
# Of the kinds that only their name describes.
_KINDS = {
    3: "host",
    5: "empty",
    6: "wait event",
    7: "record event",
    8: "signal semaphore",
    9: "wait semaphore",
    10: "allocate",
    11: "free",
    12: "memory operations",
    13: "conditional",
}
_MEMORY = {1: "host", 2: "device", 3: "array", 4: "unified"}
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class KernelParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


class MemsetParams(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("dst", c_void_p),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


class MemcpyParams(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        ("src_at", c_size_t * 4),
        ("src_kind", c_int),
        ("src_host", c_void_p),
        ("src_device", c_void_p),
        ("src_array", c_void_p),
        ("reserved0", c_void_p),
        ("src_pitch", c_size_t),
        ("src_height", c_size_t),
        ("dst_at", c_size_t * 4),
        ("dst_kind", c_int),
        ("dst_host", c_void_p),
        ("dst_device", c_void_p),
        ("dst_array", c_void_p),
        ("reserved1", c_void_p),
        ("dst_pitch", c_size_t),
        ("dst_height", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    ]


class EdgeData(Structure):
    """CUgraphEdgeData."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5)]


class AttributeValue(Structure):
    """CUlaunchAttributeValue, 64 bytes of which a cluster takes three numbers."""

    _fields_ = [("cluster", c_uint * 3), ("pad", c_ubyte * 52)]


def graph_nodes(graph: int, driver: Any = None) -> list[str]:
    """One line for each node of a ``cudaGraph_t``, in the order of capture.

    A line is kind, name and launch shape; ``after`` lists the numbers of the nodes it waits for, unless it is just the one
    before: ``kernel norm_forward grid=(64, 1, 1) block=(128, 1, 1) shared=0``.

    Args:
        graph: what ``torch.cuda.CUDAGraph.raw_cuda_graph()`` gives, of a graph made with ``keep_graph=True``.
        driver: the CUDA driver library; None: this machine's.

    Raises:
        CaptureError: the driver refuses to describe the graph.
    """
    return _Reader(driver or cuda_driver()).lines(graph)


def cuda_driver() -> ctypes.CDLL:
    """The CUDA driver of this process.

    Raises:
        CaptureError: there is none.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CaptureError(f"the CUDA driver {name} cannot be loaded, so no graph can be described: {error}") from None


class _Reader:
    """Asks the driver and puts its answers into words."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._names: dict[int, str] = {}  # a kernel is named once

    def lines(self, graph: int) -> list[str]:
        handles = self._list("cuGraphGetNodes", c_void_p(graph))
        number = {handle: place for place, handle in enumerate(handles)}
        lines = []
        for place, handle in enumerate(handles):
            head, *inner = self._describe(handle)
            lines += [head + self._after(handle, place, number), *(f"  {line}" for line in inner)]
        return lines

    def _describe(self, node: int) -> list[str]:
        """The node's line, and for a graph within the graph the lines of its nodes."""
        kind = c_int()
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value == KERNEL:
            return [self._kernel(node)]
        if kind.value == MEMCPY:
            return [self._memcpy(node)]
        if kind.value == MEMSET:
            memset = MemsetParams()
            self._call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
            size = f"{memset.width}x{memset.height} of {memset.element} bytes"
            return [f"memset {memset.value:#x} {size}"]
        if kind.value == CHILD:
            child = c_void_p()
            self._call("cuGraphChildGraphNodeGetGraph", c_void_p(node), byref(child))
            return ["graph", *self.lines(child.value or 0)]
        return [_KINDS.get(kind.value, f"node of kind {kind.value}")]

    def _kernel(self, node: int) -> str:
        params = KernelParams()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params))
        line = f"kernel {self._name(params)} grid={tuple(params.grid)} block={tuple(params.block)} shared={params.shared}"
        value = AttributeValue()
        if self._try("cuGraphKernelNodeGetAttribute", c_void_p(node), c_int(_CLUSTER_DIMENSION), byref(value)):
            if any(size > 1 for size in value.cluster):
                line += f" cluster={tuple(value.cluster)}"
        return line

    def _name(self, params: KernelParams) -> str:
        """A kernel is a function of a module, or belongs to a library that modules were made from; either has a name."""
        handle = params.func or params.kern
        if handle not in self._names:
            name = c_char_p()
            ask = ("cuFuncGetName", "cuKernelGetName") if params.func else ("cuKernelGetName",)
            known = any(self._try(function, byref(name), c_void_p(handle)) for function in ask)
            self._names[handle] = name.value.decode(errors="replace") if known and name.value else "(without a name)"
        return self._names[handle]

    def _memcpy(self, node: int) -> str:
        copy = MemcpyParams()
        if not self._try("cuGraphMemcpyNodeGetParams", c_void_p(node), byref(copy)):
            return "memcpy"  # between two contexts: the driver does not say
        source, target = (_MEMORY.get(kind, str(kind)) for kind in (copy.src_kind, copy.dst_kind))
        return f"memcpy {source} to {target} {copy.width}x{copy.height}x{copy.depth} bytes"

    def _after(self, node: int, place: int, number: dict[int, int]) -> str:
        if hasattr(self._driver, "cuGraphNodeGetDependencies_v2"):
            handles = self._list("cuGraphNodeGetDependencies_v2", c_void_p(node), edges=True)
        else:
            handles = self._list("cuGraphNodeGetDependencies", c_void_p(node))
        before = sorted(number[handle] for handle in handles)
        if before == [place - 1] or (place == 0 and not before):
            return ""
        return f" after={','.join(map(str, before)) or 'nothing'}"

    # ---- the driver --------------------------------------------------------------------------------------------

    def _list(self, function: str, of: c_void_p, edges: bool = False) -> list[int]:
        """The handles that a function of (object, array, [edges' data,] count) gives: their number first, then them."""
        count = c_size_t()
        none = (None, None) if edges else (None,)
        self._call(function, of, *none, byref(count))
        if not count.value:
            return []
        found = (c_void_p * count.value)()
        arrays = (found, (EdgeData * count.value)()) if edges else (found,)
        self._call(function, of, *arrays, byref(count))
        return [handle or 0 for handle in found]

    def _call(self, function: str, *arguments: Any) -> None:
        result = self._function(function)(*arguments)
        if result:
            raise CaptureError(f"the CUDA driver's {function} gave error {result}: the captured graph cannot be described")

    def _try(self, function: str, *arguments: Any) -> bool:
        return hasattr(self._driver, function) and not self._function(function)(*arguments)

    def _function(self, name: str) -> Callable[..., int]:
        function = getattr(self._driver, name)
        return function  # type: ignore[no-any-return]
