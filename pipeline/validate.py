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
6. nobody waits for ever (:mod:`pipeline.rendezvous`);
7. where W of several microbatches is one product (:mod:`pipeline.coalesce`), nothing is computed between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, place_of
from pipeline.rendezvous import Queue, Rendezvous, direction_of, queue_of
from pipeline.schedules import Placement
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number

WINDOWS = ("step", "microbatch")

Rows = Sequence[Sequence[Action]]
Site = tuple[int, int]  # (rank, position)

# Looked up once: an enumeration's member costs more than a global name, and these are compared for every action of a plan.
_F, _I, _W, _B, _COMMIT = Kind.F, Kind.I, Kind.W, Kind.B, Kind.COMMIT
_MESSAGES = SENDS | RECEIVES
_NOWHERE = -1


class _Sparse(dict[int, int]):
    """A table of positions that are mostly nowhere."""

    def __missing__(self, key: int) -> int:
        return _NOWHERE


class _Sites:
    """Where the actions of the chunks are. A chunk lives on one rank, so a position says it all.

    ``at[kind][chunk * microbatches + microbatch]`` is the position of an action, or ``_NOWHERE``.
    """

    def __init__(self, placement: Placement, microbatches: int, actions: int) -> None:
        self.ranks, self.microbatches = placement.ranks, microbatches
        size = placement.num_chunks * microbatches
        kinds = *sorted(COMPUTE), *sorted(_MESSAGES)
        # With more microbatches than actions some are missing, however many are claimed: no table is made for them.
        self.at: dict[Kind, list[int]] = {kind: [_NOWHERE] * size if size <= actions else _Sparse() for kind in kinds}  # type: ignore[misc]
        self.commits: dict[Action, int] = {}

    def position(self, action: Action) -> int:
        """Of an action that is not a commit."""
        chunk, microbatch = action.key
        return self.at[action.kind][chunk * self.microbatches + microbatch]

    def site(self, action: Action) -> Site:
        return self.ranks[action.key[0]], self.position(action)

    def __contains__(self, action: Action) -> bool:
        return self.position(action) != _NOWHERE


def validate(
    plan: Rows,
    placement: Placement,
    num_microbatches: int,
    *,
    lowered: bool,
    allow_unordered: bool = False,
    window: str | None = None,
    coalesce_w: int = 1,
) -> None:
    """Check a plan: one sequence of actions per rank.

    Args:
        plan: the actions of each rank, in order.
        placement: which rank holds which chunk.
        num_microbatches: microbatches per step, at least 1.
        lowered: True for a plan with messages and step end; False for compute actions only.
        allow_unordered: the plan declares that F, I and W of a chunk may leave microbatch order.
        window: ``"step"`` or ``"microbatch"``; None accepts either, the same on all ranks.
        coalesce_w: how many microbatches' W are one product.

    Raises:
        PlanError: the first rule broken, with rank, position, action in ``place`` (position = the row's
            length for an action that is missing).
        UsageError: ``num_microbatches`` < 1 or an unknown window.
    """
    num_microbatches = whole_number("the number of microbatches", num_microbatches)
    if num_microbatches < 1:
        raise UsageError(f"a step has at least one microbatch, not {num_microbatches}")
    if window is not None and window not in WINDOWS:
        raise UsageError(f"unknown window {window!r}; use one of {', '.join(WINDOWS)}")
    if len(plan) != placement.num_ranks:
        raise PlanError(f"the plan has {len(plan)} rows, the placement {placement.num_ranks} ranks")
    sites = _sites(plan, placement, num_microbatches, lowered)
    _check_counts(plan, sites, placement, num_microbatches)
    _check_stages(plan, sites)
    if not allow_unordered:
        _check_microbatch_order(plan, placement)
    if coalesce_w > 1:
        _check_groups(plan, coalesce_w)
    if lowered:
        _check_messages(plan, sites, placement, num_microbatches)
        _check_queues(plan, placement)
        _check_commits(plan, window)
    _check_progress(plan, placement, lowered)


def _fail(reason: str, site: Site, action: Action) -> NoReturn:
    raise PlanError(reason, rank=site[0], position=site[1], action=str(action))


def _end(plan: Rows, rank: int) -> Site:
    return rank, len(plan[rank])


