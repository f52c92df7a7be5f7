"""The engine: runs a plan, action by action, eagerly or from captured graphs, under the contract.

One step, in time order (:meth:`Engine.step`):

1. begin      the ledger opens the step; the loss divisor is written
2. actions    the plan's F, I, W with their receives and sends, in the plan's order
3. REDUCE     pending sends complete; main gradients and amax slots are reduced
4. STEP       vote, norm, clip, optimizer; versions are bumped
5. COMMIT     histories roll, epoch e → e + 1
6. refresh    every cached weight is made once, with the new epoch's scale
7. end        no lease, no pending transfer is left

Streams are named and resolved when work is launched; every hand-over between two of them is an explicit edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.actions import Action, Kind
from pipeline.batch import StepBuffers, StepInput
from pipeline.captured import Captured, poison_, released_by
from pipeline.effects import effects_of, last_writers
from pipeline.epochs import check_commits, commits_before
from pipeline.p2p import Pending, Transport
from pipeline.partial import agree_on_collectives
from pipeline.plan import GraphKey, Plan
from pipeline.program import COLLECTIVE, COMPUTE
from pipeline.saving import StateCopies
from pipeline.spans import NO_SPANS, SpanKind, Spans, Watch
from pipeline.stage import MicrobatchSlot, Stage
from pipeline.step_end import StepEnd, StepResult
from qeffect_lm.contract.errors import StaleWeightError
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger, Summary
from qeffect_lm.contract.real_streams import BoundEvent, RealStreams
from qeffect_lm.contract.timeline import Begun, Direction
from qeffect_lm.errors import QEffectError
from qeffect_lm.fp8.cache import LAYOUTS, WeightCache
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.watchdog import CompletionWatchdog


@dataclass
class _Transfer:
    """A transfer: what starts it, and in flight its event. A replayed step starts it anew."""

    begin: Callable[[], Pending]
    pending: Pending | None = None
    event: BoundEvent | None = None

    def start(self) -> None:
        self.pending = self.begin()

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()


class Engine:
    """Executes one rank's part of a plan.

    Args:
        plan: validated; its slots decide the storages.
        stages: this rank's chunks by global stage number.
        transport: None where no neighbouring chunk is on another rank.
        inputs: where each step's data is staged.
        compute_stream: names the stream that compute work is launched on, asked at each launch.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        ledger: Ledger,
        cache: WeightCache,
        end: StepEnd,
        inputs: StepBuffers,
        transport: Transport | None,
        poison: bool = False,
        compute_stream: Callable[[], str] = lambda: COMPUTE,
    ) -> None:
        self.plan, self.mesh, self.stages, self.ledger = plan, mesh, dict(stages), ledger
        self.cache, self.end, self.inputs, self.divisor = cache, end, inputs, inputs.divisor
        self._transport, self._poison = transport, poison
        self.compute_stream = compute_stream
        self.streams = RealStreams(ledger, device=self.divisor.device, create=True)
        self.copies = StateCopies(self.streams, ledger, compute_stream)
        self.rank = mesh.coord("pp")
        self.actions = plan.actions[self.rank]
        self._slots = plan.slots[self.rank]
        self._effects = effects_of(plan, self.rank, end.replicated, end.tied is not None, end.exchanging)
        self._agreed = 0  # actions whose exchanges tensor-parallel peers have compared
        self._completes = last_writers(self.actions) if end.replicated else {}
        self.captured: Captured | None = None
        self.watch: Watch | None = None
        self.spans: Spans = NO_SPANS  # a profiler's, while it profiles a step
        self.watchdog: CompletionWatchdog | None = None
        self._pending: dict[tuple[str, int, int], _Transfer] = {}  # (RECV_F…, chunk, microbatch), or slot for sends
        self._events: dict[tuple[str, int, int], BoundEvent] = {}
        self._reducing = False  # peers' communicators are in use on the collective stream, perhaps
        self.across: Callable[[Callable[[], object]], object] = lambda work: work()  # runs what crosses ranks
        self.summaries: dict[GraphKey, Summary] | None = None  # filled where they are wanted, of what runs eagerly
        self._step = 0
        self._commits = commits_before(self.actions)
        self._first_epochs = dict(ledger.timeline.epochs)  # at the start of the step
        self._first_versions: dict[str, int] = {}
        self.updating = False  # the optimizer has begun in this step: what follows cannot be put back
        self._broken: str | None = None
        self._handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.I: self._input_grad,
            Kind.W: self._weight_grad,
            Kind.B: self._backward,
            **dict.fromkeys((Kind.SEND_F, Kind.SEND_B), self._send), **dict.fromkeys((Kind.RECV_F, Kind.RECV_B), self._receive),
            Kind.COMMIT: self._commit,
            Kind.REDUCE: self._reduce,
            Kind.STEP: self._optimizer_step,
        }
        if ledger.timeline.window == "step":
            for kind, direction in ((Kind.F, Direction.FORWARD), (Kind.I, Direction.BACKWARD)):
                mine = [a for a in self.actions if a.kind in (kind, Kind.B if kind is Kind.I else kind)]
                ledger.timeline.expect(direction, [(str(kind), *a.key) for a in mine])

    # ---- the step ----------------------------------------------------------------------------------------------

    def step(self, step: int, batch: StepInput) -> StepResult:
        """Run optimizer step ``step`` (0-based) on ``batch``.

        On one rank an exception before the optimizer began leaves nothing of the step behind, and the next step is clean. With
        messages in flight between ranks the engine refuses further steps: all ranks end and resume.

        Raises:
            ContractViolation: at the first illegal action.
            PeerLostError: a neighbour died.
        """
        if self._broken is not None:
            raise QEffectError(f"{self._broken}: restart from the last checkpoint")
        if self.captured is not None and self.ledger.checks:
            self.captured.check()
        if self.ledger.checks:
            self._agreed = agree_on_collectives(self.ledger, self.end, self._agreed)
        self._step = step
        begun = self.ledger.timeline.begun()
        self.updating = False
        self._first_epochs = dict(self.ledger.timeline.epochs)
        self._first_versions = dict(self.ledger.versions.versions) if self.ledger.checks else {}
        try:
            self.ledger.begin_step(step)
            with self.computing():
                self._launch("DIVISOR")
                self.inputs.load(step, batch)
                if self.captured is not None and self.captured.step is not None:
                    self.copies.before_update()
                    self.captured.step.replay(self)
                else:
                    self.run_actions(self.actions)
                    self.finish()
            self.ledger.end_step()
        except BaseException:
            self._abandon(begun)
            if self.updating:
                self._broken = f"step {step} failed while the optimizer ran, its state may be half-updated"
            elif self._transport is not None:
                self._broken = f"step {step} failed with messages in flight, which the next step could take for its own"
            raise
        return self.end.result()

    def run_actions(self, actions: Sequence[Action]) -> None:
        """Run some of the plan's actions, in order."""
        for action in actions:
            if action.is_compute:  # its span is without the waits and copies before it
                self._handlers[action.kind](action)
            else:
                with self.spans.action(action, self._slots):
                    self._handlers[action.kind](action)
            if action in self._completes:
                with self.spans.piece(f"REDUCE s{action.chunk}", SpanKind.REDUCE):
                    self._reduce_chunk(action)

    def finish(self) -> None:
        """What follows a step's last action."""
        self.check_updated()
        with self.spans.piece("REFRESH", SpanKind.REFRESH):
            self._refresh()
        self.settle()

    def watch_completion(self) -> None:
        """Have the watchdog, if there is one, see that what was just launched is done in time."""
        if self.watchdog is not None:
            event = torch.cuda.Event()
            event.record()
            self.watchdog.watch(event.query, f"the graph of step {self._step}")

    @property
    def first_epochs(self) -> Mapping[Direction, int]:
        """The epochs that this step began with."""
        return self._first_epochs

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The body's work is launched on the compute stream: after what the caller launched, and before what it launches next.

        Nothing to do on a CPU, where a stream is only a name.
        """
        real = self.streams.real(self.compute_stream())
        if real is None:
            yield
            return
        caller = torch.cuda.current_stream(self.divisor.device)
        real.wait_stream(caller)
        try:
            with torch.cuda.stream(real):
                yield
        finally:
            caller.wait_stream(real)

    @contextmanager
    def rehearsal(self, across: Callable[[Callable[[], object]], object]) -> Iterator[None]:
        """A step that is captured: begun like any other, and ended by the caller's roll-back. ``across`` runs what crosses
        ranks."""
        self._step, self._first_epochs = -1, dict(self.ledger.timeline.epochs)
        self._first_versions = dict(self.ledger.versions.versions) if self.ledger.checks else {}
        self.across, before = across, self.across
        self.spans, spans = NO_SPANS, self.spans  # a tape would take them down
        self.ledger.begin_step(-1)
        try:
            with self.computing():
                yield
        finally:
            self.across, self.spans = before, spans
            self._forget()

    def _abandon(self, begun: Begun) -> None:
        self.watch = None
        if self._transport is None:  # with messages in flight a stream may never be done, and this engine runs no other step
            self.streams.synchronize_all()
        self._forget()
        for stage in self.stages.values():
            for slot in stage.slots:
                slot.saved = None
        self.ledger.timeline.begin_again(begun)
        self.ledger.abandon_step()

    # ---- compute actions ---------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        chunk, microbatch = action.key
        stage, i, slot = self._place(action)
        self._complete(("RECV_F", chunk, microbatch))
        self._complete(("SEND_F", chunk, i))
        self._write_inputs(stage, slot, microbatch)
        self._launch("F", chunk, microbatch)
        self._run(action, lambda scope: stage.forward(slot, scope))
        if stage.last:
            self._launch("LOSS", chunk, microbatch)
            self.end.losses[microbatch].copy_(slot.out)
            if self.end.row_losses is not None and slot.context.row_losses is not None:
                self.end.row_losses[microbatch].copy_(slot.context.row_losses)
        elif chunk + 1 in self.stages:
            self._hand_over("PASS_F", action, chunk + 1)

    def _input_grad(self, action: Action) -> None:
        chunk, microbatch = action.key
        stage, i, slot = self._place(action)
        self._complete(("RECV_B", chunk, microbatch))
        self._complete(("SEND_B", chunk, i))
        self._launch("I", chunk, microbatch)
        self._run(action, lambda scope: stage.input_grad(slot, scope))
        self._mark(f"{Kind.I}", chunk, microbatch)
        if not stage.first and chunk - 1 in self.stages:
            self._hand_over("PASS_B", action, chunk - 1)

    def _weight_grad(self, action: Action) -> None:
        chunk, microbatch = action.key
        stage, _, slot = self._place(action)
        after = self._events.pop((f"{Kind.I}", chunk, microbatch), None)
        if after is not None:
            self.streams.wait(self.compute_stream(), after)
        self._launch("W", chunk, microbatch)
        retained = self._retained(action) if self._poison else []
        self._run(action, lambda scope: stage.weight_grad(slot, scope))
        for tensor in retained:
            poison_(tensor)

    def _backward(self, action: Action) -> None:
        raise QEffectError(f"{action}: the engine runs I and W; lower B to them first")

    def _run(self, action: Action, work: Callable) -> None:
        """One compute action: its graph if there is one, else eagerly; the ledger sees the same effects.

        Storages, graph and the slots that the ledger hears of have one source: the plan's places of the microbatch.
        """
        chunk, microbatch = action.key
        i, w = self._slots.i_slots.index[action.key], self._slots.w_slots.index[action.key]
        key = self.plan.graph_key(action)._replace(i_slot=i, w_slot=w)
        slots = (Slot("I", chunk, i), Slot("W", chunk, w))
        epoch = None if action.kind is Kind.W else self._epoch(action)
        watch = self.watch
        if watch is not None:
            watch.begin(action)
        with self.spans.action(action, self._slots):
            if self.captured is not None:
                graph, summary = self.captured.actions[key]
                self.ledger.replay(summary, chunk, microbatch, slots=slots, epoch=epoch)
                graph.replay()
            else:
                joint = self.plan.joint(action)
                with self.ledger.action(
                    str(action.kind), chunk, microbatch, beta=key.beta, slots=slots, epoch=epoch, joint=joint
                ) as scope:
                    work(scope)
                if self.summaries is not None:
                    self.summaries[key] = scope.summarise()
        if watch is not None:
            watch.end(action)

    def _epoch(self, action: Action) -> int:
        """The scale epoch that the plan gives an action: the step's first one, and one more for each commit before it."""
        direction, commits = self._commits[action]
        return self._first_epochs[direction] + commits

    def _write_inputs(self, stage: Stage, slot: MicrobatchSlot, microbatch: int) -> None:
        """Key, and where they are needed tokens and targets, into the slot (written, never replaced)."""
        self._launch("INPUT", stage.index, microbatch)
        context, inputs = slot.context, self.inputs
        context.key.copy_(inputs.keys[microbatch])
        if context.starts is not None:
            assert inputs.starts is not None
            context.starts.copy_(inputs.starts[microbatch])
        if stage.first:
            assert inputs.inputs is not None
            slot.x.copy_(inputs.inputs[microbatch])
        if stage.last:
            assert context.targets is not None and inputs.targets is not None
            context.targets.copy_(inputs.targets[microbatch])
        if context.loss_mask is not None:
            assert inputs.loss_mask is not None
            context.loss_mask.copy_(inputs.loss_mask[microbatch])

    def _place(self, action: Action) -> tuple[Stage, int, MicrobatchSlot]:
        stage = self.stages[action.key[0]]
        i = self._slots.i_slots.index[action.key]
        return stage, i, stage.slots[i]

    def _hand_over(self, work: str, action: Action, chunk: int) -> None:
        """Between two chunks of one rank: the producer's result into the slot of its reader, ``chunk``."""
        _, _, source = self._place(action)
        target = self.stages[chunk].slots[self._slots.i_slots.index[chunk, action.key[1]]]
        self._launch(work, *action.key)
        if work == "PASS_F":
            target.x.copy_(source.out)
        else:
            assert source.dx is not None
            target.dy.copy_(source.dx)

    def _retained(self, action: Action) -> list[torch.Tensor]:
        """Debug: what is retained until this W, to be poisoned when W has read it."""
        key = self.plan.graph_key(action)
        if self.captured is None:
            payloads = self.ledger.leases.payloads(*action.key).values()
            tensors = [tensor for payload in payloads for tensor in payload.tensors()]
        else:
            tensors = self.captured.retained[key.chunk, key.i_slot, key.w_slot]
        return released_by(self.stages[key.chunk], key.w_slot, 0 if key.joint is None else key.joint.members, tensors)

    # ---- transfers ---------------------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        chunk, microbatch = action.key
        stage, i, slot = self._place(action)
        direction = "F" if action.kind is Kind.SEND_F else "B"
        peer = self.plan.placement.ranks[chunk + 1 if direction == "F" else chunk - 1]
        tensor = slot.out if direction == "F" else slot.dx
        assert self._transport is not None and tensor is not None
        stream = f"send_{direction}"
        self._edge(self.compute_stream(), stream)  # the producer is done before the send starts
        self._launch(str(action.kind), chunk, microbatch)
        transport = self._transport
        transfer = _Transfer(lambda: transport.send(tensor, peer, direction, chunk, microbatch))
        self._pending[str(action.kind), chunk, i] = self._in_flight(transfer, stream)

    def _receive(self, action: Action) -> None:
        chunk, microbatch = action.key
        _, _, slot = self._place(action)
        direction = "F" if action.kind is Kind.RECV_F else "B"
        source = chunk - 1 if direction == "F" else chunk + 1
        peer = self.plan.placement.ranks[source]
        tensor = slot.x if direction == "F" else slot.dy
        assert self._transport is not None
        stream = f"recv_{direction}"
        self._edge(self.compute_stream(), stream)  # the buffer's last reader is done before it is written
        self._launch(str(action.kind), chunk, microbatch)
        transport = self._transport
        transfer = _Transfer(lambda: transport.receive(tensor, peer, direction, source, microbatch))
        self._pending[str(action.kind), chunk, microbatch] = self._in_flight(transfer, stream)

    def _in_flight(self, transfer: _Transfer, stream: str) -> _Transfer:
        """Start a transfer, with an event of its own. On a GPU its stream waits for it; the host does not."""
        with self.streams.current(stream):
            self.across(transfer.start)
            if self.streams.real(stream) is not None:
                transfer.wait()
        transfer.event = self.streams.record(stream)
        return transfer

    def _complete(self, key: tuple[str, int, int]) -> None:
        """Compute waits for one transfer: before it reads what was received, before it writes again what was sent.

        The edge is the transfer's own event, recorded when it was launched: an event recorded now would vouch for transfers
        launched since, which may still be in flight.
        """
        transfer = self._pending.pop(key, None)
        if transfer is not None:
            assert transfer.event is not None
            with self.spans.wait(key):
                self.across(transfer.wait)
                self.streams.wait(self.compute_stream(), transfer.event)

    def settle(self) -> None:
        """No transfer outlives its step."""
        for key in list(self._pending):
            self._complete(key)
        self._forget()

    def _forget(self) -> None:
        self._pending.clear()
        self._events.clear()
        self._reducing = False

    # ---- blocking transfers outside a step (calibration, evaluation) ------------------------------------------

    def fetch(self, slots: Mapping[int, MicrobatchSlot], chunk: int, direction: str, microbatch: int = 0) -> None:
        """Receive the input (``F``) or output gradient (``B``) of ``chunk``, unless a chunk of this rank delivers it."""
        source = chunk - 1 if direction == "F" else chunk + 1
        if source in self.stages:
            return
        assert self._transport is not None
        buffer = slots[chunk].x if direction == "F" else slots[chunk].dy
        self._transport.receive(buffer, self.plan.placement.ranks[source], direction, source, microbatch).wait()

    def deliver(self, slots: Mapping[int, MicrobatchSlot], chunk: int, direction: str, microbatch: int = 0) -> None:
        """Send the output or input gradient of ``chunk`` to its reader; at the model's ends there is none."""
        target = chunk + 1 if direction == "F" else chunk - 1
        if not 0 <= target < self.plan.placement.num_chunks:
            return
        result = slots[chunk].out if direction == "F" else slots[chunk].dx
        assert result is not None
        if target in self.stages:
            (slots[target].x if direction == "F" else slots[target].dy).copy_(result)
            return
        assert self._transport is not None
        self._transport.send(result, self.plan.placement.ranks[target], direction, chunk, microbatch).wait()

    # ---- the step's end ----------------------------------------------------------------------------------------

    def _reduce_chunk(self, action: Action) -> None:
        """Replicas: the gradients of a chunk, right after their last writer; beside the work that other chunks have left."""
        stage = self.stages[action.key[0]]
        if self.ledger.checks:
            self.ledger.grads.zero_empty_(stage.gradients)
            self.ledger.grads.close(stage.gradients, self.plan.microbatches)
        self._edge(self.compute_stream(), COLLECTIVE)
        self._launch("REDUCE_G", *action.key)
        with self.streams.current(COLLECTIVE):
            self.across(lambda: self.end.reduce_gradients_(stage.index))
        self._reducing = self.end.exchanging

    def join_reductions(self) -> None:
        """Compute waits for the gradients' reductions: where a graph ends before REDUCE, or peers' communicators are used."""
        if self._completes:
            self._edge(COLLECTIVE, self.compute_stream())
        self._reducing = False

    def _reduce(self, action: Action) -> None:
        self.settle()
        if self.ledger.checks:  # mode off keeps no count of writers
            self.ledger.grads.zero_empty_()
        self._launch("SUM")
        self._run_end("sum_losses", self.end.sum_losses_)
        self._edge(self.compute_stream(), COLLECTIVE)
        self._launch("REDUCE")
        with self.streams.current(COLLECTIVE):
            self.across(self.end.reduce_)
            self.across(self.end.gather_loss_)
        self._edge(COLLECTIVE, self.compute_stream())

    def _optimizer_step(self, action: Action) -> None:
        if self.ledger.checks:
            self.ledger.grads.check_complete(self.plan.microbatches)
        self._launch("NORM")
        self._run_end("local_sums", self.end.local_sums_)
        with self.spans.piece("GATHER", SpanKind.REDUCE):
            self._edge(self.compute_stream(), COLLECTIVE)
            self._launch("GATHER")
            with self.streams.current(COLLECTIVE):
                self.across(self.end.gather_)
            self._edge(COLLECTIVE, self.compute_stream())
        self.copies.before_update()
        self._launch("STEP")
        self.updating = True
        self._run_end("optimizer_step", self.end.optimizer_step_)
        self.across(self.end.share_)  # part of STEP's write: versions move once all of it is here
        self.ledger.versions.bump()

    def _commit(self, action: Action) -> None:
        epoch = self._epoch(action)
        if action.chunk is None:
            self.ledger.commit(epoch, by=str(action))
            self._launch("COMMIT")
            self._run_end("commit", self.end.commit_)
            return
        direction = Direction.FORWARD if action.detail == "F" else Direction.BACKWARD
        self._edge(self.compute_stream(), COLLECTIVE)
        self._launch(f"REDUCE_{action.detail}", *action.key)
        with self.streams.current(COLLECTIVE):
            self.across(lambda: self.end.reduce_amax_((direction,)))  # replicas share one scale, so they share one roll
        self._edge(COLLECTIVE, self.compute_stream())
        self.ledger.commit(epoch, (direction,), str(action))
        self._launch(f"COMMIT_{action.detail}", *action.key)
        self._run_end(f"commit_{direction}", lambda: self.end.commit_direction_(direction))

    def check_updated(self) -> None:
        """The plan's actions are done: all its commits were made, and STEP wrote every parameter once.

        Raises:
            ScaleOrderError: a commit is missing, or ran too often.
            StaleWeightError: a parameter whose version did not move by one: caches made from it would pass for new ones.
        """
        if not self.ledger.checks:
            return
        check_commits(self.ledger.timeline, self._first_epochs, self.actions, self._step)
        versions = self.ledger.versions.versions
        for name, first in self._first_versions.items():
            if versions[name] != first + 1:
                raise StaleWeightError(
                    f"step {self._step} ends with {name!r} at version {versions[name]}, it began with {first}: STEP writes "
                    "each parameter once and says so",
                    layer=name,
                    parameter_version=versions[name],
                )

    def _refresh(self) -> None:
        """All weight caches once, from the new masters with the new epoch's scales."""
        if self.cache.names:
            self._launch("REFRESH")
            self._run_end("refresh", self.end.refresh_)
            if self.end.tensor:
                self.across(self.end.merge_weight_amax_)  # part of REFRESH's write of the amax slots
            self.account_refresh()

    def account_refresh(self) -> None:
        """Tell the ledger that the caches were made from the current versions."""
        self.ledger.refreshed({name: self.cache.layer_of(name) for name in self.cache.names}, LAYOUTS)

    def _run_end(self, name: str, work: Callable[[], object]) -> None:
        if self.captured is not None:
            self.captured.end[name].replay()
        else:
            with torch.no_grad():
                work()

    def end_work(self) -> dict[str, Callable[[], object]]:
        """The pieces of the step's end that become graphs."""
        work: dict[str, Callable[[], object]] = {
            "sum_losses": self.end.sum_losses_,
            "local_sums": self.end.local_sums_,
            "optimizer_step": self.end.optimizer_step_,
        }
        if self.ledger.timeline.window == "step":
            work["commit"] = self.end.commit_
        else:
            for direction in Direction:
                work[f"commit_{direction}"] = lambda d=direction: self.end.commit_direction_(d)  # type: ignore[misc]
        if self.cache.names:
            work["refresh"] = self.end.refresh_
        return work

    # ---- streams -----------------------------------------------------------------------------------------------

    def _launch(self, work: str, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Tell the ledger of a piece of work and what it accesses (:mod:`pipeline.effects`)."""
        if self._reducing and work in ("F", "I"):  # they exchange too: one order on all peers
            self.join_reductions()
        op = self._effects.launch(work, chunk, microbatch, self.compute_stream())
        self.ledger.launch(op.stream, op.accesses, op.who)

    def _edge(self, source: str, target: str) -> None:
        """Work on ``target`` from here on waits for work on ``source`` so far."""
        self.streams.edge(source, target)

    def _mark(self, what: str, chunk: int, microbatch: int) -> None:
        """Remember an event after the work just launched, for whoever continues on another stream."""
        self._events[what, chunk, microbatch] = self.streams.record(self.compute_stream())
