"""``nn.Linear`` in any module, converted in place: backward makes the input gradient, the weight gradient waits for W.

A converted linear stays what it was: the same object of a subclass of its class, the same parameters under the same names,
the same values. Outside of a schedule of ours (:mod:`qeffect_lm.integrations.pipelining.schedules`, or torch's own with the
contract attached) it computes what ``nn.Linear`` does, with autograd's weight gradient. Inside, its node keeps no weight
gradient back: it puts (x, dY) on the microbatch's tape, and W multiplies them into ``weight.grad``, in one fixed order.

What has no such split, biases, norms and embeddings, is finished by autograd in I and listed in the :class:`Conversion`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from qeffect_lm.errors import UsageError
from qeffect_lm.integrations.pipelining.fp8 import FP8Linear

_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {}


@dataclass
class Deferred:
    """One product's part of W: x ``[tokens, in]`` and dY ``[tokens, out]``, or with ``fp8`` what that made of them."""

    linear: SplitLinear
    x: Any
    dy: Any


@dataclass
class Tape:
    """What a microbatch of a stage leaves for W, in the order in which backward reached it.

    Attributes:
        scope: of the action that runs, where FP8 tells what it reads and reports; None: nothing is told.
        again: forward runs inside I, to make activations again: it reports nothing.
    """

    entries: list[Deferred] = field(default_factory=list)
    scope: Any = None
    again: bool = False


_tape: Tape | None = None  # of the action that runs; no thread-local, as autograd's work on a GPU runs in threads of its own


class running:
    """``with running(tape):`` the body is F or I of one microbatch. Not re-entrant: a rank runs one action at a time."""

    def __init__(self, tape: Tape) -> None:
        self._mine = tape

    def __enter__(self) -> Tape:
        global _tape
        if _tape is not None:
            raise UsageError("two pipeline schedules run at once in one process: run them one after the other")
        _tape = self._mine
        return self._mine

    def __exit__(self, *_: object) -> None:
        global _tape
        _tape = None


class SplitLinear(nn.Linear):
    """What a converted linear's class adds to it. ``split_name`` is its path in the stage; ``fp8`` None: its own dtype.

    ``split_seen_whole``: why it ran as an ordinary linear in a schedule; None: it did not.
    """

    split_name: str
    split_seen_whole: str | None = None
    fp8: FP8Linear | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # FSDP puts the gathered one there while a forward runs
        if _tape is None or not weight.requires_grad or not (torch.is_grad_enabled() or self.fp8 is not None):
            return F.linear(input, weight, self.bias)
        if isinstance(weight, DTensor):  # tensor parallel
            self.split_seen_whole = "its weight is a DTensor when it runs"
            return F.linear(input, weight, self.bias)
        x = input
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y: torch.Tensor = _Product.apply(x, weight, self, _tape)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def weight_grad(self, entry: Deferred) -> None:
        """W: ``weight.grad += dY.T @ x``; the first of a step overwrites nothing, it makes the gradient."""
        if isinstance(self.weight, DTensor):
            raise UsageError(
                f"{self.split_name}.weight was sharded again between its forward and W: keep weights gathered in a pipeline "
                "(reshard_after_forward=False)"
            )
        with torch.no_grad():
            grad = self.weight.grad
            if self.fp8 is not None:
                self.weight.grad = self.fp8.weight_grad(entry.x, entry.dy, grad, self.weight.dtype)
                return
            if grad is not None and grad.dtype is entry.x.dtype:
                grad.addmm_(entry.dy.t(), entry.x)
                return
            made = torch.mm(entry.dy.t(), entry.x)  # autocast: the product is narrower than the gradient
            self.weight.grad = made.to(self.weight.dtype) if grad is None else grad.add_(made)


