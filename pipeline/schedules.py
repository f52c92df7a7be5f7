"""Schedules: pure functions from (stages, microbatches) to the order of work on each rank.

A schedule returns one list of compute actions (F, I, W) per rank. Sends, receives and the step's end are
added by :mod:`pipeline.lower`; nothing here knows about communication. Within a chunk F, I and W each run in
microbatch order, so that sums do not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipeline.actions import Action, Kind
from qeffect_lm.errors import UsageError

Compute = list[list[Action]]  # one list of compute actions per rank


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
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks or set(self.ranks) != set(range(max(self.ranks) + 1)):
            raise UsageError(f"placement {self.ranks}: each rank from 0 on must hold at least one chunk")

    @classmethod
    def linear(cls, p: int) -> Placement:
        """Chunk r on rank r: one chunk per rank."""
        return cls(tuple(range(p)))

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
        return other if 0 <= other < self.num_chunks else None

    def target(self, chunk: int, direction: str) -> int | None:
        """The chunk that reads the result of ``chunk``; None, as for :meth:`source`, at the end."""
        return self.source(chunk, "B" if direction == "F" else "F")

    def crosses(self, chunk: int, other: int | None) -> bool:
        """True if ``other`` exists and lives on another rank, so that the hand-over is a message."""
        return other is not None and self.ranks[chunk] != self.ranks[other]


def _check(p: int, m: int, w_delay: int | None) -> None:
    if p < 1 or m < 1:
        raise UsageError(f"a schedule needs at least one stage and one microbatch, not p={p}, m={m}")
    if w_delay is not None and w_delay < 0:
        raise UsageError(
            f"w_delay={w_delay}: W cannot run before its I; use 0 or more, or null for the stage index"
        )


def _backward(chunk: int, microbatch: int, m: int, delay: int) -> list[Action]:
    """I of a microbatch, then the W that trails it by ``delay``; after the last I all the W that remain."""
    actions = [Action(Kind.I, chunk, microbatch)]
    last = m if microbatch == m - 1 else microbatch - delay + 1
    first = max(0, microbatch - delay)
    return actions + [Action(Kind.W, chunk, late) for late in range(first, last)]


def gpipe(p: int, m: int, w_delay: int | None = 0) -> Compute:
    """GPipe (Huang et al., 2019): all F, then all I, each in microbatch order.

    Args:
        p: stages, one per rank.
        m: microbatches.
        w_delay: microbatches by which W trails I (0: directly after it; None: the stage index).

    Returns: per rank, 3·m compute actions. Raises: UsageError for p < 1, m < 1 or w_delay < 0.
    """
    _check(p, m, w_delay)
    plan = []
    for stage in range(p):
        delay = stage if w_delay is None else w_delay
        actions = [Action(Kind.F, stage, microbatch) for microbatch in range(m)]
        for microbatch in range(m):
            actions += _backward(stage, microbatch, m, delay)
        plan.append(actions)
    return plan


def one_f_one_b(p: int, m: int, w_delay: int | None = 0) -> Compute:
    """1F1B (PipeDream-flush; Narayanan et al., 2021) with the backward split in I and W.

    Stage s runs min(m, p − 1 − s) F ahead, then alternates F and I, then runs the remaining I. At most
    min(m, p − s) microbatches are between F and I at a time. Arguments, result and errors as :func:`gpipe`.
    """
    _check(p, m, w_delay)
    plan = []
    for stage in range(p):
        delay = stage if w_delay is None else w_delay
        ahead = min(m, p - 1 - stage)
        actions = [Action(Kind.F, stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(m):
            if ahead + microbatch < m:
                actions.append(Action(Kind.F, stage, ahead + microbatch))
            actions += _backward(stage, microbatch, m, delay)
        plan.append(actions)
    return plan


SCHEDULES: Mapping[str, Callable[[int, int, int | None], Compute]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe}
)
