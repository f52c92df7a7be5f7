"""How good an order can be: a bound for any size, and the optimum of small cases by branch and bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from pipeline.auto_problem import Operation, Order, Problem


def lower_bound(problem: Problem) -> float:
    """No order of this problem costs less.

    Three things hold on every rank: it does all its work; until the first gradient can be there it runs only as many F
    as its memory takes; and W is released only so far as its memory can hold them back. The rank of chunk 0 starts at
    0, before all others, and ends with the W of the last microbatch, whose I every other rank first hands on.
    """
    ranks, hops = problem.placement.ranks, _hops(problem)
    head = [0.0] * len(ranks)  # earliest first F of each chunk
    for chunk in range(1, len(ranks)):
        head[chunk] = head[chunk - 1] + problem.t_f[chunk - 1] + hops[chunk - 1]
    gradient = [0.0] * len(ranks)  # earliest start of an I of each chunk
    gradient[-1] = head[-1] + problem.t_f[-1]
    for chunk in range(len(ranks) - 2, -1, -1):
        gradient[chunk] = gradient[chunk + 1] + problem.t_i[chunk + 1] + hops[chunk]
    tail = _tails(problem)
    bound = gradient[0] + problem.t_i[0] + tail[0]  # one microbatch's way there and back
    for rank, chunks in enumerate(problem.chunks_of):
        work, first = problem.work(rank), chunks[0]
        idle = max(0.0, gradient[chunks[-1]] - head[first] - _most(problem, rank, problem.t_f, problem.m_b))
        before = idle + work - _most(problem, rank, problem.t_w, problem.m_w)
        bound = max(bound, idle + work, head[first] + before + tail[first])
        if problem.objective == "makespan":
            bound = max(bound, head[first] + idle + work)
    return bound


def _most(problem: Problem, rank: int, times: Sequence[float], sizes: Sequence[float]) -> float:
    """The most work of one kind whose microbatches a rank can hold at once; between chunks it may be cut."""
    room, total = problem.room[rank], 0.0
    chunks = problem.chunks_of[rank]
    for chunk in sorted(chunks, key=lambda c: -times[c] / max(sizes[c], 1e-300)):
        number = float(problem.microbatches)
        if sizes[chunk] > 0:
            number = min(number, room / sizes[chunk])
        if len(chunks) == 1:
            number = floor(number)
        total += number * times[chunk]
        room -= number * sizes[chunk]
    return total


def _hops(problem: Problem) -> list[float]:
    """The latency between each chunk and the next."""
    ranks = problem.placement.ranks
    return [problem.t_comm if other != rank else 0.0 for rank, other in zip(ranks, ranks[1:], strict=False)]


def _tails(problem: Problem) -> list[float]:
    """Per chunk the least time from the end of its last I to the end of chunk 0's rank."""
    tail = [problem.t_w[0]]
    for chunk, hop in enumerate(_hops(problem)):
        tail.append(tail[-1] + problem.t_i[chunk] + hop)
    return tail


@dataclass
class Exact:
    """The best order found, its cost, and whether no other can be better."""

    order: Order
    cost: float
    proven: bool
    nodes: int


