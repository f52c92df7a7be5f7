"""``HostReplay``: the stand-in for a CUDA graph where there is no GPU.

While recording, a :class:`~torch.utils._python_dispatch.TorchDispatchMode` takes down every dispatched ATen operation with its
tensors and literal arguments, autograd's backward included. Replay runs that list into the recorded storages, and no Python
of ours: a flag, a learning rate as a float or a branch changed after capture has no effect, and a replaced (not written)
input is never seen. What a CUDA graph freezes is frozen here too. It is no speed-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

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
# They define a storage and compute nothing; a replay keeps the recorded one.
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


@dataclass(frozen=True)
class _Operation:
    """One call of the tape; ``copies`` are the outputs (position, recorded tensor) that a functional form must fill."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: tuple[tuple[int, torch.Tensor], ...]


def _harmless(op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tags speak of an operation in general: indexing depends on data with a mask only, attention draws with dropout only."""
    if op._schema.name == "aten::index":
        return all(i is None or i.dtype in (torch.int32, torch.int64) for i in args[1])
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" in names:
        position = names.index("dropout_p")
        return (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0
    return False


def _out_variant(op: Any) -> Any:
    """The overload that computes the same into ``out=``, if there is one with the same arguments."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
        if len(outs) == 1 and outs[0].name == "out":
            if [(a.name, str(a.type)) for a in arguments if a is not outs[0] and a.name != "out"] == wanted:
                return candidate
    return None


def _written(op: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes, by its schema (a collective's says nothing: all of them)."""
    collective = op.namespace == "c10d"
    values = []
    for position, argument in enumerate(op._schema.arguments):
        if collective or (argument.alias_info is not None and argument.alias_info.is_write):
            values.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _waiting(op: Any) -> Callable[..., Any]:
    """A collective that is complete when it returns: at capture Python waited for it, which a replay does not run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.ScriptObject):
                torch.distributed.Work.unbox(item).wait()
        return result

    return run


class _HostReads(TorchFunctionMode):
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


class _Recorder(TorchDispatchMode):
    def __init__(self, label: str, register: HiddenStateRegister, shares: Iterable[Graph]) -> None:
        super().__init__()
        self.label, self.register = label, register
        # Storage → its name in the digest: what graphs of the slot made and, as they come, this capture's own.
        self.known = {
            storage_id(tensor): f"shared.{place}.{number}"
            for place, graph in enumerate(shares)
            for number, tensor in enumerate(graph.pool())
        }
        self.operations: list[_Operation] = []
        self.made: list[torch.Tensor] = []
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
                kept = output.detach()
                copies.append((position, kept))
                self.known.setdefault(storage_id(kept), f"made.{len(self.made)}")
                self.made.append(kept)
        self._write_down(func, args, kwargs, tuple(copies))
        return result

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
                    "a constant: register it as mutable, or nothing rolls it back",
                    graph=self.label,
                    operation=str(func),
                    tensor=name,
                )

    def _write_down(
        self, func: Any, args: Any, kwargs: dict[str, Any], copies: tuple[tuple[int, torch.Tensor], ...]
    ) -> None:
        name = func._schema.name
        collective = func.namespace == "c10d"
        mutates = func._schema.is_mutable or collective
        if name in _ALLOCATIONS or (not copies and not mutates):
            return  # an allocation or a view: nothing to compute
        detached_args, detached_kwargs = tree_map(_detach, args), tree_map(_detach, kwargs)
        if mutates:  # some also give new tensors, as batch normalisation does
            run = _waiting(func) if collective else func
            self.operations.append(_Operation(run, detached_args, detached_kwargs, copies))
        elif name in ("aten::_to_copy", "aten::clone"):
            self.operations.append(_Operation(torch.ops.aten.copy_.default, (copies[0][1], detached_args[0]), {}, ()))
        else:
            variant = _out_variant(func) if len(copies) == 1 and len(func._schema.returns) == 1 else None
            if variant is not None:
                self.operations.append(_Operation(variant, detached_args, {**detached_kwargs, "out": copies[0][1]}, ()))
            else:
                self.operations.append(_Operation(func, detached_args, detached_kwargs, copies))

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


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class HostReplayGraph:
    """A tape of operations over fixed storages."""

    def __init__(self, label: str, operations: list[_Operation], made: list[torch.Tensor], lines: list[str]) -> None:
        self.label = label
        self._operations, self._made = operations, made
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def pool_bytes(self) -> int:
        storages = {storage_id(t): t.untyped_storage().nbytes() for t in self._made}
        return sum(storages.values())

    def pool(self) -> list[torch.Tensor]:
        return self._made

    @torch.no_grad()
    def replay(self) -> None:
        """Run the tape."""
        for operation in self._operations:
            result = operation.run(*operation.args, **operation.kwargs)
            for position, kept in operation.copies:
                kept.copy_(result[position] if isinstance(result, (tuple, list)) else result)


class HostReplay:
    """Graph backend over tapes."""

    name = "host_replay"

    def capture(
        self,
        label: str,
        work: Callable[[], None],
        *,
        register: HiddenStateRegister,
        shares: Iterable[Graph] = (),
    ) -> HostReplayGraph:
        recorder = _Recorder(label, register, shares)
        with _HostReads(label), recorder:
            work()
        return HostReplayGraph(label, recorder.operations, recorder.made, recorder.lines)
