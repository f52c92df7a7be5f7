"""Who waits for whom: a plan run without a clock, under the strictest messages a backend may have.

A receive is posted and does not block. A send blocks its rank until the receiver has posted the matching
receive (rendezvous). Each (source rank, destination rank, direction) is one first-in-first-out queue, so that
the k-th send meets the k-th receive, whatever chunks they belong to; the two directions never share a queue,
also where the previous and the next peer are the same rank. At STEP all ranks meet, for the gradient norm. A plan
that finishes here finishes on any backend that is kinder; the kindest, where no send ever waits, is ``buffered``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeline.actions import RECEIVES, SENDS, Action, Kind
from pipeline.schedules import Placement


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
        self._posted: dict[Queue, int] = defaultdict(int)
        self._sent: dict[Queue, int] = defaultdict(int)
        self._met = [0] * len(rows)  # STEPs that each rank has passed
        self._arrived: set[tuple[str, int, int]] = set()  # (direction, consumer chunk, microbatch)
        self._computed: set[tuple[str, int, int]] = set()  # (direction, producer chunk, microbatch)
        chunks = range(placement.num_chunks)
        self._sources = {direction: [placement.source(chunk, direction) for chunk in chunks] for direction in "FB"}
        self._targets = {direction: [placement.target(chunk, direction) for chunk in chunks] for direction in "FB"}
        self._queues: dict[tuple[bool, str, int], Queue] = {}  # (is a send, direction, chunk) → its queue

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
        while awake:
            rank = awake.pop()
            row = self.rows[rank]
            while self.position[rank] < len(row) and self.obstacle(rank) is None:
                action = row[self.position[rank]]
                self.position[rank] += 1
                if action.kind is Kind.STEP:
                    self._met[rank] += 1
                    awake += [other for other in range(len(self.rows)) if other != rank]
                    continue
                other = self._execute(action)
                if other is not None and other != rank:
                    awake.append(other)
        return self.done

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
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            return None if self.buffered else self._unposted(rank, position, action)
        if kind is Kind.F or kind is Kind.I or kind is Kind.B:
            return self._unfed(rank, position, action)
        return self._unmet(rank, position, action) if kind is Kind.STEP else None

    def _unmet(self, rank: int, position: int, action: Action) -> Obstacle | None:
        """At STEP: a rank that has not come to its own yet."""
        for other, passed in enumerate(self._met):
            at, row = self.position[other], self.rows[other]
            if passed == self._met[rank] and (at == len(row) or row[at].kind is not Kind.STEP):
                return Obstacle(rank, position, action, other, action)
            if passed < self._met[rank]:
                return Obstacle(rank, position, action, other, action)
        return None

    def _queue(self, action: Action, send: bool, direction: str) -> Queue:
        key = send, direction, action.key[0]
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = queue_of(action, self.placement)
        return queue

    def _unposted(self, rank: int, position: int, action: Action) -> Obstacle | None:
        queue = self._queue(action, True, "F" if action.kind is Kind.SEND_F else "B")
        if self._posted[queue] > self._sent[queue]:
            return None
        kind = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
        return Obstacle(rank, position, action, queue.dst, Action(kind, *message_of(action, self.placement)))

    def _unfed(self, rank: int, position: int, action: Action) -> Obstacle | None:
        (chunk, microbatch), direction = action.key, direction_of(action.kind)
        source = self._sources[direction][chunk]
        if source is None:
            return None
        message = self.lowered and self.placement.ranks[chunk] != self.placement.ranks[source]
        if message and (direction, chunk, microbatch) in self._arrived:
            return None
        if not message and (direction, source, microbatch) in self._computed:
            return None
        if message:
            needed = Kind.SEND_F if direction == "F" else Kind.SEND_B
        else:
            needed = Kind.F if direction == "F" else Kind.I
        return Obstacle(rank, position, action, self.placement.ranks[source], Action(needed, source, microbatch))

    def _execute(self, action: Action) -> int | None:
        """Note what an action does. Returns the rank that may have waited for it."""
        kind, direction = action.kind, direction_of(action.kind)
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            queue = self._queue(action, False, direction)
            self._posted[queue] += 1
            return queue.src
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            queue = self._queue(action, True, direction)
            self._sent[queue] += 1
            chunk, microbatch = action.key
            self._arrived.add((direction, self._targets[direction][chunk] or 0, microbatch))
            return queue.dst
        if kind is Kind.F or kind is Kind.I or kind is Kind.B:
            self._computed.add((direction, *action.key))
            target = self._targets[direction][action.key[0]]
            return None if target is None else self.placement.ranks[target]
        return None

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
