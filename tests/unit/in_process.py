"""Several ranks in one process, of a pipeline or of replicas: each a thread, messages copied through memory.

    ranks = Ranks(config(parallel__pp=2), monkeypatch, when="late")
    results = ranks.step(0, batch(0))             # one StepResult per rank; the first error is raised

A message is one copy from the sender's live buffer into the receiver's, made when both sides have posted it
(``early``) or when the receiver waits for it (``late``); a sender's wait returns after the copy. So a buffer
that is written before its send completed, or read before its receive did, shows in the numbers. ``at_once``
is the fastest network: the message is what the buffer holds when the send is posted.

:class:`LateStream` is the slowest device: one stream of a rank runs as late as the edges allow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from pipeline.engine import Engine
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.graphs.register import storage_id
from qeffect_lm.parallel.mesh import Mesh

SECONDS = 30.0
PATIENCE = 0.5  # of a sender that waits, before a message that is posted at both ends moves by itself


class Aborted(Exception):
    """Another rank failed."""


@dataclass
class Message:
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: bool = False


@dataclass
class Wire:
    """What all ranks share."""

    when: str
    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[tuple, Message] = field(default_factory=dict)
    rows: dict[tuple, torch.Tensor] = field(default_factory=dict)
    counts: dict[tuple, int] = field(default_factory=dict)
    aborted: bool = False
    late: dict[int, LateStream] = field(default_factory=dict)  # by rank
    blocking: set[tuple[str, int]] = field(default_factory=set)  # (direction, microbatch): posting the receive waits for it
    held: dict[tuple[str, int], threading.Event] = field(default_factory=dict)  # nothing moves before the event

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait under the lock; another rank's failure or the time limit end it."""
        if not self.changed.wait_for(lambda: self.aborted or condition(), SECONDS):
            raise TimeoutError("the other rank never came")
        if self.aborted and not condition():
            raise Aborted

    def next_key(self, *key: Any) -> tuple:
        """Number the uses of one key: the n-th send meets the n-th receive."""
        self.counts[key] = self.counts.get(key, -1) + 1
        return (*key[1:], self.counts[key])

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def reset(self) -> None:
        """After an abort: no message of before is delivered later."""
        self.messages.clear()
        self.rows.clear()
        self.counts.clear()
        self.aborted = False


@dataclass
class FakePending:
    wire: Wire
    message: Message
    receives: bool
    what: tuple[str, int]
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1
        wire, message = self.wire, self.message
        if self.receives and self.what in wire.held and not wire.held[self.what].wait(SECONDS):
            raise TimeoutError(f"nobody let {self.what} go")
        with wire.changed:
            if self.receives:
                wire.wait_for(lambda: message.done or message.source is not None)
                deliver(message)
            elif wire.when != "at_once":
                # Whoever received without waiting lets the sender wait for ever; a network would not.
                posted = wire.changed.wait_for(lambda: wire.aborted or message.done, PATIENCE) or message.target is None
                if posted:
                    wire.wait_for(lambda: message.done)
                else:
                    deliver(message)
            wire.changed.notify_all()


def deliver(message: Message) -> None:
    if not message.done:
        assert message.source is not None and message.target is not None
        with _disable_current_modes():  # no stream of either rank does this
            message.target.copy_(message.source)
        message.done = True


