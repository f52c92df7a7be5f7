"""Operands of W of several microbatches side by side, so that one product makes them all (``pipeline.coalesce_w``).

    x^T   [in,  n * tokens]      member k quantises its columns into [:, k * tokens : (k + 1) * tokens]
    dY^T  [out, n * tokens]      the same in I
    W     dw = dY^T @ x          one GEMM over the columns of all members; the main gradient is touched once

The storages are made before any capture and stay: a graph of any member, captured by itself, finds its part at base +
position * stride. Members share one scale for each operand, since a step has one scale epoch (the ledger checks it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from qeffect_lm.fp8.quantise import Place
from qeffect_lm.fp8.recipes import FORMATS
from qeffect_lm.layers.linear import SplitLinear, WeightGradOperands


def place_bytes(layers: Iterable[torch.nn.Module], tokens: int) -> int:
    """Bytes of one W-slot of a stage: its columns of every operand that is joined, one byte an element."""
    return sum(tokens * (layer.in_features + layer.out_features) for layer in taking_part(layers))


def taking_part(layers: Iterable[torch.nn.Module]) -> list[SplitLinear]:
    """Those whose operands are joined: they quantise with scales known beforehand, and their weight is trained."""
    return [layer for layer in layers if isinstance(layer, SplitLinear) and layer.joins]


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
        names = {"input": "x", "grad_output": "dy"}
        columns = {name: self._columns[kind] for kind, name in names.items()}
        return columns | {f"{name}_scale_inv": self._scale_inv[kind] for kind, name in names.items()}


@dataclass(frozen=True)
class JoinedPlace:
    """A W-slot: a position in its group's storages. What a layer is given in F, I and W."""

    layers: Mapping[str, JoinedOperands]
    position: int

    def of(self, layer: str, kind: str) -> Place | None:
        """Where ``layer`` quantises to; None: into storages of its own."""
        operands = self.layers.get(layer)
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
            {layer.name: JoinedOperands(layer, members, tokens, device) for layer in taking} for _ in range(w_slots // members)
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
