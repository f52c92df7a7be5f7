"""Every interleaving of a partially ordered set of nodes, with memoised states (explicit-state model checking).

A program is given as *nodes* ``0 … n-1`` with, for each, the nodes that must have run before it (a bit mask), a hashable start
state and a function that runs one node. :func:`explore` visits every pair (set of executed nodes, state) that any allowed order
reaches, once: orders that meet in the same set with the same state continue as one, so the cost is the number of such pairs and
not of orders. That is exact; there is no sampling and no reduction that a property could slip through.

Nothing here knows what a node means. To execute plans of several ranks symbolically, make one node of every operation, give
each its rank's previous one as predecessor, keep queues, slots and terms such as ``("F", microbatch, "v3", "e5")`` in the
state, and return :data:`BLOCKED` from a receive whose queue is empty: a deadlock is a reachable pair in which every node that
is left is blocked or waits for one that is. :func:`restrict` removes nodes that only order others (events, waits, launches)
without changing any order of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class _Marker:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


BLOCKED = _Marker("BLOCKED")
"""Returned by ``apply``: the node cannot run in this state, perhaps in a later one."""
STOP = _Marker("STOP")
"""Returned by ``apply``: the node ran, and what comes after it in this order is of no interest."""

Apply = Callable[[S, int, int], "S | _Marker"]


class TooManyStatesError(RuntimeError):
    """More pairs than ``limit``: the question is too large for exhaustion."""


@dataclass
class Exploration(Generic[S]):
    """What :func:`explore` saw.

    Attributes:
        finals: every state in which all nodes have run, with one order that leads there.
        deadlocks: per reachable set of executed nodes in which nothing can go on, one order that leads there.
        states: how many pairs (executed nodes, state) were visited.
    """

    finals: dict[S, tuple[int, ...]] = field(default_factory=dict)
    deadlocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    states: int = 0


def mask(nodes: Iterable[int]) -> int:
    """The bit mask of a set of nodes."""
    result = 0
    for node in nodes:
        result |= 1 << node
    return result


def explore(
    before: Sequence[int],
    start: S,
    apply: Apply[S],
    *,
    visit: Callable[[int, S], None] | None = None,
    limit: int = 10_000_000,
) -> Exploration[S]:
    """Run all nodes in every order in which each comes after those in ``before[node]``.

    Args:
        before: per node, the bit mask of the nodes that come before it in every order (direct ones suffice).
        start: the state before anything ran; hashable, compared by value.
        apply: ``apply(state, executed, node)`` returns the state after ``node`` (a new value: orders share states),
            :data:`BLOCKED` or :data:`STOP`. ``executed`` is the bit mask of the nodes that ran before it.
        visit: called once with every reachable pair ``(executed, state)``, the first one included.
        limit: the most pairs to visit.

    Raises:
        TooManyStatesError: there are more pairs than ``limit``.
    """
    everything = (1 << len(before)) - 1
    result: Exploration[S] = Exploration()
    first = (0, start)
    parents: dict[tuple[int, S], tuple[tuple[int, S], int] | None] = {first: None}
    todo = [first]
    while todo:
        pair = todo.pop()
        executed, state = pair
        if visit is not None:
            visit(executed, state)
        if executed == everything:
            if state not in result.finals:
                result.finals[state] = _order(parents, pair)
            continue
        moved = False
        for node in range(len(before) - 1, -1, -1):  # the stack turns this round: the lowest node runs first
            if executed >> node & 1 or before[node] & ~executed:
                continue
            after = apply(state, executed, node)
            if after is BLOCKED:
                continue
            moved = True
            if after is STOP:
                continue
            reached = (executed | 1 << node, after)
            if reached not in parents:
                if len(parents) >= limit:
                    raise TooManyStatesError(f"more than {limit} states")
                parents[reached] = (pair, node)  # type: ignore[index]
                todo.append(reached)  # type: ignore[arg-type]
        if not moved and executed not in result.deadlocks:
            result.deadlocks[executed] = _order(parents, pair)
    result.states = len(parents)
    return result


def _order(parents: dict, pair: tuple) -> tuple[int, ...]:
    """The nodes that ran on the way to ``pair``."""
    nodes: list[int] = []
    step = parents[pair]
    while step is not None:
        pair, node = step
        nodes.append(node)
        step = parents[pair]
    return tuple(reversed(nodes))


def restrict(before: Sequence[int], keep: Sequence[int]) -> list[int]:
    """The same orders over the nodes ``keep`` alone (renumbered in their order there).

    ``before`` must list every node after its predecessors, as the host's order of launching does. What came before a node
    that is left out comes before whatever it came before.
    """
    place = {node: i for i, node in enumerate(keep)}
    known: list[int] = []  # per node: the kept nodes (by their new numbers) that come before it
    result = [0] * len(keep)
    for node, predecessors in enumerate(before):
        if predecessors >> node:
            raise ValueError(f"node {node} comes before one of its predecessors")
        seen = 0
        while predecessors:
            lowest = predecessors & -predecessors
            number = lowest.bit_length() - 1
            seen |= known[number]
            if number in place:
                seen |= 1 << place[number]
            predecessors ^= lowest
        known.append(seen)
        if node in place:
            result[place[node]] = seen
    return result
