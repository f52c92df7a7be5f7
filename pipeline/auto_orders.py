"""Orders for :mod:`pipeline.auto` to start from: greedy list scheduling under the memory limit.

:func:`float_weights` keeps the order of F and I and decides when W runs: while the rank would wait, or when memory
is short. :func:`greedy` decides everything by what is ready. Both simulate all ranks together, in time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

from pipeline.auto_problem import EPS, Operation, Order, Problem

Choice = Operation | float | None  # what to run now; or when to look again; or nothing is known


class _Clock:
    """All ranks half-way through a step: what each has done, holds and has been sent.

    It gives up once the order is known to cost more than ``most``. The order's own times, those of
    :func:`~pipeline.auto_problem.measure`, are kept beside the clock's for that: a rank may decide late to run what it
    could have run before, so the clock may be behind them. What a rank has idled, and all its work, is in its cost.
    """

    def __init__(self, problem: Problem, most: float = inf) -> None:
        self.problem = problem
        margin = most + 10 * problem.slack + EPS * most  # rounding must not decide
        self.allowed = [margin - problem.work(rank) for rank in range(len(problem.chunks_of))]
        self.idle = [0.0] * len(self.allowed)
        self.begun = [problem.objective == "makespan"] * len(self.allowed)  # a span begins with the rank's first work
        self.ended = [0.0] * len(self.allowed)
        self.made_f = [[0.0] * problem.microbatches for _ in problem.placement.ranks]
        self.made_i = [[0.0] * problem.microbatches for _ in problem.placement.ranks]
        ranks, m = problem.placement.ranks, problem.microbatches
        self.order: Order = [[] for _ in problem.chunks_of]
        self.ready_f = [[inf] * m for _ in ranks]  # per chunk and microbatch: when the input is there
        self.ready_i = [[inf] * m for _ in ranks]
        self.ready_f[0] = [0.0] * m
        self.count = {kind: [0] * len(ranks) for kind in "FIW"}
        self.held = [0.0] * len(self.order)
        self.free = [0.0] * len(self.order)
        self.late: list[list[Operation]] = [[] for _ in self.order]  # W in the order of their I
        self.late_done = [0] * len(self.order)

    def next_weight(self, rank: int) -> Operation | None:
        late, done = self.late[rank], self.late_done[rank]
        return late[done] if done < len(late) else None

    def run(self, choose: Callable[[int, float], Choice]) -> Order | None:
        """Let ``choose(rank, now)`` pick for every free rank until nothing more happens.

        Returns: the order; None if work is left; empty if it costs more than is wanted.
        """
        events = [(0.0, rank) for rank in range(len(self.order))]
        slack, free, pop, push = self.problem.slack, self.free, heapq.heappop, heapq.heappush
        while events:
            now, rank = pop(events)
            if free[rank] > now + slack:
                continue
            choice = choose(rank, now)
            if isinstance(choice, tuple):
                if not self._execute(rank, now, choice, events):
                    return []
            elif choice is not None and choice < inf:
                push(events, (choice, rank))
        complete = sum(map(len, self.order)) == self.problem.operations
        return self.order if complete else None

    def _execute(self, rank: int, now: float, operation: Operation, events: list[tuple[float, int]]) -> bool:
        """Run an operation; False if the order costs too much."""
        problem, (kind, chunk, microbatch) = self.problem, operation
        self.order[rank].append(operation)
        self.count[kind][chunk] += 1
        start, other = self.ended[rank], None
        if kind == "F":
            length = problem.t_f[chunk]
            self.held[rank] += problem.m_b[chunk]
            source, made = chunk - 1, self.made_f
            if chunk + 1 < len(made):
                other, ready = chunk + 1, self.ready_f
            else:
                self.ready_i[chunk][microbatch] = now + length
        elif kind == "I":
            length = problem.t_i[chunk]
            self.held[rank] += problem.m_w[chunk] - problem.m_b[chunk]
            self.late[rank].append(("W", chunk, microbatch))
            source, made = chunk + 1, self.made_i
            if chunk:
                other, ready = chunk - 1, self.ready_i
        else:
            length = problem.t_w[chunk]
            self.held[rank] -= problem.m_w[chunk]
            self.late_done[rank] += 1
        ranks = problem.placement.ranks
        if kind != "W":
            if 0 <= source < len(ranks):
                arrival = made[source][microbatch]
                if ranks[source] != rank:
                    arrival += problem.t_comm
                if arrival > start:
                    if self.begun[rank]:
                        self.idle[rank] += arrival - start
                        if self.idle[rank] > self.allowed[rank]:
                            return False
                    start = arrival
            made[chunk][microbatch] = start + length
        self.begun[rank] = True
        self.ended[rank] = start + length
        end = self.free[rank] = now + length
        if other is not None:
            holder = ranks[other]
            ready[other][microbatch] = end if holder == rank else end + problem.t_comm
            if holder != rank:  # now it is known when the result will be there: the holder may wait for it
                heapq.heappush(events, (now, holder))
                heapq.heappush(events, (ready[other][microbatch], holder))
        heapq.heappush(events, (end, rank))
        return True


def float_weights(order: Order, problem: Problem, patience: float, most: float = inf) -> Order | None:
    """The same order of F and I, with each W where it costs least.

    Args:
        order: any valid order; its W are dropped.
        problem: times, sizes and limit.
        patience: with a result on its way that arrives in less than ``patience`` · T_W the rank waits for it;
            otherwise it runs a W.
        most: an order that costs more is not wanted.

    Returns: an order within the limit, or None if this order of F and I cannot keep it; an empty one if it costs more.
    """
    clock = _Clock(problem, most)
    todo = [[operation for operation in row if operation[0] != "W"] for row in order]
    place = [0] * len(todo)
    slack = problem.slack

    def choose(rank: int, now: float) -> Choice:
        weight = clock.next_weight(rank)
        if place[rank] == len(todo[rank]):
            return weight
        operation = todo[rank][place[rank]]
        kind, chunk, microbatch = operation
        at = (clock.ready_f if kind == "F" else clock.ready_i)[chunk][microbatch]
        full = kind == "F" and clock.held[rank] + problem.m_b[chunk] > problem.room[rank]
        if at <= now + slack and not full:
            place[rank] += 1
            return operation
        if weight is not None and (full or at - now >= patience * problem.t_w[weight[1]]):
            return weight
        return None if full else at

    return clock.run(choose)


def greedy(problem: Problem, patience: float, first: str, most: float = inf) -> Order | None:
    """List scheduling: of what is ready a rank takes F or I, and W when neither is, or when memory is short.

    An F starts only if the rank could still finish its oldest open microbatch, so no limit above one microbatch
    blocks it.

    Args:
        problem: times, sizes and limit.
        patience: as in :func:`float_weights`.
        first: what is taken if both are ready: ``"F"``, ``"I"``, or ``"turns"``: the other than last time.
        most: an order that costs more is not wanted.

    Returns: an order within the limit, or None; an empty one if it costs more than ``most``.
    """
    clock = _Clock(problem, most)
    last = ["I"] * len(clock.order)
    done_i = clock.count["I"]

    def choose(rank: int, now: float) -> Choice:
        forward, short, soon = _ready_forward(clock, rank, now)
        backward, later = _ready_backward(clock, rank, now)
        weight = clock.next_weight(rank)
        if short and weight is not None and (backward is None or last[rank] == "I"):
            return weight
        wants_f = first == "F" or (first == "turns" and last[rank] == "I")
        if forward is not None and (backward is None or wants_f):
            last[rank] = "F"
            return "F", forward, clock.count["F"][forward]
        if backward is not None:
            last[rank] = "I"
            return "I", backward, done_i[backward]
        soon = min(soon, later)
        if weight is not None and soon - now >= patience * problem.t_w[weight[1]]:
            return weight
        return soon

    return clock.run(choose)


# Asked at every event of a search that makes dozens of orders of up to a hundred thousand operations: plain loops.


def _ready_forward(clock: _Clock, rank: int, now: float) -> tuple[int | None, bool, float]:
    """(the last chunk whose F may start, whether memory alone keeps another from it, when the next one may)."""
    problem = clock.problem
    chunks, done, done_i, m_b = problem.chunks_of[rank], clock.count["F"], clock.count["I"], problem.m_b
    held, room, latest = clock.held[rank], problem.room[rank], now + problem.slack
    oldest = problem.microbatches
    for chunk in chunks:
        if done_i[chunk] < oldest:
            oldest = done_i[chunk]
    reserve = 0.0
    for chunk in chunks:
        if done[chunk] <= oldest:
            reserve += m_b[chunk]
    best, short, soon = None, False, inf
    for chunk in reversed(chunks):
        microbatch = done[chunk]
        if microbatch == problem.microbatches:
            continue
        at = clock.ready_f[chunk][microbatch]
        kept = reserve - m_b[chunk] if microbatch <= oldest else reserve
        fits = held + m_b[chunk] + kept <= room
        if at > latest:
            if fits and at < soon:
                soon = at
        elif not fits:
            short = True
        elif best is None:
            best = chunk
    return best, short and best is None, soon


def _ready_backward(clock: _Clock, rank: int, now: float) -> tuple[int | None, float]:
    """(the chunk whose I may start: the one that is furthest behind, the last of those; when the next one may)."""
    done, done_i, latest = clock.count["F"], clock.count["I"], now + clock.problem.slack
    best, fewest, soon = None, 0, inf
    for chunk in clock.problem.chunks_of[rank]:
        microbatch = done_i[chunk]
        if microbatch >= done[chunk]:
            continue
        at = clock.ready_i[chunk][microbatch]
        if at <= latest and (best is None or microbatch <= fewest):
            best, fewest = chunk, microbatch
        if now < at < soon:
            soon = at
    return best, soon
