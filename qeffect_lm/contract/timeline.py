"""I1, ``ScaleTimeline``: scaling updates are serialised in time.

Every quantised role has a history of absolute maxima and a scale. Whoever reads, reads an immutable *epoch*; running work
max-merges its amax into the open window's slots; :meth:`ScaleTimeline.commit` alone rolls the histories and makes the next
scales (delayed scaling as in the FP8 formats paper, Micikevicius et al. 2022, and Transformer Engine's recipe):

    scale = fp8_max / amax / 2**margin,   amax = max of the history, or its most recent entry

The tensors (float32, one row per role, forward roles first) are what kernels and captured graphs touch; the epochs, windows and
reports are the host's account of them. An amax slot holds ``EMPTY`` (-1) until somebody reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import torch

from qeffect_lm.contract.errors import ScaleOrderError
from qeffect_lm.state import EXPERT_REPLICAS, LogicalTensor, Role

EMPTY = -1.0
WINDOWS = ("step", "microbatch")


class Direction(StrEnum):
    """Forward roles (inputs, weights: E4M3) and backward ones (output gradients: E5M2) roll apart in window `microbatch`."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class ScaleRole:
    """One quantised tensor of one linear, e.g. ``layers.0.mlp.down.input``; ``fp8_max`` is its format's largest value.
    ``shared``: all ranks of a pipeline stage have it; else an expert's rank alone, and its replicas."""

    name: str
    direction: Direction
    fp8_max: float
    shared: bool = True


@dataclass
class _Reader:
    contributor: Hashable
    direction: Direction
    epoch: int


class Begun(NamedTuple):
    """What a step began with and may have moved when it fails: epochs, commits, and copies of tensors by name."""

    epochs: dict[Direction, int]
    commits: int
    tensors: dict[str, torch.Tensor]


