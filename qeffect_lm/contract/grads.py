"""``GradSlot``: every producer of a weight gradient knows its place in the flat main gradient.

The first writer of the optimizer step uses beta 0 (overwrite), later ones beta 1 (add): nothing is zero-filled, and what a
previous step left is gone. A producer without work reports EMPTY; a slot with only EMPTYs is zeroed before the optimizer
reads it. The optimizer refuses to step until each slot has as many writers as the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qeffect_lm.contract.errors import GradSlotError


@dataclass(frozen=True)
class GradSlot:
    """One producer's place: ``view`` is the parameter's main gradient (any shape, main-gradient dtype)."""

    name: str
    view: torch.Tensor


class GradSlots:
    """The main-gradient slots of one rank and who wrote them in this step."""

    def __init__(self, slots: Iterable[GradSlot]) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._writes: dict[str, int] = dict.fromkeys(self.slots, 0)
        self._reports: dict[str, int] = dict.fromkeys(self.slots, 0)
        self._group_writes: dict[tuple[str, ...], int] = {}
        self._group_reports: dict[tuple[str, ...], int] = {}
        self._overlaps: dict[tuple[str, ...], set[tuple[str, ...]]] = {}  # a group → other groups that share a slot
        self._singles = False  # somebody wrote one slot by itself in this step
        self._zeroed: set[str] = set()
        self._closed: set[str] = set()  # reduced over replicas before the step's end
        self._read = False  # the optimizer has taken this step's gradient

    def begin_step(self) -> None:
        for name in self._writes:
            self._writes[name] = self._reports[name] = 0
        self._group_writes.clear()
        self._group_reports.clear()
        self._zeroed.clear()
        self._closed.clear()
        self._singles = self._read = False

    def _count(self, name: str) -> int:
        return self._writes[name] + sum(n * group.count(name) for group, n in self._group_writes.items())

    def write(self, name: str, beta: int, microbatch: int | None = None) -> None:
        """Account for one write.

        Raises:
            GradSlotError: beta 0 where there are writers already (their sum would be lost), beta 1 where there are none
                (last step's gradient would be added), or the optimizer has read the gradient.
        """
        self._check(name, beta, self._count(name) if name in self.slots else 0, microbatch)
        self._writes[name] += 1
        self._singles = True

    def write_group(self, names: tuple[str, ...], beta: int, microbatch: int | None = None) -> None:
        """Account for a graph's writes: a few comparisons for all of ``names``, whatever their number."""
        if not names:
            return
        others = self._overlaps.get(names)
        if others is None:
            others = self._learn(names)
        written = self._group_writes.get(names, 0)
        if self._read or others is None or not self._closed.isdisjoint(names):
            known = False
        elif beta:
            known = written > 0  # every name has this group's own writes
        else:
            known = not written and not self._singles and not any(self._group_writes.get(other) for other in others)
        if not known:
            seen: dict[str, int] = {}
            for name in names:
                before = self._count(name) if name in self.slots else 0
                self._check(name, beta, before + seen.get(name, 0), microbatch)
                seen[name] = seen.get(name, 0) + 1
        self._group_writes[names] = written + 1

    def write_counts(self, counts: Mapping[str, int]) -> None:
        """Account for all writers of a step at once: the first of each name with beta 0.

        Raises:
            GradSlotError: a name has writers already.
        """
        for name, count in counts.items():
            self._check(name, 0, self._count(name) if name in self.slots else 0, None)
            self._writes[name] += count
        self._singles = True

    def _learn(self, names: tuple[str, ...]) -> set[tuple[str, ...]] | None:
        """The groups seen so far that share a slot with a new one; None for one that names a slot twice or an unknown one."""
        own = set(names)
        if len(own) != len(names) or not own.issubset(self.slots):
            return None
        others = {group for group in self._overlaps if not own.isdisjoint(group)}
        for other in others:
            self._overlaps[other].add(names)
        self._overlaps[names] = others
        return others

    def _check_known(self, name: str, microbatch: int | None = None) -> None:
        if name not in self.slots:
            raise GradSlotError(f"no gradient slot was declared for {name!r}", layer=name, microbatch=microbatch)

    def _check(self, name: str, beta: int, count: int, microbatch: int | None) -> None:
        self._check_known(name, microbatch)
        if self._read or name in self._closed:
            late = "the optimizer" if self._read else "its reduction over replicas"
            raise GradSlotError(
                f"writer {count + 1} of {name!r} comes after {late}: its part would be lost",
                layer=name,
                microbatch=microbatch,
                writers=count,
            )
        if (beta == 0) != (count == 0):
            lost = "overwrite what is there" if beta == 0 else "add to the previous step's gradient"
            raise GradSlotError(
                f"writer {count + 1} of {name!r} has beta {beta}: it would {lost}",
                layer=name,
                microbatch=microbatch,
                beta=beta,
                writers=count,
            )

    def report_empty(self, name: str) -> None:
        """A producer had no work this time (an idle expert, or a W whose operands a later one multiplies)."""
        self._check_known(name)
        self._reports[name] += 1

    def report_counts(self, counts: Mapping[str, int]) -> None:
        """Account for all EMPTYs of a step at once."""
        for name, count in counts.items():
            self._check_known(name)
            self._reports[name] += count

    def report_group(self, names: tuple[str, ...]) -> None:
        """The same of a graph, for all of ``names``."""
        if names not in self._group_reports:
            for name in names:
                self._check_known(name)
        self._group_reports[names] = self._group_reports.get(names, 0) + 1

    def check_complete(self, expected: int) -> None:
        """Before the optimizer, once a step: every slot has ``expected`` reports, writes or EMPTYs, and holds this step's sum.

        Raises:
            GradSlotError: names the first slot that has not, or that nobody wrote or zeroed; or the optimizer came before.
        """
        if self._read:
            raise GradSlotError("the optimizer would step a second time on one gradient", expected=expected)
        self._check_counts(self.slots, expected, "the optimizer would step on")
        self._read = True

    def close(self, names: Iterable[str], expected: int) -> None:
        """Before ``names`` are reduced over replicas, while others are still written: they are complete, and stay as they are.

        Raises:
            GradSlotError: as :meth:`check_complete`; or a name was closed before.
        """
        names = tuple(names)
        again = next((name for name in names if self._read or name in self._closed), None)
        if again is not None:
            raise GradSlotError(f"{again!r} would be reduced over replicas a second time", layer=again)
        self._check_counts(names, expected, "replicas would reduce")
        self._closed.update(names)

    def _check_counts(self, names: Iterable[str], expected: int, what: str) -> None:
        grouped: dict[str, int] = dict.fromkeys(self.slots, 0)
        for group, times in self._group_writes.items():
            for name in group:
                grouped[name] += times
        reported = dict(self._reports)
        for group, times in self._group_reports.items():
            for name in group:
                reported[name] += times
        for name in names:
            count = self._writes[name] + grouped[name] + reported[name]
            if count != expected:
                raise GradSlotError(
                    f"{what} {name!r} with {count} of {expected} contributions",
                    layer=name,
                    writers=count,
                    expected=expected,
                )
            if not self._writes[name] and not grouped[name] and name not in self._zeroed:
                raise GradSlotError(f"nobody wrote or zeroed {name!r}: it holds the previous step's gradient", layer=name)

    def zero_empty_(self, names: Iterable[str] | None = None) -> Sequence[str]:
        """Zero the slots, of ``names`` (perhaps none) or of all, that got only EMPTYs; returns their names."""
        written = {name for group in self._group_writes for name in group} | self._closed
        idle = [name for name in (self.slots if names is None else names) if not self._writes[name] and name not in written]
        for name in idle:
            self.slots[name].view.zero_()
        self._zeroed.update(idle)
        return idle
