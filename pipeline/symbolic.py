"""Programs executed on symbols, over every interleaving their streams, events and messages allow: the judge of the plan check.

It knows nothing of ledgers, clocks, leases or plans' rules. A launch is a function: what it writes is a term of what it reads
*at that moment*, such as ``F(x, key, weights, scales)``; gradients are ordered sums, amax are sets until a commit rolls
them. So a wrong slot, a stale scale, a lost or repeated addition or a reordered sum is a different term at the end. What may
run when:

* a stream runs its launches in order; an event is what the stream has been given when it is recorded; launches after a wait run
  after what the event stands for; nothing else orders two launches of one rank (the host runs ahead of all streams);
* a queue (source, destination, direction) is first in, first out: the k-th receive gets what the k-th send reads;
* at GATHER every rank gets every rank's row.

A step can also fail to end: a send whose receive is never posted, a receive whose message never comes, ranks that wait for each
other (with rendezvous sends). And two launches that may run at once must not share a library workspace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.program import BEGIN, COMPLETE, LAUNCH, RECORD, WAIT, Buffer, Op, Program
from qeffect_lm.modelcheck.explore import TooManyStatesError, explore, mask, restrict

Place = tuple[int, Buffer]  # (rank, buffer)
RESULTS = (  # what a step leaves: the state of the next one, and what is logged
    *("parameters", "optimizer", "caches", "scales_forward", "scales_backward", "amax_forward", "amax_backward"),
    *("losses", "rows", "skip"),
)
HOST = "host"  # the calling thread, as programs name it: the judge imports nothing of the clocks
LIMIT = 50_000  # states; enough for every small plan


@dataclass(frozen=True)
class Outcome:
    """What can become of a program.

    Attributes:
        deadlock: it need not end.
        overlap: two launches may use one workspace at once.
        finals: every result that some interleaving gives (terms are numbered by the :class:`Simulator`).
        complete: False where only some interleavings were run, because two results or too many states were found.
    """

    deadlock: bool = False
    overlap: bool = False
    finals: frozenset[Hashable] = frozenset()
    complete: bool = True

    @property
    def sound(self) -> bool:
        """It ends, in one way."""
        return not self.deadlock and not self.overlap and self.complete and len(self.finals) == 1


@dataclass
class _Node:
    """A launch that a stream runs. A gather is two: each rank gives its row, then takes all of them."""

    rank: int
    step: int
    op: Op
    stream: str
    message: tuple | None = None  # the queue's place that it writes (send, gather) or reads
    takes: bool = False


@dataclass
class _Graph:
    nodes: list[_Node] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # bit masks
    rendezvous: list[int] = field(default_factory=list)  # more edges, where both ends of a message meet and hosts block
    deadlock: bool = False


class Simulator:
    """Runs programs; outcomes of one simulator can be compared."""

    def __init__(self, steps: int = 2, limit: int = LIMIT) -> None:
        self._steps, self._limit = steps, limit
        self._terms: dict[Hashable, int] = {}

    def run(self, program: Program, *, reduce: bool = True) -> Outcome:
        """All outcomes of a program's steps.

        ``reduce``: launches that conflict with nothing they could be exchanged with run as soon as they can; every order of the
        others is tried. Exchanging independent launches changes no state (Mazurkiewicz 1977), so no result is lost; False tries
        every order of all.
        """
        graph = _graph(program, self._steps)
        if graph.deadlock:
            return Outcome(deadlock=True)
        order = _sorted(graph.before)
        if order is None or _sorted([a | b for a, b in zip(graph.before, graph.rendezvous, strict=True)]) is None:
            return Outcome(deadlock=True)
        ancestors = [0] * len(order)
        for node in order:
            seen = graph.before[node]
            for other in _bits(graph.before[node]):
                seen |= ancestors[other]
            ancestors[node] = seen
        racing, overlap = _races(graph, ancestors)
        return self._explore(graph, order, ancestors, sorted(racing) if reduce else order, overlap)

    # ---- all orders --------------------------------------------------------------------------------------------

    def _explore(self, graph: _Graph, order: list[int], ancestors: list[int], free: list[int], overlap: bool) -> Outcome:
        free = [node for node in order if node in set(free)]  # in topological order, as ``restrict`` wants them
        number = {node: place for place, node in enumerate(order)}
        before = [mask(number[other] for other in _bits(graph.before[node])) for node in order]
        kept = restrict(before, [number[node] for node in free])
        place = {node: 1 << i for i, node in enumerate(free)}
        needs = [sum(place[other] for other in _bits(ancestors[node]) if other in place) for node in order]
        tied = [(node, needs[i]) for i, node in enumerate(order) if node not in place]
        index: dict[Hashable, int] = {}
        values: list[Hashable] = []
        self._prepare(graph, index, values)

        def settle(state: list[Hashable], done: int, now: int) -> tuple[Hashable, ...]:
            """Run every tied launch whose free ones have all run, and had not all before."""
            for node, wanted in tied:
                if not wanted & ~now and (done < 0 or wanted & ~done):
                    self._apply(graph.nodes[node], index, state)
            return tuple(state)

        def apply(state: tuple[Hashable, ...], executed: int, node: int) -> tuple[Hashable, ...]:
            after = list(state)
            self._apply(graph.nodes[free[node]], index, after)
            return settle(after, executed, executed | 1 << node)

        everything = (1 << len(free)) - 1
        ranks = sorted({node.rank for node in graph.nodes})
        finals: set[Hashable] = set()

        def visit(executed: int, state: tuple[Hashable, ...]) -> None:
            if executed == everything:
                places = [index.get((rank, name)) for rank in ranks for name in RESULTS]
                finals.add(tuple(None if place is None else state[place] for place in places))
                if len(finals) > 1:
                    raise _TwoResults

        try:
            explore(kept, settle(values, -1, 0), apply, visit=visit, limit=self._limit)
        except (_TwoResults, TooManyStatesError):
            return Outcome(overlap=overlap, finals=frozenset(finals), complete=False)
        return Outcome(overlap=overlap, finals=frozenset(finals))

    def _prepare(self, graph: _Graph, index: dict[Hashable, int], values: list[Hashable]) -> None:
        """A place in the state for every buffer and message, with what it holds at the start."""
        for node in graph.nodes:
            for buffer, _ in node.op.accesses:
                if (node.rank, buffer) not in index:
                    index[node.rank, buffer] = len(values)
                    values.append(self._start(node.rank, buffer))
            if node.message is not None and node.message not in index:
                index[node.message] = len(values)
                values.append(None)

    def _start(self, rank: int, buffer: Buffer) -> Hashable:
        name = _role(buffer)
        if name == "amax_forward":  # the weights were cast when the caches were made
            return frozenset([("weight", self._term("start amax", rank))]), False
        if name == "amax_backward":
            return frozenset(), False
        if name == "losses" or (isinstance(name, str) and name.startswith("scales")):
            return ()
        if isinstance(name, tuple) and str(name[0]).startswith("grads"):
            return (self._term("start", rank, name),)
        return self._term("start", rank, name)

    def _term(self, *parts: Hashable) -> int:
        return self._terms.setdefault(parts, len(self._terms))

    # ---- what a launch computes --------------------------------------------------------------------------------

    def _apply(self, node: _Node, index: Mapping[Hashable, int], state: list[Hashable]) -> None:
        op, rank, step = node.op, node.rank, node.step
        old = {buffer: state[index[rank, buffer]] for buffer, _ in op.accesses}
        if node.message is not None:
            self._move(node, index, state, old)
            return
        read = [buffer for buffer, access in op.accesses if access == "read" and buffer[0] != "workspace"]
        # Several places of one buffer are read side by side, in the order of their numbers.
        ordered = sorted(read, key=lambda buffer: (str(_role(buffer)), buffer[2:] if isinstance(buffer, tuple) else ()))
        reads = tuple((_role(buffer), self._seen(op, buffer, old[buffer])) for buffer in ordered)
        for buffer, access in op.accesses:
            if access != "read" and buffer[0] != "workspace":
                state[index[rank, buffer]] = self._written(op, step, buffer, access, reads, old)

    def _move(self, node: _Node, index: Mapping[Hashable, int], state: list[Hashable], old: dict[Buffer, Hashable]) -> None:
        """A transfer, or one rank's half of a gather."""
        assert node.message is not None
        at = index[node.message]
        if not node.takes:
            given = tuple(value for buffer, value in old.items() if ("read" in _of(node.op, buffer)))
            if node.op.work == "GATHER":
                rows = dict(state[at] or ())  # type: ignore[call-overload]
                state[at] = tuple(sorted({**rows, node.rank: given}.items()))
            else:
                state[at] = given
            return
        for buffer in old:
            if "write" in _of(node.op, buffer):
                taken = state[at]
                state[index[node.rank, buffer]] = taken[0] if isinstance(taken, tuple) and len(taken) == 1 else taken

    def _seen(self, op: Op, buffer: Buffer, value: Hashable) -> Hashable:
        """Of all scales, F and I read their own roles'."""
        if op.work in ("F", "I") and isinstance(buffer, str) and buffer.startswith("scales"):
            return dict(value).get(_key(op), "start")  # type: ignore[call-overload]
        return value

    def _written(
        self, op: Op, step: int, buffer: Buffer, access: str, reads: tuple, old: dict[Buffer, Hashable]
    ) -> Hashable:
        name, work, before = _role(buffer), op.work, old[buffer]
        kind = str(name[0] if isinstance(name, tuple) else name)
        if kind.startswith("amax"):
            return self._amax(op, access, reads, before)
        if access == "max_merge":  # of something that is no amax
            return ((kind, self._term(work, name, reads, before)),)
        if kind.startswith("scales"):
            return self._rolled(dict(before), old.get(f"amax_{kind[7:]}"), old.get("skip"))  # type: ignore[call-overload]
        if kind.startswith("grads"):
            if work in ("REDUCE", "REDUCE_G"):
                return (self._term("reduced", before),)
            part = self._term(work, op.chunk, name, reads)
            beta = op.joint_beta if name[0] == "grads_J" else op.beta
            return (*before, part) if beta else (part,)  # type: ignore[misc]
        if kind == "losses":
            return tuple(sorted({**dict(before), str(op.microbatch): reads}.items()))  # type: ignore[call-overload]
        if work.startswith("PASS"):
            return next((value for other, value in old.items() if "read" in _of(op, other)), None)
        if work in ("INPUT", "DIVISOR"):
            return self._term("data", name, step, op.microbatch)
        both = before if work in ("REDUCE", "NORM", "STEP") or (work == "I" and kind == "retained_W") else None
        return self._term(work, op.chunk, name, reads, both)

    def _amax(self, op: Op, access: str, reads: tuple, before: Any) -> Hashable:
        """(what was reported to which role, whether replicas were asked since)."""
        mine = (_key(op), self._term(op.work, op.chunk, "amax", reads))
        if access == "max_merge":
            return before[0] | {mine}, False
        if op.work.startswith("COMMIT"):
            return frozenset(), False
        return (before[0], True) if op.work.startswith("REDUCE") else (frozenset([mine]), False)

    def _rolled(self, scales: dict, amax: Any, skip: Hashable) -> Hashable:
        """A commit: the roles that somebody reported move on, from what was reported and whether replicas were asked."""
        reported, reduced = amax or (frozenset(), False)
        for key in {key for key, _ in reported}:
            mine = frozenset(term for other, term in reported if other == key)
            scales[key] = self._term("roll", scales.get(key), mine, reduced, skip)
        return tuple(sorted(scales.items(), key=str))


