"""Several pipeline ranks in one process: each a thread, messages copied through memory.

    ranks = Ranks(config(parallel__pp=2), monkeypatch, when="late")
    results = ranks.step(0, batch(0))             # one StepResult per rank; the first error is raised

A message is one copy from the sender's live buffer into the receiver's, made when both sides have posted it
(``early``) or when the receiver waits for it (``late``); a sender's wait returns after the copy. So a buffer
that is written before its send completed, or read before its receive did, shows in the numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.parallel.mesh import Mesh

SECONDS = 30.0


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
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1
        wire, message = self.wire, self.message
        with wire.changed:
            if self.receives:
                wire.wait_for(lambda: message.done or message.source is not None)
                deliver(message)
            else:
                wire.wait_for(lambda: message.done)
            wire.changed.notify_all()


def deliver(message: Message) -> None:
    if not message.done:
        assert message.source is not None and message.target is not None
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
        with self.wire.changed:
            message = self.wire.messages.setdefault(self.wire.next_key(side, *key), Message())
            for name, tensor in buffer.items():
                setattr(message, name, tensor)
            if self.wire.when == "early" and message.source is not None and message.target is not None:
                deliver(message)
            self.wire.changed.notify_all()
        pending = FakePending(self.wire, message, side == "receive")
        self.pending.append(pending)
        return pending


class Ranks:
    """The ranks of one pipeline, assembled and prepared."""

    def __init__(self, settings: Config, monkeypatch: pytest.MonkeyPatch, *, when: str = "late") -> None:
        self.world = settings.parallel.pp
        self.wire = Wire(when)
        for module in ("step_end", "evaluate", "measure"):
            monkeypatch.setattr(f"pipeline.{module}.gather_rows", self._gather)
        self.transports = [FakeTransport(self.wire, rank) for rank in range(self.world)]
        self.parts: list[Assembly] = []
        for rank, transport in enumerate(self.transports):
            monkeypatch.setattr("qeffect_lm.app.assemble.Transport", lambda *_, t=transport: t)
            self.parts.append(assemble(settings, Mesh({"pp": self.world}, rank)))

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
            rows[0].copy_(mine)
            return
        wire = self.wire
        with wire.changed:
            _, number = wire.next_key(mesh.rank, "gather")
            wire.rows[mesh.rank, number] = mine.clone()
            wire.changed.notify_all()
            wire.wait_for(lambda: all((rank, number) in wire.rows for rank in range(self.world)))
            for rank in range(self.world):
                rows[rank].copy_(wire.rows[rank, number])