class ScaleTimeline:
    """Scales, histories and open amax slots of one rank's roles, and the order of their updates.

    Args:
        roles: the roles, in any order.
        window: ``step`` (one commit per optimizer step, both directions together) or ``microbatch`` (as Transformer
            Engine: forward after each forward, backward after each backward).
        history: length of the amax history.
        amax: ``max`` or ``most_recent``.
        margin: power of two by which scales stay below the format's edge.
    """

    def __init__(
        self,
        roles: Sequence[ScaleRole],
        *,
        window: str = "step",
        history: int = 16,
        amax: Literal["max", "most_recent"] | str = "max",
        margin: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if window not in WINDOWS:
            raise ValueError(f"window must be one of {WINDOWS}, not {window!r}")
        if amax not in ("max", "most_recent"):
            raise ValueError(f"amax must be max or most_recent, not {amax!r}")
        if len({role.name for role in roles}) != len(roles):
            raise ValueError("two roles have one name: they would share a scale")
        self.window = window
        self.amax, self.margin = amax, margin
        # Of each direction the shared ones come first: they are one range, the same on all ranks of a stage.
        self.roles = sorted(roles, key=lambda role: (role.direction is Direction.BACKWARD, not role.shared, role.name))
        self.index = {role.name: i for i, role in enumerate(self.roles)}
        self._direction = {role.name: role.direction for role in self.roles}
        n = len(self.roles)
        forward = sum(role.direction is Direction.FORWARD for role in self.roles)
        self._rows = {Direction.FORWARD: slice(0, forward), Direction.BACKWARD: slice(forward, n)}
        self._shared = {
            direction: slice(rows.start, rows.start + sum(role.shared for role in self.roles[rows]))
            for direction, rows in self._rows.items()
        }
        self.scale = torch.ones(n, device=device)
        self.history = torch.zeros(n, history, device=device)
        self.open_amax = torch.full((n,), EMPTY, device=device)
        maxima = [role.fp8_max for role in self.roles]
        self.fp8_max = torch.tensor(maxima, device=device, dtype=torch.float32)
        self.spoilt = torch.zeros((), dtype=torch.float64, device=device)  # non-finite slots rolled away in this step
        self.epochs: dict[Direction, int] = {Direction.FORWARD: 0, Direction.BACKWARD: 0}
        self._readers: dict[Hashable, _Reader] = {}
        self._expected: dict[Direction, frozenset[Hashable]] = {d: frozenset() for d in Direction}
        self._reported: dict[Direction, set[Hashable]] = {d: set() for d in Direction}
        self._contributed: dict[Direction, Hashable] = {}  # the last F or I in the open window
        self._window_open = False
        self.commits = 0

    # ---- device work: pure functions of the tensors, safe to capture ------------------------------------------

    def scale_of(self, role: str) -> torch.Tensor:
        """0-dim view of the role's scale (float32)."""
        return self.scale[self.index[role]]

    def history_of(self, role: str) -> torch.Tensor:
        """View of the role's amax history, newest first (float32); all zeros where there was no amax yet."""
        return self.history[self.index[role]]

    def slot_of(self, role: str) -> torch.Tensor:
        """0-dim view of the role's open amax slot (float32)."""
        return self.open_amax[self.index[role]]

    def roll_(self, skip: torch.Tensor, directions: Iterable[Direction] = tuple(Direction)) -> None:
        """Roll histories, make the next scales, clear the slots. ``skip`` (0-dim bool) keeps all but the clearing.

        A role whose slot is EMPTY or not finite does not roll and keeps its scale; an amax of 0 rolls but keeps the scale.
        Window ``microbatch`` rolls as Transformer Engine's fused update, bit for bit for all finite amax: there a slot of 0 is
        idle and does not roll, and a scale that would overflow becomes the largest float32 instead of keeping its value.
        """
        for direction in directions:
            rows = self._rows[direction]
            if rows.start == rows.stop:
                continue
            amax, history, scale = self.open_amax[rows], self.history[rows], self.scale[rows]
            rolls = torch.isfinite(amax) & (amax > 0 if self.window == "microbatch" else amax >= 0) & ~skip
            if self.window == "microbatch":
                self.spoilt.add_((~torch.isfinite(amax)).sum())
            rolled = torch.cat([amax[:, None], history[:, :-1]], dim=1)
            history.copy_(torch.where(rolls[:, None], rolled, history))
            peak = self._peak(history)
            candidate = self.candidate(self.fp8_max[rows], peak)
            good = rolls & (peak > 0) & torch.isfinite(candidate)
            scale.copy_(torch.where(good, candidate, scale))
            amax.fill_(EMPTY)

    def scale_from(self, role: str, history: torch.Tensor) -> torch.Tensor:
        """The scale (0-dim) that ``role`` has after rolling to ``history`` (float32, newest first); not finite where the roll
        keeps the scale of before."""
        peak = self._peak(history[None])[0]
        return torch.where(peak > 0, self.candidate(self.fp8_max[self.index[role]], peak), torch.nan)

    def _peak(self, history: torch.Tensor) -> torch.Tensor:
        return history.amax(dim=1) if self.amax == "max" else history[:, 0]

    def candidate(self, fp8_max: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
        """The scale that a history with the largest amax ``peak`` makes; not finite where the scale of before stays."""
        if self.window == "microbatch":
            return (fp8_max * 2.0**-self.margin / peak).clamp(max=torch.finfo(torch.float32).max)
        return fp8_max / peak / 2.0**self.margin

    def non_finite_(self, out: torch.Tensor) -> None:
        """``out`` (0-dim float64) = how many amax of this step were an infinity or a NaN; starts the next step's count.

        Window ``microbatch`` clears its slots before the step's fate is voted on, so those count when they are rolled away.
        """
        out.copy_((~torch.isfinite(self.open_amax)).sum())
        out.add_(self.spoilt)
        self.spoilt.zero_()

    def rows(self, direction: Direction, *, shared: bool = False) -> slice:
        """The rows of a direction's roles in all tensors; ``shared``: of those that all ranks of the stage have."""
        return (self._shared if shared else self._rows)[direction]

    # ---- the host's account ------------------------------------------------------------------------------------

    def expect(self, direction: Direction, contributors: Iterable[Hashable]) -> None:
        """The contributors that every window of ``direction`` waits for (window ``step``)."""
        self._expected[direction] = frozenset(contributors)

    def begin_window(self) -> None:
        """An optimizer step starts: the previous window must have been committed."""
        if self._window_open:
            raise ScaleOrderError("a window starts before the previous one was committed", epoch=self.epochs[Direction.FORWARD])
        self._window_open = True

    def begin(
        self, contributor: Hashable, direction: Direction, *, between: bool = False, epoch: int | None = None
    ) -> int:
        """Work that reads scales starts; it is bound to the current epoch, which is returned.

        ``between`` allows it between windows: the refresh of weight caches, whose amax enters the next window. ``epoch`` is
        the one that the reader's plan gives it (None: whichever is current).
        """
        if epoch is not None and epoch != self.epochs[direction]:
            raise ScaleOrderError(
                f"{contributor} needs the scales of {direction} epoch {epoch}, the current one is {self.epochs[direction]}: "
                f"a commit {'is missing' if epoch > self.epochs[direction] else 'ran too early or too often'}",
                epoch=epoch,
                current_epoch=self.epochs[direction],
            )
        if self.window == "step" and not self._window_open and not between:
            raise ScaleOrderError(
                f"{contributor} reads scales outside a window: the window was committed already",
                epoch=self.epochs[direction],
            )
        if contributor in self._reported[direction] or contributor in self._readers:
            raise ScaleOrderError(f"{contributor} contributes a second time to one window", epoch=self.epochs[direction])
        if not between:
            before = self._contributed.get(direction)
            if before is not None and self.window == "microbatch":
                raise ScaleOrderError(
                    f"{contributor} would contribute to the window of {before}, whose commit is missing",
                    epoch=self.epochs[direction],
                )
            self._contributed[direction] = contributor
        self._readers[contributor] = _Reader(contributor, direction, self.epochs[direction])
        return self.epochs[direction]

    def check_reader(self, contributor: Hashable, role: str) -> None:
        """A read of, or a report to, ``role`` by running work: its epoch must still be the current one.

        In window ``microbatch`` the directions roll apart, so work touches the roles of its own direction only.
        """
        reader = self._readers.get(contributor)
        if reader is None:
            raise ScaleOrderError(f"{contributor} touches scale {role!r} outside its action", role=role)
        if self.window == "microbatch" and self._direction.get(role, reader.direction) is not reader.direction:
            raise ScaleOrderError(
                f"{contributor} touches the {self._direction[role]} scale {role!r}, which may have rolled since its own F",
                role=role,
                epoch=self.epochs[self._direction[role]],
            )
        if reader.epoch != self.epochs[reader.direction]:
            raise ScaleOrderError(
                f"{contributor} began at epoch {reader.epoch} and touches {role!r} at epoch "
                f"{self.epochs[reader.direction]}: a commit ran in between",
                role=role,
                epoch=reader.epoch,
                current_epoch=self.epochs[reader.direction],
            )

    def end(self, contributor: Hashable) -> None:
        """The work ends; roles it did not report stay EMPTY from its side."""
        reader = self._readers.pop(contributor)
        self._reported[reader.direction].add(contributor)

    def commit(
        self,
        epoch: int,
        directions: Sequence[Direction] = tuple(Direction),
        by: str = "commit",
        *,
        calibration: bool = False,
    ) -> None:
        """Account for one roll: ``epoch`` is the one being closed. A ``calibration`` makes epoch 1, before any window.

        Raises:
            ScaleOrderError: not the current epoch (a commit twice, or out of order), a reader is still running, or a
                contributor has not reported (window ``microbatch``: there was none).
        """
        if len(set(directions)) != len(directions):
            raise ScaleOrderError(f"{by} closes a direction twice", epoch=epoch)
        if self.window == "step" and set(directions) != set(Direction):
            raise ScaleOrderError(f"{by} closes {', '.join(directions)} alone; window step closes both at once", epoch=epoch)
        for direction in directions:
            if epoch != self.epochs[direction]:
                raise ScaleOrderError(
                    f"{by} closes {direction} epoch {epoch}, the current one is {self.epochs[direction]}",
                    epoch=epoch,
                    current_epoch=self.epochs[direction],
                )
            running = [r.contributor for r in self._readers.values() if r.direction is direction]
            if running:
                raise ScaleOrderError(f"{by} while {running[0]} still reads epoch {epoch}", epoch=epoch)
            if calibration:
                if epoch or self._window_open:
                    raise ScaleOrderError(f"{by} calibrates after training began", epoch=epoch)
            elif self.window == "step":
                if not self._window_open:
                    raise ScaleOrderError(f"{by} of {direction} epoch {epoch} outside a window", epoch=epoch)
                missing = self._expected[direction] - self._reported[direction]
                if missing:
                    first = min(missing, key=str)
                    raise ScaleOrderError(
                        f"{by} of {direction} epoch {epoch} before {first} reported ({len(missing)} missing)",
                        epoch=epoch,
                    )
            elif direction not in self._contributed:
                raise ScaleOrderError(f"{by} of {direction} epoch {epoch}, and nothing contributed to its window", epoch=epoch)
        for direction in directions:
            self.epochs[direction] += 1
            self._contributed.pop(direction, None)
            self._reported[direction].clear()
        self.commits += 1
        if self.window == "step":
            self._window_open = False

    def replay_body(
        self, contributors: Mapping[Direction, Sequence[Hashable]], commits: Mapping[Direction, int]
    ) -> None:
        """Account for all readers of a step at once, and for the commits between them (window ``microbatch``).

        Raises:
            ScaleOrderError: the step's window is not open, or somebody has contributed to it.
        """
        running = [reader.contributor for reader in self._readers.values()]
        for direction, names in contributors.items():
            others = [*running, *self._reported[direction].intersection(names)]
            if direction in self._contributed:
                others.append(self._contributed[direction])
            if others or (names and not self._window_open):
                why = f"{others[0]} has contributed to it" if others else "it was committed already"
                raise ScaleOrderError(f"a step's graph needs a new window: {why}", epoch=self.epochs[direction])
        for direction, names in contributors.items():
            if self.window == "step":
                self._reported[direction].update(names)
                if names:
                    self._contributed[direction] = names[-1]
            self.epochs[direction] += commits[direction]
        self.commits += sum(commits.values())

    def check_committed(self) -> None:
        """At a step's end: every window that something contributed to was committed.

        Raises:
            ScaleOrderError: names the last contributor.
        """
        for direction, contributor in self._contributed.items():
            raise ScaleOrderError(
                f"the step ends and the commit after {contributor} is missing", epoch=self.epochs[direction]
            )

    def close_window(self) -> None:
        """An optimizer step ends (window ``microbatch``, where commits do not close it)."""
        self._window_open = False

    def abandon(self) -> None:
        """Forget running work and the open window's reports after a failed step (the tensors: see ``Snapshot``)."""
        self._readers.clear()
        for reported in self._reported.values():
            reported.clear()
        self._contributed.clear()
        self._window_open = False

    def begun(self) -> Begun:
        """At a step's start: what :meth:`begin_again` puts back. Before its optimizer, window ``step`` only fills slots."""
        names = ["open_amax"] if self.window == "step" else ["open_amax", "scale", "history"]
        return Begun(dict(self.epochs), self.commits, {name: getattr(self, name).clone() for name in names})

    @torch.no_grad()
    def begin_again(self, begun: Begun) -> None:
        """A step failed: slots, scales, histories and epochs are again those that it began with."""
        self.epochs.update(begun.epochs)
        self.commits = begun.commits
        for name, tensor in begun.tensors.items():
            getattr(self, name).copy_(tensor)
        self.spoilt.zero_()

    # ---- state -------------------------------------------------------------------------------------------------

    def stash(self) -> dict[str, torch.Tensor]:
        """Copies of scales and histories; later commits do not change them."""
        return {"scale": self.scale.clone(), "history": self.history.clone()}

    def logical_tensors(self) -> list[LogicalTensor]:
        """``scale/<role>``, ``amax_history/<role>``, ``amax_open/<role>`` over the live storages."""
        items = []
        for i, role in enumerate(self.roles):
            where = {} if role.shared else {"replicated": EXPERT_REPLICAS}
            items += [
                LogicalTensor.whole(f"scale/{role.name}", self.scale[i], Role.SCALE, **where),
                LogicalTensor.whole(f"amax_history/{role.name}", self.history[i], Role.AMAX_HISTORY, **where),
                LogicalTensor.whole(f"amax_open/{role.name}", self.open_amax[i], Role.AMAX_OPEN, **where),
            ]
        return items

    def state(self) -> dict[str, object]:
        """Epochs and commits: the host's counters a checkpoint saves."""
        return {"epochs": {str(d): e for d, e in self.epochs.items()}, "commits": self.commits, "window": self.window}

    def load_state(self, state: dict) -> None:
        self.epochs = {Direction(d): int(e) for d, e in state["epochs"].items()}
        self.commits = int(state["commits"])