def _sites(plan: Rows, placement: Placement, num_microbatches: int, lowered: bool) -> _Sites:
    """Where each action of a chunk is; rejects strays and repetitions."""
    sites = _Sites(placement, num_microbatches, sum(map(len, plan)))
    at, ranks, chunks = sites.at, placement.ranks, placement.num_chunks
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
            if not lowered and kind not in COMPUTE:
                _fail("a compute plan holds F, I, W and B only", (rank, position), action)
            if chunk is None or microbatch is None:
                continue  # the step's end, checked as a whole
            if chunk >= chunks:
                _fail(f"chunk out of range: the placement has {chunks} chunks", (rank, position), action)
            if microbatch >= num_microbatches:
                _fail(f"microbatch out of range: the step has {num_microbatches} microbatches", (rank, position), action)
            if ranks[chunk] != rank:
                _fail(f"chunk {chunk} lives on rank {ranks[chunk]}", (rank, position), action)
            if kind is _COMMIT:
                first = sites.commits.setdefault(action, position)
            else:
                places, key = at[kind], chunk * num_microbatches + microbatch
                first = places[key]
                if first == _NOWHERE:
                    first = places[key] = position
            if first != position:
                _fail(f"{action} a second time (first at position {first})", (rank, position), action)
    return sites


def _check_counts(plan: Rows, sites: _Sites, placement: Placement, num_microbatches: int) -> None:
    forwards, inputs, weights, fulls = (sites.at[kind] for kind in (_F, _I, _W, _B))
    for key in range(placement.num_chunks * num_microbatches):
        whole, half, other = fulls[key] != _NOWHERE, inputs[key] != _NOWHERE, weights[key] != _NOWHERE
        if forwards[key] != _NOWHERE and (half and other and not whole or whole and not half and not other):
            continue
        chunk, microbatch = divmod(key, num_microbatches)
        _fail_count(plan, sites, placement.ranks[chunk], chunk, microbatch)


def _fail_count(plan: Rows, sites: _Sites, rank: int, chunk: int, microbatch: int) -> None:
    full = Action(_B, chunk, microbatch)
    halves = Action(_I, chunk, microbatch), Action(_W, chunk, microbatch)
    for half in halves:
        if full in sites and half in sites:
            later = max(full, half, key=sites.position)
            _fail(f"{full} already is I and W, and there is {half} too", sites.site(later), later)
    forward = Action(_F, chunk, microbatch)
    for action in [forward] if full in sites else [forward, *halves]:
        if action not in sites:
            has_backward = full in sites or any(half in sites for half in halves)
            why = "" if action == forward or has_backward else ": this microbatch has no backward"
            _fail(f"{action} is missing{why}", _end(plan, rank), action)


def _check_stages(plan: Rows, sites: _Sites) -> None:
    """F before I, or B, before W."""
    microbatches = sites.microbatches
    earlier = {_I: sites.at[_F], _B: sites.at[_F], _W: sites.at[_I]}
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            before = earlier.get(action.kind)
            if before is not None:
                chunk, microbatch = place_of(action)
                first = before[chunk * microbatches + microbatch]
                if first > position:
                    needed = Action(_I if action.kind is _W else _F, chunk, microbatch)
                    _fail(f"{action} before its {needed} (at position {first})", (rank, position), action)


def _check_microbatch_order(plan: Rows, placement: Placement) -> None:
    last: dict[Kind, list[Action | None]] = {kind: [None] * placement.num_chunks for kind in (_F, _I, _W)}
    latest = {kind: [-1] * placement.num_chunks for kind in (_F, _I, _W)}  # the microbatches of the same actions
    parts = {_F: (_F,), _I: (_I,), _W: (_W,), _B: (_I, _W)}
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            kinds = parts.get(action.kind)
            if kinds is None:
                continue
            chunk, microbatch = place_of(action)
            for kind in kinds:
                if latest[kind][chunk] > microbatch:
                    _fail(
                        f"{kind} of chunk {chunk} leaves microbatch order (after {last[kind][chunk]}): "
                        "sums would depend on the schedule",
                        (rank, position),
                        action,
                    )
                last[kind][chunk] = action
                latest[kind][chunk] = microbatch


def _check_groups(plan: Rows, coalesce_w: int) -> None:
    for rank, row in enumerate(plan):
        before: Action | None = None  # the last computation
        for position, action in enumerate(row):
            if action.kind is _B:
                _fail("I and W in one: W of several microbatches cannot be one product", (rank, position), action)
            if action.kind not in COMPUTE:
                continue
            if action.kind is _W:
                chunk, microbatch = place_of(action)
                needed = Action(_W, chunk, microbatch - 1) if microbatch % coalesce_w else None
                if needed not in (None, before):
                    reason = f"one product with {needed}: it comes directly after it, not after {before}"
                    _fail(reason, (rank, position), action)
            before = action


