"""Who waits for whom: a plan run without a clock, under the strictest messages a backend may have.

A receive is posted and does not block. A send blocks its rank until the receiver has posted the matching
receive (rendezvous). Each (source rank, destination rank, direction) is one first-in-first-out queue, so that
the k-th send meets the k-th receive, whatever chunks they belong to; the two directions never share a queue,
also where the previous and the next peer are the same rank. A plan that finishes here finishes on any backend
that is kinder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    return "F" if kind in (Kind.F, Kind.SEND_F, Kind.RECV_F) else "B"


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
    """A plan half-way through. ``lowered`` False: compute only, and results travel by themselves.

    The plan's multiset of actions must be complete (see :mod:`pipeline.validate`); this class finds orders
    that block.
    """

    def __init__(self, rows: Sequence[Sequence[Action]], placement: Placement, *, lowered: bool) -> None:
        self.rows = rows
        self.placement = placement
        self.lowered = lowered
        self.position = [0] * len(rows)
        self._posted: dict[Queue, int] = defaultdict(int)
        self._sent: dict[Queue, int] = defaultdict(int)
        self._arrived: set[tuple[str, int, int]] = set()  # (direction, consumer chunk, microbatch)
        self._computed: set[tuple[str, int, int]] = set()  # (direction, producer chunk, microbatch)

    @property
    def done(self) -> bool:
        """True when every rank reached its end."""
        return all(position == len(row) for position, row in zip(self.position, self.rows, strict=True))

    def run(self) -> bool:
        """Run every rank as far as it gets. True when all reached their end."""
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while self.position[rank] < len(row) and self.obstacle(rank) is None:
                    self._execute(row[self.position[rank]])
                    self.position[rank] += 1
                    moved = True
        return self.done

    def obstacle(self, rank: int) -> Obstacle | None:
        """What the next action of a rank waits for; None when it can run or the rank is at its end."""
        position = self.position[rank]
        if position == len(self.rows[rank]):
            return None
        action = self.rows[rank][position]
        if action.kind in SENDS:
            return self._unposted(rank, position, action)
        if action.kind in (Kind.F, Kind.I, Kind.B):
            return self._unfed(rank, position, action)
        return None

    def _unposted(self, rank: int, position: int, action: Action) -> Obstacle | None:
        queue = queue_of(action, self.placement)
        if self._posted[queue] > self._sent[queue]:
            return None
        kind = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
        return Obstacle(rank, position, action, queue.dst, Action(kind, *message_of(action, self.placement)))

    def _unfed(self, rank: int, position: int, action: Action) -> Obstacle | None:
        (chunk, microbatch), direction = action.key, direction_of(action.kind)
        source = self.placement.source(chunk, direction)
        if source is None:
            return None
        if self.lowered and self.placement.crosses(chunk, source):
            fed = (direction, chunk, microbatch) in self._arrived
            needed = Kind.SEND_F if direction == "F" else Kind.SEND_B
        else:
            fed = (direction, source, microbatch) in self._computed
            needed = Kind.F if direction == "F" else Kind.I
        if fed:
            return None
        return Obstacle(
            rank, position, action, self.placement.ranks[source], Action(needed, source, microbatch)
        )

    def _execute(self, action: Action) -> None:
        if action.kind in RECEIVES:
            self._posted[queue_of(action, self.placement)] += 1
        elif action.kind in SENDS:
            queue = queue_of(action, self.placement)
            self._sent[queue] += 1
            self._arrived.add((queue.direction, *message_of(action, self.placement)))
        elif action.kind in (Kind.F, Kind.I, Kind.B):
            self._computed.add((direction_of(action.kind), *action.key))

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