class _Search:
    """Depth first over all orders, each made once: the rank whose turn comes first takes a ready operation or waits.

    After waiting it takes only what was not ready before: otherwise it could have started it earlier.
    """

    def __init__(self, problem: Problem, incumbent: Order, cost: float, max_nodes: int) -> None:
        self.problem, self.best, self.cost, self.max_nodes = problem, incumbent, cost, max_nodes
        self.bound = lower_bound(problem)
        self.tail = _tails(problem)
        self.nodes = 0
        self.complete = True
        ranks, m = problem.placement.ranks, problem.microbatches
        self.chunks = len(ranks)
        self.ready = {kind: [[inf] * m for _ in ranks] for kind in "FI"}
        self.ready["F"][0] = [0.0] * m
        self.count = {kind: [0] * self.chunks for kind in "FIW"}
        self.times = {"F": problem.t_f, "I": problem.t_i, "W": problem.t_w}
        size = len(problem.chunks_of)
        self.free = [0.0] * size  # the end of a rank's last operation
        self.turn = [(0.0, False)] * size  # when it decides next; True: after the others of that time
        self.since = [-inf] * size  # after a wait: what was ready then is refused
        self.first = [inf] * size
        self.held = [0.0] * size
        self.left = [3 * m * len(chunks) for chunks in problem.chunks_of]
        self.todo = [problem.work(rank) for rank in range(size)]
        self.todo_chain = [self.todo[r] - m * sum(problem.t_w[c] for c in problem.chunks_of[r]) for r in range(size)]
        self.order: Order = [[] for _ in range(size)]

    def run(self) -> None:
        if self.cost > self.bound + self.problem.slack:
            self._descend()

    def _descend(self) -> None:
        self.nodes += 1
        if self.nodes > self.max_nodes:
            self.complete = False
            return
        if self._least() >= self.cost - self.problem.slack:
            return
        open_ranks = [rank for rank, left in enumerate(self.left) if left]
        if not open_ranks:
            self.cost, self.best = self._least(), [list(row) for row in self.order]
            return
        rank = min(open_ranks, key=lambda r: (self.turn[r], r))
        now, later, slack = self.turn[rank][0], inf, self.problem.slack
        for operation, at in self._candidates(rank):
            if at > now + slack:
                later = min(later, at)
            elif at > self.since[rank] + slack:
                self._take(rank, operation, max(self.free[rank], at))
            if self.cost <= self.bound + slack or not self.complete:
                return
        self._wait(rank, later, [self.turn[r] for r in open_ranks if r != rank])

    def _wait(self, rank: int, later: float, others: list[tuple[float, bool]]) -> None:
        now = self.turn[rank][0]
        if any(turn == (now, False) for turn in others):
            turn = (now, True)
        else:
            turn = (min([later, *(at for at, _ in others if at > now)]), False)
        if turn[0] < inf:
            old = self.turn[rank], self.since[rank]
            self.turn[rank], self.since[rank] = turn, now
            self._descend()
            self.turn[rank], self.since[rank] = old

    def _candidates(self, rank: int) -> list[tuple[Operation, float]]:
        """The next I, F and W of each chunk that memory allows, and when each could first have started."""
        problem, m = self.problem, self.problem.microbatches
        found: list[tuple[Operation, float]] = []
        for chunk in problem.chunks_of[rank]:
            f, i, w = (self.count[kind][chunk] for kind in "FIW")
            if i < f:
                found.append((("I", chunk, i), self.ready["I"][chunk][i]))
            if f < m and self.held[rank] + problem.m_b[chunk] <= problem.room[rank]:
                found.append((("F", chunk, f), self.ready["F"][chunk][f]))
            if w < i:
                found.append((("W", chunk, w), 0.0))
        return found

    def _take(self, rank: int, operation: Operation, begin: float) -> None:
        problem, (kind, chunk, microbatch) = self.problem, operation
        old = self.free[rank], self.turn[rank], self.since[rank], self.first[rank], self.held[rank]
        length = self.times[kind][chunk]
        end, chained = begin + length, 0.0 if kind == "W" else length
        self.free[rank], self.turn[rank], self.since[rank] = end, (end, False), -inf
        self.first[rank] = min(old[3], begin)
        m_b, m_w = problem.m_b[chunk], problem.m_w[chunk]
        self.held[rank] += {"F": m_b, "I": m_w - m_b, "W": -m_w}[kind]
        self.order[rank].append(operation)
        self.count[kind][chunk] += 1
        self.left[rank] -= 1
        self.todo[rank] -= length
        self.todo_chain[rank] -= chained
        cell: tuple[str, int] | None = None
        if kind == "F":
            cell = ("F", chunk + 1) if chunk + 1 < self.chunks else ("I", chunk)
        elif kind == "I" and chunk:
            cell = ("I", chunk - 1)
        if cell is not None:
            holder = problem.placement.ranks[cell[1]]
            self.ready[cell[0]][cell[1]][microbatch] = end if holder == rank else end + problem.t_comm
        self._descend()
        if cell is not None:
            self.ready[cell[0]][cell[1]][microbatch] = inf
        self.todo_chain[rank] += chained
        self.todo[rank] += length
        self.left[rank] += 1
        self.count[kind][chunk] -= 1
        self.order[rank].pop()
        self.free[rank], self.turn[rank], self.since[rank], self.first[rank], self.held[rank] = old

    def _least(self) -> float:
        """A cost that no completion of this state goes below; the cost itself at the end."""
        problem, least = self.problem, 0.0
        spans = problem.objective == "span"
        for rank, free in enumerate(self.free):
            begun = self.first[rank] if self.first[rank] < inf else free
            least = max(least, free + self.todo[rank] - (begun if spans else 0.0))
            chunk = problem.chunks_of[rank][0]
            if self.count["I"][chunk] < problem.microbatches:
                least = max(least, free + self.todo_chain[rank] + self.tail[chunk])
        return least


def search(problem: Problem, incumbent: Order, cost: float, max_nodes: int = 200_000) -> Exact:
    """The optimum of a small problem, or as far as ``max_nodes`` allow.

    Args:
        problem: times, sizes, limit.
        incumbent: a valid order within the limit, of this ``cost``: the search looks for better ones only.
        max_nodes: states to look at; 200,000 take a few seconds.

    Returns: the best order and whether it is proven to be the optimum over all orders in which within a chunk F, I
    and W keep microbatch order.
    """
    state = _Search(problem, incumbent, cost, max_nodes)
    state.run()
    proven = state.complete or state.cost <= state.bound + problem.slack
    return Exact(state.best, state.cost, proven, state.nodes)
