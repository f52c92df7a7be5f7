"""Which scale epoch each action of a plan reads or closes, counted in commits since the step began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.actions import Action, Kind
from qeffect_lm.contract.errors import ScaleOrderError
from qeffect_lm.contract.timeline import Direction, ScaleTimeline


def directions_of(action: Action) -> tuple[Direction, ...]:
    """The directions whose scales a COMMIT moves; none for other actions."""
    if action.kind is not Kind.COMMIT:
        return ()
    if action.chunk is None:
        return tuple(Direction)
    return (Direction.FORWARD if action.detail == "F" else Direction.BACKWARD,)


def commits_before(actions: Sequence[Action]) -> dict[Action, tuple[Direction, int]]:
    """For each F, I and COMMIT its direction, and how many commits of it the step makes before."""
    made = dict.fromkeys(Direction, 0)
    before: dict[Action, tuple[Direction, int]] = {}
    for action in actions:
        closes = directions_of(action)
        reads = {Kind.F: Direction.FORWARD, Kind.I: Direction.BACKWARD, Kind.B: Direction.BACKWARD}.get(action.kind)
        direction = closes[0] if closes else reads
        if direction is not None:
            before[action] = (direction, made[direction])
        for closed in closes:
            made[closed] += 1
    return before


def check_commits(timeline: ScaleTimeline, first: Mapping[Direction, int], actions: Sequence[Action], step: int) -> None:
    """After ``actions`` of a step that began at epochs ``first``: each of their commits was made once.

    Raises:
        ScaleOrderError: a commit is missing, or ran too often.
    """
    for direction, epoch in first.items():
        wanted = epoch + sum(direction in directions_of(action) for action in actions)
        now = timeline.epochs[direction]
        if now != wanted:
            raise ScaleOrderError(
                f"step {step} ends at {direction} epoch {now}, its plan's commits lead to {wanted}",
                epoch=wanted,
                current_epoch=now,
            )