class _TwoResults(Exception):
    """The answer is known: it depends on the order."""


def _role(buffer: Buffer) -> Buffer:
    """A buffer without its slot: where a value lies is not part of it."""
    return buffer if isinstance(buffer, str) else buffer[:2]


def _key(op: Op) -> Hashable:
    """The scale roles that a piece of work reports to."""
    return "weight" if op.work == "REFRESH" else f"{op.chunk}.{op.work}"


def _of(op: Op, buffer: Buffer) -> list[str]:
    return [str(access) for other, access in op.accesses if other == buffer]


def _bits(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


# ---- who waits for whom ------------------------------------------------------------------------------------------


def _graph(program: Program, steps: int) -> _Graph:
    """The launches of all ranks and what orders them."""
    graph = _Graph()
    ends: dict[tuple, dict[str, list[int]]] = defaultdict(lambda: {"SEND": [], "RECV": []})
    gathers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # per rank
    for rank, row in enumerate(program.rows):
        frontier: dict[str, int] = defaultdict(int)
        events: dict[int | None, int] = {}
        posted: dict[tuple, int] = {}
        blocked = 0  # what the host has waited for: nothing is launched before it is there
        known = 0  # what it has waited for by events: every later launch comes after it

        def add(node: _Node, frontier: dict[str, int] = frontier) -> int:
            graph.nodes.append(node)
            graph.before.append(frontier[node.stream] | known)  # noqa: B023 - read at once
            graph.rendezvous.append(blocked)  # noqa: B023 - read at once
            frontier[node.stream] = 1 << len(graph.nodes) - 1
            return len(graph.nodes) - 1

        for step in range(steps):
            for op in row:
                if op.kind == BEGIN:
                    posted.clear()
                elif op.kind == RECORD:
                    events[op.event] = frontier[op.stream]
                elif op.kind == WAIT and op.stream == HOST:
                    known |= events.get(op.event, 0)
                elif op.kind == WAIT:
                    frontier[op.stream] |= events.get(op.event, 0)
                elif op.kind == COMPLETE and op.work.startswith("RECV"):
                    blocked |= posted.get((op.work, op.chunk, op.microbatch), 0)
                elif op.kind == LAUNCH and op.work == "GATHER":
                    at = ("gather", len(gathers[rank]))
                    gives = add(_Node(rank, step, op, op.stream, at))
                    takes = add(_Node(rank, step, op, op.stream, at, takes=True))
                    gathers[rank].append((gives, takes))
                elif op.kind == LAUNCH and op.work[:4] in ("SEND", "RECV"):
                    sends = op.work.startswith("SEND")
                    queue = (rank, op.peer, op.work[-1]) if sends else (op.peer, rank, op.work[-1])
                    line = ends[queue][op.work[:4]]
                    line.append(add(_Node(rank, step, op, op.stream, (*queue, len(line)), takes=not sends)))
                    posted[op.work, op.chunk, op.microbatch] = 1 << line[-1]
                elif op.kind == LAUNCH:
                    add(_Node(rank, step, op, op.stream))
    _join(graph, ends, gathers, len(program.rows))
    graph.deadlock = graph.deadlock or not _hosts_finish(program, steps)
    return graph


def _join(graph: _Graph, ends: Mapping[tuple, dict[str, list[int]]], gathers: Mapping[int, list], ranks: int) -> None:
    for line in ends.values():
        graph.deadlock |= len(line["SEND"]) != len(line["RECV"])
        for send, receive in zip(line["SEND"], line["RECV"], strict=False):
            graph.rendezvous[send] |= graph.before[receive]
            graph.rendezvous[receive] |= graph.before[send]
            graph.before[receive] |= 1 << send
    graph.deadlock |= len({len(gathers[rank]) for rank in range(ranks)}) > 1
    if not graph.deadlock:
        for meeting in zip(*(gathers[rank] for rank in range(ranks)), strict=True):
            everyone = mask(gives for gives, _ in meeting)
            for _, takes in meeting:
                graph.before[takes] |= everyone


def _hosts_finish(program: Program, steps: int) -> bool:
    """Every host comes to its end: a send waits for its receive to be posted, a received message and a gather are awaited."""
    rows = [[op for _ in range(steps) for op in row] for row in program.rows]
    at = [0] * len(rows)
    posted: dict[tuple, int] = defaultdict(int)  # ("SEND" or "RECV", queue) → how many
    met = [0] * len(rows)
    places: list[dict[tuple, tuple]] = [{} for _ in rows]  # per rank: transfer → (queue, place in it)

    def can(rank: int, op: Op) -> bool:
        if op.kind == LAUNCH and op.work[:4] == "SEND":
            queue = rank, op.peer, op.work[-1]
            return posted["RECV", queue] > posted["SEND", queue]
        if op.kind == COMPLETE and op.work.startswith("RECV"):
            queue, place = places[rank].get((op.work, op.chunk, op.microbatch), (None, -1))
            return place < posted["SEND", queue]
        if op.kind == LAUNCH and op.work == "GATHER":
            comes = [at[other] < len(row) and row[at[other]].work == "GATHER" for other, row in enumerate(rows)]
            return all(met[other] > met[rank] or (comes[other] and met[other] == met[rank]) for other in range(len(rows)))
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and can(rank, row[at[rank]]):
                op = row[at[rank]]
                at[rank] += 1
                moved = True
                if op.kind == LAUNCH and op.work[:4] in ("SEND", "RECV"):
                    queue = (rank, op.peer, op.work[-1]) if op.work[0] == "S" else (op.peer, rank, op.work[-1])
                    places[rank][op.work, op.chunk, op.microbatch] = queue, posted[op.work[:4], queue]
                    posted[op.work[:4], queue] += 1
                elif op.kind == LAUNCH and op.work == "GATHER":
                    met[rank] += 1
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


def _sorted(before: list[int]) -> list[int] | None:
    """A topological order; None where the waits form a cycle."""
    left = {node: bits for node, bits in enumerate(before)}
    after: dict[int, list[int]] = defaultdict(list)
    for node, bits in left.items():
        for other in _bits(bits):
            after[other].append(node)
    degree = [len(_bits(bits)) for bits in before]
    ready = [node for node, count in enumerate(degree) if not count]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for other in after[node]:
            degree[other] -= 1
            if not degree[other]:
                ready.append(other)
    return order if len(order) == len(before) else None


def _races(graph: _Graph, ancestors: list[int]) -> tuple[set[int], bool]:
    """The launches that conflict with another one in either order, and whether two of them share a workspace."""
    users: dict[Place, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for number, node in enumerate(graph.nodes):
        for buffer, access in node.op.accesses:
            if node.op.work != "GATHER" or (access == "write") == node.takes:
                users[node.rank, buffer][node.stream].append((number, str(access)))
    racing: set[int] = set()
    overlap = False
    for (_, buffer), streams in users.items():
        lines = list(streams.values())
        for i, line in enumerate(lines):
            for one, mine in line:
                for other, theirs in (pair for rest in lines[i + 1 :] for pair in rest):
                    if mine == theirs != "write" or ancestors[one] >> other & 1 or ancestors[other] >> one & 1:
                        continue
                    racing |= {one, other}
                    overlap |= buffer[0] == "workspace"
    return racing, overlap
