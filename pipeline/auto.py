"""``auto``: a schedule made from measured times and a memory limit.

For each allowed placement all named schedules and a number of other orders (:mod:`pipeline.auto_orders`) are tried,
those within the limit are timed, and the best are improved by local search (:mod:`pipeline.auto_improve`); of a large
problem the other orders are chosen with fewer microbatches (:mod:`pipeline.auto_trial`). The result
is therefore at least as good, by the cost model of :mod:`pipeline.simulate`, as every named schedule that keeps the
limit. A lower bound (:mod:`pipeline.auto_exact`) says how far from the best possible it may be at most; for small
cases an exact search says how far it is.

The result depends on the arguments alone: no clock and no unseeded random number. It may be computed on one rank and
sent to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from pipeline.actions import collector_paused
from pipeline.auto_exact import Exact, lower_bound, search
from pipeline.auto_improve import improve
from pipeline.auto_problem import Problem, from_actions, to_actions
from pipeline.auto_trial import CHOSEN, KINDS, NAMED, Candidate, Trial, held, shortened, starts
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from pipeline.slots import Holding
from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number

PerRank = float | Sequence[float]  # one number, or one per rank

SHAPES = ("linear", "interleaved", "v")
OBJECTIVES = ("span", "makespan")
SHARES = (0.5, 0.25, 0.25)  # of the search's effort, for the best orders that differ
EFFORT = 12_000_000  # operations timed in local search with effort 1
MOST_TRIES = 8000
MOST_EXACT = 150  # operations; the search goes as deep as there are


@dataclass(frozen=True)
class Auto:
    """What :func:`auto` found.

    ``named`` has the cost of every named schedule that keeps the limit. ``bound`` is below the cost of any order on
    the allowed placements, so the plan is within ``cost / bound − 1`` of the optimum.
    """

    plan: Plan
    cost: float
    origin: str
    problem: Problem
    bound: float
    named: dict[str, float]
    tried: int

    @property
    def gap(self) -> float:
        """The most by which the optimum may be better, as a fraction of it."""
        return self.cost / self.bound - 1


def auto(
    p: int,
    m: int,
    T_F: PerRank,  # noqa: N803 - the paper's names
    T_I: PerRank,  # noqa: N803
    T_W: PerRank,  # noqa: N803
    T_comm: float = 0.0,  # noqa: N803
    *,
    limit: PerRank | None = None,
    M_B: PerRank = 1.0,  # noqa: N803
    M_W: PerRank | None = None,  # noqa: N803
    shapes: Sequence[str] = SHAPES,
    objective: str = "span",
    effort: float = 1.0,
    window: str = "step",
    holding: Holding | None = None,
) -> Auto:
    """The best plan found for these times under this memory limit.

    Args:
        p, m: ranks and microbatches, at least 1.
        T_F, T_I, T_W: time of one F, I, W of all the layers of a rank: one number, or one per rank. Where a placement
            has two chunks per rank each takes half.
        T_comm: latency of a message.
        limit: the activation memory that a rank may hold, in the unit of ``M_B``; None: without limit.
        M_B, M_W: activation memory of one microbatch, all the layers of a rank, after F and after I; ``M_W`` None: as
            ``M_B``, the safe assumption.
        shapes: the placements to try: ``linear`` (one chunk per rank), ``interleaved`` and ``v`` (two).
        objective: what is made small: the paper's stage ``span``, or the ``makespan`` (see :mod:`pipeline.simulate`).
        effort: how long to search; 1 takes seconds, 0 only tries the orders. Where they are chosen with fewer microbatches,
            only what is above 1 goes into improving them.
        window, holding: of the plan, see :func:`pipeline.plan.make_plan`.

    Raises:
        UsageError: a number out of range, an unknown shape or objective, or a limit that no plan can keep.
    """
    p, m = whole_number("the number of stages", p), whole_number("the number of microbatches", m)
    problems = {
        shape: _problem(shape, p, m, (T_F, T_I, T_W), T_comm, (M_B, M_B if M_W is None else M_W), limit, objective)
        for shape in _checked(p, m, shapes, objective, effort)
    }
    return solve(problems, effort=effort, window=window, holding=holding)


@collector_paused()
def solve(
    problems: Mapping[str, Problem],
    *,
    effort: float = 1.0,
    window: str = "step",
    holding: Holding | None = None,
    tolerance: float = 0.0,
) -> Auto:
    """:func:`auto` where each chunk has times and sizes of its own.

    Args:
        problems: one for each placement that may be used, by its name in :data:`SHAPES`; :func:`placement_of` places.
        effort, window, holding: as of :func:`auto`.
        tolerance: of the plans that cost at most this fraction more than the best, and no more than any named schedule within
            the limit, the one that holds least is taken.

    Raises:
        UsageError: a limit that no plan can keep.
    """
    trial = Trial(problems, effort, tolerance)
    trial.make(NAMED)  # always, and in full: no plan may be worse
    made, fewer = 0, shortened(problems)
    if fewer is not None and tolerance == 0:
        trial.make_optimal()
    if fewer is not None and not trial.wanted.settled:
        short = Trial(fewer, effort, tolerance, keep=CHOSEN)
        for kind in KINDS:
            short.make(kind)
        made = short.made
        trial.make_these(short.promising())
    if fewer is None or not trial.found:
        for kind in KINDS[1:]:
            trial.make(kind)
    if not trial.found:
        raise UsageError(_too_small(list(problems.values())))
    best = _improved(trial.candidates, effort if fewer is None else max(0.0, effort - 1))
    if tolerance > 0:
        best = min(trial.equal(best), key=held)  # of those that hold as much, the fastest: they are sorted
    bound = min(map(lower_bound, problems.values()))
    compute = to_actions(best.order)
    m = best.problem.microbatches
    plan = make_plan("auto", compute, best.problem.placement, m, window=window, holding=holding)
    return Auto(plan, best.cost, best.name, best.problem, bound, trial.named, made + trial.made)


def placement_of(shape: str, p: int) -> Placement:
    """The placement of a name in :data:`SHAPES`: one chunk on each of ``p`` ranks, or two."""
    return {
        "linear": Placement.linear(p),
        "interleaved": Placement.interleaved(p, 2),
        "v": Placement.v_shaped(p),
    }[shape]


def exact(result: Auto, max_nodes: int = 200_000) -> Exact:
    """The optimum on the placement that ``result`` chose, by branch and bound; for a few dozen operations.

    ``proven`` is False where ``max_nodes`` did not suffice: then it is the best order seen.

    Raises: UsageError: more than 150 operations, for which no search ends.
    """
    if result.problem.operations > MOST_EXACT:
        raise UsageError(f"{result.problem.operations} operations are too many for an exact search; {MOST_EXACT} at most")
    return search(result.problem, from_actions(_compute(result.plan)), result.cost, max_nodes)


def _compute(plan: Plan) -> list[list]:
    return [[action for action in row if action.is_compute] for row in plan.actions]


def _checked(p: int, m: int, shapes: Sequence[str], objective: str, effort: float) -> Sequence[str]:
    if p < 1 or m < 1:
        raise UsageError(f"a schedule needs at least one stage and one microbatch, not p={p}, m={m}")
    unknown = [shape for shape in shapes if shape not in SHAPES]
    if unknown or not shapes:
        raise UsageError(f"unknown placement {', '.join(unknown) or 'list'}; use one or more of {', '.join(SHAPES)}")
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective!r}; use one of {', '.join(OBJECTIVES)}")
    if not 0 <= effort < float("inf"):
        raise UsageError(f"effort={effort}: a number from 0 on")
    return shapes


def _problem(
    shape: str,
    p: int,
    m: int,
    times: tuple[PerRank, PerRank, PerRank],
    comm: float,
    sizes: tuple[PerRank, PerRank],
    limit: PerRank | None,
    objective: str,
) -> Problem:
    """Times and sizes per rank, spread evenly over the chunks of a placement."""
    placement = placement_of(shape, p)
    share = placement.num_chunks // p
    numbers = []
    for label, value in zip(("T_F", "T_I", "T_W", "M_B", "M_W"), (*times, *sizes), strict=True):
        each = _per_rank(label, value, p)
        numbers.append(tuple(each[rank] / share for rank in placement.ranks))
    t_f, t_i, t_w, m_b, m_w = numbers
    _per_rank("T_comm", comm, p)
    if sum(t_f) + sum(t_i) + sum(t_w) <= 0:
        raise UsageError("durations are all zero: there is nothing to schedule")
    if any(after > before for before, after in zip(m_b, m_w, strict=True)):
        raise UsageError("M_W, what is held after I, must not be above M_B, what is held after F")
    held = tuple(2 * m * sum(m_b) for _ in range(p)) if limit is None else _per_rank("limit", limit, p)
    return Problem(placement, m, t_f, t_i, t_w, comm, m_b, m_w, held, objective)


def _per_rank(label: str, value: PerRank, p: int) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * p
    if len(values) != p or any(not isfinite(one) or one < 0 for one in values):
        raise UsageError(f"{label} needs one number from 0 on, or one for each of the {p} ranks, not {value}")
    return values


def _too_small(problems: Sequence[Problem]) -> str:
    for rank in range(len(problems[0].limit)):
        least = min(sum(problem.m_b[chunk] for chunk in problem.chunks_of[rank]) for problem in problems)
        if all(problem.room[rank] < least for problem in problems):
            limit = problems[0].limit[rank]
            return f"the memory limit {limit:g} of rank {rank} is below one microbatch, which holds {least:g} there"
    return f"no plan found within the memory limit {min(problems[0].limit):g}; raise it"


def _improved(found: Sequence[Candidate], effort: float) -> Candidate:
    """The best candidate after local search from the best few that differ; as given where it finds nothing."""
    best = found[0]
    for candidate, share in zip(starts(found), SHARES, strict=False):
        if best.cost <= lower_bound(best.problem) + best.problem.slack:
            break
        tries = int(share * min(MOST_TRIES, effort * EFFORT / candidate.problem.operations))
        order, cost = improve(candidate.order, candidate.problem, tries) if tries else (candidate.order, candidate.cost)
        if cost < best.cost:
            best = Candidate(f"{candidate.name}, improved", candidate.problem, order, cost)
    return best
