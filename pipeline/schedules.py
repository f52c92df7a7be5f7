"""Schedules: pure functions from (ranks, microbatches) to the order of work on each rank.

A schedule returns one list of compute actions (F, I, W) per rank. Sends, receives and the step's end are
added by :mod:`pipeline.lower`; nothing here knows about communication. Within a chunk F, I and W each run in
microbatch order, so that sums do not depend on the schedule.

Every schedule takes any number of ranks and microbatches, from one on. Where the published form needs more
microbatches than there are, the order for enough of them is made and the surplus left out: what remains of a
valid order is valid, and no rank waits longer for it. :meth:`Schedule.notes` says so.

The two schedules on a V of chunks are in :mod:`pipeline.schedules_v`; the registry :data:`SCHEDULES`, below, has all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipeline.actions import Action, Kind
from pipeline.schedules_v import dual_pipe_v, zb_v
from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number

Compute = list[list[Action]]  # one list of compute actions per rank

_F, _I, _W = Kind.F, Kind.I, Kind.W  # looked up once: an enumeration's member costs more than a global name


@dataclass(frozen=True)
class Placement:
    """Which rank holds which chunk: ``ranks[chunk]``.

    Every rank 0 … num_ranks − 1 holds at least one chunk. Neighbouring chunks on one rank hand over in
    memory, all others by send and receive.

    Raises:
        UsageError: no chunk at all, or a rank without one.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = tuple(rank if type(rank) is int else whole_number("a rank of a placement", rank) for rank in self.ranks)
        object.__setattr__(self, "ranks", ranks)
        if not ranks or min(ranks) < 0 or len(set(ranks)) != max(ranks) + 1:
            raise UsageError(f"placement {self.ranks}: each rank from 0 on must hold at least one chunk")

    @classmethod
    def linear(cls, p: int) -> Placement:
        """Chunk r on rank r: one chunk per rank."""
        return cls(tuple(range(whole_number("the number of ranks", p))))

    @classmethod
    def interleaved(cls, p: int, chunks: int) -> Placement:
        """Chunk c on rank c mod p: ``chunks`` per rank, the model goes round the ranks that many times."""
        return cls(tuple(range(whole_number("the number of ranks", p))) * whole_number("the number of chunks", chunks))

    @classmethod
    def v_shaped(cls, p: int) -> Placement:
        """Chunks r and 2p − 1 − r on rank r: the model goes to the last rank and comes back."""
        p = whole_number("the number of ranks", p)
        return cls((*range(p), *reversed(range(p))))

    @property
    def num_chunks(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in stage order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)

    def source(self, chunk: int, direction: str) -> int | None:
        """The chunk whose result ``chunk`` reads: for ``"F"`` the one before, for ``"B"`` the one after."""
        other = chunk - 1 if direction == "F" else chunk + 1
        return other if 0 <= other < len(self.ranks) else None

    def target(self, chunk: int, direction: str) -> int | None:
        """The chunk that reads the result of ``chunk``; None, as for :meth:`source`, at the end."""
        other = chunk + 1 if direction == "F" else chunk - 1
        return other if 0 <= other < len(self.ranks) else None

    def crosses(self, chunk: int, other: int | None) -> bool:
        """True if ``other`` exists and lives on another rank, so that the hand-over is a message."""
        return other is not None and self.ranks[chunk] != self.ranks[other]


def _check(p: int, m: int, w_delay: int | None = 0) -> None:
    lag = 0 if w_delay is None else w_delay
    for what, value in (("the number of stages", p), ("the number of microbatches", m), ("w_delay", lag)):
        whole_number(what, value)
    if p < 1 or m < 1:
        raise UsageError(f"a schedule needs at least one stage and one microbatch, not p={p}, m={m}")
    if w_delay is not None and w_delay < 0:
        raise UsageError(f"w_delay={w_delay}: W cannot run before its I; use 0 or more, or null for the stage index")


def _lag(w_delay: int | None, rank: int) -> int:
    return rank if w_delay is None else w_delay


def _with_weights(order: list[Action], lag: int) -> list[Action]:
    """An order of F and I, completed: after each I the W that trails it by ``lag`` I, after the last I the rest."""
    weights = [Action(_W, action.chunk, action.microbatch) for action in order if action.kind is _I]
    last, seen, done = len(weights), 0, 0
    actions = []
    for action in order:
        actions.append(action)
        if action.kind is _I:
            seen += 1
            due = seen - lag if seen < last else last
            if done < due:
                actions += weights[done:due]
                done = due
    return actions


