"""The orders that :mod:`pipeline.auto` tries: which there are, which of them can still matter, which were found.

Where a step has many microbatches, most of them are alike: the first fill the pipeline, the last drain it, and in between
an order repeats itself. So a large problem's orders are first tried with fewer microbatches (:func:`shortened`), and only
the best of them are made in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from pipeline.auto_exact import lower_bound
from pipeline.auto_orders import float_weights, greedy
from pipeline.auto_problem import Order, Problem, fits, from_actions, measure, to_actions
from pipeline.schedules import SCHEDULES
from pipeline.simulate import peak_activations

PATIENCE = (0.0, 0.5, 1.0)  # see float_weights; tried in this order
STARTS = 3  # the best orders, of different cost, that are worth going on with: in local search
CHOSEN = 2  # and those that, tried with fewer microbatches, are worth making in full
NAMED, FLOATING, GREEDY = "named", "floating", "greedy"  # where an order comes from
KINDS = (NAMED, FLOATING, GREEDY)  # the cheapest first: a good order early saves much of the dearer ones
LARGE = 10_000  # operations above which the first order that is known to be optimal ends the search
LONG = 20_000  # operations above which orders are first tried with fewer microbatches
FILLED = 3  # microbatches per rank that such a trial has: enough to fill the pipeline, to go on for a while, and to drain it
MADE = 3_000_000  # operations in orders made and timed per placement with effort 1 or less; the named ones always are

Place = tuple[int, int]  # of an order: (placement, number among its guesses)


@dataclass(frozen=True)
class Candidate:
    """An order within the limit: where it comes from, its problem (placement and times), and its cost."""

    name: str
    problem: Problem
    order: Order
    cost: float


class Trial:
    """Orders of several placements, made and timed; ``named`` has the costs of the named ones within the limit.

    Args:
        problems: one for each placement, by its name.
        effort: see :data:`MADE`.
        tolerance: what is found matters up to this fraction above the best.
        keep: how many of the best orders, of different cost, matter.
    """

    def __init__(self, problems: Mapping[str, Problem], effort: float, tolerance: float, keep: int = STARTS) -> None:
        self.guesses = [_Guesses(shape, problem, effort) for shape, problem in problems.items()]
        self.wanted = _Wanted(problems.values(), tolerance, keep)
        self.found: list[tuple[float, Place, Candidate]] = []
        self.named: dict[str, float] = {}

    @property
    def made(self) -> int:
        """How many orders were made, complete or given up."""
        return sum(guesses.made for guesses in self.guesses)

    @property
    def candidates(self) -> list[Candidate]:
        """The orders found, in the order of their cost."""
        return [candidate for *_, candidate in self._sorted()]

    def make(self, kind: str, patience: Sequence[float] = PATIENCE) -> None:
        """Make the orders of a kind that can matter."""
        for number, guesses in enumerate(self.guesses):
            for place, name, order in guesses.make(kind, patience, self.wanted):
                self._add((number, place), name, order, kind)

    def make_optimal(self) -> None:
        """Look for an order that is known to be optimal, where each gap has its W: others are given up at their first gaps."""
        most = self.wanted.most
        self.wanted.most = min(most, self.wanted.optimum)
        self.make(FLOATING, PATIENCE[:1])
        if not self.wanted.settled:
            self.wanted.most = most

    def make_these(self, places: Iterable[Place]) -> None:
        """Make these orders, the best guess first; they are not named ones."""
        for number, place in places:
            if not self.wanted.settled:
                for name, order in self.guesses[number].make_one(place, self.wanted):
                    self._add((number, place), name, order, GREEDY)

    def _add(self, at: Place, name: str, order: Order, kind: str) -> None:
        problem = self.guesses[at[0]].problem
        fit = all(fits(row, problem, rank) for rank, row in enumerate(order))
        timing = measure(order, problem) if fit else None
        if timing is not None:
            candidate = Candidate(name, problem, order, timing.cost)
            self.found.append((timing.cost, at, candidate))
            self.wanted.add(candidate)
            if kind == NAMED:
                self.named[name] = timing.cost

    def _sorted(self) -> list[tuple[float, Place, Candidate]]:
        return sorted(self.found, key=lambda one: one[:2])

    def equal(self, best: Candidate) -> list[Candidate]:
        """``best`` and those within the tolerance of it that are no worse than any named one."""
        most = min(best.cost * (1 + self.wanted.tolerance), *self.named.values(), inf)
        return [candidate for candidate in (best, *self.candidates) if candidate.cost <= most]

    def promising(self) -> list[Place]:
        """The places of the best orders that are not named ones, and of the one that holds least within the tolerance."""
        chosen = starts(self.candidates)[: self.wanted.keep]
        if chosen and self.wanted.tolerance > 0:
            chosen.append(min(self.equal(chosen[0]), key=held))
        return [at for _, at, candidate in self._sorted() if candidate in chosen and candidate.name not in SCHEDULES]


def shortened(problems: Mapping[str, Problem]) -> dict[str, Problem] | None:
    """The same problems with fewer microbatches, where the full ones are large and that saves a quarter of them; else None.

    The number keeps its remainder by the number of ranks: interleaved orders run in groups of so many.
    """
    any_problem = next(iter(problems.values()))
    p, m = any_problem.placement.num_ranks, any_problem.microbatches
    each = max(problem.operations for problem in problems.values()) // m
    fewer = max(FILLED * p, LARGE // each)
    fewer += (m - fewer) % p
    if each * m <= LONG or 4 * fewer > 3 * m:
        return None
    return {shape: replace(problem, microbatches=fewer) for shape, problem in problems.items()}


class _Wanted:
    """Up to which cost an order can still matter, given those found so far; dearer ones need not be completed.

    What matters is the best order, those as good within the tolerance, and those that local search would start from; nothing
    but the best once that is known to be the optimum.
    """

    def __init__(self, problems: Iterable[Problem], tolerance: float, keep: int) -> None:
        self.problems, self.tolerance, self.keep = list(problems), tolerance, keep
        self.optimum = min(lower_bound(problem) + problem.slack for problem in self.problems)
        self.found: list[Candidate] = []
        self.most = inf
        self.settled = False  # nothing can be better, and looking for what rounding makes less is not worth the time

    def add(self, candidate: Candidate) -> None:
        if candidate.cost <= self.most:
            self.found.append(candidate)
            self.found.sort(key=lambda one: one.cost)
            best = self.found[0].cost
            kept = [] if best <= self.optimum else starts(self.found)[: self.keep]
            last = best if best <= self.optimum else kept[-1].cost if len(kept) == self.keep else inf
            self.most = max(last, best * (1 + self.tolerance))
            large = max(problem.operations for problem in self.problems) > LARGE
            self.settled = large and best <= self.optimum and self.tolerance == 0
            self.found = [one for one in self.found if one.cost <= self.most]


def held(candidate: Candidate) -> float:
    """Activation memory of the fullest rank at its peak."""
    problem = candidate.problem
    return max(peak_activations(to_actions(candidate.order), problem.m_b, problem.m_w))


def starts(found: Sequence[Candidate]) -> list[Candidate]:
    """Of candidates in the order of their cost those that differ in it, or in their placement."""
    chosen: list[Candidate] = []
    for candidate in found:
        slack = candidate.problem.slack
        if all(abs(candidate.cost - other.cost) > slack or candidate.problem != other.problem for other in chosen):
            chosen.append(candidate)
    return chosen


class _Guesses:
    """The orders of one placement worth timing, best guesses first: the named ones as they are, then with W where it costs
    least, and greedy ones. ``made`` counts those made, complete or given up; :data:`MADE` limits their number."""

    def __init__(self, shape: str, problem: Problem, effort: float) -> None:
        self.problem = problem
        self.most = MADE * max(1.0, effort) / problem.operations
        p, m = problem.placement.num_ranks, problem.microbatches
        self._named = {name: from_actions(schedule(p, m)) for name, schedule in SCHEDULES.items() if schedule.shape == shape}
        self._bases: dict[str, Callable[[], Order]] = {name: partial(self._named.__getitem__, name) for name in self._named}
        if shape == "linear":
            for slope in (1.25, 1.5, 1.75, 2, 2.5, 3):
                self._bases[f"ahead {slope:g}"] = cache(partial(_steeper, problem, slope))
        self.made = 0
        self._none: set[int] = set()  # places of orders that cannot keep the limit

    def make(self, kind: str, patience: Sequence[float], wanted: _Wanted) -> Iterator[tuple[int, str, Order]]:
        """(its place among all guesses, its name, it) of one kind, without those that cannot matter."""
        for place, (one, waits, *_) in enumerate(self._all(wanted)):
            if one == kind and waits in patience and (kind == NAMED or not (wanted.settled or self._before(place) > self.most)):
                for name, order in self.make_one(place, wanted):
                    yield place, name, order

    def make_one(self, place: int, wanted: _Wanted) -> Iterator[tuple[str, Order]]:
        """The name and order at a place; nothing if it cannot keep the limit or cannot matter."""
        *_, name, guess = list(self._all(wanted))[place]
        order = guess()
        if order is None:
            self._none.add(place)
            return
        self.made += 1
        if order:
            yield name, order

    def _before(self, place: int) -> int:
        return place - sum(none < place for none in self._none)

    def _all(self, wanted: _Wanted) -> Iterator[tuple[str, float, str, Callable[[], Order | None]]]:
        """(kind, patience, name, how to make it)."""
        for name in self._named:
            yield NAMED, PATIENCE[0], name, self._bases[name]
        for patience in PATIENCE:
            for name, base in self._bases.items():
                yield FLOATING, patience, f"{name}, W by patience {patience:g}", partial(self._floating, base, patience, wanted)
            for first in ("F", "I", "turns"):
                yield GREEDY, patience, f"greedy {first}, patience {patience:g}", partial(self._greedy, patience, first, wanted)

    def _floating(self, base: Callable[[], Order], patience: float, wanted: _Wanted) -> Order | None:
        return float_weights(base(), self.problem, patience, wanted.most)

    def _greedy(self, patience: float, first: str, wanted: _Wanted) -> Order | None:
        return greedy(self.problem, patience, first, wanted.most)


def _steeper(problem: Problem, slope: float) -> Order:
    """1F1B with ``slope`` times as many F ahead, as far as the limit allows; without W."""
    p, m = problem.placement.num_ranks, problem.microbatches
    order: Order = []
    for stage in range(p):
        most = int(min(m, problem.room[stage] / problem.m_b[stage])) if problem.m_b[stage] > 0 else m
        ahead = max(1, min(most, round(slope * (p - stage))))
        forwards = [("F", stage, microbatch) for microbatch in range(m)]
        backwards = [("I", stage, microbatch) for microbatch in range(m)]
        turns = [operation for pair in zip(backwards, forwards[ahead:], strict=False) for operation in pair]
        order.append([*forwards[:ahead], *turns, *backwards[len(turns) // 2 :]])
    return order
