"""A piece of Transformer Engine's work as one opaque operation: F and I around its own autograd tape.

Its kernels are calls that torch's dispatcher does not see, and its Python touches tensors that such kernels made. So while it
works, the watch of a capture stands aside; it is told before what the region reads and writes (each of those tensors must be
registered or made in the capture) and after what it made. Inside, Transformer Engine's own autograd functions build a tape of
their own, which belongs to the microbatch's slot from F to I.

Two facts of Transformer Engine 2.20 shape this. Its backward takes apart what forward left (``clear_tensor_data`` empties
statistics and activations, ``restore_from_func_ctx`` forgets the tensor objects), so a tape runs once; a capture that takes I
of one F twice (once per beta) needs :meth:`Tape.keep`. And weight gradients leave through a queue without tags, which is why
a region hands them over at once (:mod:`qeffect_lm.layers.te.weight_grad`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from qeffect_lm.layers.context import LayerContext

if TYPE_CHECKING:
    from qeffect_lm.layers.norm import RMSNorm
    from qeffect_lm.layers.te.library import Library


class Part:
    """What a region runs. ``norm``: the norm inside, whose weight I differentiates."""

    norm: RMSNorm | None = None

    def __init__(self, name: str, library: Library) -> None:
        self.name, self.library = name, library

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Transformer Engine's module on activations."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        """Its FP8 switch around :meth:`compute`."""
        return nullcontext()

    def touches(self) -> list[torch.Tensor]:
        """Storages besides activations that F or I reads or writes."""
        return []

    def forwarding(self, context: LayerContext) -> None:
        """Tell the scope what F reads, reports and retains."""

    def backwarding(self, context: LayerContext) -> None:
        """Tell the scope what I reads and reports."""

    def incoming(self, dy: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``dy``, or a copy where W would read it from a buffer that is written again before."""
        return dy

    def backwarded(self, context: LayerContext) -> list[torch.Tensor]:
        """Hand the delayed weight gradients to their leases; the tensors that these hold."""
        return []


def run(part: Part, context: LayerContext, *inputs: torch.Tensor) -> torch.Tensor:
    """F of ``part`` on activations; in training I follows when autograd asks for it."""
    if context.training:
        out: torch.Tensor = _Region.apply(part, context, *inputs)
        return out
    with opaque(part.library, f"te.{part.name} evaluation", inputs) as made, torch.no_grad(), part.autocast():
        out = part.compute(*inputs)
        made.append(out)
    return out


@contextmanager
def opaque(library: Library, label: str, arguments: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Work that a capture does not look into; the body appends the tensors that it made and hands out.

    Raises:
        CaptureError: the capture knows one of ``arguments`` not, or cannot hold such work (``host_replay``).
    """
    mode = _get_current_dispatch_mode()
    recorder: Any = mode if hasattr(mode, "foreign") else None
    if recorder is not None:
        recorder.foreign(label, tuple(arguments))
    made: list[torch.Tensor] = []
    with nullcontext() if mode is None else _disable_current_modes(), library.holding_still():
        yield made
    if recorder is not None:
        recorder.adopt(made)


class Tape:
    """Transformer Engine's autograd graph of one F, from its inputs to its output."""

    def __init__(self, out: torch.Tensor, wanted: list[torch.Tensor]) -> None:
        self._out, self._wanted = out, wanted

    def held(self) -> list[torch.Tensor]:
        """What the tape keeps alive until I."""
        return [tensor for node in _nodes(self._out) for tensor in node.saved_tensors if tensor is not None]

    def backward(self, dy: torch.Tensor, *, again: bool) -> tuple[torch.Tensor | None, ...]:
        """Gradients of what is wanted; ``again`` keeps the tape usable for one more."""
        kept = self.keep() if again else None
        grads = torch.autograd.grad(self._out, self._wanted, dy, retain_graph=again, allow_unused=True)
        if kept is not None:
            self.put_back(kept)
        return grads

    def keep(self) -> list[tuple[Any, dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Per node of the tape its attributes, and an alias of each saved tensor, before backward takes them apart."""
        return [
            (node, {name: _copied(value) for name, value in vars(node).items()}, [(t, t.detach()) for t in _saved(node)])
            for node in _nodes(self._out)
        ]

    @staticmethod
    def put_back(kept: list[tuple[Any, dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]]) -> None:
        """The inverse of :meth:`keep`."""
        for node, attributes, saved in kept:
            for name, value in attributes.items():
                setattr(node, name, value)
            for tensor, alias in saved:
                if tensor.data_ptr() != alias.data_ptr():
                    tensor.data = alias


def _nodes(out: torch.Tensor) -> list[Any]:
    """The nodes of Python functions between ``out`` and its leaves."""
    found: list[Any] = []
    seen: set[Any] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.append(node)
        waiting += [following for following, _ in node.next_functions]
    return found


def _saved(node: Any) -> list[torch.Tensor]:
    return [tensor for tensor in node.saved_tensors if type(tensor) is torch.Tensor]


def _copied(value: Any) -> Any:
    """A copy of what backward changes in place: lists of tensor objects, storages of quantised tensors in them (backward fills
    and empties them), and a linear's bag of arguments. Quantizers, stores and recipes are shared, and stay so."""
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "restore_from_saved"):  # its constructor wants tensors, which it does not have while they are saved
        copied = object.__new__(type(value))
        vars(copied).update(vars(value))
        return copied
    return copy.copy(value) if hasattr(value, "setup_saved_tensors") else value


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, context: LayerContext, *inputs: torch.Tensor) -> torch.Tensor:
        part.forwarding(context)
        with opaque(part.library, f"te.{part.name} F", [*inputs, *part.touches()]) as made, torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            with part.autocast():
                out = part.compute(*leaves)
            trained = [] if part.norm is None or not part.norm.weight.requires_grad else [part.norm.weight]
            ctx.tape = Tape(out, [*leaves, *trained])
            result = out.detach()
            made.append(result)
        ctx.part, ctx.context, ctx.count, ctx.held = part, context, len(inputs), ctx.tape.held
        return result

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        part, context = ctx.part, ctx.context
        part.backwarding(context)
        with opaque(part.library, f"te.{part.name} I", [dy, *part.touches()]) as made:
            grads = ctx.tape.backward(part.incoming(dy, context), again=context.again)
            made += [grad for grad in grads if grad is not None]
            made += part.backwarded(context)
        if not context.again:
            ctx.tape, ctx.held = None, list
        place = None if part.norm is None else part.norm.grad_place(context)
        if place is not None:  # a cheap parameter: finished in I
            out, beta = place
            out.add_(grads[ctx.count]) if beta else out.copy_(grads[ctx.count])
        return None, None, *grads[: ctx.count]
