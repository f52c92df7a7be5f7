"""``CudaGraphs``: captured actions on a GPU.

The graphs of one slot share a memory pool, and no other slot's: within a slot F, I and W follow each other, so what F's capture
freed, I's may use again; two slots are in use at the same time. Everything a capture allocates for itself lies in that pool;
what it reads from outside must be registered (:mod:`qeffect_lm.graphs.recorder` watches every dispatched operation).

A capture takes down launches and runs none of them, so work runs eagerly first (``warms_up``): libraries then allocate their
workspaces and compile their kernels outside of any capture.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.graphs.backend import Graph
from qeffect_lm.graphs.nodes import graph_nodes
from qeffect_lm.graphs.recorder import HostReads, Recorder
from qeffect_lm.graphs.register import HiddenStateRegister, storage_id


class _Watch(Recorder):
    """Keeps identities, not memory: a tensor that dies inside the capture gives its bytes back to the pool."""

    def __init__(self, label: str, register: HiddenStateRegister, shares: Iterable[Graph]) -> None:
        super().__init__(label, register, shares)
        self.numbers: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []

    def keep(self, made: torch.Tensor) -> None:
        self.numbers.setdefault(storage_id(made), len(self.numbers))
        self.references.append(StorageWeakRef(made.untyped_storage()))  # its identity stays taken while this lives


class CudaGraph:
    """A CUDA graph and the pool it shares with its slot's other graphs."""

    def __init__(self, label: str, pool: Any, lines: list[str], watch: _Watch, graph: torch.cuda.CUDAGraph, size: int) -> None:
        self.label, self.pool_id, self.pool_bytes = label, pool, size
        self.lines = [f"node {line}" for line in graph_nodes(graph.raw_cuda_graph())]
        self.lines += [f"operation {line}" for line in lines]
        self.digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
        self._graph, self._watch = graph, watch

    def storages(self) -> dict[int, int]:
        return self._watch.numbers

    def replay(self) -> None:
        """Launch the graph on the current stream; returns at once."""
        self._graph.replay()

    def reset(self) -> None:
        """Destroy the graph; its pool's memory is free once the last graph of the slot is destroyed."""
        self._graph.reset()


class CudaGraphs:
    """Graph backend over CUDA graphs.

    Args:
        stream: all captures run on it; autograd's backward runs where its forward was recorded, so F and I need the same one.
    """

    name = "cuda_graphs"
    warms_up = True

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def across(self, work: Callable[[], object]) -> object:
        """NCCL's work is captured like any other."""
        return work()

    def capture(
        self,
        label: str,
        work: Callable[[], None],
        *,
        register: HiddenStateRegister,
        shares: Iterable[Graph] = (),
    ) -> CudaGraph:
        """See :class:`~qeffect_lm.graphs.backend.GraphBackend`."""
        shares = list(shares)
        pool = next((graph.pool_id for graph in shares if isinstance(graph, CudaGraph)), None)
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        before = torch.cuda.memory_reserved(self.stream.device)
        watch = _Watch(label, register, shares)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # its nodes are read, so it is not thrown away once instantiated
        torch.cuda.synchronize(self.stream.device)
        with torch.cuda.stream(self.stream), _no_collection(), torch.autograd.set_multithreading_enabled(False):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with HostReads(label), watch:
                    work()
            except BaseException as error:
                with suppress(RuntimeError):  # an operation that CUDA refused has ended the capture already
                    graph.capture_end()
                graph.reset()
                if isinstance(error, RuntimeError) and "captur" in str(error) and not isinstance(error, CaptureError):
                    raise CaptureError(f"the capture of {label} was refused by CUDA: {error}", graph=label) from error
                raise
            graph.capture_end()
        graph.instantiate()
        size = torch.cuda.memory_reserved(self.stream.device) - before
        return CudaGraph(label, pool, watch.lines, watch, graph, size)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while capturing: it could free device memory or destroy another graph in the middle of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
