"""The scheduling problem that :mod:`pipeline.auto` solves, and a fast clock for it.

The search tries thousands of orders, so it does not use :class:`~pipeline.actions.Action`: an operation is a tuple
``(kind, chunk, microbatch)`` with kind ``"F"``, ``"I"`` or ``"W"``. The clock is that of :mod:`pipeline.simulate`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.actions import Action, Kind
from pipeline.schedules import Placement

Operation = tuple[str, int, int]
Order = list[list[Operation]]  # one list per rank

_NAME = {kind: kind.value for kind in Kind}
EPS = 1e-9  # relative slack against rounding in comparisons of times and sizes; times are scaled to their sum


@dataclass(frozen=True)
class Problem:
    """Chunks on ranks, their times and sizes, and what each rank may hold.

    Args:
        placement: which rank holds which chunk.
        microbatches: per step.
        t_f, t_i, t_w: time of F, I and W, one per chunk.
        t_comm: latency of a message between ranks.
        m_b, m_w: activation memory of one microbatch after F and after I, one per chunk.
        limit: what each rank may hold, in the unit of ``m_b``.
        objective: ``"span"`` (the paper's cost) or ``"makespan"``, see :mod:`pipeline.simulate`.
    """

    placement: Placement
    microbatches: int
    t_f: tuple[float, ...]
    t_i: tuple[float, ...]
    t_w: tuple[float, ...]
    t_comm: float
    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    limit: tuple[float, ...]
    objective: str = "span"
    chunks_of: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    slack: float = field(init=False, repr=False, compare=False)
    room: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = range(self.placement.num_ranks)
        object.__setattr__(self, "chunks_of", tuple(self.placement.chunks(rank) for rank in ranks))
        object.__setattr__(self, "slack", EPS * (sum(self.t_f) + sum(self.t_i) + sum(self.t_w)))
        object.__setattr__(self, "room", tuple(limit + EPS * max(limit, 1e-300) for limit in self.limit))

    @property
    def operations(self) -> int:
        return 3 * self.microbatches * self.placement.num_chunks

    def work(self, rank: int) -> float:
        """Compute time of a rank over a step."""
        return self.microbatches * sum(self.t_f[c] + self.t_i[c] + self.t_w[c] for c in self.chunks_of[rank])

    @property
    def busiest(self) -> float:
        return max(map(self.work, range(self.placement.num_ranks)))


@dataclass
class Timing:
    """When everything runs: ``value[rank]`` is the rank's span (or end, for makespan), ``cost`` their maximum.

    ``binding[rank][place]`` is the (rank, place) of the operation whose result this one had to wait for, if it had.
    """

    cost: float
    value: list[float]
    start: list[list[float]]
    end: list[list[float]]
    binding: list[list[tuple[int, int] | None]]


def from_actions(compute: Sequence[Sequence[Action]]) -> Order:
    """The operations of F, I, W actions (no B)."""
    return [[(_NAME[action.kind], action.chunk, action.microbatch) for action in row] for row in compute]  # type: ignore[misc]


def to_actions(order: Order) -> list[list[Action]]:
    """The inverse of :func:`from_actions`."""
    return [[Action(Kind(kind), chunk, microbatch) for kind, chunk, microbatch in row] for row in order]


def fits(row: Sequence[Operation], problem: Problem, rank: int) -> bool:
    """True if a rank's order never holds more than its limit."""
    held, room, m_b, m_w = 0.0, problem.room[rank], problem.m_b, problem.m_w
    for kind, chunk, _ in row:
        if kind == "F":
            held += m_b[chunk]
            if held > room:
                return False
        elif kind == "I":
            held += m_w[chunk] - m_b[chunk]
        else:
            held -= m_w[chunk]
    return True


def measure(order: Order, problem: Problem) -> Timing | None:
    """Run an order against the clock; None if it blocks."""
    ranks, m, comm = problem.placement.ranks, problem.microbatches, problem.t_comm
    chunks, count = len(ranks), len(order)
    times = {"F": problem.t_f, "I": problem.t_i, "W": problem.t_w}
    done: dict[str, list[list[tuple[float, int] | None]]] = {kind: [[None] * m for _ in ranks] for kind in "FI"}
    start: list[list[float]] = [[0.0] * len(row) for row in order]
    end: list[list[float]] = [[0.0] * len(row) for row in order]
    binding: list[list[tuple[int, int] | None]] = [[None] * len(row) for row in order]
    place, free, blocked = [0] * count, [0.0] * count, [True] * count
    awake = list(range(count))
    while awake:
        rank = awake.pop()
        if not blocked[rank]:
            continue
        row, starts, ends, binds = order[rank], start[rank], end[rank], binding[rank]
        i, now, size = place[rank], free[rank], len(row)
        blocked[rank] = False
        while i < size:
            kind, chunk, microbatch = row[i]
            begin = now
            if kind != "W":
                source = chunk - 1 if kind == "F" else chunk + 1
                if 0 <= source < chunks:
                    made = done[kind][source][microbatch]
                    if made is None:
                        blocked[rank] = True
                        break
                    other = ranks[source]
                    arrival = made[0] + comm if other != rank else made[0]
                    if arrival >= now:
                        begin = arrival
                        binds[i] = (other, made[1])
            starts[i] = begin
            ends[i] = now = begin + times[kind][chunk]
            if kind != "W":
                done[kind][chunk][microbatch] = (now, i)
                target = chunk + 1 if kind == "F" else chunk - 1
                if 0 <= target < chunks and ranks[target] != rank and blocked[ranks[target]]:
                    awake.append(ranks[target])
            i += 1
        place[rank], free[rank] = i, now
    if any(place[rank] < len(order[rank]) for rank in range(count)):
        return None
    if problem.objective == "span":
        value = [free[rank] - start[rank][0] for rank in range(count)]
    else:
        value = list(free)
    return Timing(max(value), value, start, end, binding)


class Retimed:
    """An order with its timing, of which one rank's row changes at a time: only what follows from the change is timed again."""

    def __init__(self, order: Order, problem: Problem, timing: Timing) -> None:
        self.order, self.problem, self.timing = order, problem, timing
        m, chunks = problem.microbatches, problem.placement.ranks
        self._where: dict[str, list[list[int]]] = {kind: [[0] * m for _ in chunks] for kind in "FI"}
        for row in order:
            self._note(row, 0, len(row))

    def _note(self, row: Sequence[Operation], first: int, stop: int) -> None:
        for place in range(first, stop):
            kind, chunk, microbatch = row[place]
            if kind != "W":
                self._where[kind][chunk][microbatch] = place

    def change(self, rank: int, row: list[Operation], first: int, stop: int) -> Timing | None:
        """Put ``row``, which differs from the rank's in places ``first`` … ``stop`` − 1, in its place.

        Returns: its timing, that of :func:`measure`; None, with everything as before, if the order blocks.
        """
        before = self.order[rank]
        self.order[rank] = row
        self._note(row, first, stop)
        timing = self._timed(rank, first, stop)
        if timing is None:
            self.order[rank] = before
            self._note(before, first, stop)
        return timing

    def keep(self, timing: Timing) -> None:
        """The change stays: the next one is timed from here."""
        self.timing = timing

    def undo(self, rank: int, row: list[Operation], first: int, stop: int) -> None:
        """Back to the row before the last change."""
        self.order[rank] = row
        self._note(row, first, stop)

    def _timed(self, changed: int, first: int, stop: int) -> Timing | None:
        order, problem, old = self.order, self.problem, self.timing
        if min(*problem.t_f, *problem.t_i) <= 0:
            return measure(order, problem)  # a circle of work that takes no time would settle
        ranks, comm, where = problem.placement.ranks, problem.t_comm, self._where
        times = {"F": problem.t_f, "I": problem.t_i, "W": problem.t_w}
        start, end, binding = list(old.start), list(old.end), list(old.binding)  # rows are copied when they change
        mine: set[int] = set()
        waiting = [(old.start[changed][first], changed, first)]  # places to look at again, earliest first
        left = 2 * problem.operations  # a circle of waits never settles
        while waiting:
            _, rank, place = heapq.heappop(waiting)
            if rank not in mine:
                mine.add(rank)
                start[rank], end[rank], binding[rank] = list(start[rank]), list(end[rank]), list(binding[rank])
            row, starts, ends, binds = order[rank], start[rank], end[rank], binding[rank]
            moved = range(first, stop) if rank == changed else range(0)
            now = ends[place - 1] if place else 0.0
            for at in range(place, len(row)):
                left -= 1
                kind, chunk, microbatch = row[at]
                begin, bind = now, None
                if kind != "W":
                    source = chunk - 1 if kind == "F" else chunk + 1
                    if 0 <= source < len(ranks):
                        other, made = ranks[source], where[kind][source][microbatch]
                        if other == rank and made > at:
                            return None
                        arrival = end[other][made] + comm if other != rank else ends[made]
                        if arrival >= now:
                            begin, bind = arrival, (other, made)
                starts[at], binds[at] = begin, bind
                now = begin + times[kind][chunk]
                same = ends[at] == now
                ends[at] = now
                if kind != "W" and not (same and at not in moved):
                    target = chunk + 1 if kind == "F" else chunk - 1
                    if 0 <= target < len(ranks):
                        reader = where[kind][target][microbatch]
                        heapq.heappush(waiting, (start[ranks[target]][reader], ranks[target], reader))
                if same and at + 1 not in moved:
                    break
            if left < 0:
                return measure(order, problem)
        span = problem.objective == "span"
        value = [ends[-1] - (starts[0] if span else 0.0) for starts, ends in zip(start, end, strict=True)]
        return Timing(max(value), value, start, end, binding)