class FakeTransport:
    """The interface of :class:`pipeline.p2p.Transport`."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.pending: list[FakePending] = []

    def send(self, tensor: torch.Tensor, peer: int, direction: str, chunk: int, microbatch: int) -> FakePending:
        return self._post("send", (self.rank, peer, direction, chunk, microbatch), source=tensor)

    def receive(self, tensor: torch.Tensor, peer: int, direction: str, chunk: int, microbatch: int) -> FakePending:
        return self._post("receive", (peer, self.rank, direction, chunk, microbatch), target=tensor)

    def _post(self, side: str, key: tuple, **buffer: torch.Tensor) -> FakePending:
        what = key[2], key[4]
        with self.wire.changed:
            message = self.wire.messages.setdefault(self.wire.next_key(side, *key), Message())
        late = self.wire.late.get(self.rank)
        if side == "send" and late is not None and late.current in late.follow:
            late.kept.append(lambda: self._put(side, message, what, buffer))
        else:
            self._put(side, message, what, buffer)
        pending = FakePending(self.wire, message, side == "receive", what)
        self.pending.append(pending)
        return pending

    def _put(self, side: str, message: Message, what: tuple[str, int], buffer: dict[str, torch.Tensor]) -> None:
        """One side is there."""
        with self.wire.changed:
            for name, tensor in buffer.items():
                setattr(message, name, tensor)
            if side == "send" and self.wire.when == "at_once":
                with _disable_current_modes():
                    message.source = buffer["source"].clone()
            self.wire.changed.notify_all()
            if side == "receive" and what in self.wire.blocking:
                self.wire.wait_for(lambda: message.source is not None)
            if self.wire.when != "late" and message.source is not None and message.target is not None:
                deliver(message)
                self.wire.changed.notify_all()


class Ranks:
    """The ranks of one pipeline, or the replicas of one process (not both), assembled and prepared."""

    def __init__(self, settings: Config, monkeypatch: pytest.MonkeyPatch, *, when: str = "late") -> None:
        sizes = {"pp": settings.parallel.pp, "dp": settings.parallel.dp, "ep": settings.parallel.ep}
        self.world = max(sizes.values())
        assert self.world == settings.parallel.world
        self.wire = Wire(when)
        self.connect(monkeypatch)
        self.transports = [FakeTransport(self.wire, rank) for rank in range(self.world)]
        self.parts: list[Assembly] = []
        for rank, transport in enumerate(self.transports):
            monkeypatch.setattr("qeffect_lm.app.assemble.Transport", lambda *_, t=transport: t)
            mesh = Mesh(sizes, rank)
            if sizes["dp"] > 1:
                mesh._groups |= dict.fromkeys(("dp", "data", "replicas"), SimpleNamespace(rank=rank))  # type: ignore[arg-type]
            if sizes["ep"] > 1:
                lines = ("ep", "data", "samples", "experts", "peers")
                mesh._groups |= dict.fromkeys(lines, SimpleNamespace(rank=rank))  # type: ignore[arg-type]
            self.parts.append(assemble(settings, mesh))

    def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let collectives go through this object's memory, for as long as ``monkeypatch`` lasts."""
        for module in ("step_end", "evaluate", "measure"):
            monkeypatch.setattr(f"pipeline.{module}.gather_rows", self._gather)
        fake = SimpleNamespace(all_reduce=self._all_reduce, ReduceOp=dist.ReduceOp)
        monkeypatch.setattr("pipeline.step_end.dist", fake)
        sharing = {"all_to_all_single": self._all_to_all, "broadcast": self._broadcast}
        for module in ("sharded", "ordered"):
            monkeypatch.setattr(f"pipeline.{module}.dist", SimpleNamespace(**vars(fake), **sharing))
        monkeypatch.setattr("pipeline.ordered.all_gather", self._all_gather)
        monkeypatch.setattr("qeffect_lm.parallel.expert._all_to_all", self._all_to_all)

    def each(self, call: Callable[[Assembly], Any]) -> list[Any]:
        """Run ``call`` on every rank at once; the first rank's own error is raised."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException | None] = [None] * self.world
        self.wire.reset()

        def body(rank: int) -> None:
            try:
                results[rank] = call(self.parts[rank])
            except BaseException as error:
                errors[rank] = error
                self.wire.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        own = [error for error in errors if error is not None and not isinstance(error, Aborted)]
        if own:
            raise own[0]
        return results

    def prepare(self, batch: Any) -> None:
        self.each(lambda part: part.prepare(batch))

    def step(self, step: int, batch: Any) -> list[Any]:
        for transport in self.transports:
            transport.pending.clear()
        return self.each(lambda part: part.engine.step(step, batch))

    def _gather(self, rows: torch.Tensor, mine: torch.Tensor, mesh: Mesh, axis: str) -> None:
        """As :func:`pipeline.p2p.gather_rows`."""
        if mesh.size(axis) == 1:
            self._on_stream(mesh.rank, lambda: rows[0].copy_(mine))
            return

        def gather() -> None:
            for rank, row in enumerate(self._exchange(mesh.rank, mine)):
                rows[rank].copy_(row)

        self._on_stream(mesh.rank, gather)

    def _all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        """As :func:`torch.distributed.all_reduce`, in order of rank."""

        def reduce() -> None:
            rows = torch.stack(self._exchange(group.rank, tensor))
            tensor.copy_(rows.amax(0) if op == dist.ReduceOp.MAX else rows.sum(0))

        self._on_stream(group.rank, reduce)

    def _all_gather(self, output: torch.Tensor, mine: torch.Tensor, group: Any = None) -> None:
        """As :func:`torch.distributed.all_gather_into_tensor`."""
        self._on_stream(group.rank, lambda: output.copy_(torch.cat(self._exchange(group.rank, mine))))

    def _all_to_all(
        self, output: torch.Tensor, mine: torch.Tensor, received: Any, sent: list[int] | None, group: Any = None
    ) -> None:
        """As :func:`torch.distributed.all_to_all_single`."""

        def exchange() -> None:
            splits = sent or [mine.shape[0] // self.world] * self.world
            each = self._exchange(group.rank, splits)
            parts = [row.split(cut)[group.rank] for row, cut in zip(self._exchange(group.rank, mine), each, strict=True)]
            assert received is None or ([part.shape[0] for part in parts] == received and mine.shape[0] == sum(splits))
            output.copy_(torch.cat(parts))

        self._on_stream(group.rank, exchange)

    def _broadcast(self, tensor: torch.Tensor, source: int, group: Any = None) -> None:
        """As :func:`torch.distributed.broadcast`; replicas alone, so a global rank is a replica's."""
        self._on_stream(group.rank, lambda: tensor.copy_(self._exchange(group.rank, tensor)[source]))

    def _on_stream(self, rank: int, work: Callable[[], Any]) -> None:
        late = self.wire.late.get(rank)
        if late is None:
            work()
        else:
            late.launch(work)

    def _exchange(self, rank: int, mine: Any) -> list[Any]:
        """Everybody's tensor (or list), in order of rank; a collective like any other."""
        wire = self.wire
        with wire.changed:
            _, number = wire.next_key(rank, "exchange")
            wire.rows[rank, number] = mine.clone() if isinstance(mine, torch.Tensor) else list(mine)
            wire.changed.notify_all()
            wire.wait_for(lambda: all((other, number) in wire.rows for other in range(self.world)))
            return [wire.rows[other, number] for other in range(self.world)]


