"""For the pipeline's tests: random plans, and an independent judge of whether a plan can finish."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from random import Random

from hypothesis import strategies as st

from pipeline.actions import Action, Kind
from pipeline.schedules import SCHEDULES, Placement

PLACEMENTS = [
    (0,),
    (0, 0),
    (0, 1),
    (0, 1, 0, 1),
    (0, 1, 1, 0),
    (0, 1, 2),
    (0, 1, 2, 2, 1, 0),
    (1, 0),
    (2, 0, 1, 0),
]


PLAIN = [name for name, schedule in SCHEDULES.items() if schedule.shape == "linear" and not schedule.own_lag]


@st.composite
def named(draw: st.DrawFn, ranks: int = 6, microbatches: int = 12) -> tuple[str, int, int, int | None, int | None]:
    """Arguments of a named schedule: (name, p, m, w_delay, chunks per rank)."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    w_delay = draw(st.sampled_from([0, None]) if schedule.own_lag else st.none() | st.integers(0, 9))
    chunks = draw(st.none() | st.integers(1, 3)) if schedule.shape == "interleaved" else None
    return schedule.name, draw(st.integers(1, ranks)), draw(st.integers(1, microbatches)), w_delay, chunks


def random_compute(
    seed: int, placement: Placement, microbatches: int, *, unordered: bool
) -> list[list[Action]]:
    """Any order of work whose data dependencies hold; B instead of I and W here and there."""
    random = Random(seed)
    fused = {
        (chunk, microbatch)
        for chunk in range(placement.num_chunks)
        for microbatch in range(microbatches)
        if random.random() < 0.3
    }
    waiting: list[Action] = []
    for chunk in range(placement.num_chunks):
        for microbatch in range(microbatches):
            kinds = (Kind.F, Kind.B) if (chunk, microbatch) in fused else (Kind.F, Kind.I, Kind.W)
            waiting += [Action(kind, chunk, microbatch) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    done: set[tuple[str, int, int]] = set()
    while waiting:
        ready = [action for action in waiting if _ready(action, done, placement, unordered)]
        action = random.choice(ready)
        waiting.remove(action)
        rows[placement.ranks[action.key[0]]].append(action)
        done.update((part, *action.key) for part in _parts(action))
    return rows


def _parts(action: Action) -> str:
    return "IW" if action.kind is Kind.B else str(action.kind)


def _ready(action: Action, done: set, placement: Placement, unordered: bool) -> bool:
    chunk, microbatch = action.key
    for part in _parts(action):
        needs = []
        if part == "F" and chunk > 0:
            needs.append(("F", chunk - 1, microbatch))
        if part == "I":
            needs.append(("F", chunk, microbatch))
            if chunk + 1 < placement.num_chunks:
                needs.append(("I", chunk + 1, microbatch))
        if part == "W" and action.kind is Kind.W:
            needs.append(("I", chunk, microbatch))
        if microbatch > 0 and not unordered:
            needs.append((part, chunk, microbatch - 1))
        if any(need not in done for need in needs):
            return False
    return True


@st.composite
def computes(draw: st.DrawFn, unordered: bool = False) -> tuple[list[list[Action]], Placement, int]:
    """(rows, placement, microbatches) of a valid compute plan."""
    placement = Placement(draw(st.sampled_from(PLACEMENTS)))
    microbatches = draw(st.integers(1, 4))
    rows = random_compute(draw(st.integers(0, 2**32)), placement, microbatches, unordered=unordered)
    return rows, placement, microbatches


def can_finish(rows: list[list[Action]], placement: Placement, *, lowered: bool) -> bool:
    """True unless the plan's waits form a cycle, by sorting the graph of all waits (no simulation).

    Each action waits for the one before it on its rank. Lowered, a send also waits for the receive it meets
    in its queue (rendezvous), and F and I wait for the send of their input; otherwise for its producer.
    """
    graph: dict[object, set] = {}
    where = {
        action: (rank, place)
        for rank, row in enumerate(rows)
        for place, action in enumerate(row)
        if action.chunk is not None
    }
    for rank, row in enumerate(rows):
        for place, action in enumerate(row):
            waits = graph.setdefault((rank, place), set())
            if place:
                waits.add((rank, place - 1))
            if action.chunk is None or action.kind in (Kind.W, Kind.COMMIT, Kind.RECV_F, Kind.RECV_B):
                continue
            chunk, microbatch = action.key
            forward = action.kind in (Kind.F, Kind.SEND_F)
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                peer = chunk + 1 if forward else chunk - 1
                waits.add(where[Action(Kind.RECV_F if forward else Kind.RECV_B, peer, microbatch)])
                continue
            source = chunk - 1 if forward else chunk + 1
            if not 0 <= source < placement.num_chunks:
                continue
            if lowered and placement.ranks[source] != rank:
                waits.add(where[Action(Kind.SEND_F if forward else Kind.SEND_B, source, microbatch)])
            elif forward:
                waits.add(where[Action(Kind.F, source, microbatch)])
            else:
                split = Action(Kind.I, source, microbatch)
                waits.add(where[split if split in where else Action(Kind.B, source, microbatch)])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True
