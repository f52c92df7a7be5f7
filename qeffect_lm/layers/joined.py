"""Operands of W of several microbatches side by side, so that one product makes them all (``pipeline.coalesce_w``).

    x^T   [in,  n * tokens]      member k quantises its columns into [:, k * tokens : (k + 1) * tokens]
    dY^T  [out, n * tokens]      the same in I
    W     dw = dY^T @ x          one GEMM over the columns of all members; the main gradient is touched once

The storages are made before any capture and stay: a graph of any member, captured by itself, finds its part at base +
position * stride. Members share one scale for each operand, since a step has one scale epoch (the ledger checks it).

Of a linear of experts each member has places for as many rows as its routing could ever give, and leaves beside them which rows
are whose, and a scale for each group: of an expert that has had no amax yet, each member has one of its own.

    x^T   [in,  n * places]      member k in [:, k * places : (k + 1) * places]; without kernels rows [n * places, in]
    splits [n, groups + 1], scales [n, groups]
    W     dw[e] = dY[rows of e]^T @ x[rows of e]      over e's rows of all members, one after the other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from qeffect_lm import kernels
from qeffect_lm.fp8.grouped import GroupPlace, Members, Rows, places_of
from qeffect_lm.fp8.quantise import Place
from qeffect_lm.fp8.recipes import FORMATS
from qeffect_lm.layers.base import Deferred
from qeffect_lm.layers.grouped import GroupedLinear
from qeffect_lm.layers.linear import SplitLinear, WeightGradOperands

KINDS = {"input": "x", "grad_output": "dy"}


def place_bytes(layers: Iterable[torch.nn.Module], tokens: int) -> int:
    """Bytes of one W-slot of a stage: its columns of every operand that is joined, one byte an element; of groups also their
    scales and splits."""
    return sum(_place_bytes(layer, tokens) for layer in taking_part(layers))


def _place_bytes(layer: Deferred, tokens: int) -> int:
    if isinstance(layer, GroupedLinear):
        groups = len(layer.experts)
        return _places(layer, tokens) * (layer.in_features + layer.out_features) + 4 * (2 * groups + groups + 1)
    assert isinstance(layer, SplitLinear)
    return tokens * (layer.in_features + layer.out_features)


def _places(layer: GroupedLinear, tokens: int) -> int:
    """Of a microbatch, whatever its routing."""
    return places_of(layer.most_rows(tokens), len(layer.experts))


def taking_part(layers: Iterable[torch.nn.Module]) -> list[Deferred]:
    """Those whose operands are joined: they quantise with scales known beforehand, and their weight is trained."""
    return [layer for layer in layers if isinstance(layer, Deferred) and layer.joins]


class JoinedOperands:
    """Both operands of one linear, for ``members`` microbatches of ``tokens``."""

    def __init__(self, layer: SplitLinear, members: int, tokens: int, device: torch.device | str) -> None:
        self._tokens = tokens
        self._columns: dict[str, torch.Tensor] = {}
        self._scale_inv: dict[str, torch.Tensor] = {}
        for kind, features in (("input", layer.in_features), ("grad_output", layer.out_features)):
            self._columns[kind] = torch.zeros(features, members * tokens, dtype=FORMATS[kind].dtype, device=device)
            self._scale_inv[kind] = torch.ones((), device=device)

    def place(self, kind: str, position: int) -> Place:
        """Where the member at ``position`` quantises ``input`` or ``grad_output`` to."""
        first = position * self._tokens
        return Place(self._columns[kind][:, first : first + self._tokens], self._scale_inv[kind])

    def first(self, members: int) -> WeightGradOperands:
        """The operands of the first ``members``, as those of one large microbatch."""
        x, dy = (self._columns[kind][:, : members * self._tokens] for kind in ("input", "grad_output"))
        return WeightGradOperands(x, self._scale_inv["input"], dy, self._scale_inv["grad_output"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The storages by name, for the register."""
        columns = {name: self._columns[kind] for kind, name in KINDS.items()}
        return columns | {f"{name}_scale_inv": self._scale_inv[kind] for kind, name in KINDS.items()}


@dataclass(frozen=True)
class JoinedRows:
    """Both operands of a linear of groups, of the microbatches that ``members`` tells of."""

    members: Members
    x: Rows
    dy: Rows

    def tensors(self) -> list[torch.Tensor]:
        return [*self.x.tensors(), *self.dy.tensors(), self.members.offsets]


