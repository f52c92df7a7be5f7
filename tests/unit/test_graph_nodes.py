"""A CUDA graph's nodes as text, read through a driver that a test makes up; and where two documents differ first."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p, cast
from typing import Any

import pytest

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.graphs.document import fingerprint, first_difference
from qeffect_lm.graphs.nodes import AttributeValue, EdgeData, KernelParams, MemcpyParams, MemsetParams, graph_nodes

KERNEL, MEMCPY, MEMSET, CHILD, EMPTY = 0, 1, 2, 4, 5


def _at(pointer: Any, kind: Any) -> Any:
    return cast(pointer, POINTER(kind)).contents


class Driver:
    """Nodes by handle; every function writes where its pointers point, as the real one does, and returns 0 or an error.

    A node is (kind, values, handles of what it waits for); a graph is a list of handles.
    """

    def __init__(self, graphs: dict[int, list[int]], nodes: dict[int, tuple[int, Any, list[int]]], base: int = 0) -> None:
        self.graphs, self.nodes, self.base = graphs, nodes, base

    def _give(self, values: list[int], array: Any, count: Any) -> int:
        number = _at(count, c_size_t)
        if array is not None:
            for place, value in enumerate(values[: number.value]):
                array[place] = value + self.base
        number.value = len(values)
        return 0

    def _node(self, handle: Any) -> tuple[int, Any, list[int]]:
        return self.nodes[handle.value - self.base]

    def cuGraphGetNodes(self, graph: Any, array: Any, count: Any) -> int:  # noqa: N802
        return self._give(self.graphs[graph.value], array, count)

    def cuGraphNodeGetDependencies_v2(self, node: Any, array: Any, edges: Any, count: Any) -> int:  # noqa: N802
        assert (array is None) == (edges is None) and (edges is None or ctypes.sizeof(edges[0]) == ctypes.sizeof(EdgeData) == 8)
        return self._give(self._node(node)[2], array, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        _at(kind, c_int).value = self._node(node)[0]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:  # noqa: N802
        name, grid, block, shared, *_ = self._node(node)[1]
        found = _at(params, KernelParams)
        found.grid, found.block, found.shared = grid, block, shared
        if name.startswith("library "):
            found.kern = 7000 + self.base + len(name)
        else:
            found.func = 8000 + self.base + len(name)
        self.name = name.removeprefix("library ").encode()
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:  # noqa: N802
        if function.value - self.base < 8000:
            return 400
        _at(name, c_char_p).value = self.name
        return 0

    def cuKernelGetName(self, name: Any, kernel: Any) -> int:  # noqa: N802
        _at(name, c_char_p).value = self.name
        return 0

    def cuGraphKernelNodeGetAttribute(self, node: Any, attribute: Any, value: Any) -> int:  # noqa: N802
        assert attribute.value == 4
        _at(value, AttributeValue).cluster = (*self._node(node)[1][4:], 0, 0, 0)[:3]
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, params: Any) -> int:  # noqa: N802
        found = _at(params, MemsetParams)
        found.dst, (found.value, found.element, found.width, found.height) = 12345 + self.base, self._node(node)[1]
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, params: Any) -> int:  # noqa: N802
        if self._node(node)[1] is None:
            return 1
        found = _at(params, MemcpyParams)
        found.src_kind, found.dst_kind, found.width = self._node(node)[1]
        found.height = found.depth = 1
        found.src_device = 99 + self.base
        return 0

    def cuGraphChildGraphNodeGetGraph(self, node: Any, graph: Any) -> int:  # noqa: N802
        _at(graph, c_void_p).value = self._node(node)[1]
        return 0


NODES = {
    11: (KERNEL, ("quantise", (8, 4, 1), (128, 1, 1), 2048), []),
    12: (KERNEL, ("library gemm", (16, 1, 1), (384, 1, 1), 0, 2, 1, 1), [11]),
    13: (MEMSET, (0, 4, 256, 1), [11]),
    14: (MEMCPY, (2, 2, 4096), [12, 13]),
    15: (CHILD, 2, [14]),
    16: (EMPTY, None, []),
    17: (MEMCPY, None, [16]),
    21: (KERNEL, ("inner", (1, 1, 1), (32, 1, 1), 0), []),
}
GRAPHS = {1: [11, 12, 13, 14, 15, 16, 17], 2: [21]}
LINES = [
    "kernel quantise grid=(8, 4, 1) block=(128, 1, 1) shared=2048",
    "kernel gemm grid=(16, 1, 1) block=(384, 1, 1) shared=0 cluster=(2, 1, 1)",
    "memset 0x0 256x1 of 4 bytes after=0",
    "memcpy device to device 4096x1x1 bytes after=1,2",
    "graph",
    "  kernel inner grid=(1, 1, 1) block=(32, 1, 1) shared=0",
    "empty after=nothing",
    "memcpy",
]


@pytest.mark.parametrize("base", [0, 1 << 40])
def test_every_kind_of_node(base):
    """Names, shapes, sizes and order are there; handles and addresses, which differ by ``base``, are not."""
    assert graph_nodes(1, Driver(GRAPHS, NODES, base)) == LINES


def test_an_older_driver():
    """Without edge data and launch attributes: the same but for clusters."""

    class Older(Driver):
        cuGraphKernelNodeGetAttribute = property()  # noqa: N815 (hasattr says no)
        cuGraphNodeGetDependencies_v2 = property()  # noqa: N815

        def cuGraphNodeGetDependencies(self, node: Any, array: Any, count: Any) -> int:  # noqa: N802
            return self._give(self._node(node)[2], array, count)

    assert graph_nodes(1, Older(GRAPHS, NODES)) == [line.replace(" cluster=(2, 1, 1)", "") for line in LINES]


def test_errors_of_the_driver_have_a_name():
    class Refuses(Driver):
        def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
            return 700

    with pytest.raises(CaptureError, match="cuGraphNodeGetType gave error 700"):
        graph_nodes(1, Refuses(GRAPHS, NODES))


# ---- documents ---------------------------------------------------------------------------------------------

DOCUMENT = [
    "plan 1",
    "rank 0: 0F0 0I0 0W0",
    "slots I 0.0=0",
    "graph 0F i=0 w=0",
    "effects scales=forward",
    "node kernel a",
    "node kernel b",
    "operation add",
    "graph step",
    "operation mul",
]


@pytest.mark.parametrize(
    ("place", "line", "words"),
    [
        (1, "rank 0: 0F0 0W0 0I0", "first in the plan: 'rank 0: 0F0 0I0 0W0' was saved, 'rank 0: 0F0 0W0 0I0' was captured"),
        (2, "slots I 0.0=1", "first in the plan: 'slots I"),
        (3, "graph 0F i=1 w=0", "first in the list of graphs"),
        (4, "effects scales=backward", "first in graph 0F i=0 w=0, its effects"),
        (6, "node kernel c", "first in graph 0F i=0 w=0, node 1: 'node kernel b' was saved, 'node kernel c' was captured"),
        (7, "operation sub", "first in graph 0F i=0 w=0, operation 0"),
        (9, "operation div", "first in graph step, operation 0"),
    ],
)
def test_the_first_difference_is_named(place, line, words):
    changed = [*DOCUMENT]
    changed[place] = line
    found = first_difference(DOCUMENT, changed)
    assert found is not None and found.startswith(words), found
    assert fingerprint(DOCUMENT) != fingerprint(changed)


def test_a_line_more_is_told_of_the_graph_that_has_it():
    """The other side goes on with something else there: that is no part of the difference."""
    more = [*DOCUMENT[:7], "node kernel c", *DOCUMENT[7:]]
    words = "first in graph 0F i=0 w=0, node 2: {} was saved, {} was captured"
    assert first_difference(DOCUMENT, more) == words.format("nothing", "'node kernel c'")
    assert first_difference(more, DOCUMENT) == words.format("'node kernel c'", "nothing")
    more = [*DOCUMENT[:8], "operation sub", *DOCUMENT[8:]]
    assert first_difference(more, DOCUMENT) == (
        "first in graph 0F i=0 w=0, operation 1: 'operation sub' was saved, nothing was captured"
    )


def test_a_document_that_ends_early():
    assert first_difference(DOCUMENT, DOCUMENT) is None
    assert first_difference(DOCUMENT[:-1], DOCUMENT) == (
        "first in graph step, operation 0: nothing was saved, 'operation mul' was captured"
    )
    assert first_difference(DOCUMENT, DOCUMENT[:-1]) == (
        "first in graph step, operation 0: 'operation mul' was saved, nothing was captured"
    )
    long = first_difference(["plan " + "x" * 500], ["plan"])
    assert long is not None and len(long) < 500
