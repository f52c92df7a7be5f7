"""The same plan on NCCL: no circle between compute and the communicators' own queues, for every schedule and for random plans.

A model of what NCCL does with the engine's transfers, of its own making: the host never waits; each communicator is one queue
of work on each of its two ranks, in the order of issue; a transfer runs when both sides have come to it; it starts after the
compute that was issued before it, and its consumer, or the next writer of a sent buffer, waits for it. Tags do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import product
from random import Random

import pytest

from pipeline.actions import RECEIVES, SENDS, Action, Kind
from pipeline.auto import auto
from pipeline.p2p import queues_of
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.rendezvous import Queue, message_of, queue_of
from pipeline.schedules import SCHEDULES, Placement
from tests.unit.pipeline_plans import PLACEMENTS, random_compute

Communicator = Callable[[Queue], Hashable]


def of_its_own(queue: Queue) -> Hashable:
    """What :class:`pipeline.p2p.Transport` does."""
    return queue


def by_direction(queue: Queue) -> Hashable:
    """One communicator of a pair for outputs and one for gradients, whichever way they go."""
    return frozenset((queue.src, queue.dst)), queue.direction


def shared(queue: Queue) -> Hashable:
    """One communicator for a pair of ranks."""
    return frozenset((queue.src, queue.dst))


def finishes(plan: Plan, communicator: Communicator) -> bool:
    """Issue everything, then let streams run until nothing moves. True if all work was done and each message met its own."""
    compute: list[list[list[Hashable]]] = []  # rank → compute work in order → the transfers it waits for
    lanes: dict[tuple[int, Hashable], list[tuple[Hashable, int]]] = {}  # (rank, communicator) → (transfer, after compute)
    for rank, row in enumerate(plan.actions):
        work: list[list[Hashable]] = []
        pending: dict[Hashable, Hashable] = {}
        slots = plan.slots[rank].i_slots.index
        for action in row:
            if action.kind in (*SENDS, *RECEIVES):
                queue = queue_of(action, plan.placement)
                transfer = queue, message_of(action, plan.placement)
                lanes.setdefault((rank, communicator(queue)), []).append((transfer, len(work)))
                place = slots[action.key] if action.kind in SENDS else action.key[1]
                pending[action.kind, action.key[0], place] = transfer
            elif action.is_compute or action.kind is Kind.REDUCE:
                waits = list(pending) if action.kind is Kind.REDUCE else []
                if action.kind in (Kind.F, Kind.I):
                    receive, send = ("RECV_F", "SEND_F") if action.kind is Kind.F else ("RECV_B", "SEND_B")
                    waits = [(Kind(receive), *action.key), (Kind(send), action.key[0], slots[action.key])]
                work.append([pending.pop(key) for key in waits if key in pending])
        compute.append(work)
    done, issued, moved = [0] * len(compute), set(), True
    ends: dict[Hashable, list[tuple[int, Hashable]]] = {}
    for lane, transfers in lanes.items():
        for transfer, _ in transfers:
            ends.setdefault(transfer, []).append(lane)
    while moved:
        moved = False
        for rank, work in enumerate(compute):
            while done[rank] < len(work) and all(transfer in issued for transfer in work[done[rank]]):
                done[rank] += 1
                moved = True
        for transfers in list(lanes.values()):
            while transfers and _ready(transfers[0][0], ends, lanes, done):
                transfer = transfers[0][0]
                for lane in ends[transfer]:
                    lanes[lane].pop(0)
                issued.add(transfer)
                moved = True
    return all(done[rank] == len(work) for rank, work in enumerate(compute)) and not any(lanes.values())


def _ready(transfer: Hashable, ends: dict, lanes: dict, done: list[int]) -> bool:
    assert len(ends[transfer]) == 2, "a transfer has two ends"
    for lane in ends[transfer]:
        if not lanes[lane] or lanes[lane][0][0] != transfer or lanes[lane][0][1] > done[lane[0]]:
            return False
    return True


CASES = [
    (name, p, m, chunks)
    for name, schedule in SCHEDULES.items()
    for p, m, chunks in product((2, 3, 5), (1, 2, 3, 5, 8), (1, 3) if schedule.shape == "interleaved" else (None,))
]


def test_every_schedule_finishes_on_communicators_of_its_queues():
    for name, p, m, chunks in CASES:
        plan = build_plan(name, p, m, chunks=chunks)
        assert finishes(plan, of_its_own), (name, p, m, chunks)


def test_plans_of_auto_and_any_order_finish():
    for p, limit in product((2, 3), (1.0, None)):
        assert finishes(auto(p, 5, 1.0, 2.0, 0.5, 0.3, limit=limit, effort=0.05, objective="makespan").plan, of_its_own)
    random = Random(3)
    for seed in range(60):
        placement, m = Placement(random.choice(PLACEMENTS)), random.randint(1, 4)
        compute = random_compute(seed, placement, m, unordered=False)
        split = [[part for a in row for part in _parts(a)] for row in compute]
        assert finishes(make_plan("random", split, placement, m), of_its_own), seed


def _parts(action: Action) -> list[Action]:
    return [Action(Kind.I, *action.key), Action(Kind.W, *action.key)] if action.kind is Kind.B else [action]


@pytest.mark.parametrize(
    ("communicator", "shapes"), [(shared, {"linear", "v", "interleaved"}), (by_direction, {"v", "interleaved"})]
)
def test_fewer_communicators_would_not_do(communicator, shapes):
    """Control: with one communicator for a pair of ranks some plans never finish; with one for each direction those where the
    model comes back to a rank still do not.
    """
    few = [case for case in CASES if case[1] <= 3 and case[2] in (2, 5)]
    stuck = {SCHEDULES[n].shape for n, p, m, chunks in few if not finishes(build_plan(n, p, m, chunks=chunks), communicator)}
    assert stuck == shapes


def test_the_transport_knows_every_queue():
    plan = build_plan("zb-v", 2, 3)
    assert queues_of(plan) == sorted(Queue(a, b, d) for a, b in ((0, 1), (1, 0)) for d in "FB")
    assert queues_of(build_plan("1f1b", 2, 3)) == [Queue(0, 1, "F"), Queue(1, 0, "B")]
    assert queues_of(build_plan("zb-v", 1, 3)) == []
