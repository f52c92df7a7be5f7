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

from pipeline.actions import Action, Kind
from pipeline.rendezvous import Queue, Rendezvous, message_of, queue_of
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
    receives = _receives(compute, placement, i_slot_until)
    rows = []
    for rank, actions in enumerate(compute):
        row: list[Action] = []
        for place, action in enumerate(actions):
            row += receives[rank][place]
            row += [action, *_sends(action, placement)]
            if window == "microbatch" and action.kind is not Kind.W:
                row.append(Action(Kind.COMMIT, *action.key, "F" if action.kind is Kind.F else "I"))
        rows.append(row)
    _post_earlier(rows, placement)
    end = [Action(Kind.REDUCE), Action(Kind.STEP)] + [Action(Kind.COMMIT)] * (window == "step")
    return [row + end for row in rows]


def _sends(action: Action, placement: Placement) -> list[Action]:
    """The send that follows a compute action, if its result is needed on another rank."""
    if action.kind is Kind.W:
        return []
    direction = "F" if action.kind is Kind.F else "B"
    target = placement.target(action.key[0], direction)
    if not placement.crosses(action.key[0], target):
        return []
    return [Action(Kind(f"SEND_{direction}"), *action.key)]


def _receives(
    compute: Sequence[Sequence[Action]], placement: Placement, i_slot_until: Kind
) -> list[list[list[Action]]]:
    """``[rank][place]``: the receives posted just before compute action ``place`` of that rank."""
    consumer: dict[Action, int] = {}  # receive → place of its consumer in its rank's compute list
    for row in compute:
        for place, action in enumerate(row):
            if action.kind is Kind.F:
                consumer[Action(Kind.RECV_F, *action.key)] = place
            elif action.kind is not Kind.W:
                consumer[Action(Kind.RECV_B, *action.key)] = place
    queues: dict[Queue, list[Action]] = {}  # in the order of their sends
    for row in compute:
        for action in row:
            for send in _sends(action, placement):
                kind = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
                receive = Action(kind, *message_of(send, placement))
                queues.setdefault(queue_of(send, placement), []).append(receive)
    before: list[list[list[Action]]] = [[[] for _ in row] for row in compute]
    for queue in sorted(queues):
        latest = len(compute[queue.dst])
        posted: list[tuple[int, Action]] = []
        for receive in reversed(queues[queue]):  # no later than any receive behind it in the queue
            latest = min(latest, _preferred(receive, consumer[receive], compute[queue.dst], i_slot_until))
            posted.append((latest, receive))
        for place, receive in reversed(posted):
            before[queue.dst][place].append(receive)
    return before


def _preferred(receive: Action, consumer: int, actions: Sequence[Action], i_slot_until: Kind) -> int:
    """Before which of the rank's compute actions a receive would best be posted, by the module's rule."""
    if consumer == 0:
        return 0
    ahead = actions[consumer - 1]
    releases = ahead.kind in (i_slot_until, Kind.B) and ahead.key[0] == receive.key[0]
    return consumer if receive.kind is Kind.RECV_F and releases else consumer - 1


def _post_earlier(rows: list[list[Action]], placement: Placement) -> None:
    """Move receives forward, in place, until no send waits in a cycle.

    When every rank is stuck and the data dependencies have no cycle, at least one is stuck in a send whose
    receive its peer has not posted yet, the next of its queue. Posting it where the peer stands now lets the
    send go.
    """
    machine = Rendezvous(rows, placement, lowered=True)
    finished = machine.run()
    while not finished:
        stuck = next(filter(None, (machine.obstacle(rank) for rank in range(len(rows)) if machine.at_send(rank))))
        peer, here = rows[stuck.other], machine.position[stuck.other]
        del peer[peer.index(stuck.needed, here)]
        peer.insert(here, stuck.needed)
        finished = machine.run([stuck.other])
