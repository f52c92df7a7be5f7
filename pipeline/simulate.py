"""How long a plan takes and how much it holds, by the model of "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024).

The work of a rank runs in order, one piece at a time. A result reaches another rank ``T_comm`` after its
producer ended; messages are pure latency and occupy no compute. Commits, reduction and the optimizer step take
no time here. Two conventions say what a step costs:

* *stage span*, the paper's: the longest time, over ranks, from the start of the rank's first F to the end of its
  last work. A rank's steps can then overlap another rank's: nothing waits for all ranks between two steps.
* *makespan*: from the start of the first work to the end of the last, on any rank. That is what a step takes when
  its end waits for everybody, as a global gradient norm does.

The bubble rate is (cost − work) / cost, where work is m · (T_F + T_I + T_W) for one chunk per rank (the busiest
rank's, if they differ). The paper's 1F1B has one undivided backward, B = I + W, which sends its gradient when all
of it has run: :func:`pipeline.schedules.fused` makes such a plan, and its published bubble rates follow. With I
and W apart 1F1B sends after I, and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.actions import Action, Kind, place_of
from pipeline.plan import Plan
from qeffect_lm.errors import UsageError

Duration = float | Sequence[float]  # one number, or one per chunk
_SPLIT = (Kind.F, Kind.I, Kind.W)


@dataclass(frozen=True)
class Simulation:
    """``start[rank][position]`` and ``end[rank][position]`` of each action, in the unit of the durations.

    ``busy[rank]`` is the rank's compute time. ``cost`` and ``bubble`` are by stage span, ``makespan`` and
    ``makespan_bubble`` by makespan.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    cost: float
    bubble: float
    makespan: float
    makespan_bubble: float


def _listed(duration: Duration) -> Duration:
    """An array or tensor as the numbers it holds."""
    numbers = getattr(duration, "tolist", None)
    return duration if numbers is None else numbers()  # type: ignore[no-any-return]


def _of_chunk(duration: Duration, chunk: int) -> float:
    return float(duration[chunk]) if isinstance(duration, Sequence) else float(duration)


def simulate(
    plan: Plan,
    T_F: Duration,  # noqa: N803 - the paper's names
    T_I: Duration,  # noqa: N803
    T_W: Duration,  # noqa: N803
    T_comm: float = 0.0,  # noqa: N803
) -> Simulation:
    """Run a valid plan against the clock.

    Args:
        plan: as :func:`pipeline.plan.build_plan` makes it.
        T_F, T_I, T_W: time of one F, I, W: one number, or one per chunk. B takes T_I + T_W.
        T_comm: latency of a message.

    Raises:
        UsageError: a negative time, no work at all, or not one time per chunk.
    """
    T_F, T_I, T_W, T_comm = _listed(T_F), _listed(T_I), _listed(T_W), _listed(T_comm)  # type: ignore[assignment]  # noqa: N806
    for duration in (T_F, T_I, T_W, T_comm):
        listed = isinstance(duration, Sequence)
        values = list(duration) if isinstance(duration, Sequence) else [duration]
        if min(values, default=-1.0) < 0 or (listed and len(values) != plan.placement.num_chunks):
            raise UsageError(f"durations must not be negative and, if a list, one per chunk: {duration}")
    chunks = range(plan.placement.num_chunks)
    lengths = {kind: [_of_chunk(time, c) for c in chunks] for kind, time in zip(_SPLIT, (T_F, T_I, T_W), strict=True)}
    lengths[Kind.B] = [sum(pair) for pair in zip(lengths[Kind.I], lengths[Kind.W], strict=True)]
    start, end = _run(plan, lengths, T_comm)
    busy = tuple(
        sum([lengths[action.kind][place_of(action)[0]] if action.kind in lengths else 0.0 for action in row])
        for row in plan.actions
    )
    cost = max(_extent(*rank) for rank in zip(plan.actions, start, end, strict=True))
    if cost <= 0:
        raise UsageError("durations are all zero: there is nothing to simulate")
    makespan = max(ends[-1] for ends in end)  # the first F of chunk 0 starts at 0
    freeze = tuple(map(tuple, start)), tuple(map(tuple, end))
    work = max(busy)
    bubbles = [max(0.0, (total - work) / total) for total in (cost, makespan)]  # rounding may give −1e-16
    return Simulation(*freeze, busy, cost, bubbles[0], makespan, bubbles[1])


