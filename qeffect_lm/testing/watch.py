"""What a layer holds besides parameters, and whether its work changes it: state that nobody declared.

A replayed graph runs no Python and reads the storages that it was captured with; a checkpoint holds parameters; microbatches
interleave. So whatever else a layer remembers goes wrong somewhere: this finds it, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qeffect_lm.errors import QEffectError
from qeffect_lm.graphs.register import HiddenStateRegister, digest, storage_id
from qeffect_lm.layers.base import named_parameters

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# The framework's own attributes: who writes them is known.
_KNOWN = frozenset({"main_grad", "cached", "library", "recipe", "training", *vars(nn.Module())})


class LayerCheckError(QEffectError):
    """A layer that does something else than it must; the message names layer, action and tensor."""


@dataclass(frozen=True)
class Held:
    """A tensor of a layer. ``kind``: ``parameter``, ``buffer`` or ``attribute``."""

    kind: str
    tensor: torch.Tensor


def tensors_of(layer: nn.Module) -> dict[str, Held]:
    """Name → tensor of everything that a layer holds, its attributes through containers and plain objects."""
    found = {name: Held("parameter", parameter) for name, parameter in named_parameters(layer)}
    known = {id(held.tensor) for held in found.values()}
    for name, buffer in layer.named_buffers():
        found[name] = Held("buffer", buffer)
    for name, value in _walk(layer, torch.Tensor):
        if isinstance(value, torch.Tensor) and id(value) not in known:
            found[name] = Held("attribute", value)
    return found


def values_of(layer: nn.Module) -> dict[str, object]:
    """Name → value of every attribute that is a number, a text or the like."""
    return dict(_walk(layer, _PLAIN))  # type: ignore[arg-type]


def _walk(layer: nn.Module, wanted: type | tuple[type, ...]) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()

    def walk(name: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, wanted):
            yield name, value
        elif isinstance(value, (torch.Tensor, *_PLAIN, nn.Module)) or id(value) in seen:
            return
        elif isinstance(value, Mapping):
            seen.add(id(value))
            for key, item in value.items():
                yield from walk(f"{name}[{key!r}]", item)
        elif isinstance(value, (list, tuple)):
            seen.add(id(value))
            for i, item in enumerate(value):
                yield from walk(f"{name}[{i}]", item)
        elif not type(value).__module__.startswith(("torch", "qeffect_lm.")) and hasattr(value, "__dict__"):
            seen.add(id(value))
            for attribute, item in vars(value).items():
                yield from walk(f"{name}.{attribute}", item)

    for path, module in layer.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _KNOWN:
                yield from walk(".".join(filter(None, (path, attribute))), value)


class Watch:
    """A layer's state at some moment. :meth:`check` compares."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self._name, self._layer = name, layer
        self._digests = {key: digest(held.tensor) for key, held in tensors_of(layer).items()}
        self._values = values_of(layer)

    def check(self, action: str) -> None:
        """After ``action`` (F, I or W) ran.

        Raises:
            LayerCheckError: it changed something; names it.
        """
        for key, held in tensors_of(self._layer).items():
            if self._digests.get(key) == digest(held.tensor):
                continue
            what = f"{key!r} ({held.tensor.dtype}, {list(held.tensor.shape)})".replace("torch.", "")
            why = {
                "parameter": "only the optimizer writes parameters",
                "buffer": "buffers are constants: a capture refuses to write them, a checkpoint does not hold them",
                "attribute": "it is state that nobody declared: microbatches interleave, a checkpoint does not hold it, and a "
                "restart would forget it. Save what I needs in autograd's context, what W needs in the lease",
            }[held.kind]
            verb = "writes" if key in self._digests else "keeps a tensor in"
            raise LayerCheckError(f"{self._name}: {action} {verb} the {held.kind} {what}: {why}")
        for key, value in values_of(self._layer).items():
            before = self._values.get(key, "nothing")
            if type(before) is not type(value) or before != value:
                raise LayerCheckError(
                    f"{self._name}: {action} changes the attribute {key!r} from {before!r} to {value!r}: a replayed graph runs "
                    "no Python, so there it would stay what it was at the capture"
                )


class NamedRegister(HiddenStateRegister):
    """A register that tells which attribute of a layer an unknown tensor is."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._layer_name = name
        attributes = {key: held.tensor for key, held in tensors_of(layer).items() if held.kind == "attribute"}
        self._attributes = {storage_id(tensor): key for key, tensor in attributes.items()}

    def knows(self, tensor: torch.Tensor) -> bool:
        if super().knows(tensor):
            return True
        key = self._attributes.get(storage_id(tensor))
        if key is not None:
            raise LayerCheckError(
                f"{self._layer_name}: a capture finds the attribute {key!r}, a tensor that nobody declared: register it with "
                "register_buffer(..., persistent=False) if it is a constant"
            )
        return False
