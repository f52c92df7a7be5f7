"""Records what an engine really does in a step, from its ledger and its transport, in the words of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipeline.program import BEGIN, COMPLETE, END, LAUNCH, RECORD, WAIT, Op, parse_name
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.contract.timeline import Direction


def words(ops: Iterable[Op]) -> list[str]:
    """Operations as text, launches under the name that the ledger is told."""
    return [str(replace(op, **parse_name(op.who)) if op.kind == LAUNCH else op) for op in ops]


class Recorder:
    """Wraps the methods of one rank's ledger and transport; ``lines`` are the operations since the last step began."""

    def __init__(self, assembly: Assembly) -> None:
        self.engine, self.ledger = assembly.engine, assembly.ledger
        self.ops: list[Op] = []
        self.events: list[Any] = []  # in the order of their recording, kept alive
        self.commit_epoch: int | None = None
        self.firsts: dict[Direction, int] = {}
        for name in ("begin_step", "end_step", "launch", "record", "wait", "action", "replay", "commit", "refreshed"):
            self._wrap(self.ledger, name)
        self._wrap(self.ledger.versions, "bump")
        transport = self.engine._transport
        if transport is not None:
            for name in ("send", "receive"):
                self._wrap(transport, name)

    def _wrap(self, owner: Any, name: str) -> None:
        inner, seen = getattr(owner, name), getattr(self, f"_{name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "bump":  # the version is read after it moved
                inner(*args, **kwargs)
                return seen()
            if name in ("record", "send", "receive"):
                return seen(inner(*args, **kwargs), *args, **kwargs)
            seen(*args, **kwargs)
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    @property
    def lines(self) -> list[str]:
        return [str(op) for op in self.ops]

    def _amend(self, **fields: Any) -> None:
        op = self.ops[-1]
        assert op.kind == LAUNCH and all(getattr(op, field) is None for field in fields), "told twice"
        self.ops[-1] = replace(op, **fields)

    def _begin_step(self, step: int) -> None:
        self.ops, self.events = [Op(BEGIN)], []
        self.firsts = dict(self.ledger.timeline.epochs)
        self.first = max(self.ledger.versions.versions.values())

    def _end_step(self) -> None:
        self.ops.append(Op(END))

    def _version(self) -> int:
        assert len(set(self.ledger.versions.versions.values())) == 1
        return max(self.ledger.versions.versions.values()) - self.first

    def _launch(self, stream: str, accesses: Any, who: str) -> None:
        self.ops.append(Op(LAUNCH, stream, accesses=tuple(accesses), epoch=self.commit_epoch, **parse_name(who)))
        self.commit_epoch = None

    def _record(self, event: Any, stream: str, covers: Any = None) -> Any:
        assert covers is None, "programs have no early events"
        self.events.append(event)
        self.ops.append(Op(RECORD, stream, event=len(self.events) - 1))
        return event

    def _wait(self, stream: str, event: Any) -> None:
        number = next(number for number, other in enumerate(self.events) if other is event)
        self.ops.append(Op(WAIT, stream, event=number))

    def _account(
        self, kind: str, chunk: int, microbatch: int, beta: int | None, slots: Any, epoch: int | None, joint: Any
    ) -> None:
        assert self.ops[-1].name == f"{chunk}{kind}{microbatch}"
        (i_kind, i_chunk, i), (w_kind, w_chunk, w) = slots
        assert (i_kind, w_kind, i_chunk, w_chunk) == ("I", "W", chunk, chunk)
        self._amend(i_slot=i, w_slot=w, beta=beta)
        if kind == "W" and joint is not None:
            self._amend(members=joint.members, joint_beta=joint.beta)
        if kind != "W":
            direction = Direction.FORWARD if kind == "F" else Direction.BACKWARD
            assert epoch == self.ledger.timeline.epochs[direction]
            self._amend(epoch=epoch - self.firsts[direction], version=self._version())

    def _action(
        self, kind: str, chunk: int, microbatch: int, *, beta: Any = None, slots: Any, epoch: Any = None, joint: Any = None
    ) -> None:
        self._account(kind, chunk, microbatch, beta, slots, epoch, joint)

    def _replay(self, summary: Any, chunk: int, microbatch: int, *, slots: Any, epoch: Any = None) -> None:
        self._account(summary.kind, chunk, microbatch, summary.beta, slots, epoch, summary.joint)

    def _commit(self, epoch: int, directions: Any = tuple(Direction), by: str = "", **_: Any) -> None:
        self.commit_epoch = epoch - self.firsts[directions[0]]

    def _bump(self, *_: Any) -> None:
        self._amend(version=self._version())

    def _refreshed(self, *_: Any) -> None:
        forward = Direction.FORWARD
        self._amend(version=self._version(), epoch=self.ledger.timeline.epochs[forward] - self.firsts[forward])

    def _send(self, pending: Any, tensor: Any, peer: int, direction: str, chunk: int, microbatch: int) -> Any:
        return self._transfer(pending, tensor, peer, f"{chunk}SEND_{direction}{microbatch}")

    def _receive(self, pending: Any, tensor: Any, peer: int, direction: str, source: int, microbatch: int) -> Any:
        chunk = source + 1 if direction == "F" else source - 1
        return self._transfer(pending, tensor, peer, f"{chunk}RECV_{direction}{microbatch}")

    def _transfer(self, pending: Any, tensor: Any, peer: int, name: str) -> Any:
        """The transfer moves the very buffer that its launch declared; its wait is recorded when it happens."""
        op = self.ops[-1]
        ((role, chunk, slot), _) = op.accesses[0]  # type: ignore[misc]
        assert op.name == name and len(op.accesses) == 1
        assert getattr(self.engine.stages[chunk].slots[slot], role) is tensor
        self._amend(peer=peer)
        return _Waited(pending, self, name)


class _Waited:
    def __init__(self, pending: Any, recorder: Recorder, name: str) -> None:
        self.pending, self.recorder, self.name = pending, recorder, name

    def wait(self) -> None:
        self.recorder.ops.append(Op(COMPLETE, **parse_name(self.name)))
        self.pending.wait()
