"""What FP8 histories say about the values that were quantised: saturation, jumps, room, without any work in the step.

A history keeps the amax of each window, and a scale follows from the history before its window. So two looks at histories and
scales tell of every window between them which scale its values were quantised with and how large they were, as long as the
histories are not shorter than that. One copy to the host each time; the rest is arithmetic on the host, in the float32 of
:class:`~qeffect_lm.contract.timeline.ScaleTimeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from qeffect_lm.contract.timeline import Direction, ScaleTimeline

EDGE = 1.0 + 1e-6
"""amax × scale / fp8_max from which a window saturates. A product of roundings may lie a little above 1 where the amax is the
history's own."""


@dataclass
class Windows:
    """What was seen of some roles since the last time; every array is ``[roles]``.

    Attributes:
        fp8_max: the formats' largest values.
        seen: windows that were looked at.
        saturated: those of them whose largest value lay beyond the format's: amax × scale > fp8_max.
        excess: the largest amax × scale / fp8_max; 0 where none was seen.
        jump: the largest amax / (largest amax of the history before it); 0 where there was none.
        amax: of the newest window; 0: none yet.
        scale: that the newest window was quantised with.
    """

    names: list[str]
    fp8_max: np.ndarray
    seen: np.ndarray
    saturated: np.ndarray
    excess: np.ndarray
    jump: np.ndarray
    amax: np.ndarray
    scale: np.ndarray

    def merge(self, later: Windows) -> Windows:
        """Of the same roles, further windows."""
        return Windows(
            self.names,
            self.fp8_max,
            self.seen + later.seen,
            self.saturated + later.saturated,
            np.maximum(self.excess, later.excess),
            np.maximum(self.jump, later.jump),
            later.amax,
            later.scale,
        )

    def join(self, other: Windows) -> Windows:
        """Other roles beside these (another stage's, another rank's experts'); of one that both have, :meth:`sorted` takes the
        first."""
        arrays = [np.concatenate(pair) for pair in zip(self._arrays(), other._arrays(), strict=True)]
        return Windows([*self.names, *other.names], *arrays)

    def sorted(self) -> Windows:
        """In order of names: the same whatever the layout."""
        first = {name: i for i, name in reversed(list(enumerate(self.names)))}
        order = [first[name] for name in sorted(first)]
        return Windows([self.names[i] for i in order], *(array[order] for array in self._arrays()))

    def _arrays(self) -> list[np.ndarray]:
        return [self.fp8_max, self.seen, self.saturated, self.excess, self.jump, self.amax, self.scale]

    @property
    def room(self) -> np.ndarray:
        """Bits between the newest amax and the format's largest value: negative where it saturates, NaN where there is no amax.
        Each bit of room moves the edge below which values become zero up by as much."""
        filled = np.where(self.amax > 0, self.amax.astype(np.float64) * self.scale / self.fp8_max, np.nan)
        return -np.log2(filled)


@dataclass
class _Look:
    history: np.ndarray
    scale: np.ndarray
    epochs: dict[Direction, int]


class ScaleWatch:
    """Looks at one rank's timeline now and then."""

    def __init__(self, timeline: ScaleTimeline) -> None:
        self._timeline = timeline
        self._fp8_max = timeline.fp8_max.cpu().numpy()
        self._length = timeline.history.shape[1]
        self._before = self._look()

    def restart(self) -> None:
        """Forget what was: the next :meth:`windows` tells of the time from now on. A copy to the host."""
        self._before = self._look()

    def reaches(self, steps: int, commits: int) -> bool:
        """Whether histories are long enough to tell of ``steps`` steps with ``commits`` commits of a direction each."""
        return steps * commits <= self._length

    def windows(self, skipped: int = 0) -> Windows:
        """All windows since the last look (or since the watch was made), in which ``skipped`` steps were skipped. A copy to the
        host."""
        return self.look(skipped)()

    def look(self, skipped: int = 0) -> Callable[[], Windows]:
        """The same with the arithmetic left for later: what it returns does it."""
        before, after = self._before, self._look()
        self._before = after
        return lambda: self._between(before, after, skipped)

    def _between(self, before: _Look, after: _Look, skipped: int) -> Windows:
        timeline, count = self._timeline, len(after.scale)
        rolled, known = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
        for direction in Direction:
            rows = timeline.rows(direction)
            commits = after.epochs[direction] - before.epochs[direction]
            usual = commits - skipped if timeline.window == "step" else commits
            rolled[rows] = np.minimum(self._rolled(before.history[rows], after.history[rows], usual), max(usual, 0))
            known[rows] = commits <= self._length
        # Windows and what came before them, newest first: a role that rolled r times has r new entries.
        both = np.concatenate([after.history, before.history], axis=1)
        place = np.arange(both.shape[1])[None, :]
        old = np.minimum(self._length + place - rolled[:, None], both.shape[1] - 1)
        line = np.take_along_axis(both, np.where(place < rolled[:, None], place, old), axis=1)

        scale = before.scale.copy()  # that the oldest of the new windows was quantised with
        excess, jump = np.zeros(count), np.zeros(count)
        saturated, used = np.zeros(count, dtype=np.int64), scale.copy()
        for k in range(int(rolled.max(initial=0)) - 1, -1, -1):
            new, amax = known & (k < rolled), line[:, k]
            past = line[:, k + 1 : k + 1 + self._length]
            filled = np.where(new, amax.astype(np.float64) * scale / self._fp8_max, 0.0)
            saturated += filled > EDGE
            excess = np.maximum(excess, filled)
            peak = past.max(axis=1)
            jump = np.maximum(jump, np.where(new & (peak > 0), amax / np.where(peak > 0, peak, 1.0), 0.0))
            used = np.where(new, scale, used)
            scale = np.where(new, self._next(line[:, k : k + self._length], scale), scale)
        used = np.where(known, used, after.scale)
        return Windows(
            [role.name for role in timeline.roles],
            self._fp8_max,
            np.where(known, rolled, 0),
            saturated,
            excess,
            jump,
            after.history[:, 0],
            used,
        )

    def _look(self) -> _Look:
        timeline = self._timeline
        both = torch.cat([timeline.history, timeline.scale[:, None]], dim=1).cpu().numpy()
        return _Look(both[:, :-1], both[:, -1], dict(timeline.epochs))

    @staticmethod
    def _rolled(before: np.ndarray, after: np.ndarray, usual: int) -> np.ndarray:
        """Per role how often its history rolled. The newest entries are new, the others are those of before, moved on.

        ``usual`` times where that fits, leaves something to compare and brings no zero; else as few as fit: idle experts and
        amax that are not finite do not roll.
        """
        length = after.shape[1]

        def fits(count: int) -> np.ndarray:
            return (after[:, count:] == before[:, : length - count]).all(axis=1)

        found = np.full(len(after), -1)
        if 0 < usual < length:
            found[fits(usual) & (after[:, usual - 1] > 0)] = usual
        for count in range(length + 1):
            open_ = found < 0
            if not open_.any():
                break
            found[open_ & fits(count)] = count
        return found

    def _next(self, history: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """The scale after rolling to ``history``, as :meth:`ScaleTimeline.roll_` makes it."""
        timeline = self._timeline
        peak = history.max(axis=1) if timeline.amax == "max" else history[:, 0]
        candidates = timeline.candidate(torch.from_numpy(self._fp8_max), torch.from_numpy(peak.copy())).numpy()
        return np.where((peak > 0) & np.isfinite(candidates), candidates, scale).astype(np.float32)
