"""Flat parameter storage: one buffer each for masters, main gradients and the two Adam moments.

Every parameter has one element offset that is the same in all buffers, aligned so that it is a multiple of
256 bytes in each of them whatever their dtypes. Parameters with weight decay come first, then those without,
then frozen ones: the optimizer therefore works on two contiguous ranges and never visits the third, which
has neither gradient nor moments. Within a range the order is the order of the specs. Padding between
parameters starts at zero and stays zero.

Buffers are allocated once and only ever written in place: a captured graph may bake their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qeffect_lm.state import LogicalTensor, Role

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class ParamSpec:
    """What the flat storage has to know about one parameter (this rank's piece of it).

    ``shape`` is the local shape. ``axes`` names per dimension the mesh axis that cuts it ("tp", "ep", ...)
    or None; left out, no dimension is cut. ``global_shape`` and ``start`` (first index of this piece per
    dimension) are needed when a dimension is cut. ``decay`` says whether weight decay applies. A parameter
    with ``trainable=False`` is stored and saved, but has no main gradient and no moments and is never
    updated.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    axes: tuple[str | None, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def check(self) -> None:
        """Raise ValueError when ``axes``, ``global_shape`` or ``start`` do not fit ``shape``."""
        for label, value in (("axes", self.axes), ("global_shape", self.global_shape), ("start", self.start)):
            if value is not None and len(value) != len(self.shape):
                raise ValueError(f"{self.name}: {label} {value} does not fit shape {self.shape}")
        cut = [axis for axis in self.axes or () if axis is not None]
        if cut and (self.global_shape is None or self.start is None):
            raise ValueError(f"{self.name}: cut along {cut}, so global_shape and start must be given")


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies: ``offset`` and ``numel`` in elements, the same in every buffer."""

    spec: ParamSpec
    offset: int
    numel: int
    segment: str


class FlatBuffers:
    """Masters, parameters, main gradients and moments of one rank.

    ``master_buffer`` and ``param_buffer`` are ``[total]``; ``grad_buffer``, ``moment1_buffer`` and
    ``moment2_buffer`` are ``[trainable]``, the part before the frozen parameters; moments have the master's
    dtype. When ``param_dtype`` equals ``master_dtype``, ``param_buffer`` *is* ``master_buffer``; otherwise
    :meth:`gather` refreshes it by a cast. ``decay_range`` and ``no_decay_range`` are the two element ranges
    the optimizer updates.

    Raises ValueError for duplicate names and for specs that contradict themselves.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        *,
        master_dtype: torch.dtype = torch.float32,
        param_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        align = ALIGNMENT_BYTES // min(dtype.itemsize for dtype in (master_dtype, param_dtype, grad_dtype))
        self.entries: dict[str, Entry] = {}
        bounds = [0]
        segments = (("decay", True, True), ("no_decay", False, True), ("frozen", None, False))
        for segment, decay, trainable in segments:
            end = bounds[-1]
            for spec in specs:
                if spec.trainable != trainable or (decay is not None and spec.decay != decay):
                    continue
                spec.check()
                if spec.name in self.entries:
                    raise ValueError(f"two parameters are called {spec.name!r}; names must be unique")
                self.entries[spec.name] = Entry(spec, end, spec.numel, segment)
                end += -(-spec.numel // align) * align
            bounds.append(end)
        self.decay_range = slice(bounds[0], bounds[1])
        self.no_decay_range = slice(bounds[1], bounds[2])
        self.frozen_range = slice(bounds[2], bounds[3])

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.master_buffer = zeros(bounds[3], master_dtype)
        self.separate_params = param_dtype != master_dtype
        self.param_buffer = zeros(bounds[3], param_dtype) if self.separate_params else self.master_buffer
        self.grad_buffer = zeros(bounds[2], grad_dtype)
        self.moment1_buffer = zeros(bounds[2], master_dtype)
        self.moment2_buffer = zeros(bounds[2], master_dtype)

    @property
    def names(self) -> list[str]:
        """All parameter names in storage order."""
        return list(self.entries)

    @property
    def trainable_names(self) -> list[str]:
        """Names of the parameters that have gradients and moments, in storage order."""
        return [name for name, entry in self.entries.items() if entry.segment != "frozen"]

    def entry(self, name: str) -> Entry:
        """Where ``name`` lies. Raises KeyError naming what this rank holds."""
        try:
            return self.entries[name]
        except KeyError:
            held = ", ".join(self.entries) or "none"
            raise KeyError(f"no parameter {name!r} on this rank; it holds {held}") from None

    def master(self, name: str) -> torch.Tensor:
        """The master values, a live view of the parameter's shape."""
        return self._view(self.master_buffer, self.entry(name))

    def param(self, name: str) -> torch.Tensor:
        """The values layers compute with (compute dtype), a live view; the master itself when dtypes are
        equal."""
        return self._view(self.param_buffer, self.entry(name))

    def grad(self, name: str) -> torch.Tensor:
        """The main gradient, a live view. Raises KeyError for a frozen parameter."""
        return self._view(self.grad_buffer, self._trainable(name))

    def moment1(self, name: str) -> torch.Tensor:
        """Adam's first moment, a live view. Raises KeyError for a frozen parameter."""
        return self._view(self.moment1_buffer, self._trainable(name))

    def moment2(self, name: str) -> torch.Tensor:
        """Adam's second moment, a live view. Raises KeyError for a frozen parameter."""
        return self._view(self.moment2_buffer, self._trainable(name))

    def gather(self) -> None:
        """Refresh the compute-dtype parameters from the masters (one cast); nothing to do when they are one
        storage."""
        if self.separate_params:
            self.param_buffer.copy_(self.master_buffer)

    def logical_tensors(self) -> list[LogicalTensor]:
        """Saved state: ``master/``, ``moment1/``, ``moment2/`` and, where separately stored, ``param/`` +
        name."""
        tensors: list[LogicalTensor] = []
        for name, entry in self.entries.items():
            tensors.append(self._logical(f"master/{name}", self.master(name), Role.MASTER, entry.spec))
            if entry.segment != "frozen":
                tensors.append(self._logical(f"moment1/{name}", self.moment1(name), Role.MOMENT, entry.spec))
                tensors.append(self._logical(f"moment2/{name}", self.moment2(name), Role.MOMENT, entry.spec))
            if self.separate_params:
                tensors.append(self._logical(f"param/{name}", self.param(name), Role.PARAM, entry.spec))
        return tensors

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
        padding = self.master_buffer.numel() - used
        lines.append(f"{used:,} parameters and {padding:,} elements of padding in {self.bytes():,} bytes")
        return "\n".join(lines)

    def bytes(self) -> int:
        """Bytes of all buffers together (parameters, masters, main gradients, moments)."""
        buffers = [self.master_buffer, self.grad_buffer, self.moment1_buffer, self.moment2_buffer]
        if self.separate_params:
            buffers.append(self.param_buffer)
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _trainable(self, name: str) -> Entry:
        entry = self.entry(name)
        if entry.segment == "frozen":
            raise KeyError(f"parameter {name!r} is frozen: it has no main gradient and no moments")
        return entry

    @staticmethod
    def _view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
        return buffer[entry.offset : entry.offset + entry.numel].view(entry.spec.shape)

    @staticmethod
    def _logical(name: str, tensor: torch.Tensor, role: Role, spec: ParamSpec) -> LogicalTensor:
        axes = spec.axes or (None,) * len(spec.shape)
        return LogicalTensor(
            name=name,
            tensor=tensor,
            role=role,
            global_shape=spec.global_shape or spec.shape,
            start=spec.start or (0,) * len(spec.shape),
            axes=axes,
            replicated=tuple(axis for axis in ("dp", "tp", "ep") if axis not in axes),
        )
