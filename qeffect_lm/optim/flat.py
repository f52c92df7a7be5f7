"""Flat parameter storage: one buffer each for masters, main gradients and the two Adam moments.

Every parameter has one element offset that is the same in all buffers, aligned so that it is a multiple of
256 bytes in each of them whatever their dtypes. Parameters with weight decay come first, then those without,
then frozen ones: the optimizer therefore works on two contiguous ranges and never visits the third, which
has neither gradient nor moments. Within a range the order is the order of the specs. Padding between
parameters starts at zero and stays zero.

With a :class:`Shard` (ZeRO stage 1) the buffers of masters and moments hold only what this data-parallel rank owns, one piece
of the flat range behind the other (:mod:`qeffect_lm.optim.buckets`); parameters and main gradients stay whole.

A *tied* weight is another parameter's, perhaps another rank's (``ParamSpec.tied_to``). It has a main gradient of its own, in a
buffer beside the others, since two layers write it; and where the parameter itself lies on another rank, a copy of it in the
compute dtype. It has no master and no moments, and neither optimizer nor norm know of it.

Buffers are allocated once and only ever written in place: a captured graph may bake their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qeffect_lm.optim.buckets import BucketPlan, Span, boxes, plan_buckets
from qeffect_lm.parallel.cuts import Piece, length_of
from qeffect_lm.parallel.mesh import axes_of
from qeffect_lm.state import LogicalTensor, Role

ALIGNMENT_BYTES = 256
REPLICATED = ("dp", "ep", "cp", "tp")  # the axes over which every rank of a stage holds a parameter that none of them cuts


@dataclass(frozen=True)
class ParamSpec:
    """What the flat storage has to know about one parameter (this rank's piece of it).

    ``shape`` is the local shape. ``axes`` names per dimension the mesh axis that cuts it ("tp", "ep", ...)
    or None; left out, no dimension is cut. ``global_shape`` and ``start`` (first index of this piece per
    dimension) are needed when a dimension is cut. ``decay`` says whether weight decay applies. A parameter
    with ``trainable=False`` is stored and saved, but has no main gradient and no moments and is never
    updated. ``group`` is the pipeline chunk whose work completes its gradient. ``tied_to`` names the parameter that
    this weight is (tied embeddings). Where a rank's part of the one dimension that is cut is several ``pieces``, they say
    which, in local order, and ``start`` is the first one's. ``summed``: every tensor-parallel rank holds it whole, and the
    gradient there is a part of their sum. ``replicated``: the axes over which every rank holds it, or its piece, unless they
    cut it.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    axes: tuple[str | None, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    trainable: bool = True
    group: int = 0
    tied_to: str | None = None
    pieces: tuple[Piece, ...] = ()
    summed: bool = False
    replicated: tuple[str, ...] = REPLICATED

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def dimension(self) -> int | None:
        """The one that is cut."""
        return next((d for d, axis in enumerate(self.axes or ()) if axis is not None), None)

    @property
    def counted(self) -> int:
        """Elements that are no copies of another rank's: they come first."""
        if not self.pieces:
            return self.numel
        own = sum(piece.length for piece in self.pieces if not piece.copy)
        return self.numel // length_of(self.pieces) * own

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logical parameter's values ``[global shape]``."""
        d = self.dimension
        if d is None or self.global_shape is None or self.start is None:
            return whole
        pieces = self.pieces or (Piece(self.start[d], self.shape[d]),)
        return torch.cat([whole.narrow(d, piece.start, piece.length) for piece in pieces], dim=d)

    def blocks(self, first: Sequence[int], extent: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...], bool]]:
        """Where a local block lies in the logical parameter: for each piece that it is in, first and length along the cut
        dimension (within the block), start in the whole, and whether it is a copy."""
        whole = tuple(a + b for a, b in zip(self.start or (0,) * len(self.shape), first, strict=True))
        d = self.dimension
        if not self.pieces or d is None:
            yield 0, extent[d or 0] if extent else 0, whole, False
            return
        local = 0
        for piece in self.pieces:
            low, high = max(first[d], local), min(first[d] + extent[d], local + piece.length)
            if low < high:
                place = piece.start + low - local
                yield low - first[d], high - low, (*whole[:d], place, *whole[d + 1 :]), piece.copy
            local += piece.length

    def check(self) -> None:
        """Raise ValueError when ``axes``, ``global_shape`` or ``start`` do not fit ``shape``."""
        for label, value in (("axes", self.axes), ("global_shape", self.global_shape), ("start", self.start)):
            if value is not None and len(value) != len(self.shape):
                raise ValueError(f"{self.name}: {label} {value} does not fit shape {self.shape}")
        cut = [axis for axis in self.axes or () if axis is not None]
        if cut and (self.global_shape is None or self.start is None):
            raise ValueError(f"{self.name}: cut along {cut}, so global_shape and start must be given")
        if self.pieces and (len(cut) != 1 or length_of(self.pieces) != self.shape[self.dimension or 0]):
            raise ValueError(f"{self.name}: pieces {self.pieces} do not make up the one cut dimension of shape {self.shape}")
        if [piece.copy for piece in self.pieces] != sorted(piece.copy for piece in self.pieces):
            raise ValueError(f"{self.name}: copies of other ranks' pieces come last, not as in {self.pieces}")


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies: ``offset`` and ``numel`` in elements, the same in every buffer."""

    spec: ParamSpec
    offset: int
    numel: int
    segment: str


@dataclass(frozen=True)
class Shard:
    """Which part of the optimizer's state a replica holds: of ``ranks`` replicas that of ``rank``. ``bucket_bytes`` is the most
    bytes of main gradients that are reduced at once."""

    ranks: int
    rank: int
    bucket_bytes: int


@dataclass(frozen=True)
class Views:
    """One range that the optimizer updates, in all storages. ``param`` is None where it is the master itself."""

    master: torch.Tensor
    grad: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    param: torch.Tensor | None


class FlatBuffers:
    """Masters, parameters, main gradients and moments of one rank.

    ``master_buffer`` and ``param_buffer`` are ``[total]``; ``grad_buffer``, ``moment1_buffer`` and
    ``moment2_buffer`` are ``[trainable]``, the part before the frozen parameters; moments have
    ``moment_dtype``, by default the master's. When ``param_dtype`` equals ``master_dtype``, ``param_buffer``
    *is* ``master_buffer``; otherwise :meth:`gather` refreshes it by a cast. ``decay_range`` and
    ``no_decay_range`` are the two element ranges the optimizer updates.

    With ``shard``, ``buckets`` is the plan (else None). The moments are then ``[owned]``, and so is a master of
    another dtype than the parameters, frozen parts included; a master of their dtype is the whole parameter, of
    which this rank updates its part. :meth:`owned` and :meth:`views` tell the optimizer what to update.

    Raises ValueError for duplicate names and for specs that contradict themselves.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        *,
        master_dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        moment_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
    ) -> None:
        self.device = torch.device(device)
        moment_dtype = master_dtype if moment_dtype is None else moment_dtype
        dtypes = (master_dtype, param_dtype, grad_dtype, moment_dtype)
        self.entries, bounds = layout(specs, [dtype.itemsize for dtype in dtypes])
        self.tied = {spec.name: spec for spec in specs if spec.tied_to is not None}
        self.decay_range = slice(bounds[0], bounds[1])
        self.no_decay_range = slice(bounds[1], bounds[2])
        self.frozen_range = slice(bounds[2], bounds[3])

        self.separate_params = param_dtype != master_dtype
        self.buckets = None if shard is None else plan_of(self.entries, bounds, shard, grad_dtype.itemsize)
        # The flat ranges whose moments are here, and whose masters are.
        self._own = [(0, bounds[3])] if shard is None or self.buckets is None else self.buckets.shard(shard.rank)
        masters, moments = bounds[3], bounds[2]
        if shard is not None and self.buckets is not None:
            moments = self.buckets.owned(shard.rank, trainable=True)
            masters = self.buckets.owned(shard.rank) if self.separate_params else masters

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.master_buffer = zeros(masters, master_dtype)
        self.param_buffer = zeros(bounds[3], param_dtype) if self.separate_params else self.master_buffer
        self.grad_buffer = zeros(bounds[2], grad_dtype)
        self.moment1_buffer = zeros(moments, moment_dtype)
        self.moment2_buffer = zeros(moments, moment_dtype)
        self.tied_grad_buffers = {name: zeros(spec.numel, grad_dtype) for name, spec in self.tied.items() if spec.trainable}
        self.tied_param_buffers = {
            name: zeros(spec.numel, param_dtype) for name, spec in self.tied.items() if spec.tied_to not in self.entries
        }

    @property
    def names(self) -> list[str]:
        """All parameter names in storage order."""
        return list(self.entries)

    @property
    def trainable_names(self) -> list[str]:
        """Names of the parameters that have gradients and moments, in storage order."""
        return [name for name, entry in self.entries.items() if entry.segment != "frozen"]

    @property
    def gradient_names(self) -> list[str]:
        """Whatever has a main gradient here: the trainable parameters, then tied weights."""
        return [*self.trainable_names, *self.tied_grad_buffers]

    def entry(self, name: str) -> Entry:
        """Where ``name`` lies. Raises KeyError naming what this rank holds."""
        try:
            return self.entries[name]
        except KeyError:
            held = ", ".join(self.entries) or "none"
            raise KeyError(f"no parameter {name!r} on this rank; it holds {held}") from None

    @property
    def whole_masters(self) -> bool:
        """Whether every master is here whole: not where masters are sharded."""
        return self.buckets is None or not self.separate_params

    @property
    def groups(self) -> list[int]:
        """Those of the trainable parameters."""
        return sorted({self.entries[name].spec.group for name in self.trainable_names})

    def ranges(self, group: int, axis: str = "dp") -> list[tuple[int, int]]:
        """Where the main gradients of a group lie that all ranks of an axis (or line) hold, padding included: ascending ranges
        of elements, neighbours joined."""
        entries = [self.entries[name] for name in self.trainable_names]
        stops = [entry.offset for entry in entries[1:]] + [self.grad_buffer.numel()]
        found: list[tuple[int, int]] = []
        for entry, stop in zip(entries, stops, strict=True):
            start = entry.offset
            if entry.spec.group != group or not set(axes_of(axis)) <= set(entry.spec.replicated):
                continue
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return found

    def master(self, name: str) -> torch.Tensor:
        """The master values, a live view of the parameter's shape. Raises ValueError where masters are sharded."""
        if not self.whole_masters:
            raise ValueError(f"the master of {name!r} is sharded over the replicas (optim.zero=1): no rank holds it whole")
        return self._view(self.master_buffer, self.entry(name))

    def fill_(self, name: str, values: torch.Tensor) -> None:
        """Give a parameter its first values ``[global shape]``: masters (what this rank owns of them) and compute-dtype
        parameter. Of a copy of another rank's parameter, that."""
        if name in self.tied_param_buffers:
            self.param(name).copy_(self.tied[name].take(values))
            return
        entry = self.entry(name)
        values = entry.spec.take(values)
        flat = values.reshape(-1)
        if self.whole_masters:
            self.master(name).copy_(values)
        else:
            for start, stop in self.own_parts(name):
                at = self._local(entry.offset + start)
                self.master_buffer[at : at + stop - start].copy_(flat[start:stop])
        self.param(name).copy_(values)

    def own_parts(self, name: str) -> list[tuple[int, int]]:
        """The elements ``[start, stop)`` of the flattened parameter that this rank updates; all of it without a shard."""
        entry = self.entry(name)
        parts = ((start - entry.offset, stop - entry.offset) for start, stop in self._own)
        inside = ((max(0, start), min(entry.numel, stop)) for start, stop in parts)
        return [(start, stop) for start, stop in inside if start < stop]

    def owned(self, span: slice) -> list[slice]:
        """The parts of a flat range that this rank updates, in order; the range itself without a shard."""
        inside = (slice(max(start, span.start), min(stop, span.stop)) for start, stop in self._own)
        return [part for part in inside if part.start < part.stop]

    def views(self, span: slice) -> Views:
        """The storages of a trainable flat range that :meth:`owned` gave. Raises ValueError where another replica owns it."""
        at = self._local(span.start)
        local = slice(at, at + span.stop - span.start)
        return Views(
            self.master_buffer[span if self.whole_masters else local],
            self.grad_buffer[span],
            self.moment1_buffer[local],
            self.moment2_buffer[local],
            self.param_buffer[span] if self.separate_params else None,
        )

    def _local(self, offset: int) -> int:
        """Where an owned flat element lies in the buffers that hold only what is owned."""
        before = 0
        for start, stop in self._own:
            if start <= offset < stop:
                return before + offset - start
            before += stop - start
        raise ValueError(f"element {offset} belongs to another replica")

    def param(self, name: str) -> torch.Tensor:
        """The values layers compute with (compute dtype), a live view; the master itself when dtypes are
        equal. Of a tied weight the parameter that it is, or its copy."""
        spec = self.tied.get(name)
        if spec is None:
            return self._view(self.param_buffer, self.entry(name))
        if name in self.tied_param_buffers:
            return self.tied_param_buffers[name].view(spec.shape)
        assert spec.tied_to is not None
        return self.param(spec.tied_to)

    def grad(self, name: str) -> torch.Tensor:
        """The main gradient, a live view. Raises KeyError for a frozen parameter."""
        if name in self.tied_grad_buffers:
            return self.tied_grad_buffers[name].view(self.tied[name].shape)
        return self._view(self.grad_buffer, self._trainable(name))

    def moment1(self, name: str) -> torch.Tensor:
        """Adam's first moment, a live view. Raises KeyError for a frozen parameter, ValueError where moments are sharded."""
        return self._view(self.moment1_buffer, self._whole_moment(name))

    def moment2(self, name: str) -> torch.Tensor:
        """Adam's second moment, as :meth:`moment1`."""
        return self._view(self.moment2_buffer, self._whole_moment(name))

    def gather(self) -> None:
        """Refresh the compute-dtype parameters from the masters (one cast), what this rank owns of them; nothing to do when
        they are one storage."""
        if not self.separate_params:
            return
        if self.buckets is None:
            self.param_buffer.copy_(self.master_buffer)
            return
        for span in self.owned(slice(0, self.no_decay_range.stop)):
            views = self.views(span)
            assert views.param is not None
            views.param.copy_(views.master)

    def logical_tensors(self) -> list[LogicalTensor]:
        """Saved state: ``master/``, ``moment1/``, ``moment2/`` and, where separately stored, ``param/`` +
        name. The copy of another rank's parameter is listed under that one's name, as a replica."""
        tensors: list[LogicalTensor] = []
        for name in self.tied_param_buffers:
            spec = self.tied[name]
            kind, role = ("param", Role.PARAM) if self.separate_params else ("master", Role.MASTER)
            copies = self._logical(f"{kind}/{spec.tied_to}", self.param(name), role, spec)
            tensors += [replace(copy, replicated=(*copy.replicated, "pp")) for copy in copies]
        for name, entry in self.entries.items():
            spec = entry.spec
            if self.whole_masters:
                tensors += self._logical(f"master/{name}", self.master(name), Role.MASTER, spec)
            else:
                tensors += self._parts(f"master/{name}", self.master_buffer, Role.MASTER, entry)
            if entry.segment != "frozen":
                tensors += self._parts(f"moment1/{name}", self.moment1_buffer, Role.MOMENT, entry)
                tensors += self._parts(f"moment2/{name}", self.moment2_buffer, Role.MOMENT, entry)
            if self.separate_params:
                tensors += self._logical(f"param/{name}", self.param(name), Role.PARAM, spec)
        return tensors

    def logical(self, label: str, tensor: torch.Tensor, role: Role, name: str) -> list[LogicalTensor]:
        """``tensor``, laid out as the parameter ``name`` is here, as pieces of the logical tensor ``label``."""
        return self._logical(label, tensor, role, self.entry(name).spec)

    def gradient_tensors(self) -> list[LogicalTensor]:
        """``grad/`` + name of every trainable parameter: its main gradient as the step left it; of a sharded one what this rank
        owns, the rest means nothing after the reduction."""
        found: list[LogicalTensor] = []
        for name in self.trainable_names:
            found += self._parts(f"grad/{name}", self.grad_buffer, Role.GRADIENT, self.entry(name), whole=True)
        return found

    def _parts(
        self, name: str, buffer: torch.Tensor, role: Role, entry: Entry, *, whole: bool = False
    ) -> list[LogicalTensor]:
        """What this rank owns of a parameter's sharded state, as blocks of the logical tensor; one without a shard. ``whole``:
        the buffer holds all of it, not the owned parts alone."""
        spec = entry.spec
        if self.buckets is None or not entry.numel:
            return self._logical(name, self._view(buffer, entry), role, spec)
        parts = []
        for start, stop in self.own_parts(spec.name):
            at = entry.offset + start if whole else self._local(entry.offset + start)
            for begin, extent in boxes(spec.shape, start, stop):
                size = math.prod(extent)
                for piece in self._logical(name, buffer[at : at + size].view(extent), role, spec, begin):
                    elsewhere = tuple(axis for axis in piece.replicated if axis not in axes_of("replicas"))
                    parts.append(replace(piece, replicated=elsewhere))
                at += size
        return parts

    def table(self) -> str:
        """The layout as text: per parameter its segment, shape, offset (elements) and bytes of master."""
        width = max([len("parameter"), *(len(name) for name in self.entries)])
        lines = [f"{'parameter':<{width}}  segment   {'offset':>12}  {'elements':>12}  {'bytes':>14}  shape"]
        for name, entry in self.entries.items():
            size = entry.numel * self.master_buffer.element_size()
            shape = "x".join(map(str, entry.spec.shape)) or "scalar"
            numbers = f"{entry.offset:>12,}  {entry.numel:>12,}  {size:>14,}"
            lines.append(f"{name:<{width}}  {entry.segment:<8}  {numbers}  {shape}")
        used = sum(entry.numel for entry in self.entries.values())
        padding = self.frozen_range.stop - used
        lines.append(f"{used:,} parameters and {padding:,} elements of padding in {self.bytes():,} bytes")
        return "\n".join(lines)

    def bytes(self) -> int:
        """Bytes of all buffers together (parameters, masters, main gradients, moments)."""
        buffers = [self.master_buffer, self.grad_buffer, self.moment1_buffer, self.moment2_buffer]
        buffers += [*self.tied_grad_buffers.values(), *self.tied_param_buffers.values()]
        if self.separate_params:
            buffers.append(self.param_buffer)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _trainable(self, name: str) -> Entry:
        entry = self.entry(name)
        if entry.segment == "frozen":
            raise KeyError(f"parameter {name!r} is frozen: it has no main gradient and no moments")
        return entry

    def _whole_moment(self, name: str) -> Entry:
        entry = self._trainable(name)
        if self.buckets is not None:
            raise ValueError(f"the moments of {name!r} are sharded over the replicas (optim.zero=1): no rank holds them whole")
        return entry

    @staticmethod
    def _view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
        return buffer[entry.offset : entry.offset + entry.numel].view(entry.spec.shape)

    @staticmethod
    def _logical(
        name: str, tensor: torch.Tensor, role: Role, spec: ParamSpec, first: Sequence[int] | None = None
    ) -> list[LogicalTensor]:
        """A block of a parameter's local tensor, from local index ``first`` on (None: all of it)."""
        axes = spec.axes or (None,) * len(spec.shape)
        dimension = spec.dimension if spec.pieces else None
        made = []
        for begin, length, start, copy in spec.blocks(first or (0,) * len(spec.shape), tuple(tensor.shape)):
            made.append(
                LogicalTensor(
                    name=name,
                    tensor=tensor if dimension is None else tensor.narrow(dimension, begin, length),
                    role=role,
                    global_shape=spec.global_shape or spec.shape,
                    start=start,
                    axes=axes,
                    replicated=tuple(axis for axis in spec.replicated if axis not in axes),
                    copy=copy,
                )
            )
        return made


