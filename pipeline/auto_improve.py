"""Local search over complete orders: what delays the last operation is moved, as in job-shop scheduling.

Only neighbours on a critical path are exchanged; any other change leaves the cost as it is.
"""

from __future__ import annotations

from math import exp
from random import Random

from pipeline.auto_problem import Order, Problem, Retimed, Timing, fits, measure

POWER = 6  # of the sum of idle times that is made smaller: near the largest, yet it sees the others too
REACH = (1, 1, 2, 3, 5, 8, 13)  # how many operations later a W is tried
WARMTH = 0.005  # how much worse, relative to the score, a step may be at the start; falls to 0


def improve(order: Order, problem: Problem, tries: int, seed: int = 0) -> tuple[Order, float]:
    """The best order found within ``tries`` measurements, and its cost; never worse than ``order``.

    ``order`` must be valid and within the limit. Deterministic: the random choices follow from ``seed``.
    """
    random = Random(seed)
    rows = [list(row) for row in order]
    now = measure(rows, problem)
    assert now is not None, "the order blocks"
    score, retimed = _score(now, problem), Retimed(rows, problem, now)
    best, best_cost = [list(row) for row in rows], now.cost
    used = 0
    while used < tries:
        moves = _moves(rows, now, problem, random)
        if not moves:
            break
        warmth = WARMTH * score * (1 - used / tries)
        accepted = False
        for rank, place in moves[:40]:
            changed = _changed(rows[rank], place, random)
            if changed is None or not fits(changed, problem, rank):
                continue
            before, first, stop = rows[rank], place - 1, min(len(changed), place + max(REACH))
            used += 1
            after = retimed.change(rank, changed, first, stop)
            worse = None if after is None else _score(after, problem) - score
            if after is not None and worse is not None and (worse <= 0 or random.random() < exp(-worse / (warmth + 1e-300))):
                now, score, accepted = after, score + worse, True
                retimed.keep(after)
                if now.cost < best_cost - problem.slack:
                    best, best_cost = [list(row) for row in rows], now.cost
                break
            if after is not None:
                retimed.undo(rank, before, first, stop)
            if used >= tries:
                break
        if not accepted:
            used += 1  # so that a place without a way out is left
    return best, best_cost


def _score(timing: Timing, problem: Problem) -> float:
    work = problem.busiest
    return float(sum(max(0.0, value - work) ** POWER for value in timing.value) ** (1 / POWER))


def _moves(rows: Order, timing: Timing, problem: Problem, random: Random) -> list[tuple[int, int]]:
    """(rank, place) of critical operations that directly follow the one before, on the way to a late end."""
    work = problem.busiest
    late = [rank for rank, value in enumerate(timing.value) if value - work >= 0.8 * (timing.cost - work)]
    rank = random.choice(late)
    place = len(rows[rank]) - 1
    moves = []
    while True:
        binding = timing.binding[rank][place]
        if place and timing.start[rank][place] - timing.end[rank][place - 1] <= problem.slack:
            moves.append((rank, place))
            if binding is None or random.random() < 0.5:
                place -= 1
                continue
        if binding is None:
            break
        rank, place = binding
    random.shuffle(moves)
    return moves


def _changed(row: list, place: int, random: Random) -> list | None:
    """The row with the operation before ``place`` moved behind it (a W: also further); None if it must stay."""
    kind, chunk, microbatch = row[place - 1]
    if kind != "W":
        other, other_chunk, other_microbatch = row[place]
        if chunk == other_chunk and (kind == other or microbatch == other_microbatch):
            return None
        changed = list(row)
        changed[place - 1], changed[place] = row[place], row[place - 1]
        return changed
    target = place - 1
    for _ in range(random.choice(REACH)):
        if target + 1 == len(row) or row[target + 1][:2] == ("W", chunk):
            break
        target += 1
    if target == place - 1:
        return None
    return [*row[: place - 1], *row[place : target + 1], row[place - 1], *row[target + 1 :]]
