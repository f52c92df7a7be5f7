"""``Guard``: the contract around a loop of your own, without our models or pipeline.

A guard does two things in one call, so that they cannot drift apart: it makes the real wait between two CUDA streams and
tells the ledger of it; it runs your work on a stream and tells the ledger which bytes the work reads and writes. On CPU,
where work is done when the call returns, only the account is kept: the verdict depends on the recorded edges alone, so a
missing edge is an error there too, before it becomes a race on a GPU.

Buffers are tensors: a guard looks at the bytes that a tensor covers in its storage, so that views of one storage are known to
overlap, or not to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Mode, Summary
from qeffect_lm.contract.real_streams import BoundEvent, RealStreams
from qeffect_lm.contract.streams import HOST, Access, BufferAccess
from qeffect_lm.contract.timeline import ScaleRole, ScaleTimeline
from qeffect_lm.contract.trace import TraceWriter
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import UsageError

MAX_RANGES = 4096  # a tensor in more pieces than this counts as everything between its first and its last byte

Tensors = Iterable[torch.Tensor]


class Replayable(Protocol):
    """What a guard asks of a graph; ``torch.cuda.CUDAGraph`` and a ``HostReplay`` graph have it."""

    def replay(self) -> None: ...


def byte_ranges(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The byte ranges [lo, hi) of its storage that a strided tensor covers, in ascending order.

    A tensor of more than ``MAX_RANGES`` pieces gives one range from its first to its last byte.
    """
    if tensor.numel() == 0:
        return []
    size = tensor.element_size()
    # Innermost dimension first: a dimension whose steps touch the piece so far makes the piece longer.
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, count) for stride, count in sizes if count > 1 and stride > 0)
    piece = 1
    while dims and dims[0][0] <= piece:
        stride, count = dims.pop(0)
        piece += stride * (count - 1)
    start = int(tensor.storage_offset())
    if math.prod(count for _, count in dims) > MAX_RANGES:
        return [(start * size, (start + piece + sum(stride * (count - 1) for stride, count in dims)) * size)]
    starts = [int(start)]
    for stride, count in dims:
        starts = [at + stride * k for k in range(count) for at in starts]
    merged: list[tuple[int, int]] = []
    for at in sorted(starts):
        if merged and at <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], at + piece))
        else:
            merged.append((at, at + piece))
    return [(lo * size, hi * size) for lo, hi in merged]


class GuardedGraph:
    """A graph with the streams, bytes and state it touches; :meth:`replay` checks them, then launches it."""

    def __init__(
        self,
        guard: Guard,
        name: str,
        graph: Replayable,
        stream: str,
        accesses: tuple[BufferAccess, ...],
        summary: Summary | None,
    ) -> None:
        self.guard, self.name, self.graph, self.stream = guard, name, graph, stream
        self._accesses, self._summary = accesses, summary

    def replay(self, microbatch: int = 0, *, chunk: int = 0, slots: tuple[Slot, Slot] | None = None) -> None:
        """Replay on the guard's stream, under the checks.

        Args:
            microbatch, chunk: whose lease the graph moves (a graph with a ``summary``).
            slots: F's I-slot and W-slot.

        Raises:
            ContractViolation: before anything is launched.
        """
        guard = self.guard
        if self._summary is not None:
            guard.ledger.replay(self._summary, chunk, microbatch, slots=slots)
        guard.ledger.launch(self.stream, self._accesses, self.name)
        with guard.streams.current(self.stream):
            self.graph.replay()