def _check_messages(plan: Rows, sites: _Sites, placement: Placement, num_microbatches: int) -> None:
    """Each hand-over between ranks is sent after its producer and received before its consumer; no others."""
    wrong: dict[tuple[Kind, int | None], str] = {}  # why a chunk has no such message
    for kind in _MESSAGES:
        direction = direction_of(kind)
        look = placement.target if kind in SENDS else placement.source
        for chunk, rank in enumerate(placement.ranks):
            other = look(chunk, direction)
            if other is None:
                wrong[kind, chunk] = f"chunk {chunk} has nobody to exchange this with"
            elif not placement.crosses(chunk, other):
                wrong[kind, chunk] = f"chunks {chunk} and {other} share rank {rank}: nothing to exchange"
    for rank, row in enumerate(plan):
        for position, action in enumerate(row):
            if action.kind in _MESSAGES and (action.kind, action.chunk) in wrong:
                _fail(wrong[action.kind, action.key[0]], (rank, position), action)
    for chunk in range(placement.num_chunks):
        for direction in "FB":
            source = placement.source(chunk, direction)
            if source is not None and placement.crosses(chunk, source):
                _check_line(plan, sites, source, chunk, direction)


def _check_line(plan: Rows, sites: _Sites, source: int, chunk: int, direction: str) -> None:
    """All messages from one chunk to another."""
    microbatches, forward = sites.microbatches, direction == "F"
    send_kind, receive_kind = Kind(f"SEND_{direction}"), Kind(f"RECV_{direction}")

    def of(kind: Kind, where: int) -> list[int]:
        return sites.at[kind][where * microbatches : (where + 1) * microbatches]

    def works(where: int) -> list[int]:
        if forward:
            return of(_F, where)
        return [b if i == _NOWHERE else i for i, b in zip(of(_I, where), of(_B, where), strict=True)]

    sends, receives = of(send_kind, source), of(receive_kind, chunk)
    for microbatch, (sent, received, made, read) in enumerate(
        zip(sends, receives, works(source), works(chunk), strict=True)
    ):
        if sent > made and _NOWHERE < received < read:
            continue
        send, receive = Action(send_kind, source, microbatch), Action(receive_kind, chunk, microbatch)
        for action, other in ((send, receive), (receive, send)):
            if action not in sites:
                there = sites.ranks[other.key[0]]
                why = f": {other} on rank {there} has no partner" if other in sites else ""
                _fail(f"{action} is missing{why}", _end(plan, sites.ranks[action.key[0]]), action)
        producer, consumer = (
            Action(_F, *action.key) if forward else _backward(sites, *action.key) for action in (send, receive)
        )
        if sent < made:
            _fail(f"{send} before its producer {producer}", sites.site(send), send)
        _fail(f"{receive} is posted after its consumer {consumer}", sites.site(receive), receive)


def _backward(sites: _Sites, chunk: int, microbatch: int) -> Action:
    full = Action(_B, chunk, microbatch)
    return full if full in sites else Action(_I, chunk, microbatch)


def _check_queues(plan: Rows, placement: Placement) -> None:
    sends: dict[Queue, list[Action]] = {}
    receives: dict[Queue, list[Action]] = {}
    lines: dict[tuple[Kind, int], list[Action]] = {}  # the same lists, by kind and chunk
    for row in plan:
        for action in row:
            if action.kind in _MESSAGES:
                line = lines.get((action.kind, place_of(action)[0]))
                if line is None:
                    ends = sends if action.kind in SENDS else receives
                    line = lines[action.kind, action.key[0]] = ends.setdefault(queue_of(action, placement), [])
                line.append(action)
    for queue, sent in sends.items():
        step = 1 if queue.direction == "F" else -1
        for place, (send, receive) in enumerate(zip(sent, receives[queue], strict=True)):
            (chunk, microbatch), (reader, other) = place_of(send), place_of(receive)
            if microbatch != other or chunk + step != reader:
                _fail(
                    f"message {place} from rank {queue.src} to rank {queue.dst}, direction {queue.direction} "
                    f"is {send} at the sender and {receive} at the receiver",
                    (queue.dst, plan[queue.dst].index(receive)),
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