class _Product(torch.autograd.Function):
    """The weight is an input so that the result requires a gradient wherever it is to be trained; it gets none here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: SplitLinear, tape: Tape) -> torch.Tensor:
        flat = x.reshape(-1, linear.in_features)
        ctx.linear, ctx.tape, ctx.shape = linear, tape, x.shape
        if linear.fp8 is None:
            ctx.save_for_backward(flat, weight)
            y = torch.mm(flat, weight.t())
        else:
            y, kept = linear.fp8.forward(flat, tape)
            ctx.save_for_backward(*kept)
        return y.view(*x.shape[:-1], linear.out_features)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:  # type: ignore[override]
        linear: SplitLinear = ctx.linear
        flat = dy.reshape(-1, linear.out_features)
        wants = ctx.needs_input_grad[0]
        if linear.fp8 is None:
            x, weight = ctx.saved_tensors
            dx = torch.mm(flat, weight) if wants else None
            operands = x, flat
        else:
            dx, operands = linear.fp8.backward(flat, ctx.saved_tensors, ctx.tape, wants)
        ctx.tape.entries.append(Deferred(linear, *operands))
        return (None if dx is None else dx.view(ctx.shape)), None, None, None


@dataclass(frozen=True)
class Conversion:
    """What became of a module.

    Attributes:
        split: paths of the linears whose weight gradient is W's.
        whole: parameters that autograd finishes in I, and why.
    """

    split: tuple[str, ...]
    whole: dict[str, str]

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for name, why in self.whole.items():
            reasons.setdefault(why, []).append(name)
        lines = [f"{len(self.split)} linears are split: {_few(self.split)}"]
        return "\n".join(lines + [f"{len(names)} finished in I ({why}): {_few(names)}" for why, names in reasons.items()])


def _few(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def split_linears(module: nn.Module, *, only: Callable[[str, nn.Linear], bool] | None = None) -> Conversion:
    """Convert every ``nn.Linear`` of ``module`` in place.

    Args:
        only: called with path and linear; False leaves it whole, for later calls too.

    Returns: what was split, and what was not and why. A linear of a class with a ``forward`` of its own, or whose weight is
        computed by a parametrization or some subclass of ``nn.Parameter``, is left whole; one whose weight is a ``DTensor``
        when it runs (tensor parallel, not FSDP's) runs whole.
    """
    split, left = [], {}
    for path, child in module.named_modules():
        if not isinstance(child, nn.Linear):
            continue
        why = _left_whole(child)
        if why is None and only is not None and not only(path, child):
            why = vars(child)["split_left"] = "left whole on request"
        if why is not None:
            left[f"{path}.weight".removeprefix(".")] = why  # the root's own path is empty
            continue
        if not isinstance(child, SplitLinear):
            child.__class__ = _class_of(type(child))
            _split(child).fp8 = None
        _split(child).split_name = path
        split.append(path)
    mine = {id(child.weight) for child in module.modules() if isinstance(child, SplitLinear)}
    whole = {}
    for path, parameter in module.named_parameters():
        if id(parameter) not in mine and parameter.requires_grad:
            whole[path] = left.get(path, "no linear's weight")
    return Conversion(tuple(split), whole)


def _split(linear: nn.Linear) -> SplitLinear:
    assert isinstance(linear, SplitLinear)
    return linear


def _left_whole(linear: nn.Linear) -> str | None:
    if "split_left" in vars(linear):
        return str(vars(linear)["split_left"])
    if isinstance(linear, SplitLinear):
        return None
    if type(linear).forward is not nn.Linear.forward:
        return "its class has a forward of its own"
    if "forward" in vars(linear):  # a wrapper that holds the class's: the one that is called, whatever its class becomes
        return "its forward was replaced before it was split"
    if hasattr(linear, "parametrizations"):
        return "its weight is computed by a parametrization"
    if type(linear.weight) is not nn.Parameter and not isinstance(linear.weight, DTensor):  # which FSDP's is between steps
        return f"its weight is a {type(linear.weight).__name__}"
    return None


def _class_of(base: type[nn.Linear]) -> type[nn.Linear]:
    """``base`` with our forward in front; one class for each."""
    if base not in _CLASSES:
        body = {"__module__": base.__module__, "__qualname__": f"Split{base.__qualname__}"}
        _CLASSES[base] = type(f"Split{base.__name__}", (SplitLinear, base) if base is not nn.Linear else (SplitLinear,), body)
    return _CLASSES[base]


def weight_grads(tape: Tape) -> None:
    """W of a microbatch: every deferred product, in the tape's order; the operands are let go one by one."""
    tape.entries.reverse()
    while tape.entries:
        entry = tape.entries.pop()
        entry.linear.weight_grad(entry)