def ahead_order(stage: int, m: int, ahead: int, lag: int = 0) -> list[Action]:
    """One stage of one chunk per rank: ``ahead`` ≥ 1 F, then I and F in turn; W trails its I by ``lag``."""
    order = [Action(_F, stage, microbatch) for microbatch in range(min(ahead, m))]
    for microbatch in range(m):
        order.append(Action(_I, stage, microbatch))
        if ahead + microbatch < m:
            order.append(Action(_F, stage, ahead + microbatch))
    return _with_weights(order, lag)


def gpipe(p: int, m: int, w_delay: int | None = 0) -> Compute:
    """GPipe (Huang et al., 2019): all F, then all I, each in microbatch order.

    Args:
        p: stages, one per rank.
        m: microbatches.
        w_delay: microbatches by which W trails I (0: directly after it; None: the stage index).

    Returns: per rank, 3·m compute actions. Raises: UsageError for p < 1, m < 1 or w_delay < 0.
    """
    _check(p, m, w_delay)
    return [ahead_order(stage, m, m, _lag(w_delay, stage)) for stage in range(p)]


def one_f_one_b(p: int, m: int, w_delay: int | None = 0) -> Compute:
    """1F1B (PipeDream-flush; Narayanan et al., 2021) with the backward split in I and W.

    Stage s runs p − s F, then I and F in turn, then the remaining I. At most min(m, p − s) microbatches are
    between F and I at a time. Arguments, result and errors as :func:`gpipe`.
    """
    _check(p, m, w_delay)
    return [ahead_order(stage, m, p - stage, _lag(w_delay, stage)) for stage in range(p)]


def zb_h1(p: int, m: int) -> Compute:
    """ZB-H1 ("Zero Bubble Pipeline Parallelism", Qi et al., ICLR 2024): 1F1B whose W trails I by the stage index.

    Holds, with the W still to come, as much on every stage as 1F1B on its first: p microbatches. Result and errors
    as :func:`gpipe`.
    """
    _check(p, m)
    return [ahead_order(stage, m, p - stage, stage) for stage in range(p)]


def zb_h2(p: int, m: int) -> Compute:
    """ZB-H2 (as :func:`zb_h1`): stage s runs 2(p − s) − 1 F ahead, W trails by 2s; holds 2p − 1 microbatches."""
    _check(p, m)
    return [ahead_order(stage, m, 2 * (p - stage) - 1, 2 * stage) for stage in range(p)]


