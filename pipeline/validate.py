"""Is this plan right? Checked before anything runs, on any list of actions, without a GPU.

:func:`validate` raises :class:`~qeffect_lm.contract.errors.PlanError` with rank, position, action and reason
at the first rule that a plan breaks:

1. every action is on the rank that holds its chunk, its microbatch exists;
2. each (chunk, microbatch) has F once, and either B once or I and W once each;
3. F before I before W; within a chunk each of them in microbatch order, so that sums do not depend on the
   schedule;
4. exactly the messages that cross ranks are sent and received, once each, after their producer and before
   their consumer, in the same order at both ends of a queue;
5. the step ends with REDUCE, STEP and, in window ``step``, COMMIT; in window ``microbatch`` each F and I
   commits before the next one of its chunk;
6. nobody waits for ever (:mod:`pipeline.rendezvous`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind
from pipeline.rendezvous import Queue, Rendezvous, direction_of, message_of, queue_of
from pipeline.schedules import Placement
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError

WINDOWS = ("step", "microbatch")

Rows = Sequence[Sequence[Action]]
Site = tuple[int, int]  # (rank, position)
Sites = dict[Action, Site]


def validate(
    plan: Rows,
    placement: Placement,
    num_microbatches: int,
    *,
    lowered: bool,
    allow_unordered: bool = False,
    window: str | None = None,
) -> None:
    """Check a plan: one sequence of actions per rank.

    Args:
        plan: the actions of each rank, in order.
        placement: which rank holds which chunk.
        num_microbatches: microbatches per step, at least 1.
        lowered: True for a plan with messages and step end; False for compute actions only.
        allow_unordered: the plan declares that F, I and W of a chunk may leave microbatch order.
        window: ``"step"`` or ``"microbatch"``; None accepts either, the same on all ranks.

    Raises:
        PlanError: the first rule broken, with rank, position, action in ``place`` (position = the row's
            length for an action that is missing).
        UsageError: ``num_microbatches`` < 1 or an unknown window.
    """
    if num_microbatches < 1:
        raise UsageError(f"a step has at least one microbatch, not {num_microbatches}")
    if window is not None and window not in WINDOWS:
        raise UsageError(f"unknown window {window!r}; use one of {', '.join(WINDOWS)}")
    if len(plan) != placement.num_ranks:
        raise PlanError(f"the plan has {len(plan)} rows, the placement {placement.num_ranks} ranks")
    sites = _sites(plan, placement, num_microbatches, lowered)
    _check_counts(plan, sites, placement, num_microbatches)
    _check_stages(sites)
    if not allow_unordered:
        _check_microbatch_order(plan)
    if lowered:
        _check_messages(plan, sites, placement, num_microbatches)
        _check_queues(plan, placement)
        _check_commits(plan, window)
    _check_progress(plan, placement, lowered)


def _fail(reason: str, site: Site, action: Action) -> NoReturn:
    raise PlanError(reason, rank=site[0], position=site[1], action=str(action))


def _walk(plan: Rows) -> Iterator[tuple[Site, Action]]:
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            yield (rank, position), action


def _end(plan: Rows, rank: int) -> Site:
    return rank, len(plan[rank])


def _sites(plan: Rows, placement: Placement, num_microbatches: int, lowered: bool) -> Sites:
    """Where each action of a chunk is; rejects strays and repetitions."""
    sites: Sites = {}
    for site, action in _walk(plan):
        if not lowered and action.kind not in COMPUTE:
            _fail("a compute plan holds F, I, W and B only", site, action)
        if action.chunk is None:
            continue  # the step's end, checked as a whole
        chunk, microbatch = action.key
        if chunk >= placement.num_chunks:
            _fail(f"chunk out of range: the placement has {placement.num_chunks} chunks", site, action)
        if microbatch >= num_microbatches:
            _fail(f"microbatch out of range: the step has {num_microbatches} microbatches", site, action)
        if placement.ranks[chunk] != site[0]:
            _fail(f"chunk {chunk} lives on rank {placement.ranks[chunk]}", site, action)
        if action in sites:
            _fail(f"{action} a second time (first at position {sites[action][1]})", site, action)
        sites[action] = site
    return sites


def _check_counts(plan: Rows, sites: Sites, placement: Placement, num_microbatches: int) -> None:
    for chunk, rank in enumerate(placement.ranks):
        for microbatch in range(num_microbatches):
            full = Action(Kind.B, chunk, microbatch)
            halves = Action(Kind.I, chunk, microbatch), Action(Kind.W, chunk, microbatch)
            for half in halves:
                if full in sites and half in sites:
                    later = max(full, half, key=lambda action: sites[action])
                    _fail(f"{full} already is I and W, and there is {half} too", sites[later], later)
            forward = Action(Kind.F, chunk, microbatch)
            needed = [forward] if full in sites else [forward, *halves]
            for action in needed:
                if action not in sites:
                    has_backward = full in sites or any(half in sites for half in halves)
                    why = "" if action == forward or has_backward else ": this microbatch has no backward"
                    _fail(f"{action} is missing{why}", _end(plan, rank), action)


def _check_stages(sites: Sites) -> None:
    earlier = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}
    for action, site in sites.items():
        if action.kind in earlier:
            first = Action(earlier[action.kind], *action.key)
            if sites[first] > site:
                _fail(f"{action} before its {first} (at position {sites[first][1]})", site, action)


def _check_microbatch_order(plan: Rows) -> None:
    last: dict[tuple[Kind, int], Action] = {}
    for site, action in _walk(plan):
        if action.kind not in COMPUTE:
            continue
        kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
        chunk, microbatch = action.key
        for kind in kinds:
            before = last.get((kind, chunk))
            if before is not None and before.key[1] > microbatch:
                _fail(
                    f"{kind} of chunk {chunk} leaves microbatch order (after {before}): "
                    "sums would depend on the schedule",
                    site,
                    action,
                )
            last[kind, chunk] = action


def _backward(sites: Sites, chunk: int, microbatch: int) -> Action:
    full = Action(Kind.B, chunk, microbatch)
    return full if full in sites else Action(Kind.I, chunk, microbatch)


def _check_messages(plan: Rows, sites: Sites, placement: Placement, num_microbatches: int) -> None:
    """Each hand-over between ranks is sent after its producer and received before its consumer; no others."""
    for action, site in sites.items():
        if action.kind in SENDS | RECEIVES:
            chunk, direction = action.key[0], direction_of(action.kind)
            look = placement.target if action.kind in SENDS else placement.source
            other = look(chunk, direction)
            if other is None:
                _fail(f"chunk {chunk} has nobody to exchange this with", site, action)
            if not placement.crosses(chunk, other):
                _fail(f"chunks {chunk} and {other} share rank {site[0]}: nothing to exchange", site, action)
    for chunk, rank in enumerate(placement.ranks):
        for direction in "FB":
            source = placement.source(chunk, direction)
            if source is None or not placement.crosses(chunk, source):
                continue
            for microbatch in range(num_microbatches):
                send = Action(Kind(f"SEND_{direction}"), source, microbatch)
                receive = Action(Kind(f"RECV_{direction}"), chunk, microbatch)
                _check_pair(plan, sites, (placement.ranks[source], send), (rank, receive))


def _check_pair(plan: Rows, sites: Sites, send: tuple[int, Action], receive: tuple[int, Action]) -> None:
    for (rank, action), (other_rank, other) in ((send, receive), (receive, send)):
        if action not in sites:
            why = f": {other} on rank {other_rank} has no partner" if other in sites else ""
            _fail(f"{action} is missing{why}", _end(plan, rank), action)
    forward = direction_of(send[1].kind) == "F"
    producer, consumer = (
        Action(Kind.F, *action.key) if forward else _backward(sites, *action.key)
        for action in (send[1], receive[1])
    )
    if sites[send[1]] < sites[producer]:
        _fail(f"{send[1]} before its producer {producer}", sites[send[1]], send[1])
    if sites[receive[1]] > sites[consumer]:
        _fail(f"{receive[1]} is posted after its consumer {consumer}", sites[receive[1]], receive[1])


def _check_queues(plan: Rows, placement: Placement) -> None:
    sends: dict[Queue, list[tuple[Site, Action]]] = {}
    receives: dict[Queue, list[tuple[Site, Action]]] = {}
    for site, action in _walk(plan):
        if action.kind in SENDS | RECEIVES:
            ends = sends if action.kind in SENDS else receives
            ends.setdefault(queue_of(action, placement), []).append((site, action))
    for queue, sent in sends.items():
        pairs = zip(sent, receives[queue], strict=True)
        for place, ((_, send), (site, receive)) in enumerate(pairs):
            if message_of(send, placement) != message_of(receive, placement):
                _fail(
                    f"message {place} from rank {queue.src} to rank {queue.dst}, direction {queue.direction} "
                    f"is {send} at the sender and {receive} at the receiver",
                    site,
                    receive,
                )


def _check_commits(plan: Rows, window: str | None) -> None:
    reduce, step, commit = Action(Kind.REDUCE), Action(Kind.STEP), Action(Kind.COMMIT)
    tails = {"step": [reduce, step, commit], "microbatch": [reduce, step]}
    if window is None:
        window = "step" if commit in plan[0] else "microbatch"
    tail = tails[window]
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            expected = position - (len(row) - len(tail))
            if action.chunk is None and (expected < 0 or tail[expected] != action):
                reason = f"in window {window} the step ends with {' '.join(map(str, tail))}"
                _fail(reason, (rank, position), action)
        for place, action in enumerate(tail):
            position = len(row) - len(tail) + place
            if position < 0 or row[position] != action:
                _fail(f"{action} is missing at the step's end", _end(plan, rank), action)
        _check_microbatch_commits(row, rank, window)


def _check_microbatch_commits(row: Sequence[Action], rank: int, window: str) -> None:
    """Window ``microbatch``: between two F (two I) of a chunk lies the commit of the first."""
    open_commit: dict[tuple[int, str], Action] = {}
    for position, action in enumerate(row):
        if action.kind is Kind.COMMIT and action.chunk is not None:
            if window == "step":
                _fail("in window step only the step commits", (rank, position), action)
            assert action.detail is not None
            if open_commit.pop((action.chunk, action.detail), None) != action:
                _fail(f"{action} does not follow its {action.detail}", (rank, position), action)
        elif window == "microbatch" and action.kind in (Kind.F, Kind.I, Kind.B):
            chunk, microbatch = action.key
            detail = "F" if action.kind is Kind.F else "I"
            if (chunk, detail) in open_commit:
                reason = f"{open_commit[chunk, detail]} must come first: {action} reads its scales"
                _fail(reason, (rank, position), action)
            open_commit[chunk, detail] = Action(Kind.COMMIT, chunk, microbatch, detail)
    for action in open_commit.values():
        _fail(f"{action} is missing", (rank, len(row)), action)


def _check_progress(plan: Rows, placement: Placement, lowered: bool) -> None:
    machine = Rendezvous(plan, placement, lowered=lowered)
    if machine.run():
        return
    cycle = machine.cycle()
    first = cycle[0]
    _fail(f"deadlock: {'; '.join(map(str, cycle))}", (first.rank, first.position), first.action)
