"""From an order of work to a plan: messages, commits and the step's end.

The rule for messages: a send follows its producer at once; a receive is posted one compute action ahead of
its consumer, so that data moves while the rank computes. Where that action releases an I-slot of the
consumer's own chunk (mostly it is an I), an F's receive is posted after it: the data lands in the slot so
released, and posting earlier would cost another one.

A receive is posted earlier than that in two cases: where its queue's senders run in another order than its
receivers, and where a sender would otherwise wait, in a cycle, for a receive that is posted later. So a
compute plan without a cycle of data always gives a plan without a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.actions import Action, Kind, place_of
from pipeline.rendezvous import Queue, Rendezvous, queue_of
from pipeline.schedules import Placement
from pipeline.validate import WINDOWS, validate
from qeffect_lm.errors import UsageError


def lower(
    compute: Sequence[Sequence[Action]],
    placement: Placement,
    *,
    window: str = "step",
    i_slot_until: Kind = Kind.I,
    checked: bool = False,
) -> list[list[Action]]:
    """Add receives, sends, commits and the step's end to a compute plan.

    Args:
        compute: per rank its F, I, W and B in order; complete, and any order whose data dependencies have no
            cycle.
        placement: which rank holds which chunk.
        window: ``"step"`` ends with REDUCE, STEP, COMMIT; ``"microbatch"`` commits after each F and each I
            (as Transformer Engine does) and ends with REDUCE, STEP.
        i_slot_until: what releases an I-slot, ``I`` or ``W`` (see :class:`pipeline.slots.Holding`).
        checked: ``compute`` has already passed :func:`pipeline.validate.validate`.

    Raises:
        PlanError: the compute plan is not complete or its data dependencies have a cycle.
        UsageError: unknown window.
    """
    if window not in WINDOWS:
        raise UsageError(f"unknown window {window!r}; use one of {', '.join(WINDOWS)}")
    if not checked:
        microbatches = 1 + max((action.key[1] for row in compute for action in row), default=0)
        validate(compute, placement, microbatches, lowered=False, allow_unordered=True)
    sends = _sends(compute, placement)
    receives = _receives(compute, sends, placement, i_slot_until)
    rows = []
    for actions, sent, received in zip(compute, sends, receives, strict=True):
        row: list[Action] = []
        for place, action in enumerate(actions):
            row += received.get(place, ())
            row.append(action)
            send = sent[place]
            if send is not None:
                row.append(send)
            if window == "microbatch" and action.kind is not Kind.W:
                row.append(Action(Kind.COMMIT, *action.key, "F" if action.kind is Kind.F else "I"))
        rows.append(row)
    _post_earlier(rows, placement)
    end = [Action(Kind.REDUCE), Action(Kind.STEP)] + [Action(Kind.COMMIT)] * (window == "step")
    return [row + end for row in rows]


def _sends(compute: Sequence[Sequence[Action]], placement: Placement) -> list[list[Action | None]]:
    """``[rank][place]``: the send that follows a compute action, if its result is needed on another rank."""
    chunks = range(placement.num_chunks)
    forward = [placement.crosses(chunk, placement.target(chunk, "F")) for chunk in chunks]
    backward = [placement.crosses(chunk, placement.target(chunk, "B")) for chunk in chunks]
    weight, first = Kind.W, Kind.F
    sends: list[list[Action | None]] = []
    for row in compute:
        sent: list[Action | None] = []
        for action in row:
            kind = action.kind
            if kind is weight:
                sent.append(None)
            elif kind is first:
                chunk, microbatch = place_of(action)
                sent.append(Action(Kind.SEND_F, chunk, microbatch) if forward[chunk] else None)
            else:
                chunk, microbatch = place_of(action)
                sent.append(Action(Kind.SEND_B, chunk, microbatch) if backward[chunk] else None)
        sends.append(sent)
    return sends


def _receives(
    compute: Sequence[Sequence[Action]], sends: Sequence[Sequence[Action | None]], placement: Placement, i_slot_until: Kind
) -> list[dict[int, list[Action]]]:
    """``[rank][place]``: the receives posted just before compute action ``place`` of that rank."""
    consumer: dict[Kind, dict[tuple[int, int], int]] = {Kind.RECV_F: {}, Kind.RECV_B: {}}  # its place, by (chunk, microbatch)
    forward, backward = consumer[Kind.RECV_F], consumer[Kind.RECV_B]
    for row in compute:
        for place, action in enumerate(row):
            if action.kind is Kind.F:
                forward[place_of(action)] = place
            elif action.kind is not Kind.W:
                backward[place_of(action)] = place
    queues: dict[Queue, list[Action]] = {}  # receives in the order of their sends
    by_chunk: dict[tuple[Kind, int], list[Action]] = {}  # the same lists
    for sent in sends:
        for send in sent:
            if send is None:
                continue
            chunk, microbatch = place_of(send)
            line = by_chunk.get((send.kind, chunk))
            if line is None:
                line = by_chunk[send.kind, chunk] = queues.setdefault(queue_of(send, placement), [])
            if send.kind is Kind.SEND_F:
                line.append(Action(Kind.RECV_F, chunk + 1, microbatch))
            else:
                line.append(Action(Kind.RECV_B, chunk - 1, microbatch))
    before: list[dict[int, list[Action]]] = [{} for _ in compute]
    for queue in sorted(queues):
        actions = compute[queue.dst]
        latest = len(actions)
        posted: list[tuple[int, Action]] = []
        for receive in reversed(queues[queue]):  # no later than any receive behind it in the queue
            latest = min(latest, _preferred(receive, consumer[receive.kind][place_of(receive)], actions, i_slot_until))
            posted.append((latest, receive))
        for place, receive in reversed(posted):
            before[queue.dst].setdefault(place, []).append(receive)
    return before


def _preferred(receive: Action, consumer: int, actions: Sequence[Action], i_slot_until: Kind) -> int:
    """Before which of the rank's compute actions a receive would best be posted, by the module's rule."""
    if consumer == 0:
        return 0
    if receive.kind is not Kind.RECV_F:
        return consumer - 1
    ahead = actions[consumer - 1]
    releases = ahead.kind in (i_slot_until, Kind.B) and ahead.chunk == receive.chunk
    return consumer if releases else consumer - 1


def _post_earlier(rows: list[list[Action]], placement: Placement) -> None:
    """Move receives forward, in place, until no send waits in a cycle.

    When every rank is stuck and the data dependencies have no cycle, at least one is stuck in a send whose
    receive its peer has not posted yet, the next of its queue. Posting it where the peer stands now lets the
    send go.
    """
    machine = Rendezvous(rows, placement, lowered=True)
    finished = machine.run()
    while not finished:
        stuck = machine.first_unposted()
        assert stuck is not None, "the data dependencies have a cycle"
        peer, here = rows[stuck.other], machine.position[stuck.other]
        del peer[peer.index(stuck.needed, here)]
        peer.insert(here, stuck.needed)
        finished = machine.run([stuck.other])
