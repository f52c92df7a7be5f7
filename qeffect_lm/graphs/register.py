"""The hidden-state register: every storage a capture may touch, with its owner and its rules.

What a captured graph bakes (addresses, Python scalars) keeps its meaning only while somebody owns it. An address the
register does not know is a :class:`CaptureError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from qeffect_lm.contract.errors import CaptureError

_OURS = frozenset({"qeffect_lm", "models", "pipeline"})  # whose objects add_object looks into


class Rule(StrEnum):
    """What a capture may do to a tensor, and what its transaction owes it.

    ``RESTORED``: may be written; a copy is put back. ``GUARDED``: too large to copy on a device; nothing that really runs
    during a capture there changes it, and a checksum before and after proves that (where captures run their work, it is
    restored). ``SCRATCH``: means nothing between two steps (main gradients, a slot's borders); may be written, is left as it
    is. ``CONSTANT``: never written.
    """

    RESTORED = "restored"
    GUARDED = "guarded"
    SCRATCH = "scratch"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Registered:
    """One named tensor, its owner, and its rule."""

    name: str
    owner: str
    tensor: torch.Tensor
    rule: Rule


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while it is alive."""
    return tensor.untyped_storage()._cdata


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it fills its storage; else what does, so that other views of it are saved too."""
    if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        return tensor
    base = tensor._base
    if base is not None and base.numel() * base.element_size() == base.untyped_storage().nbytes():
        return base
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _tensors(name: str, part: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that ``part`` holds, with the path to it."""
    seen: set[int] = set()

    def walk(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            # A wrapper (a library's quantised tensor) computes by rules of its own over storages that its owner registers.
            if type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
                yield name, value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from walk(f"{name}.{i}", item)
        elif type(value).__module__.split(".")[0] in _OURS and hasattr(value, "__dict__"):
            for attribute, item in vars(value).items():
                yield from walk(f"{name}/{attribute}", item)

    yield from walk(name, part)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


class HiddenStateRegister:
    """Named tensors of one rank; a storage is known when some registered tensor lies in it.

    Args:
        tensors: name → tensor, registered as the caller's own.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self._entries: dict[str, Registered] = {}
        self._storages: dict[int, str] = {}
        self._writable: set[int] = set()
        self._addresses: dict[str, int] = {}
        self._aliases: list[torch.Tensor] = []  # keep storages alive: a freed one's identity may come back
        self._parts: list[tuple[str, object]] = []
        self._watched: list[tuple[str, Callable[[], torch.Tensor], int]] = []
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor, owner="caller")

    def add(self, name: str, tensor: torch.Tensor, *, owner: str, rule: Rule = Rule.RESTORED) -> None:
        """Register a tensor. A name is registered once."""
        if name in self._entries:
            raise ValueError(f"{name!r} is registered already")
        self._entries[name] = Registered(name, owner, tensor, rule)
        self._storages[storage_id(tensor)] = name
        if rule is not Rule.CONSTANT:
            self._writable.add(storage_id(tensor))
        self._addresses[name] = tensor.data_ptr()
        self._aliases.append(tensor.detach())

    def add_object(self, owner: str, part: object, rules: Mapping[str, Rule] | None = None) -> None:
        """Register every storage that ``part`` holds in its attributes, through containers and our own objects, once
        each. ``rules``: of attributes that are not ``RESTORED``.

        Raises:
            ValueError: a rule for an attribute that holds no tensor of its own.
        """
        rules = {f"{owner}/{attribute}": rule for attribute, rule in (rules or {}).items()}
        self._parts.append((owner, part))
        for name, tensor in _tensors(owner, part):
            if not self.knows(tensor):
                self.add(name, _whole_storage(tensor), owner=owner, rule=rules.get(name, Rule.RESTORED))
        unknown = rules.keys() - self._entries.keys()
        if unknown:
            raise ValueError(f"{min(unknown)!r} holds no tensor of its own: there is nothing to give a rule")

    def watch(self, name: str, current: Callable[[], torch.Tensor]) -> None:
        """Have :meth:`check_watched` see that ``current()`` stays at its address (a parameter, an owner's attribute)."""
        self._watched.append((name, current, current().data_ptr()))

    def check_watched(self) -> None:
        """The part of :meth:`check_addresses` that is cheap enough for every step.

        Raises:
            CaptureError: names the tensor that was replaced or moved.
        """
        for name, current, address in self._watched:
            if current().data_ptr() != address:
                raise CaptureError(
                    f"{name!r} was replaced since the capture: graphs read the old storage; write it in place (copy_), then "
                    "bump its version and refresh the caches",
                    tensor=name,
                )

    def knows(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) in self._storages

    def name_of(self, tensor: torch.Tensor) -> str | None:
        return self._storages.get(storage_id(tensor))

    def may_write(self, tensor: torch.Tensor) -> bool:
        """Whether a capture may write the tensor's storage: one of its entries is no constant."""
        return storage_id(tensor) in self._writable

    @property
    def entries(self) -> list[Registered]:
        return list(self._entries.values())

    def under(self, *rules: Rule) -> list[Registered]:
        """The entries of these rules."""
        return [entry for entry in self._entries.values() if entry.rule in rules]

    def check_addresses(self) -> None:
        """Loads are in place: no registered tensor may have moved, and no registered object may hold another one, since
        it was registered.

        Raises:
            CaptureError: names the tensor.
        """
        moved = [name for name, entry in self._entries.items() if entry.tensor.data_ptr() != self._addresses[name]]
        moved += [name for part in self._parts for name, tensor in _tensors(*part) if not self.knows(tensor)]
        if moved:
            raise CaptureError(
                f"{moved[0]!r} moved since it was registered: graphs would read the old storage", tensor=moved[0]
            )

    def table(self) -> str:
        """The register as text: name, owner, shape, dtype, rule."""
        lines = [f"{'tensor':48} {'owner':12} {'dtype':16} {'rule':11} shape"]
        for entry in self._entries.values():
            dtype = str(entry.tensor.dtype).removeprefix("torch.")
            lines.append(f"{entry.name:48} {entry.owner:12} {dtype:16} {entry.rule:11} {tuple(entry.tensor.shape)}")
        return "\n".join(lines)
