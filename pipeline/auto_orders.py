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
        problem, ranks, order = self.problem, self.problem.placement.ranks, self.order
        slack, comm, t_f, t_i, t_w = problem.slack, problem.t_comm, problem.t_f, problem.t_i, problem.t_w
        m_b, m_w, held, free, late, late_done = problem.m_b, problem.m_w, self.held, self.free, self.late, self.late_done
        count_f, count_i, count_w = (self.count[kind] for kind in "FIW")
        made_f, made_i, ready_f, ready_i = self.made_f, self.made_i, self.ready_f, self.ready_i
        idle, allowed, begun, ended = self.idle, self.allowed, self.begun, self.ended
        last, push, replace = len(ranks) - 1, heapq.heappush, heapq.heappushpop
        events = [(0.0, rank) for rank in range(len(order))]
        event = heapq.heappop(events)
        while True:
            now, rank = event
            choice = None if free[rank] > now + slack else choose(rank, now)
            if not isinstance(choice, tuple):
                if choice is not None and choice < inf:
                    event = replace(events, (choice, rank))
                elif events:
                    event = heapq.heappop(events)
                else:
                    break
                continue
            kind, chunk, microbatch = choice
            order[rank].append(choice)
            start = ended[rank]
            if kind == "W":
                length = t_w[chunk]
                count_w[chunk] += 1
                held[rank] -= m_w[chunk]
                late_done[rank] += 1
            else:
                if kind == "F":
                    length, source, target, made, ready = t_f[chunk], chunk - 1, chunk + 1, made_f, ready_f
                    count_f[chunk] += 1
                    held[rank] += m_b[chunk]
                    if chunk == last:
                        ready_i[chunk][microbatch] = now + length
                else:
                    length, source, target, made, ready = t_i[chunk], chunk + 1, chunk - 1, made_i, ready_i
                    count_i[chunk] += 1
                    held[rank] += m_w[chunk] - m_b[chunk]
                    late[rank].append(("W", chunk, microbatch))
                if 0 <= source <= last:
                    arrival = made[source][microbatch]
                    if ranks[source] != rank:
                        arrival += comm
                    if arrival > start:
                        if begun[rank]:
                            idle[rank] += arrival - start
                            if idle[rank] > allowed[rank]:
                                return []
                        start = arrival
                made[chunk][microbatch] = start + length
                if 0 <= target <= last:
                    holder = ranks[target]
                    if holder == rank:
                        ready[target][microbatch] = now + length
                    else:  # now it is known when the result will be there: the holder, if not at work till then, may wait
                        ready[target][microbatch] = at = now + length + comm
                        busy = free[holder]
                        if busy <= at + slack:
                            push(events, (at, holder))
                            if busy <= now + slack:
                                push(events, (now, holder))
            begun[rank] = True
            ended[rank] = start + length
            free[rank] = end = now + length
            event = replace(events, (end, rank))
        complete = sum(map(len, order)) == problem.operations
        return order if complete else None


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
    following = [(operation for operation in row if operation[0] != "W") for row in order]
    ahead = [next(row, None) for row in following]  # each rank's next F or I
    slack, m_b, room, held = problem.slack, problem.m_b, problem.room, clock.held
    ready_f, ready_i, late, late_done = clock.ready_f, clock.ready_i, clock.late, clock.late_done
    awaited = [patience * time for time in problem.t_w]

    def choose(rank: int, now: float) -> Choice:
        operation, full = ahead[rank], False
        if operation is None:
            return clock.next_weight(rank)
        kind, chunk, microbatch = operation
        if kind == "F":
            at = ready_f[chunk][microbatch]
            full = held[rank] + m_b[chunk] > room[rank]
        else:
            at = ready_i[chunk][microbatch]
        if at <= now + slack and not full:
            ahead[rank] = next(following[rank], None)
            return operation
        waiting, done = late[rank], late_done[rank]
        if done < len(waiting):
            weight = waiting[done]
            if full or at - now >= awaited[weight[1]]:
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
    done_f, done_i, late, late_done = clock.count["F"], clock.count["I"], clock.late, clock.late_done
    awaited = [patience * time for time in problem.t_w]
    ready_forward, ready_backward = _ready_forward(clock), _ready_backward(clock)

    def choose(rank: int, now: float) -> Choice:
        forward, short, soon = ready_forward(rank, now)
        backward, later = ready_backward(rank, now)
        waiting, done = late[rank], late_done[rank]
        weight = waiting[done] if done < len(waiting) else None
        if short and weight is not None and (backward is None or last[rank] == "I"):
            return weight
        if forward is not None and (backward is None or first == "F" or (first == "turns" and last[rank] == "I")):
            last[rank] = "F"
            return "F", forward, done_f[forward]
        if backward is not None:
            last[rank] = "I"
            return "I", backward, done_i[backward]
        if later < soon:
            soon = later
        if weight is not None and soon - now >= awaited[weight[1]]:
            return weight
        return soon

    return clock.run(choose)


# Asked at every event of a search that makes dozens of orders of up to a hundred thousand operations: plain loops.


def _ready_forward(clock: _Clock) -> Callable[[int, float], tuple[int | None, bool, float]]:
    """Of (rank, now): the last chunk whose F may start, whether memory alone keeps another from it, when the next one may."""
    problem, done, done_i, ready_f, holding = clock.problem, clock.count["F"], clock.count["I"], clock.ready_f, clock.held
    chunks_of, m_b, rooms, slack, m = problem.chunks_of, problem.m_b, problem.room, problem.slack, problem.microbatches
    backwards = [chunks[::-1] for chunks in chunks_of]

    def ready(rank: int, now: float) -> tuple[int | None, bool, float]:
        held, room, oldest, reserve, soon, short = holding[rank], rooms[rank], m, 0.0, inf, False
        for chunk in chunks_of[rank]:
            if done_i[chunk] < oldest:
                oldest = done_i[chunk]
        for chunk in chunks_of[rank]:
            if done[chunk] <= oldest:
                reserve += m_b[chunk]
        latest = now + slack
        for chunk in backwards[rank]:
            microbatch = done[chunk]
            if microbatch == m:
                continue
            at, size = ready_f[chunk][microbatch], m_b[chunk]
            fits = held + size + (reserve - size if microbatch <= oldest else reserve) <= room
            if at > latest:
                if fits and at < soon:
                    soon = at
            elif fits:
                return chunk, False, inf  # when another may is not asked then
            else:
                short = True
        return None, short, soon

    return ready


def _ready_backward(clock: _Clock) -> Callable[[int, float], tuple[int | None, float]]:
    """Of (rank, now): the chunk whose I may start, the one furthest behind, the last of those; when the next one may."""
    done, done_i, ready_i = clock.count["F"], clock.count["I"], clock.ready_i
    chunks_of, slack = clock.problem.chunks_of, clock.problem.slack

    def ready(rank: int, now: float) -> tuple[int | None, float]:
        best, fewest, soon = None, 0, inf
        for chunk in chunks_of[rank]:
            microbatch = done_i[chunk]
            if microbatch < done[chunk]:
                at = ready_i[chunk][microbatch]
                if at <= now + slack and (best is None or microbatch <= fewest):
                    best, fewest = chunk, microbatch
                if now < at < soon:
                    soon = at
        return best, soon

    return ready
