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
from torch.utils._pytree import tree_map

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.graphs.backend import Graph
from qeffect_lm.graphs.recorder import HostReads, Recorder
from qeffect_lm.graphs.register import HiddenStateRegister, storage_id
from qeffect_lm.parallel.peers import naming

# They define a storage and compute nothing; a replay keeps the recorded one.
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


@dataclass(frozen=True)
class _Operation:
    """One call of the tape; ``copies`` are the outputs (position, recorded tensor) that a functional form must fill."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: tuple[tuple[int, torch.Tensor], ...]


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


def _waiting(op: Any, arguments: Iterable[Any], label: str) -> Callable[..., Any]:
    """A collective that is complete when it returns: at capture Python waited for it, which a replay does not run. A lost peer
    is named as it is in eager execution."""
    others = _others(arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        with naming(others, f"{op._schema.name.rpartition('::')[2].strip('_')} in the replay of {label}"):
            result = op(*args, **kwargs)
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(item, torch.ScriptObject):
                    torch.distributed.Work.unbox(item).wait()
        return result

    return run


def _others(arguments: Iterable[Any]) -> list[int]:
    """The other ranks of the process group among a collective's arguments, where it comes before any other object."""
    group = next(item for item in arguments if isinstance(item, torch.ScriptObject))
    ranks = torch.distributed.get_process_group_ranks(torch.distributed.ProcessGroup.unbox(group))
    return [rank for rank in ranks if rank != torch.distributed.get_rank()]


class _Tape(Recorder):
    """Writes down what must run again, and keeps every tensor alive: replays write into the recorded ones."""

    def __init__(self, label: str, register: HiddenStateRegister, shares: Iterable[Graph]) -> None:
        super().__init__(label, register, shares)
        self.operations: list[_Operation] = []
        self.made: list[torch.Tensor] = []
        self.passes = False  # inside of :meth:`across`

    def foreign(self, name: str, arguments: tuple[object, ...]) -> None:
        raise CaptureError(
            f"kernel {name} in the capture of {self.label} is no ATen operation, and nothing else can be replayed here: use "
            "graphs.backend=cuda_graphs",
            graph=self.label,
            operation=name,
        )

    def keep(self, made: torch.Tensor) -> None:
        self.made.append(made)

    def across(self, work: Callable[[], object]) -> object:
        """The call itself is what a replay repeats: waiting for a peer is no operation of the dispatcher."""
        self.lines.append("across ranks")
        self.operations.append(_Operation(work, (), {}, ()))
        self.passes = True
        try:
            return work()
        finally:
            self.passes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.passes:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def write_down(
        self, func: Any, args: Any, kwargs: dict[str, Any], outputs: tuple[tuple[int, torch.Tensor], ...]
    ) -> None:
        name = func._schema.name
        collective = func.namespace == "c10d"
        mutates = func._schema.is_mutable or collective
        if name in _ALLOCATIONS or (not outputs and not mutates):
            return  # an allocation or a view: nothing to compute
        detached_args, detached_kwargs = tree_map(_detach, args), tree_map(_detach, kwargs)
        if mutates:  # some also give new tensors, as batch normalisation does
            run = _waiting(func, args, self.label) if collective else func
            self.operations.append(_Operation(run, detached_args, detached_kwargs, outputs))
        elif name in ("aten::_to_copy", "aten::clone"):
            self.operations.append(_Operation(torch.ops.aten.copy_.default, (outputs[0][1], detached_args[0]), {}, ()))
        else:
            variant = _out_variant(func) if len(outputs) == 1 and len(func._schema.returns) == 1 else None
            if variant is not None:
                self.operations.append(_Operation(variant, detached_args, {**detached_kwargs, "out": outputs[0][1]}, ()))
            else:
                self.operations.append(_Operation(func, detached_args, detached_kwargs, outputs))


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


class HostReplayGraph:
    """A tape of operations over fixed storages."""

    def __init__(self, label: str, operations: list[_Operation], made: list[torch.Tensor], lines: list[str]) -> None:
        self.label = label
        self._operations, self._made = operations, made
        self.lines = [f"operation {line}" for line in lines]
        self.digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    @property
    def pool_bytes(self) -> int:
        storages = {storage_id(t): t.untyped_storage().nbytes() for t in self._made}
        return sum(storages.values())

    def storages(self) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for number, tensor in enumerate(self._made):
            numbers.setdefault(storage_id(tensor), number)
        return numbers

    def reset(self) -> None:
        self._operations, self._made = [], []

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
    warms_up = False

    _tape: _Tape | None = None  # of the capture that runs

    def across(self, work: Callable[[], object]) -> object:
        """See :class:`~qeffect_lm.graphs.backend.GraphBackend`."""
        return work() if self._tape is None else self._tape.across(work)

    def capture(
        self,
        label: str,
        work: Callable[[], None],
        *,
        register: HiddenStateRegister,
        shares: Iterable[Graph] = (),
    ) -> HostReplayGraph:
        recorder = _Tape(label, register, shares)
        self._tape = recorder
        try:
            with HostReads(label), recorder:
                work()
        finally:
            self._tape = None
        return HostReplayGraph(label, recorder.operations, recorder.made, recorder.lines)