def _run(plan: Plan, lengths: dict[Kind, list[float]], t_comm: float) -> tuple[list[list[float]], list[list[float]]]:
    """When each action starts and ends. A rank runs as far as it can, and wakes those that wait for its results."""
    rows, placement, m = plan.actions, plan.placement, plan.microbatches
    chunks = range(placement.num_chunks)
    # Per kind and chunk: where its input comes from, how long that takes, and which rank reads its result.
    inputs: dict[Kind, list[tuple[list[float | None], float] | None]] = {}
    outputs: dict[Kind, list[tuple[list[float | None], int | None]]] = {}
    for direction, kinds in (("F", (Kind.F,)), ("B", (Kind.I, Kind.B))):
        made: list[list[float | None]] = [[None] * m for _ in chunks]
        sources = [placement.source(chunk, direction) for chunk in chunks]
        targets = [placement.target(chunk, direction) for chunk in chunks]
        for kind in kinds:
            inputs[kind] = [
                None if source is None else (made[source], t_comm * placement.crosses(chunk, source))
                for chunk, source in enumerate(sources)
            ]
            outputs[kind] = [
                (made[chunk], None if target is None else placement.ranks[target]) for chunk, target in enumerate(targets)
            ]
    start: list[list[float]] = [[] for _ in rows]
    end: list[list[float]] = [[] for _ in rows]
    awake, listed = list(range(len(rows))), [True] * len(rows)
    while awake:
        rank = awake.pop()
        listed[rank] = False
        row, starts, ends = rows[rank], start[rank], end[rank]
        now = ends[-1] if ends else 0.0
        for position in range(len(ends), len(row)):
            action = row[position]
            kind = action.kind
            if kind not in lengths:
                starts.append(now)
                ends.append(now)
                continue
            chunk, microbatch = place_of(action)
            if kind is not Kind.W:
                source = inputs[kind][chunk]
                if source is not None:
                    done = source[0][microbatch]
                    if done is None:
                        break
                    now = max(done + source[1], now)
            starts.append(now)
            now += lengths[kind][chunk]
            ends.append(now)
            if kind is not Kind.W:
                results, reader = outputs[kind][chunk]
                results[microbatch] = now
                if reader is not None and reader != rank and not listed[reader]:
                    listed[reader] = True
                    awake.append(reader)
    finished = all(len(done) == len(row) for done, row in zip(end, rows, strict=True))
    assert finished, "the plan is not valid"
    return start, end


def _extent(row: Sequence[Action], start: Sequence[float], end: Sequence[float]) -> float:
    work = [position for position, action in enumerate(row) if action.is_compute]
    return max(end[position] for position in work) - start[work[0]]


def peak_activations(
    rows: Sequence[Sequence[Action]],
    M_B: Duration = 1.0,  # noqa: N803 - the paper's names
    M_W: Duration = 1.0,  # noqa: N803
) -> tuple[float, ...]:
    """The most activation memory that each rank holds: F adds M_B, I changes it to M_W, W releases that.

    Args:
        rows: the actions of each rank, lowered or not.
        M_B: what one microbatch of a chunk holds after F: one number, or one per chunk; any unit.
        M_W: what of it is left after I, at most M_B.

    Returns: per rank, in the unit of M_B; exact in the numbers held, not summed up step by step.

    Raises: UsageError: a negative size, or M_W above M_B.
    """
    M_B, M_W = _listed(M_B), _listed(M_W)  # noqa: N806
    for values in zip(*(size if isinstance(size, Sequence) else [size] for size in (M_B, M_W)), strict=False):
        if not 0 <= values[1] <= values[0]:
            raise UsageError(f"activation sizes need 0 ≤ M_W ≤ M_B, not M_B {M_B}, M_W {M_W}")
    peaks = []
    for row in rows:
        after_f: dict[int, int] = {}  # chunk → microbatches between F and I, and between I and W
        after_i: dict[int, int] = {}
        seen: set[tuple[int, ...]] = set()  # numbers held at some F
        most = 0.0
        for action in row:
            kind, chunk = action.kind, action.chunk
            if kind is Kind.F:
                after_f[chunk] = after_f.get(chunk, 0) + 1  # type: ignore[index, arg-type]
                numbers = (*after_f.values(), -1, *after_i.values())
                if numbers not in seen:
                    seen.add(numbers)
                    held = sum(count * _of_chunk(M_B, chunk) for chunk, count in after_f.items())
                    held += sum(count * _of_chunk(M_W, chunk) for chunk, count in after_i.items())
                    most = max(most, held)
            elif kind is Kind.W:
                after_i[chunk] -= 1  # type: ignore[index]
            elif kind is Kind.I or kind is Kind.B:
                after_f[chunk] -= 1  # type: ignore[index]
                after_i[chunk] = after_i.get(chunk, 0) + (kind is Kind.I)  # type: ignore[index, arg-type]
        peaks.append(most)
    return tuple(peaks)
