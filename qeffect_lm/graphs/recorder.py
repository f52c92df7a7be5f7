"""What a capture may do and what it did: the watch over every dispatched operation while a graph is recorded.

Every operation's tensors must be known: registered (:mod:`qeffect_lm.graphs.register`), made inside the capture, or made by a
graph of the same slot. What would freeze something that changes (a host read, a random draw, a shape that depends on data, an
unregistered tensor) is a :class:`CaptureError`. Operations, shapes, dtypes, frozen literals and the names of the storages go
into the graph's digest; addresses never do, so that a capture after a restart has the same digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.graphs.backend import Graph
from qeffect_lm.graphs.register import HiddenStateRegister, storage_id

_FORBIDDEN_TAGS = {
    torch.Tag.nondeterministic_seeded: "draws from a random generator: use keyed randomness (layers.dropout)",
    torch.Tag.dynamic_output_shape: "has an output whose shape depends on data",
    torch.Tag.data_dependent_output: "reads a tensor's value on the host",
}
# They read a tensor on the host without dispatching any operation.
_HOST_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})

def _harmless(op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tags speak of an operation in general: indexing depends on data with a mask only, attention draws with dropout only."""
    if op._schema.name == "aten::index":
        return all(i is None or i.dtype in (torch.int32, torch.int64) for i in args[1])
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" in names:
        position = names.index("dropout_p")
        return (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0
    return False


def _written(op: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes, by its schema (a collective's says nothing: all of them)."""
    collective = op.namespace == "c10d"
    values = []
    for position, argument in enumerate(op._schema.arguments):
        if collective or (argument.alias_info is not None and argument.alias_info.is_write):
            values.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


class HostReads(TorchFunctionMode):
    """Refuses the reads that the dispatcher never sees (except in an autograd node's backward, where torch suspends
    such modes)."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise CaptureError(
                f"Tensor.{func.__name__} in the capture of {self.label} reads a tensor's value on the host",
                graph=self.label,
                operation=func.__name__,
            )
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Checks and describes every operation. Subclasses say what is kept of it (:meth:`keep`, :meth:`write_down`)."""

    def __init__(self, label: str, register: HiddenStateRegister, shares: Iterable[Graph]) -> None:
        super().__init__()
        self.label, self.register = label, register
        # Storage → its name in the digest: what graphs of the slot made and, as they come, this capture's own.
        self.known = {
            storage: f"shared.{place}.{number}"
            for place, graph in enumerate(shares)
            for storage, number in graph.storages().items()
        }
        self.count = 0
        self.constants: list[torch.Tensor] = []  # kept alive: a freed storage's identity may come back
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tag, reason in _FORBIDDEN_TAGS.items():
            if tag in func.tags and not _harmless(func, args, kwargs):
                raise CaptureError(f"{func} in the capture of {self.label} {reason}", graph=self.label, operation=str(func))
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        self._check_known(func, inputs)
        self._check_written(func, _written(func, args, kwargs))
        self.lines.append(self._describe(func, args, kwargs))
        result = func(*args, **kwargs)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        sources = {storage_id(t) for t in inputs}
        copies = []
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and storage_id(output) not in sources:
                made = output.detach()
                copies.append((position, made))
                self.known.setdefault(storage_id(made), f"made.{self.count}")
                self.count += 1
                self.keep(made)
        self.write_down(func, args, kwargs, tuple(copies))
        return result

    def foreign(self, name: str, arguments: tuple[object, ...]) -> None:
        """A kernel that the dispatcher does not see is about to be launched (:func:`qeffect_lm.kernels.launched`)."""
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and storage_id(tensor) not in self.known and not self.register.knows(tensor):
                raise CaptureError(
                    f"kernel {name} in the capture of {self.label} touches a tensor {tuple(tensor.shape)} {tensor.dtype} that "
                    "the hidden-state register does not know: register it, or make it inside the capture",
                    graph=self.label,
                    operation=name,
                )
        self.lines.append(self._describe(name, arguments, {}))

    def adopt(self, made: Iterable[torch.Tensor]) -> None:
        """Such a kernel made these tensors and hands them out: known from here on, as if an operation had made them."""
        for tensor in made:
            if storage_id(tensor) not in self.known and not self.register.knows(tensor):
                self.known[storage_id(tensor)] = f"made.{self.count}"
                self.count += 1
                self.keep(tensor)

    def keep(self, made: torch.Tensor) -> None:
        """An operation made a tensor; its storage's identity must not be given to another one before the graph dies."""
        raise NotImplementedError

    def write_down(
        self, func: Any, args: Any, kwargs: dict[str, Any], outputs: tuple[tuple[int, torch.Tensor], ...]
    ) -> None:
        """An operation ran; ``outputs`` are its new tensors with their positions."""

    def _check_known(self, func: Any, inputs: list[torch.Tensor]) -> None:
        for tensor in inputs:
            if storage_id(tensor) in self.known or self.register.knows(tensor):
                continue
            if func._schema.name == "aten::lift_fresh":  # torch.tensor(literal): a constant of this capture
                self.known[storage_id(tensor)] = f"constant.{len(self.constants)}"
                self.constants.append(tensor)
                continue
            raise CaptureError(
                f"{func} in the capture of {self.label} touches a tensor {tuple(tensor.shape)} {tensor.dtype} that the "
                "hidden-state register does not know: register it, or make it inside the capture",
                graph=self.label,
                operation=str(func),
            )

    def _check_written(self, func: Any, written: list[torch.Tensor]) -> None:
        for tensor in written:
            if storage_id(tensor) not in self.known and not self.register.may_write(tensor):
                name = self.register.name_of(tensor)
                raise CaptureError(
                    f"{func} in the capture of {self.label} writes {name!r}, which the hidden-state register holds as "
                    "a constant: register it under another rule, or nothing rolls it back",
                    graph=self.label,
                    operation=str(func),
                    tensor=name,
                )

    def _describe(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """One line of the digest: the operation over which storages, by name, never by address."""

        def text(leaf: Any) -> str:
            if isinstance(leaf, torch.Tensor):
                name = self.known.get(storage_id(leaf)) or self.register.name_of(leaf)
                return f"{name}+{leaf.storage_offset()} {leaf.dtype}{tuple(leaf.shape)}{tuple(leaf.stride())}"
            if isinstance(leaf, (torch.ScriptObject, torch.Generator, torch.UntypedStorage)):
                return type(leaf).__name__
            return repr(leaf)

        return f"{func}({', '.join(text(leaf) for leaf in tree_flatten((args, sorted(kwargs.items())))[0])})"