def interleaved(p: int, m: int, w_delay: int | None = 0, chunks: int = 2) -> Compute:
    """Interleaved 1F1B (Narayanan et al., 2021): rank r holds chunks r, r + p, r + 2p …

    F runs through groups of p microbatches, each group through all chunks of the rank; I in the same way with
    the chunks reversed. Rank r runs 2(p − r − 1) + (chunks − 1)p F ahead and then F and I in turn. The published
    form needs m divisible by p; here the last group is cut.

    Args:
        p: ranks.
        m: microbatches.
        w_delay: how many I of the rank lie between an I and its W (None: the rank).
        chunks: chunks per rank; 1 is :func:`one_f_one_b`.

    Returns: per rank, 3·m·chunks compute actions. Raises: UsageError for p, m or chunks < 1, or w_delay < 0.
    """
    _check(p, m, w_delay)
    if chunks < 1:
        raise UsageError(f"a rank needs at least one chunk, not {chunks}")
    whole = -(-m // p) * p
    work = [(group, chunk) for group in range(0, whole, p) for chunk in range(chunks)]
    plan = []
    for rank in range(p):
        forward = [Action(_F, chunk * p + rank, group + k) for group, chunk in work for k in range(p)]
        backward = [Action(_I, (chunks - 1 - chunk) * p + rank, group + k) for group, chunk in work for k in range(p)]
        ahead = 2 * (p - rank - 1) + (chunks - 1) * p if chunks > 1 else p - rank - 1
        order = forward[:ahead]
        for place, action in enumerate(backward):
            order += [*forward[ahead + place : ahead + place + 1], action]
        if whole > m:
            order = [action for action in order if action.key[1] < m]
        plan.append(_with_weights(order, _lag(w_delay, rank)))
    return plan


def fused(compute: Compute) -> Compute:
    """The same order with B in the place of every I that its W directly follows: the undivided backward."""
    plan = []
    for row in compute:
        merged: list[Action] = []
        for action in row:
            if action.kind is _W and merged and merged[-1].kind is _I and merged[-1].key == action.key:
                merged[-1] = Action(Kind.B, *action.key)
            else:
                merged.append(action)
        plan.append(merged)
    return plan


@dataclass(frozen=True)
class Schedule:
    """A named schedule: how to make its order, and where its chunks lie.

    Args:
        name: as in a configuration and on the command line.
        make: (p, m, w_delay, chunks per rank) → compute actions per rank.
        shape: ``linear`` (one chunk per rank), ``interleaved`` (any number) or ``v`` (two).
        own_lag: the schedule itself says when W runs; ``w_delay`` must stay 0 (or None).
        enough: the microbatches that the published form needs, as a function of p and m; fewer are degraded.
    """

    name: str
    make: Callable[[int, int, int | None, int], Compute]
    shape: str
    own_lag: bool
    enough: Callable[[int, int], int]

    def __call__(self, p: int, m: int, w_delay: int | None = 0, chunks: int | None = None) -> Compute:
        """The compute actions per rank. Raises UsageError for numbers out of range."""
        p, m = whole_number("the number of stages", p), whole_number("the number of microbatches", m)
        _check(p, m, w_delay)
        if self.own_lag and w_delay:
            raise UsageError(f"w_delay={w_delay}: schedule {self.name} itself sets when W runs: set w_delay to 0")
        return self.make(p, m, w_delay, self.chunks(chunks))

    def chunks(self, wanted: int | None = None) -> int:
        """Chunks per rank; ``wanted`` None: the schedule's usual number. Raises UsageError for one it cannot have."""
        usual = 1 if self.shape == "linear" else 2
        wanted = None if wanted is None else whole_number("the number of chunks", wanted)
        if wanted is None or wanted == usual or (self.shape == "interleaved" and wanted >= 1):
            return usual if wanted is None else wanted
        if self.shape == "interleaved":
            raise UsageError(f"a rank needs at least one chunk, not {wanted}")
        number = "one chunk" if usual == 1 else "two chunks"
        raise UsageError(f"schedule {self.name} has {number} per rank, not {wanted}")

    def placement(self, p: int, chunks: int | None = None) -> Placement:
        """Which rank holds which chunk. Raises UsageError for chunks that the schedule cannot have."""
        number = self.chunks(chunks)
        return Placement.v_shaped(p) if self.shape == "v" else Placement.interleaved(p, number)

    def notes(self, p: int, m: int) -> tuple[str, ...]:
        """What differs from the published form at this size, for people; empty when nothing does."""
        enough = self.enough(p, m)
        if m >= enough:
            return ()
        return (f"{self.name} is published for {enough} microbatches on {p} ranks; its order is cut to the {m} there are",)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("1f1b", lambda p, m, delay, _: one_f_one_b(p, m, delay), "linear", False, lambda p, m: 1),
            Schedule("gpipe", lambda p, m, delay, _: gpipe(p, m, delay), "linear", False, lambda p, m: 1),
            Schedule("interleaved-1f1b", interleaved, "interleaved", False, lambda p, m: -(-m // p) * p),
            Schedule("zb-h1", lambda p, m, *_: zb_h1(p, m), "linear", True, lambda p, m: p),
            Schedule("zb-h2", lambda p, m, *_: zb_h2(p, m), "linear", True, lambda p, m: 2 * p - 1),
            Schedule("zb-v", lambda p, m, *_: zb_v(p, m), "v", True, lambda p, m: 2 * p - 1),
            Schedule("dualpipev", lambda p, m, *_: dual_pipe_v(p, m), "v", True, lambda p, m: 2 * p),
        )
    }
)
"""Every named schedule. ``auto`` is not among them: it is made from measured times, see :mod:`pipeline.auto`."""


def find_schedule(name: str) -> Schedule:
    """The schedule of a name. Raises UsageError that lists the names."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
