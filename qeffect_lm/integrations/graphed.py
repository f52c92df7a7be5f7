"""The contract in a hand-written loop over ``make_graphed_callables``, torch's or Transformer Engine's.

A graphed callable has one set of static buffers: its forward writes the activations there that its backward reads. A second
forward before the backward overwrites them, and the gradient is that of another batch, without a word. A cached FP8 weight
that is not made again after the optimizer stepped (``is_first_microbatch=False`` too often), a batch that arrives on a stream
nobody waited for, a microbatch without a backward: the same. :func:`guard_callables` makes each of them an error before the
work is launched.

    (model,), contract = guard_callables((model,), optimizer, streams={"compute": compute, "copy": copy})
    for step in range(steps):
        with contract.step():
            for microbatch in range(microbatches):
                with contract.work("copy", "batch", writes=[x]):
                    x.copy_(batch, non_blocking=True)
                contract.edge("copy", "compute")
                model(x, is_first_microbatch=microbatch == 0).sum().backward()
                contract.edge("compute", "copy")
            contract.optimizer_step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qeffect_lm.contract.errors import LeaseLeakError, StaleWeightError
from qeffect_lm.contract.guard import Guard
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.errors import UsageError

FIRST = "is_first_microbatch"
TAPE = "static buffers"


class GuardedCallables:
    """What :func:`guard_callables` gives beside the callables: the step, the optimizer, streams.

    Attributes:
        guard: streams, leases and versions (:class:`~qeffect_lm.contract.guard.Guard`).
    """

    def __init__(self, optimizer: Any, guard: Guard, stream: str) -> None:
        self.guard, self._optimizer, self._stream, self._step = guard, optimizer, stream, 0
        self.work, self.edge = guard.work, guard.edge
        self._stepped = False
        self._entered = 0  # steps begun, abandoned ones included
        self._open: set[tuple[int, int]] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step.

        Raises:
            LeaseLeakError: a forward has had no backward.
            UsageError: the optimizer has not stepped.
        """
        self._stepped = False
        self._entered += 1
        self._open.clear()
        with self.guard.step(self._step):
            yield
            if self.guard.ledger.checks and not self._stepped:
                raise UsageError("the step ends and optimizer_step() was not called")
            self.guard.ledger.commit(self.guard.timeline.epochs[Direction.FORWARD])
        self._step += 1

    def optimizer_step(self) -> None:
        """The optimizer's ``step``, after every microbatch's backward: cached weights are stale from here on.

        Raises:
            LeaseLeakError: a microbatch's backward has not run: its gradient would be missing, or come after.
        """
        if self._open and self.guard.ledger.checks:
            chunk, microbatch = min(self._open)
            raise LeaseLeakError(
                f"the optimizer steps while call {microbatch} of callable {chunk} has had no backward: its gradient would be "
                "missing",
                chunk=chunk,
                microbatch=microbatch,
            )
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        with self.guard.work(self._stream, "optimizer", reads=grads, writes=parameters):
            self._optimizer.step()
        self._stepped = True


