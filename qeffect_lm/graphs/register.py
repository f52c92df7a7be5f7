"""The hidden-state register: every storage a capture may touch, with its owner and its rules.

What a captured graph bakes (addresses, Python scalars) keeps its meaning only while somebody owns it. An address the
register does not know is a :class:`CaptureError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from qeffect_lm.contract.errors import CaptureError

_OURS = frozenset({"qeffect_lm", "models", "pipeline"})  # whose objects add_object looks into


@dataclass(frozen=True)
class Registered:
    """One named tensor: who owns it, and whether the capture transaction must put it back (``mutable``)."""

    name: str
    owner: str
    tensor: torch.Tensor
    mutable: bool


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while it is alive."""
    return tensor.untyped_storage()._cdata


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


class HiddenStateRegister:
    """Named tensors of one rank; a storage is known when some registered tensor lies in it."""

    def __init__(self) -> None:
        self._entries: dict[str, Registered] = {}
        self._storages: dict[int, str] = {}
        self._addresses: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor, *, owner: str, mutable: bool = True) -> None:
        """Register a tensor. A name is registered once."""
        if name in self._entries:
            raise ValueError(f"{name!r} is registered already")
        self._entries[name] = Registered(name, owner, tensor.detach(), mutable)
        self._storages[storage_id(tensor)] = name
        self._addresses[name] = tensor.data_ptr()

    def add_all(self, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]], *, owner: str, mutable: bool = True) -> None:
        for name, tensor in tensors:
            self.add(f"{prefix}/{name}", tensor, owner=owner, mutable=mutable)

    def add_object(self, owner: str, part: object) -> None:
        """Register every storage that ``part`` holds in its attributes, through containers and our own objects, once each."""
        seen: set[int] = set()

        def walk(name: str, value: object) -> None:
            if id(value) in seen:
                return
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                whole = value._base if value._base is not None else value
                if not self.knows(whole):
                    self.add(name, whole, owner=owner)
            elif isinstance(value, Mapping):
                for key, item in value.items():
                    walk(f"{name}.{key}", item)
            elif isinstance(value, (list, tuple)):
                for i, item in enumerate(value):
                    walk(f"{name}.{i}", item)
            elif type(value).__module__.split(".")[0] in _OURS and hasattr(value, "__dict__"):
                for attribute, item in vars(value).items():
                    walk(f"{name}/{attribute}", item)

        walk(owner, part)

    def knows(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) in self._storages

    def name_of(self, tensor: torch.Tensor) -> str | None:
        return self._storages.get(storage_id(tensor))

    @property
    def entries(self) -> list[Registered]:
        return list(self._entries.values())

    def mutable(self) -> list[Registered]:
        """What a transaction saves and puts back, one entry per distinct tensor."""
        return [entry for entry in self._entries.values() if entry.mutable]

    def check_addresses(self) -> None:
        """Loads are in place: no registered tensor may have moved since it was registered.

        Raises:
            CaptureError: names the tensor.
        """
        for name, entry in self._entries.items():
            if entry.tensor.data_ptr() != self._addresses[name]:
                raise CaptureError(
                    f"{name!r} moved since it was registered: graphs would read the old storage", tensor=name
                )

    def table(self) -> str:
        """The register as text: name, owner, shape, dtype, rule."""
        lines = [f"{'tensor':48} {'owner':12} {'dtype':16} {'rolled back':11} shape"]
        for entry in self._entries.values():
            rule = "yes" if entry.mutable else "constant"
            dtype = str(entry.tensor.dtype).removeprefix("torch.")
            lines.append(f"{entry.name:48} {entry.owner:12} {dtype:16} {rule:11} {tuple(entry.tensor.shape)}")
        return "\n".join(lines)
