"""Runs a plan over stages that are any ``nn.Module``: F, I and W under the contract, eagerly.

F calls the stage's module as torch's ``PipelineStage`` does; I is one pass of autograd, in which converted linears put off
their weight gradients (:mod:`qeffect_lm.integrations.pipelining.convert`); W makes these. Nothing is computed twice: what a
module computes again in backward (activation checkpointing) it computes once, in I, and W reads what I left.

Each microbatch of a stage has a lease from F to W; messages and buffers are the plan's; the ledger sees every action and every
launch, and refuses what the contract forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from pipeline.actions import Action, Kind
from pipeline.p2p import queues_of
from pipeline.plan import Plan
from qeffect_lm.contract.grads import GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Mode, Scope
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.integrations.pipelining import sharded
from qeffect_lm.integrations.pipelining.convert import Tape, running, weight_grads
from qeffect_lm.integrations.pipelining.fp8 import FP8State
from qeffect_lm.integrations.pipelining.links import Border, GroupLine, GroupTransport, Meta

TAPE = "tape"


@dataclass
class Batch:
    """One step's microbatches: positional arguments of the first stage, keyword arguments of all, targets of the last."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Saved:
    """Autograd's ends of a microbatch, from F to I."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass
class Results:
    """What the last stage gives: outputs as its module returned them, and losses, both by microbatch."""

    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class Runner:
    """One rank's stages under a plan.

    Args:
        stages: by stage number, torch's stages; their ``submod`` is asked for when it runs, as it may be replaced.
        loss_fn: ``(output, target, **loss_kwargs)`` → 0-dim loss; None: forward only.
        seed: what each microbatch's loss is multiplied with for its gradient.
        mode: ``enforce`` or ``off``.
        defer: receives are started when they are needed, not where the plan has them.
    """

    def __init__(
        self,
        plan: Plan,
        line: GroupLine,
        stages: Mapping[int, PipelineStage],
        device: torch.device,
        *,
        loss_fn: Callable[..., torch.Tensor] | None,
        seed: float = 1.0,
        fp8: FP8State | None = None,
        mode: str = "enforce",
        timeout: float = 600.0,
        defer: bool = False,
    ) -> None:
        self.plan, self.line, self.device, self._stages = plan, line, device, dict(stages)
        self.rank = line.coord("pp")
        self._loss_fn, self._seed, self.fp8 = loss_fn, seed, fp8
        timeline = ScaleTimeline([]) if fp8 is None else fp8.timeline
        versions = WeightVersions([]) if fp8 is None else fp8.versions
        self.ledger = Ledger(timeline, versions, GradSlots([]), mode=Mode(mode))
        self._slots = plan.slots[self.rank]
        self._transport: GroupTransport | None = None
        self._timeout, self._defer = timeout, defer
        self._training, self._evaluating = {}, {}  # type: dict[tuple[int, str], Border], dict[tuple[int, str], Border]
        self._in: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # handed over on this rank
        self._dy: dict[tuple[int, int], tuple[torch.Tensor | None, ...]] = {}
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._step = 0
        self._broken: str | None = None
        for kind, direction in ((Kind.F, Direction.FORWARD), (Kind.I, Direction.BACKWARD)):
            mine = [(str(kind), *a.key) for a in plan.actions[self.rank] if a.kind is kind]
            timeline.expect(direction, mine)

    # ---- a training step ---------------------------------------------------------------------------------------

    def step(self, batch: Batch, keep_outputs: bool) -> Results:
        """All actions of this rank, in the plan's order; gradients are in ``parameter.grad``, the caller's optimizer is next.

        Raises:
            ContractViolation: at the first illegal action.
            PeerLostError: a neighbour died.
        """
        self._check()
        self._connect()
        if self.fp8 is not None:
            self.fp8.begin(self.ledger)
        results = Results()
        try:
            self.ledger.begin_step(self._step)
            for stage in self._stages.values():
                sharded.hold_back(stage.submod)
            for action in self.plan.actions[self.rank]:
                self._do(action, batch, results, keep_outputs)
            for border in self._training.values():
                border.settle()
            self.ledger.end_step()
        except BaseException:
            self._abandon()
            raise
        self._step += 1
        return results

    def _do(self, action: Action, batch: Batch, results: Results, keep: bool) -> None:
        kind = action.kind
        if kind is Kind.F:
            self._forward(action, batch, results, keep)
        elif kind is Kind.I:
            self._input_grad(action)
        elif kind is Kind.W:
            self._weight_grad(action)
        elif self._defer and kind in (Kind.RECV_F, Kind.RECV_B):
            return  # the action that needs it starts it
        elif kind is Kind.RECV_F:
            self._border(action.key[0] - 1, "F").post(action.key[1])
        elif kind is Kind.RECV_B:
            self._post_gradients(action)
        elif kind is Kind.REDUCE:
            for stage in self._stages.values():
                sharded.reduce(stage)
        elif kind is Kind.COMMIT:
            if self.fp8 is not None:
                self.fp8.commit(self.ledger)
            else:
                self.ledger.commit(self.ledger.timeline.epochs[Direction.FORWARD])
        # SEND_F and SEND_B are done where their results are at hand; STEP is the caller's

    def _forward(self, action: Action, batch: Batch, results: Results, keep: bool) -> None:
        chunk, microbatch = action.key
        with self._action("F", action) as (scope, tape):
            scope.retain(TAPE, tape)
            inputs, outputs, raw = self._call(chunk, microbatch, batch, tape, self._training, self._slots.i_slots.index)
            if chunk == self.plan.placement.num_chunks - 1:
                loss = self._loss(raw, microbatch, batch)  # off the tape: a loss may run a backward of its own, in F
                results.losses[microbatch] = loss.detach()
                if keep:
                    results.outputs[microbatch] = _detached(raw)
                outputs = (loss,)
            self._saved[action.key] = _Saved(inputs, outputs)
        self._deliver(chunk, microbatch, outputs, self._training)

    def _call(
        self, chunk: int, microbatch: int, batch: Batch, tape: Tape, borders: dict, index: Mapping
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Any]:
        """The stage's module on its inputs; → inputs that gradients go back through, outputs, and the module's own return."""
        args: tuple[Any, ...] = batch.args[microbatch]
        inputs: tuple[torch.Tensor, ...] = ()
        if chunk:
            inputs = self._inputs(chunk, microbatch, borders, index)
            args = inputs
        with running(tape):
            raw = self._stages[chunk].submod(*args, **batch.kwargs[microbatch])
        outputs = _tensors(raw) if chunk < self.plan.placement.num_chunks - 1 else ()
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise UsageError(f"stage {chunk} returns a {type(output).__name__}: stages pass on tensors or tuples of them")
        return inputs, outputs, raw

    def _inputs(self, chunk: int, microbatch: int, borders: dict, index: Mapping) -> tuple[torch.Tensor, ...]:
        """What the stage before made, as leaves of this stage's graph."""
        if chunk - 1 in self._stages:
            arrived = self._in.pop((chunk, microbatch))
            needs = tuple(t.requires_grad for t in arrived)
        else:
            border = self._border(chunk - 1, "F", borders, index)
            arrived = border.receive(microbatch)
            assert border.metas is not None
            needs = tuple(meta.requires_grad for meta in border.metas)
        grad = borders is self._training
        return tuple(t.detach().requires_grad_(grad and need) for t, need in zip(arrived, needs, strict=True))

    def _deliver(self, chunk: int, microbatch: int, outputs: tuple[torch.Tensor, ...], borders: dict) -> None:
        if chunk == self.plan.placement.num_chunks - 1:
            return
        if chunk + 1 in self._stages:
            self._in[chunk + 1, microbatch] = outputs
        else:
            self._border(chunk, "F", borders).send(microbatch, outputs)

    def _loss(self, output: Any, microbatch: int, batch: Batch) -> torch.Tensor:
        assert self._loss_fn is not None
        if batch.targets is None:
            raise UsageError("the last stage's rank needs targets: pass target= or target_mbs=")
        loss = self._loss_fn(output, batch.targets[microbatch], **batch.loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise UsageError(f"loss_fn returned {type(loss).__name__}: a loss is one number, a 0-dim tensor")
        return loss

    def _input_grad(self, action: Action) -> None:
        chunk, microbatch = action.key
        last = chunk == self.plan.placement.num_chunks - 1
        with self._action("I", action) as (scope, tape):
            tape.again = True
            saved = self._saved.pop(action.key)
            grads: Sequence[torch.Tensor | None]
            if last:
                grads = [torch.full_like(saved.outputs[0], self._seed)]
            else:
                grads = self._output_grads(chunk, microbatch, saved.outputs)
            both = zip(saved.outputs, grads, strict=True)
            pairs = [(out, grad) for out, grad in both if out.requires_grad and grad is not None]
            if pairs:
                with running(tape):
                    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            scope.input_grad_done(TAPE)
        if chunk:
            self._send_back(chunk, microbatch, saved.inputs)

    def _output_grads(
        self, chunk: int, microbatch: int, outputs: tuple[torch.Tensor, ...]
    ) -> Sequence[torch.Tensor | None]:
        if chunk + 1 in self._stages:
            return self._dy.pop((chunk + 1, microbatch))
        metas = [Meta.of(out) for out in outputs]
        arrived = iter(self._gradient_border(chunk, metas).receive(microbatch))
        return [next(arrived) if meta.requires_grad else None for meta in metas]

    def _send_back(self, chunk: int, microbatch: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """Gradients of the inputs that have one; an input that was not used gets zeros."""
        grads = [None if not t.requires_grad else torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
        for tensor in inputs:
            tensor.grad = None
        if chunk - 1 in self._stages:
            self._dy[chunk, microbatch] = tuple(grads)
        elif any(grad is not None for grad in grads):
            self._border(chunk, "B").send(microbatch, [grad for grad in grads if grad is not None])

    def _weight_grad(self, action: Action) -> None:
        with self._action("W", action) as (scope, _):
            weight_grads(scope.take_weight_grad(TAPE))
        sharded.fold(self._stages[action.key[0]].submod)

    @contextmanager
    def _action(self, kind: str, action: Action) -> Iterator[tuple[Scope, Tape]]:
        chunk, microbatch = action.key
        i, w = self._slots.i_slots.index[action.key], self._slots.w_slots.index[action.key]
        slots = (Slot("I", chunk, i), Slot("W", chunk, w))
        beta = None if kind == "F" else 1  # into parameter.grad, whose first value of a step may be an earlier call's
        with (
            torch.autograd.profiler.record_function(f"PP:{action}"),
            self.ledger.action(kind, chunk, microbatch, beta=beta, slots=slots) as scope,
        ):
            tape = Tape() if kind == "F" else self.ledger.leases.payloads(chunk, microbatch)[TAPE]
            tape.scope = scope
            yield scope, tape
            tape.scope = None

    # ---- forward only ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, keep_outputs: bool) -> Results:
        """Forward only, all microbatches of a stage and then of the next: on any placement, V shapes too. No scale moves."""
        self._check()
        self._connect()
        if self.fp8 is not None:
            self.fp8.refresh(self.ledger)
        results = Results()
        last = self.plan.placement.num_chunks - 1
        try:
            for chunk in sorted(self._stages):
                for microbatch in range(self.plan.microbatches):
                    tape = Tape(again=True)
                    _, outputs, raw = self._call(chunk, microbatch, batch, tape, self._evaluating, {})
                    if chunk == last:
                        if keep_outputs:
                            results.outputs[microbatch] = raw
                        if self._loss_fn is not None and batch.targets is not None:
                            results.losses[microbatch] = self._loss(raw, microbatch, batch)
                    self._deliver(chunk, microbatch, outputs, self._evaluating)
            for border in self._evaluating.values():
                border.settle()
        except BaseException:
            self._abandon()
            raise
        return results

    # ---- borders -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._transport is None and self.plan.num_ranks > 1:
            queues = queues_of(self.plan)
            self._transport = GroupTransport(self.line, queues, self.plan.microbatches, self._timeout, self.device)

    def _border(self, chunk: int, direction: str, borders: dict | None = None, index: Mapping | None = None) -> Border:
        """The border over which ``chunk`` sends, made when it is first asked for."""
        borders = self._training if borders is None else borders
        index = self._slots.i_slots.index if index is None else index
        found = borders.get((chunk, direction))
        if found is None:
            assert self._transport is not None
            reader = chunk + (1 if direction == "F" else -1)
            peer = self.plan.placement.ranks[reader if chunk in self._stages else chunk]
            slots = {m: i for (c, m), i in index.items() if c == reader}  # none where it is another rank's
            found = Border(self._transport, self.device, chunk=chunk, peer=peer, direction=direction, slots=slots)
            borders[chunk, direction] = found
        return found

    def _gradient_border(self, chunk: int, metas: Sequence[Meta]) -> Border:
        """The border over which stage ``chunk + 1`` sends gradients of this stage's outputs: known as the outputs are."""
        border = self._border(chunk + 1, "B")
        if border.metas is None:
            border.metas = tuple(meta for meta in metas if meta.requires_grad)
        return border

    def _post_gradients(self, action: Action) -> None:
        chunk, microbatch = action.key
        saved = self._saved.get(action.key)
        if saved is not None:  # else F has not run: it is received when it is needed
            metas = [Meta.of(out) for out in saved.outputs]
            if any(meta.requires_grad for meta in metas):
                self._gradient_border(chunk, metas).post(microbatch)

    # ---- faults ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken is not None:
            raise QEffectError(f"{self._broken}: restart from the last checkpoint")

    def _abandon(self) -> None:
        self._in.clear()
        self._dy.clear()
        self._saved.clear()
        if self.ledger.leases.step is not None:
            self.ledger.abandon_step()
            if self.fp8 is not None:
                self.fp8.abandon()
        if self._transport is not None:
            self._broken = f"step {self._step} failed with messages in flight, which the next step could take for its own"

    def close(self) -> None:
        """Give the communicators back; all ranks of the line call it."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _tensors(raw: Any) -> tuple[Any, ...]:
    return tuple(raw) if isinstance(raw, (tuple, list)) else (raw,)


def _detached(raw: Any) -> Any:
    if isinstance(raw, torch.Tensor):
        return raw.detach()
    if isinstance(raw, (tuple, list)):
        return type(raw)(map(_detached, raw))
    if isinstance(raw, dict):
        return {key: _detached(value) for key, value in raw.items()}
    return raw
