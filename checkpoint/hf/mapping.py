"""The vocabulary of a family's mapping: which rows of which Hugging Face tensors are one tensor of ours, and what of a
``config.json`` means what.

A mapping is pure: names, shapes and rows, no files and no numbers. Conversion, tests and documentation all read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from qeffect_lm.errors import UsageError

__all__ = ["Family", "Keys", "Link", "Part", "Rows", "fused_qkv", "same", "stacked"]


@dataclass(frozen=True)
class Part:
    """A tensor of theirs: name and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rows:
    """``count`` rows, from ``start`` on, of the part with this number."""

    part: int
    start: int
    count: int


@dataclass(frozen=True)
class Link:
    """One tensor of ours out of the rows of theirs, each row used once.

    Attributes:
        name: ours, without the role: ``layers.0.attention.qkv.weight``.
        shape: ours.
        parts: theirs, in the order of their own state dict.
        rows: our rows from the first to the last, as runs of rows of the parts. Of a transposed part its columns are meant.
        transposed: theirs are stored ``[in, out]``.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rows: tuple[Rows, ...]
    transposed: bool = False

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Ours out of theirs, in the order of ``parts``; equal bits. All have one dtype."""
        if len(self.rows) == 1 and not self.transposed:
            return tensors[0].reshape(self.shape)
        sources = [tensor.t() if self.transposed else tensor for tensor in tensors]
        out = torch.empty(self.shape, dtype=tensors[0].dtype)
        at = 0
        for run in self.rows:
            _bits(out)[at : at + run.count] = _bits(sources[run.part])[run.start : run.start + run.count]
            at += run.count
        return out

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Theirs out of ours, contiguous, in the order of ``parts``; the inverse of :meth:`join`."""
        if len(self.rows) == 1 and not self.transposed:
            return [tensor.reshape(self.parts[0].shape)]
        outs = []
        for part in self.parts:
            shape = part.shape[::-1] if self.transposed else part.shape
            outs.append(torch.empty(shape, dtype=tensor.dtype))
        at = 0
        for run in self.rows:
            _bits(outs[run.part])[run.start : run.start + run.count] = _bits(tensor)[at : at + run.count]
            at += run.count
        return [out.t().contiguous() if self.transposed else out for out in outs]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Seen as integers of the same size: FP8 tensors have no copies of rows of their own."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(name: str, theirs: str, shape: Sequence[int]) -> Link:
    """A tensor that is one of theirs as it is."""
    shape = tuple(shape)
    return Link(name, shape, (Part(theirs, shape),), (Rows(0, 0, shape[0]),))


def stacked(name: str, theirs: Sequence[str], rows: int, *rest: int) -> Link:
    """Tensors of ``rows`` rows each, one below the other: gate and up."""
    parts = tuple(Part(part, (rows, *rest)) for part in theirs)
    return Link(name, (len(parts) * rows, *rest), parts, tuple(Rows(i, 0, rows) for i in range(len(parts))))


def fused_qkv(name: str, theirs: Sequence[str], heads: int, kv_heads: int, head_dim: int, *rest: int) -> Link:
    """q, k and v: our rows are grouped, per KV head its query heads, then k, then v."""
    group = heads // kv_heads * head_dim
    q, k, v = theirs
    parts = (Part(q, (heads * head_dim, *rest)), Part(k, (kv_heads * head_dim, *rest)), Part(v, (kv_heads * head_dim, *rest)))
    rows: list[Rows] = []
    for head in range(kv_heads):
        rows += [Rows(0, head * group, group), *(Rows(part, head * head_dim, head_dim) for part in (1, 2))]
    return Link(name, ((heads + 2 * kv_heads) * head_dim, *rest), parts, tuple(rows))


@dataclass
class Keys:
    """The keys of a ``config.json``, each taken once; what is left over is unknown."""

    config: Mapping[str, Any]
    where: str
    taken: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None, kind: type | tuple[type, ...] | None = None) -> Any:
        """The value, or ``default`` where the key is absent or null. Raises :class:`UsageError` for a value of another type."""
        self.taken.add(key)
        value = self.config.get(key)
        if value is None:
            return default
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise UsageError(f"{self.where}: {key} is {value!r}, which is not a {_kind_name(kind)}")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A value that must be there."""
        value = self.take(key, None, kind)
        if value is None:
            raise UsageError(f"{self.where} has no {key}")
        return value

    def only(self, key: str, *allowed: Any, why: str = "") -> None:
        """A key that may be absent, null, or one of ``allowed``; anything else is a model that ours cannot be."""
        value = self.take(key, allowed[0])
        if value not in allowed:
            reason = f" ({why})" if why else ""
            raise UsageError(f"{self.where}: {key} is {value!r}, which is not supported{reason}; {allowed[0]!r} is")

    def agree(self, what: str, **values: Any) -> Any:
        """The one value of several keys that mean the same; None where none is there."""
        given = {key: value for key, value in values.items() if value is not None}
        if len(set(given.values())) > 1:
            said = " and ".join(f"{key} {value!r}" for key, value in given.items())
            raise UsageError(f"{self.where}: {said} disagree about {what}")
        return next(iter(given.values()), None)

    def ignore(self, *keys: str) -> None:
        """Keys without a say in what the model computes."""
        self.taken.update(keys)

    def finish(self) -> None:
        """Raises :class:`UsageError` for a key that nobody took."""
        unknown = sorted(set(self.config) - self.taken)
        if unknown:
            key = unknown[0]
            more = f" (and {len(unknown) - 1} more: {', '.join(unknown[1:6])})" if len(unknown) > 1 else ""
            raise UsageError(
                f"{self.where}: unknown key {key}: {self.config[key]!r}{more}; a key that may change what the model computes "
                "is never ignored"
            )


def _kind_name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join({int: "whole number", float: "number", bool: "boolean", str: "text"}.get(k, k.__name__) for k in kinds)


class Family(Protocol):
    """A model family on both sides. ``model`` is our model section as plain data, ``config`` a ``config.json``."""

    name: str  # model.family
    model_type: str
    architecture: str

    def dropped(self, name: str) -> bool:
        """Whether a tensor of theirs, found in some files, holds nothing that a model needs."""
        ...

    def to_model(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Our model section. Raises :class:`UsageError` naming the key that is unknown, unsupported or disagrees."""
        ...

    def to_config(self, model: Mapping[str, Any], dtype: str, max_positions: int) -> dict[str, Any]:
        """A ``config.json`` for a model that began as ours. Raises :class:`UsageError` for what theirs cannot be."""
        ...

    def links(self, model: Mapping[str, Any]) -> list[Link]:
        """All tensors, in the order in which theirs come in their state dict (of each link the first part counts)."""
        ...

    def order(self, model: Mapping[str, Any]) -> list[str]:
        """Names of theirs in the order of their state dict, by which shards are filled."""
        ...

    def aliases(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Tensors of theirs that may be there, or not, as a copy of another: a tied head."""
        ...