class JoinedGroups:
    """The same of one linear of groups, for ``members`` microbatches of ``tokens``."""

    def __init__(self, layer: GroupedLinear, members: int, tokens: int, device: torch.device | str) -> None:
        groups, self._places = len(layer.experts), _places(layer, tokens)
        self._turned = kernels.usable(torch.empty(0, dtype=layer.experts[0].weight.dtype, device=device))
        self._offsets = torch.zeros(members, groups + 1, dtype=torch.int32, device=device)
        self._stored: dict[str, torch.Tensor] = {}
        self._scale_inv: dict[str, torch.Tensor] = {}
        for kind, features in (("input", layer.in_features), ("grad_output", layer.out_features)):
            long = members * self._places
            shape = (features, long) if self._turned else (long, features)
            self._stored[kind] = torch.zeros(shape, dtype=FORMATS[kind].dtype, device=device)
            self._scale_inv[kind] = torch.ones(members, groups, device=device)

    def _part(self, kind: str, first: int, members: int) -> torch.Tensor:
        part = slice(first * self._places, (first + members) * self._places)
        return self._stored[kind][:, part] if self._turned else self._stored[kind][part]

    def place(self, kind: str, position: int) -> GroupPlace:
        """Where the member at ``position`` quantises ``input`` or ``grad_output`` to."""
        return GroupPlace(self._part(kind, position, 1), self._scale_inv[kind][position], self._offsets[position])

    def first(self, members: int) -> JoinedRows:
        """The operands of the first ``members``."""
        x, dy = (self._rows(kind, members) for kind in ("input", "grad_output"))
        return JoinedRows(Members(self._offsets[:members], self._places), x, dy)

    def _rows(self, kind: str, members: int) -> Rows:
        part, scale_inv = self._part(kind, 0, members), self._scale_inv[kind][:members]
        return Rows(None, scale_inv, part) if self._turned else Rows(part, scale_inv)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The storages by name, for the register."""
        stored = {name: self._stored[kind] for kind, name in KINDS.items()}
        scales = {f"{name}_scale_inv": self._scale_inv[kind] for kind, name in KINDS.items()}
        return {**stored, **scales, "offsets": self._offsets}


Joined = JoinedOperands | JoinedGroups


def joined(layer: Deferred, members: int, tokens: int, device: torch.device | str) -> Joined:
    """The storages of a layer that takes part."""
    if isinstance(layer, GroupedLinear):
        return JoinedGroups(layer, members, tokens, device)
    assert isinstance(layer, SplitLinear)
    return JoinedOperands(layer, members, tokens, device)


@dataclass(frozen=True)
class JoinedPlace:
    """A W-slot: a position in its group's storages. What a layer is given in F, I and W."""

    layers: Mapping[str, Joined]
    position: int

    def linear(self, layer: str) -> JoinedOperands | None:
        """The operands of a linear and its W-slot's neighbours; None: it does not take part."""
        found = self.layers.get(layer)
        assert found is None or isinstance(found, JoinedOperands)
        return found

    def groups(self, layer: str) -> JoinedGroups | None:
        """The same of a linear of groups."""
        found = self.layers.get(layer)
        assert found is None or isinstance(found, JoinedGroups)
        return found

    def of(self, layer: str, kind: str) -> Place | None:
        """Where ``layer`` quantises to; None: into storages of its own."""
        operands = self.linear(layer)
        return None if operands is None else operands.place(kind, self.position)

    def of_groups(self, layer: str, kind: str) -> GroupPlace | None:
        """The same of a linear of groups."""
        operands = self.groups(layer)
        return None if operands is None else operands.place(kind, self.position)


class JoinedBuffers:
    """All of a stage's storages: W-slot w is position w % members of group w // members.

    Args:
        layers: of the stage; :func:`taking_part` says which of them.
        w_slots: how many, a multiple of ``members``.
        members: microbatches that share a product.
        tokens: of a microbatch.
    """

    def __init__(
        self, layers: Iterable[torch.nn.Module], w_slots: int, members: int, tokens: int, device: torch.device | str
    ) -> None:
        if w_slots % members:
            raise ValueError(f"{w_slots} W-slots are not groups of {members}")
        self._members = members
        taking = taking_part(layers)
        self.groups = [
            {layer.name: joined(layer, members, tokens, device) for layer in taking} for _ in range(w_slots // members)
        ]
        self._storages = {tensor.untyped_storage()._cdata for tensor in self.tensors().values()}

    def place(self, w_slot: int) -> JoinedPlace:
        group, position = divmod(w_slot, self._members)
        return JoinedPlace(self.groups[group], position)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in these storages."""
        return tensor.untyped_storage()._cdata in self._storages

    def written(self, w_slot: int, members: int) -> Iterator[torch.Tensor]:
        """What the first ``members`` of a W-slot's group wrote, for debugging."""
        for operands in self.groups[w_slot // self._members].values():
            yield from operands.first(members).tensors()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The storages by name, for the register."""
        return {
            f"group{number}/{layer}/{name}": tensor
            for number, group in enumerate(self.groups)
            for layer, operands in group.items()
            for name, tensor in operands.tensors().items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors().values())
