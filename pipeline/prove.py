"""A plan with its effects, proved before step one: no tensor, no GPU, no process but this one.

:func:`prove` runs the program of every rank through the contract's own account (:mod:`pipeline.prove_rank`), twice in a row,
and the messages between ranks through :class:`~pipeline.rendezvous.Rendezvous`.

One pass in host order is enough for all interleavings. The stream clock's verdict depends on recorded edges alone: an access is
accepted only if a chain of edges orders it after every conflicting one before it. So in all interleavings that the edges allow,
conflicting accesses come in host order, every buffer holds what it holds here, and the account is the one that is checked here.
Two steps in a row are enough for all steps: every buffer is touched again in each step, and a step finds the stream clocks,
epochs and caches as the step before it did, one later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from pipeline.actions import Action, Kind
from pipeline.effects import program as program_of
from pipeline.effects import rank_program
from pipeline.plan import Plan
from pipeline.program import COMPLETE, LAUNCH, RECORD, TRANSFERS, WAIT, Op, Program
from pipeline.prove_rank import RankCheck
from pipeline.rendezvous import Queue, Rendezvous, message_of, queue_of
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.contract.streams import HOST

STEPS = 2


@dataclass(frozen=True)
class Proof:
    """What was proved: (property, how often it was checked, in words), in :data:`STEPS` consecutive steps of all ranks."""

    properties: tuple[tuple[str, int, str], ...]
    operations: int

    def lines(self) -> list[str]:
        """One line per property."""
        width = max(len(name) for name, _, _ in self.properties)
        return [f"{name:<{width}}  {text}" for name, _, text in self.properties]


def prove(subject: Plan | Program) -> Proof:
    """Check a plan, with the engine's effects or with its own, on all ranks.

    Raises:
        PlanError: at the first illegal operation; ``place`` names rank, position in the rank's program (of a plan that breaks
            a rule of :mod:`pipeline.validate`: in its list of actions) and action.
    """
    if isinstance(subject, Plan):
        subject.validate()
        subject = program_of(subject)
    about = subject.placement, subject.microbatches, subject.window, subject.unordered, subject.coalesce_w
    checks = [RankCheck(row, rank, *about) for rank, row in enumerate(subject.rows)]
    for check in checks:
        for _ in range(STEPS):
            check.run()
    messages = _check_messages(subject)
    for buffered in (False, True):
        _check_progress(subject, buffered)
    _check_streams(subject)
    return _proof(subject, checks, messages)


def prove_rank(plan: Plan, rank: int, replicas: bool = False, tied: bool = False, peers: bool = False) -> None:
    """The part of :func:`prove` that concerns one rank's engine; messages and progress follow from the plan's own rules, which
    :meth:`Plan.validate` has checked. When every rank has done it for itself, the plan is proved.

    Raises:
        PlanError: at the first illegal operation.
    """
    about = plan.placement, plan.microbatches, plan.window, plan.allow_unordered, plan.coalesce_w
    check = RankCheck(rank_program(plan, rank, replicas=replicas, tied=tied, peers=peers), rank, *about)
    for _ in range(STEPS):
        check.run()


def _proof(program: Program, checks: list[RankCheck], messages: int) -> Proof:
    def total(name: str) -> int:
        return sum(getattr(check.counts, name) for check in checks)

    scratch = sum(len(check.counts.workspaces) for check in checks)
    commits, reads, users = total("commits"), total("scale_reads"), total("workspace_users")
    ranks = program.placement.num_ranks
    rows = [
        ("leases", total("leases"), f"{total('leases')} microbatches of a chunk consumed exactly once, F then I then W"),
        ("slots", total("buffers"), f"{total('buffers')} uses of I-slots, W-slots and border buffers, none while retained"),
        ("scales", reads, f"{reads} reads, each after the commit of its epoch; {commits} commits"),
        ("caches", total("weight_reads"), f"{total('weight_reads')} reads of cached weights, each after the version's refresh"),
        ("edges", total("accesses"), f"{total('accesses')} accesses, each ordered by {total('edges')} recorded waits"),
        ("workspaces", users, f"{users} uses of {scratch} library workspaces, no two at once"),
        ("gradients", total("grad_writes"), f"{total('grad_writes')} writes, the first with beta 0, complete before REDUCE"),
        ("messages", messages, f"{messages} messages, the same at both ends of each queue"),
        ("progress", ranks, f"{ranks} ranks and their streams reach their end, with rendezvous and with buffered sends"),
    ]
    return Proof(tuple(rows), STEPS * sum(map(len, program.rows)))


# ---- between ranks ---------------------------------------------------------------------------------------------


def _check_messages(program: Program) -> int:
    """The k-th message into a queue is the k-th out of it. Returns how many there are in :data:`STEPS` steps."""
    ends: dict[bool, dict[Queue, list[tuple[int, int, Op]]]] = {True: defaultdict(list), False: defaultdict(list)}
    for rank, row in enumerate(program.rows):
        for position, op in enumerate(row):
            if op.kind == LAUNCH and op.work in TRANSFERS:
                queue = queue_of(_transfer(op), program.placement)
                ends[op.work.startswith("SEND")][queue].append((rank, position, op))
    count = 0
    for queue in sorted({*ends[True], *ends[False]}):
        sent, received = ends[True][queue], ends[False][queue]
        for (_, _, send), (rank, position, receive) in zip(sent, received, strict=False):
            if message_of(_transfer(send), program.placement) != message_of(_transfer(receive), program.placement):
                raise PlanError(
                    f"meets {send.name}, the message at its place in the queue from rank {queue.src} to rank {queue.dst}",
                    rank=rank,
                    position=position,
                    action=receive.name,
                )
        if len(sent) != len(received):
            longer = max(sent, received, key=len)
            rank, position, op = longer[min(len(sent), len(received))]
            raise PlanError(f"has no other end: {len(sent)} are sent, {len(received)} received", rank=rank, position=position,
                            action=op.name)  # fmt: skip
        count += len(sent)
    return STEPS * count


def _transfer(op: Op) -> Action:
    return Action(Kind(op.work), op.chunk, op.microbatch)


def _check_progress(program: Program, buffered: bool) -> None:
    """Nobody waits for ever: what blocks a host is a send (not if buffered), the wait for a receive, and the gather."""
    rows: list[list[Action]] = []
    positions: list[list[int]] = []
    for row in program.rows:
        actions, places = [], []
        for step in range(STEPS):
            for position, op in enumerate(row):
                action = _blocking(op, step * program.microbatches)
                if action is not None:
                    actions.append(action)
                    places.append(position)
        rows.append(actions)
        positions.append(places)
    machine = Rendezvous(rows, program.placement, lowered=True, buffered=buffered)
    if machine.run():
        return
    first = machine.cycle()[0]
    position = positions[first.rank][first.position]
    name = program.rows[first.rank][position].name
    sends = "buffered" if buffered else "rendezvous"
    waits = "; ".join(
        f"rank {one.rank} ({program.rows[one.rank][positions[one.rank][one.position]].name}) waits for rank {one.other}"
        for one in machine.cycle()
    )
    raise PlanError(f"deadlock with {sends} sends: {waits}", rank=first.rank, position=position, action=name)


def _check_streams(program: Program) -> None:
    """Streams come to their end too: a receive holds up what is launched on its stream behind it until its message is there.

    Launches wait for the one before on their stream, for events, and for what the host has waited for; both ends of a message,
    and all ranks' gathers, happen at once. None of these waits may go round in a circle.
    """
    graph: dict[Hashable, set[Hashable]] = defaultdict(set)
    places: dict[Hashable, tuple[int, int, Op]] = {}
    for rank, row in enumerate(program.rows):
        frontier: dict[str, set[Hashable]] = defaultdict(set)
        events: dict[int | None, set[Hashable]] = {}
        numbers: dict[Queue | str, int] = defaultdict(int)
        posted: dict[tuple[str, int, int], Hashable] = {}
        host: Hashable = ("host", rank, 0)
        for step in range(STEPS):
            for position, op in enumerate(row):
                awaited: Hashable = None
                if op.kind == RECORD:
                    events[op.event] = set(frontier[op.stream])
                elif op.kind == WAIT and op.stream == HOST:  # the host goes on when all that is behind the event has run
                    before, host = host, ("host", rank, (step, position))
                    graph[host] |= {before, *events[op.event]}
                elif op.kind == WAIT:
                    frontier[op.stream] |= events[op.event]
                elif op.kind == COMPLETE:
                    awaited = posted[op.work, *op.key]
                elif op.kind == LAUNCH:
                    node: Hashable = (rank, step, position)
                    if op.work in TRANSFERS or op.work == "GATHER":
                        line = op.work if op.work == "GATHER" else queue_of(_transfer(op), program.placement)
                        node = (line, numbers[line])
                        numbers[line] += 1
                        awaited = node if op.work == "GATHER" else None
                    if op.work in TRANSFERS:
                        posted[op.work, *op.key] = node
                    places.setdefault(node, (rank, position, op))
                    graph[node] |= {*frontier[op.stream], host}
                    frontier[op.stream] = {node}
                if awaited is not None:
                    before, host = host, ("host", rank, (step, position))
                    graph[host] |= {before, awaited}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = sorted({places[node] for node in error.args[1] if node in places}, key=lambda place: place[:2])
        rank, position, op = circle[0]
        names = ", ".join(f"{one.name} (rank {where})" for where, _, one in circle)
        raise PlanError(f"deadlock between streams: {names} wait for each other", rank=rank, position=position,
                        action=op.name) from None  # fmt: skip


def _blocking(op: Op, shift: int) -> Action | None:
    """What :class:`Rendezvous` must know of an operation; ``shift`` tells the steps' microbatches apart."""
    if op.kind == LAUNCH and op.work == "GATHER":
        return Action(Kind.STEP)
    if op.kind == LAUNCH and op.work in TRANSFERS:
        return Action(Kind(op.work), op.chunk, op.key[1] + shift)
    if op.kind == COMPLETE and op.work.startswith("RECV"):
        return Action(Kind.F if op.work == "RECV_F" else Kind.I, op.chunk, op.key[1] + shift)
    return None
