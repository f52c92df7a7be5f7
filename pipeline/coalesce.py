"""W of several microbatches as one product (``pipeline.coalesce_w``): which microbatches, and where in a rank's order.

W is deferred and a step has one scale epoch, so W of n consecutive microbatches of a chunk can be one GEMM over n times the
tokens. Microbatches k·n … k·n + n − 1 are a group; a step's last group may be smaller. Their W come directly after one another,
where the last of them was (later than before, so F < I < W still holds): no other work comes in between, so their W-slots can
be read together. :mod:`qeffect_lm.layers.joined` has the storages.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.actions import Action, Kind
from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number

Key = tuple[int, int]  # (chunk, microbatch)


def check_size(coalesce_w: int, microbatches: int) -> int:
    """``coalesce_w`` as a whole number. Raises UsageError unless it is 1 … ``microbatches``."""
    number = whole_number("coalesce_w", coalesce_w)
    if not 1 <= number <= microbatches:
        raise UsageError(
            f"coalesce_w={number}: W of 1 (each by itself) to {microbatches} microbatches (all of a step) can be one product"
        )
    return number


def members_of(microbatch: int, coalesce_w: int, microbatches: int) -> int:
    """How many microbatches' operands W of ``microbatch`` multiplies: those of its group if it is the group's last, else 0."""
    if (microbatch + 1) % coalesce_w and microbatch + 1 < microbatches:
        return 0
    return microbatch % coalesce_w + 1


def together(compute: Sequence[Sequence[Action]], coalesce_w: int, microbatches: int) -> list[list[Action]]:
    """The same work with each group's W directly after one another, where the last of them was.

    Raises:
        UsageError: a B, which is I and W in one.
    """
    rows = []
    for row in compute:
        moved: list[Action] = []
        waiting: dict[int, list[Action]] = {}  # by chunk
        for action in row:
            if action.kind is Kind.B:
                raise UsageError(f"{action} is I and W in one: coalesce_w={coalesce_w} needs W apart, leave it at 1 or split B")
            if action.kind is not Kind.W:
                moved.append(action)
                continue
            chunk, microbatch = action.key
            mine = waiting.setdefault(chunk, [])
            mine.append(action)
            if members_of(microbatch, coalesce_w, microbatches):
                moved += mine
                mine.clear()
        rows.append(moved)
    return rows


def groups(keys: Sequence[Key], coalesce_w: int) -> dict[Key, list[Key]]:
    """(chunk, group number) → its (chunk, microbatch)s in microbatch order."""
    found: dict[Key, list[Key]] = {}
    for chunk, microbatch in sorted(keys):
        found.setdefault((chunk, microbatch // coalesce_w), []).append((chunk, microbatch))
    return found