class LateStream(TorchDispatchMode):
    """While entered, the work that ``engine`` launches on stream ``late`` runs as late as its edges allow.

    The operations are kept back (what a stream of a device may do with any work that nobody waits for) until another stream
    waits for an event recorded behind them, which here is a call of the engine's ``_edge`` or W's wait for I's ``_mark``, or
    until the end. Sends on a stream in ``follow`` wait as long; all other streams run at once. So if the engine makes every
    edge that its data needs, all bits are as without this; if it misses one, the consumer reads what was there before. Take
    graphs (autograd looks at what it saves), and make it before faults are put into the engine: a fault then leaves out the
    edge of this device too.
    """

    def __init__(self, engine: Engine, late: str, follow: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.late, self.follow = late, follow
        self.current = "host"
        self.kept: list[Callable[[], Any]] = []
        self._running = False
        self._marked = self._edging = False
        ledger = engine.ledger
        launch, wait, edge, mark = ledger.launch, ledger.wait, engine._edge, engine._mark

        def launched(stream: str, accesses: Any, who: str) -> None:
            self.current = stream
            launch(stream, accesses, who)

        def waited(stream: str, event: Any) -> None:
            if self._marked and stream != late and not self._edging:
                self._marked = False
                self.run()
            wait(stream, event)

        def edged(source: str, target: str) -> None:
            if source == late and target != late and target not in follow:
                self.run()
            self._edging = True  # its own wait is none of W's
            edge(source, target)
            self._edging = False

        def marked(what: str, chunk: int, microbatch: int) -> None:
            self._marked = True
            mark(what, chunk, microbatch)

        ledger.launch, ledger.wait = launched, waited  # type: ignore[method-assign]
        engine._edge, engine._mark = edged, marked  # type: ignore[method-assign]

    def __enter__(self) -> LateStream:
        self.current = "host"
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self.run()

    def launch(self, work: Callable[[], Any]) -> None:
        """Run ``work`` on the current stream: now, or when it is due."""
        if self.current == self.late:
            self.kept.append(work)
        else:
            work()

    @torch.no_grad()
    def run(self) -> None:
        """Somebody waits: do everything that was kept back, in order."""
        self._running = True
        while self.kept:
            self.kept.pop(0)()
        self._running = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running or self.current != self.late:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.kept.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0]) if func._schema.returns else None
        result = func(*args, **kwargs)  # a place for the result; computed when it is due
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        assert all(isinstance(output, torch.Tensor) for output in outputs), f"{func} reads a tensor on the host"
        inputs = {storage_id(leaf) for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
        if any(storage_id(output) not in inputs for output in outputs):  # else a view

            def compute() -> None:
                again = func(*args, **kwargs)
                for output, value in zip(outputs, again if isinstance(again, (tuple, list)) else [again], strict=True):
                    output.copy_(value)

            self.kept.append(compute)
        return result
