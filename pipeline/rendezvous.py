"""Who waits for whom: a plan run without a clock, under the strictest messages a backend may have.

A receive is posted and does not block. A send blocks its rank until the receiver has posted the matching
receive (rendezvous). Each (source rank, destination rank, direction) is one first-in-first-out queue, so that
the k-th send meets the k-th receive, whatever chunks they belong to; the two directions never share a queue,
also where the previous and the next peer are the same rank. At STEP all ranks meet, for the gradient norm. A plan
that finishes here finishes on any backend that is kinder; the kindest, where no send ever waits, is ``buffered``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.actions import RECEIVES, SENDS, Action, Kind
from pipeline.schedules import Placement

# Looked up once: an enumeration's member costs more than a global name, and these are compared for every action of a plan.
_F, _I, _W, _B, _STEP = Kind.F, Kind.I, Kind.W, Kind.B, Kind.STEP
_SEND_F, _RECV_F, _SEND_B, _RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
_ANYTHING, _NOTHING = -1_000_000_000, -2_000_000_000  # no result and no queue has these numbers


class Queue(NamedTuple):
    """A stream of messages in one order. ``direction``: ``"F"`` (outputs) or ``"B"`` (input gradients)."""

    src: int
    dst: int
    direction: str


class Message(NamedTuple):
    """What a queue carries, named by its consumer."""

    chunk: int
    microbatch: int


class Obstacle(NamedTuple):
    """Why a rank cannot run its next action: ``other`` must first run ``needed``."""

    rank: int
    position: int
    action: Action
    other: int
    needed: Action

    def __str__(self) -> str:
        verb = "post" if self.needed.kind in RECEIVES else "run"
        here = f"rank {self.rank} at position {self.position} ({self.action})"
        return f"{here} waits for rank {self.other} to {verb} {self.needed}"


def direction_of(kind: Kind) -> str:
    """``"F"`` for F, SEND_F and RECV_F; ``"B"`` for I, B, SEND_B and RECV_B."""
    return "F" if kind is Kind.F or kind is Kind.SEND_F or kind is Kind.RECV_F else "B"


def queue_of(action: Action, placement: Placement) -> Queue:
    """The queue of a send or receive whose other end exists."""
    chunk, direction = action.key[0], direction_of(action.kind)
    here = placement.ranks[chunk]
    if action.kind in SENDS:
        target = placement.target(chunk, direction)
        assert target is not None, f"{action} has no receiver"
        return Queue(here, placement.ranks[target], direction)
    source = placement.source(chunk, direction)
    assert source is not None, f"{action} has no sender"
    return Queue(placement.ranks[source], here, direction)


def message_of(action: Action, placement: Placement) -> Message:
    """The message of a send or receive whose other end exists."""
    chunk, microbatch = action.key
    if action.kind in SENDS:
        target = placement.target(chunk, direction_of(action.kind))
        assert target is not None, f"{action} has no receiver"
        return Message(target, microbatch)
    return Message(chunk, microbatch)


class _Line:
    """One direction of a plan half-way through.

    ``fed[chunk]``: its work needs a result of another chunk. ``direct[chunk]``: the rank of the chunk that reads its result,
    if it does so without a message. ``there`` has the results that have come, by number: microbatch times the number of
    chunks plus the reading chunk. ``step`` leads from a chunk to its reader.
    """

    def __init__(self, placement: Placement, direction: str, lowered: bool) -> None:
        self.direction, self.bit, self.step = direction, int(direction == "F"), 1 if direction == "F" else -1
        self.there: set[int] = set()
        targets = [placement.target(chunk, direction) for chunk in range(placement.num_chunks)]
        self.fed = [placement.source(chunk, direction) is not None for chunk in range(placement.num_chunks)]
        self.direct = [
            None if target is None or (lowered and placement.crosses(chunk, target)) else placement.ranks[target]
            for chunk, target in enumerate(targets)
        ]
        self.sending: list[int | None] = [None] * len(targets)  # the numbers of the queues
        self.receiving: list[int | None] = [None] * len(targets)


class Rendezvous:
    """A plan half-way through. ``lowered`` False: compute only, and results travel by themselves. ``buffered``: sends do
    not wait for their receives.

    The plan's multiset of actions must be complete (see :mod:`pipeline.validate`); this class finds orders
    that block.
    """

    def __init__(
        self, rows: Sequence[Sequence[Action]], placement: Placement, *, lowered: bool, buffered: bool = False
    ) -> None:
        self.rows = rows
        self.placement = placement
        self.lowered, self.buffered = lowered, buffered
        self.position = [0] * len(rows)
        self._met = [0] * len(rows)  # STEPs that each rank has passed
        self._waits = [_ANYTHING] * len(rows)  # what each rank stopped for; see _run_rank
        self._at_send: list[int] = []  # heap of ranks that stood at a send when they last ran
        self._chunks = placement.num_chunks
        self._numbers: dict[Queue, int] = {}
        self._ends: list[tuple[int, int]] = []  # of each queue, by its number: (src, dst)
        self._posted: list[int] = []  # receives, by queue
        self._sent: list[int] = []
        self._lines = {direction: _Line(placement, direction, lowered) for direction in "FB"}

    @property
    def done(self) -> bool:
        """True when every rank reached its end."""
        return all(position == len(row) for position, row in zip(self.position, self.rows, strict=True))

    def run(self, ranks: Iterable[int] | None = None) -> bool:
        """Run every rank as far as it gets. True when all reached their end.

        How far each one gets does not depend on who runs first. ``ranks``: those whose next action may have
        become possible since the last call; None: all.
        """
        awake = list(range(len(self.rows)) if ranks is None else ranks)
        for rank in awake:
            self._waits[rank] = _NOTHING
        while awake:
            awake += self._run_rank(awake.pop())
        return self.done

    def _run_rank(self, rank: int) -> list[int]:
        """Run one rank as far as it gets; the ranks that waited for what it did.

        Where a rank stops it leaves what it stopped for: twice the number of a result (one more in direction F), −1 less the
        number of the queue in which nothing is posted, or ``_ANYTHING``; ``_NOTHING`` while it is going to run, and at its end.
        """
        row, chunks, waits = self.rows[rank], self._chunks, self._waits
        forward, backward = self._lines["F"], self._lines["B"]
        posted, sent, ends, buffered = self._posted, self._sent, self._ends, self.buffered
        woken: list[int] = []
        at, size = self.position[rank], len(row)
        while at < size:
            action = row[at]
            kind = action.kind
            if kind is _W:
                at += 1
                continue
            line = forward if kind is _F or kind is _SEND_F or kind is _RECV_F else backward
            event, other = _NOTHING, rank  # what this action lets happen, and on which rank
            if kind is _F or kind is _I or kind is _B:
                chunk = action.chunk
                key = action.microbatch * chunks + chunk  # type: ignore[operator]
                if line.fed[chunk] and key not in line.there:  # type: ignore[index]
                    waits[rank] = 2 * key + line.bit
                    break
                reader = line.direct[chunk]  # type: ignore[index]
                if reader is not None:
                    key += line.step
                    line.there.add(key)
                    event, other = 2 * key + line.bit, reader
            elif kind is _SEND_F or kind is _SEND_B:
                queue = self._queue(action, True, line)
                if not buffered and posted[queue] <= sent[queue]:
                    waits[rank] = -1 - queue
                    heapq.heappush(self._at_send, rank)
                    break
                sent[queue] += 1
                key = action.microbatch * chunks + action.chunk + line.step  # type: ignore[operator]
                line.there.add(key)
                event, other = 2 * key + line.bit, ends[queue][1]
            elif kind is _RECV_F or kind is _RECV_B:
                queue = self._queue(action, False, line)
                posted[queue] += 1
                event, other = -1 - queue, ends[queue][0]
            elif kind is _STEP:
                self.position[rank] = at
                if self._unmet(rank, at, action) is not None:
                    waits[rank] = _ANYTHING
                    break
                self._met[rank] += 1
                woken += [one for one in range(len(self.rows)) if one != rank]
            if other != rank and (waits[other] == event or waits[other] == _ANYTHING):
                waits[other] = _NOTHING
                woken.append(other)
            at += 1
        self.position[rank] = at
        return woken

    def first_unposted(self) -> Obstacle | None:
        """What the lowest rank that stands at a send waits for; None if nobody waits there."""
        while self._at_send:
            rank = self._at_send[0]
            if self.at_send(rank):
                obstacle = self.obstacle(rank)
                if obstacle is not None:
                    return obstacle
            heapq.heappop(self._at_send)
        return None

    def at_send(self, rank: int) -> bool:
        """True if the next action of a rank is a send."""
        position = self.position[rank]
        return position < len(self.rows[rank]) and self.rows[rank][position].kind in SENDS

    def obstacle(self, rank: int) -> Obstacle | None:
        """What the next action of a rank waits for; None when it can run or the rank is at its end."""
        position = self.position[rank]
        if position == len(self.rows[rank]):
            return None
        action = self.rows[rank][position]
        kind = action.kind
        if kind is _SEND_F or kind is _SEND_B:
            return None if self.buffered else self._unposted(rank, position, action)
        if kind is _F or kind is _I or kind is _B:
            return self._unfed(rank, position, action)
        return self._unmet(rank, position, action) if kind is _STEP else None

    def _unmet(self, rank: int, position: int, action: Action) -> Obstacle | None:
        """At STEP: a rank that has not come to its own yet."""
        for other, passed in enumerate(self._met):
            at, row = self.position[other], self.rows[other]
            if passed == self._met[rank] and (at == len(row) or row[at].kind is not _STEP):
                return Obstacle(rank, position, action, other, action)
            if passed < self._met[rank]:
                return Obstacle(rank, position, action, other, action)
        return None

    def _queue(self, action: Action, send: bool, line: _Line) -> int:
        """The number of an action's queue."""
        known, chunk = line.sending if send else line.receiving, action.key[0]
        number = known[chunk]
        if number is None:
            queue = queue_of(action, self.placement)
            number = known[chunk] = self._numbers.setdefault(queue, len(self._ends))
            if number == len(self._ends):
                self._ends.append((queue.src, queue.dst))
                self._posted.append(0)
                self._sent.append(0)
        return number

    def _unposted(self, rank: int, position: int, action: Action) -> Obstacle | None:
        queue = self._queue(action, True, self._lines[direction_of(action.kind)])
        if self._posted[queue] > self._sent[queue]:
            return None
        kind = _RECV_F if action.kind is _SEND_F else _RECV_B
        return Obstacle(rank, position, action, self._ends[queue][1], Action(kind, *message_of(action, self.placement)))

    def _unfed(self, rank: int, position: int, action: Action) -> Obstacle | None:
        (chunk, microbatch), direction = action.key, direction_of(action.kind)
        line = self._lines[direction]
        if not line.fed[chunk] or microbatch * self._chunks + chunk in line.there:
            return None
        source = chunk - line.step
        if self.lowered and self.placement.ranks[chunk] != self.placement.ranks[source]:
            needed = _SEND_F if direction == "F" else _SEND_B
        else:
            needed = _F if direction == "F" else _I
        return Obstacle(rank, position, action, self.placement.ranks[source], Action(needed, source, microbatch))

    def cycle(self) -> list[Obstacle]:
        """The ranks that wait for each other, once :meth:`run` got stuck; empty when nothing is stuck.

        The last one waits for the first, unless the chain ends at a rank that has no more work.
        """
        rank = next((rank for rank in range(len(self.rows)) if self.obstacle(rank) is not None), None)
        chain: list[Obstacle] = []
        while rank is not None:
            known = [obstacle.rank for obstacle in chain]
            if rank in known:
                return chain[known.index(rank) :]
            obstacle = self.obstacle(rank)
            if obstacle is None:
                break
            chain.append(obstacle)
            rank = obstacle.other
        return chain