class Guard:
    """Real streams and their account.

    Args:
        streams: names (CPU), or name → ``torch.cuda.Stream``. The host is always there, as ``"host"``.
        tensors: name → tensor, so that errors and traces call its storage so; others are numbered.
        roles: quantised tensors whose scales move (I1).
        weights: parameters with a cached form (I3).
        grads: name → main-gradient view (any shape), for gradient slots.
        window, history: of the scale timeline, see :class:`~qeffect_lm.contract.timeline.ScaleTimeline`.
        mode: ``enforce``, ``trace`` (needs ``trace``) or ``off``.
        trace: a file to write every effect to; ``python -m tools.explain`` reads it.
        device: of scales and amax slots.

    Raises:
        UsageError: a stream is called ``host``, or mode ``trace`` without a file.
    """

    def __init__(
        self,
        streams: Sequence[str] | Mapping[str, torch.cuda.Stream],
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        roles: Sequence[ScaleRole] = (),
        weights: Iterable[str] = (),
        grads: Mapping[str, torch.Tensor] | None = None,
        window: str = "step",
        history: int = 16,
        mode: Mode | str = Mode.ENFORCE,
        trace: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if Mode(mode) is Mode.TRACE and trace is None:
            raise UsageError("mode trace needs a file: Guard(..., mode='trace', trace='trace.jsonl')")
        self._writer = TraceWriter(trace) if trace is not None and Mode(mode) is Mode.TRACE else None
        self.ledger = Ledger(
            ScaleTimeline(roles, window=window, history=history, device=device),
            WeightVersions(weights),
            GradSlots(GradSlot(name, view) for name, view in (grads or {}).items()),
            mode=mode,
            trace=self._writer,
        )
        self.streams = RealStreams(self.ledger, streams)
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # a freed storage's identity may come back as another's
        for name, tensor in (tensors or {}).items():
            self._buffer(tensor, name)

    @property
    def timeline(self) -> ScaleTimeline:
        """The scales (I1)."""
        return self.ledger.timeline

    @property
    def versions(self) -> WeightVersions:
        """The weights' versions (I3)."""
        return self.ledger.versions

    def close(self) -> None:
        """Close the trace, if there is one."""
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One optimizer step: no lease, and in window ``step`` no uncommitted scale, outlives it.

        An exception in the body abandons the step: the host waits for all streams, the account of leases and readers is
        cleared, and another step may begin.
        """
        self.ledger.begin_step(step)
        try:
            yield
            self.ledger.end_step()
        except BaseException:
            self.streams.synchronize_all()
            self.ledger.abandon_step()
            raise

    # ---- buffers -----------------------------------------------------------------------------------------------

    def _buffer(self, tensor: torch.Tensor, name: str | None = None) -> str:
        identity = tensor.untyped_storage()._cdata
        if identity not in self._names:
            self._names[identity] = name or f"storage {len(self._names)}"
            self._kept.append(tensor.detach())
        return self._names[identity]

    def accesses(self, reads: Tensors = (), writes: Tensors = (), merges: Tensors = ()) -> tuple[BufferAccess, ...]:
        """What work that touches these tensors does to which bytes; ``merges`` are maxima (they commute)."""
        kinds = ((Access.READ, reads), (Access.MAX_MERGE, merges), (Access.WRITE, writes))
        found: list[BufferAccess] = []
        for kind, some in kinds:
            for tensor in some:
                buffer, size = self._buffer(tensor), tensor.untyped_storage().nbytes()
                ranges = byte_ranges(tensor)
                found += [(buffer, kind)] if ranges == [(0, size)] else [(buffer, kind, lo, hi) for lo, hi in ranges]
        return tuple(found)

    # ---- work --------------------------------------------------------------------------------------------------

    @contextmanager
    def work(
        self, stream: str, who: str, *, reads: Tensors = (), writes: Tensors = (), merges: Tensors = ()
    ) -> Iterator[None]:
        """Launch the body's work on ``stream``.

        Args:
            stream: a name of the guard's, or ``"host"`` for work of the calling thread.
            who: what the work is called in errors.
            reads, writes, merges: the tensors it touches.

        Raises:
            StreamOrderError: before the body runs, where no recorded edge orders it after a conflicting access.
        """
        self.streams.real(stream)  # an unknown name is refused before anything is told
        self.ledger.launch(stream, self.accesses(reads, writes, merges), who)
        with self.streams.current(stream):
            yield

    @contextmanager
    def update(self, stream: str, *, writers: int, reads: Tensors = (), writes: Tensors = ()) -> Iterator[None]:
        """The optimizer, as :meth:`work`: every declared gradient has its writers, and afterwards every weight another version.

        Args:
            writers: how many W (or EMPTY reports) of this step each gradient must have had.
            reads, writes: the gradients and what the optimizer writes.

        Raises:
            GradSlotError: before the body runs, where a W is missing, or an optimizer ran before in this step.
            StreamOrderError: as of :meth:`work`.
        """
        if self.ledger.checks:
            self.ledger.grads.check_complete(writers)
        with self.work(stream, "optimizer", reads=reads, writes=writes):
            yield
        self.versions.bump()

    def graph(
        self,
        name: str,
        graph: Replayable,
        stream: str,
        *,
        reads: Tensors = (),
        writes: Tensors = (),
        merges: Tensors = (),
        summary: Summary | None = None,
    ) -> GuardedGraph:
        """Guard a captured graph.

        Args:
            name: what it is called in errors.
            graph: anything with ``replay()``.
            stream: where its replays are launched.
            reads, writes, merges: the static tensors it touches.
            summary: what it does to scales, leases, cached weights and gradients; None: nothing.
        """
        self.streams.real(stream)
        return GuardedGraph(self, name, graph, stream, self.accesses(reads, writes, merges), summary)

    # ---- edges -------------------------------------------------------------------------------------------------

    def record(self, stream: str, *, covers: Tensors | None = None) -> BoundEvent:
        """An event after the work launched on ``stream`` so far; ``covers``: an early one, for these tensors' storages only."""
        return self.streams.record(stream, None if covers is None else [self._buffer(tensor) for tensor in covers])

    def wait(self, stream: str, event: BoundEvent) -> None:
        """Work on ``stream`` from here on waits for ``event``."""
        self.streams.wait(stream, event)

    def edge(self, source: str, target: str) -> None:
        """Work on ``target`` from here on waits for the work on ``source`` so far."""
        self.streams.edge(source, target)

    def synchronize(self, stream: str) -> None:
        """The host waits for the work on ``stream`` so far."""
        self.streams.edge(stream, HOST)