def layout(specs: Sequence[ParamSpec], itemsizes: Sequence[int]) -> tuple[dict[str, Entry], list[int]]:
    """Where each parameter lies, and the bounds ``[0, decay, no decay, frozen]`` of the segments, in elements; ``itemsizes``
    are those of all buffers.

    Raises ValueError as :class:`FlatBuffers`.
    """
    align = ALIGNMENT_BYTES // min(itemsizes)
    entries: dict[str, Entry] = {}
    bounds = [0]
    segments = (("decay", True, True), ("no_decay", False, True), ("frozen", None, False))
    for segment, decay, trainable in segments:
        end = bounds[-1]
        for spec in specs:
            if spec.tied_to is not None or spec.trainable != trainable or (decay is not None and spec.decay != decay):
                continue
            spec.check()
            if spec.name in entries:
                raise ValueError(f"two parameters are called {spec.name!r}; names must be unique")
            entries[spec.name] = Entry(spec, end, spec.numel, segment)
            end += -(-spec.numel // align) * align
        bounds.append(end)
    return entries, bounds


def plan_of(entries: Mapping[str, Entry], bounds: Sequence[int], shard: Shard, itemsize: int) -> BucketPlan:
    """The buckets of a layout; ``itemsize`` is a main gradient's."""
    spans = [Span(name, e.offset, e.numel, e.segment != "frozen", e.spec.group) for name, e in entries.items()]
    return plan_buckets(spans, (bounds[2], bounds[3]), shard.ranks, max(1, shard.bucket_bytes // itemsize))