class _Guarded:
    """One callable; its place among leases is its number, its calls of a step are the microbatches."""

    def __init__(
        self, contract: GuardedCallables, number: int, fn: Callable[..., Any], weights: Sequence[torch.Tensor]
    ) -> None:
        self._contract, self._number, self._fn, self._weights = contract, number, fn, list(weights)
        self._cast: list[tuple[int, int]] | None = None  # the weights as they were when they were last cast
        self._slots = (Slot("I", number, 0), Slot("W", number, 0))
        self._calls, self._of_step = 0, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contract = self._contract
        guard, tensors = contract.guard, [a for a in args if isinstance(a, torch.Tensor)]
        self._check_cast(kwargs)
        name = f"callable {self._number}"
        if not torch.is_grad_enabled():
            with guard.work(contract._stream, name, reads=[*tensors, *self._weights]):
                return self._fn(*args, **kwargs)
        if self._of_step != contract._entered:
            self._of_step, self._calls = contract._entered, 0
        microbatch, self._calls = self._calls, self._calls + 1
        call = _Call(contract, self._number, microbatch, self._slots)
        with guard.ledger.action("F", self._number, microbatch, slots=self._slots) as scope:
            scope.retain(TAPE, None)
            with guard.work(contract._stream, name, reads=[*tensors, *self._weights]):
                entered = [_Told.apply(a, call.finish) if isinstance(a, torch.Tensor) else a for a in args]
                out = self._fn(*entered, **kwargs)
        contract._open.add((self._number, microbatch))
        call.inputs = sum(t.requires_grad for t in tensors)
        if isinstance(out, torch.Tensor):
            return _Told.apply(out, call.begin)
        return type(out)(_Told.apply(part, call.begin) if isinstance(part, torch.Tensor) else part for part in out)

    def _check_cast(self, kwargs: Mapping[str, Any]) -> None:
        """Raises: StaleWeightError: the weights changed since they were cast, and this call says to use that cast."""
        if FIRST not in kwargs or kwargs[FIRST] is None:
            return
        now = [(w.data_ptr(), w._version) for w in self._weights]
        if kwargs[FIRST]:
            self._cast = now
        elif self._cast != now and self._contract.guard.ledger.checks:
            what = "were never cast" if self._cast is None else "were written since they were cast to FP8"
            raise StaleWeightError(
                f"callable {self._number} is called with {FIRST}=False and its weights {what}: the first call after each "
                f"optimizer step needs {FIRST}=True",
                layer=f"callable {self._number}",
            )


class _Call:
    """One forward and its backward. The whole backward runs between the gradient's arrival at the outputs and the inputs'."""

    def __init__(self, contract: GuardedCallables, number: int, microbatch: int, slots: tuple[Slot, Slot]) -> None:
        self.contract, self.number, self.microbatch, self.slots = contract, number, microbatch, slots
        self.inputs, self.arrived, self.done = 0, False, False

    def begin(self) -> None:
        if self.arrived:
            return
        self.arrived = True
        ledger = self.contract.guard.ledger
        with ledger.action("I", self.number, self.microbatch, beta=1, slots=self.slots) as scope:
            scope.input_grad_done(TAPE)
        if not self.inputs:  # none tells when the backward is over; the next forward comes after it on one stream
            self.finish()

    def finish(self) -> None:
        if self.done:
            return
        self.done = True
        ledger = self.contract.guard.ledger
        with ledger.action("W", self.number, self.microbatch, beta=1, slots=self.slots) as scope:
            scope.take_weight_grad(TAPE)
        self.contract._open.discard((self.number, self.microbatch))


class _Told(torch.autograd.Function):
    """The identity, whose backward tells: on an output it comes right before the callable's, on an input right after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.tell()
        return grad, None


def guard_callables(
    callables: Sequence[Callable[..., Any]],
    optimizer: torch.optim.Optimizer,
    *,
    streams: Mapping[str, torch.cuda.Stream] | Sequence[str] = ("compute",),
    stream: str = "compute",
    weights: Sequence[Sequence[torch.Tensor]] | None = None,
    contract: str = "enforce",
) -> tuple[tuple[Any, ...], GuardedCallables]:
    """Put the contract around graphed callables.

    Args:
        callables: what ``make_graphed_callables`` returned; call each through what is returned here from now on.
        optimizer: of their weights.
        streams: names, on a GPU with their streams.
        stream: the name of the one that the loop, its graphs and its optimizer run on.
        weights: of each callable, the tensors it keeps casts of; None: the parameters of callables that are modules.
        contract: ``enforce`` or ``off``.

    Returns: the callables, guarded, and the loop's side of the contract.

    Raises:
        UsageError: ``stream`` is no name in ``streams``, or a callable that is no module, without ``weights``.
    """
    if stream not in streams:
        raise UsageError(f"stream {stream!r} is not among the streams {', '.join(map(repr, streams))}")
    owned: list[Sequence[torch.Tensor]] = []
    for number, fn in enumerate(callables):
        if weights is not None:
            owned.append(weights[number])
        elif isinstance(fn, nn.Module):
            owned.append(list(fn.parameters()))
        else:
            raise UsageError(f"callable {number} is a {type(fn).__name__}, no module: say what its weights are (weights=)")
    side = GuardedCallables(optimizer, Guard(streams, mode=contract), stream)
    return tuple(_Guarded(side, number, fn, owned[number]) for number, fn in enumerate(callables)), side
