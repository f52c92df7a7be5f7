"""A stream clock that does not check the same step twice.

The verdict on a step depends on what the clock knew when it began and on the order of launches, events and waits, and on
nothing else. A training step repeats: once a step has ended in the knowledge that it began with, every later one that
follows its order has the same verdict, and following it costs one comparison per launch. At the first launch, event or wait
that differs, what was followed is told to the clock for real, and everything from there on is checked as if there were no
shortcut.

"The same knowledge": clocks only compare ticks of one stream with each other and add new, larger ones. So two states are the
same when, stream by stream, their ticks have the same order (:meth:`SteadyClock._knowledge`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from qeffect_lm.contract.streams import WHOLE, Access, BufferAccess, Event, StreamClock

ROUNDS = 3  # steps that are told for real when the shortcut ends: events of older steps vouch for nothing newer
ATTEMPTS = 16  # steps in which a steady order is looked for, after anything unusual


class Promise:
    """An event of a step that is followed, not checked: which shortcut, its how many-eth step, and the event's place in it.

    ``event`` is the real one, once the shortcut ended.
    """

    __slots__ = ("__weakref__", "era", "event", "round", "serial")

    def __init__(self, era: int, round: int, serial: int) -> None:  # noqa: A002 (what it is)
        self.era, self.round, self.serial = era, round, serial
        self.event: Event | None = None


Operation = tuple[Any, ...]  # ("work", stream, accesses, who), ("record", stream, covers), ("wait", stream, serial), ...


class SteadyClock(StreamClock):
    """See the module. :meth:`begin_step` says where a step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self._script: list[Operation] | None = None  # the order that is followed
        self._at = self._serial = self._round = self._era = 0
        self._given: list[Promise] = []  # in this followed step
        self._kept: list[weakref.ref[Promise]] = []  # those of earlier ones that somebody still holds
        self._told: list[Operation] | None = None  # of the step that is checked; None: nobody will compare it
        self._serials: dict[int, tuple[int, Event]] = {}  # its events by identity
        self._knew: Hashable = None
        self._attempts = 0

    # ---- steps -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins: follow the last one if it ended in the knowledge that it began with."""
        if self._script is not None:
            if self._at == len(self._script):
                self._at = self._serial = 0
                self._round += 1
                self._keep()
                return
            self._leave()
        told, knew = self._told, self._knew
        self._told = None
        self._serials.clear()
        if not self.enabled or self._attempts >= ATTEMPTS:
            return
        self._attempts += 1
        self._knew = self._knowledge()
        if told and knew == self._knew:
            self._script = told
            self._at = self._serial = self._round = 0
            self._era += 1
        else:
            self._told = []

    def pause(self, enabled: bool) -> None:
        """Check every step for real (``enabled`` False), as traces need it, or allow the shortcut again."""
        if enabled == self.enabled:
            return
        if self._script is not None:
            self._leave()
        self.enabled, self._attempts, self._told = enabled, 0, None

    def _knowledge(self) -> Hashable:
        """The state with each stream's ticks replaced by their ranks: equal for states that will give equal verdicts."""
        seen: dict[str, set[int]] = {}

        def note(clock: dict[str, int]) -> None:
            for stream, tick in clock.items():
                seen.setdefault(stream, set()).add(tick)

        for state in self._streams.values():
            note(state.clock)
            for overlay in state.overlays.values():
                note(overlay)
        for ranges in self._buffers.values():
            for piece in ranges:
                for stream, (tick, _) in (*piece.reads.items(), *piece.merges.items()):
                    seen.setdefault(stream, set()).add(tick)
                seen.setdefault(piece.write[0], set()).add(piece.write[1])
        ranks = {stream: {tick: rank for rank, tick in enumerate(sorted(ticks))} for stream, ticks in seen.items()}

        def spelled(clock: dict[str, int]) -> tuple[tuple[str, int], ...]:
            return tuple(sorted((stream, ranks[stream][tick]) for stream, tick in clock.items()))

        def marks(entries: dict[str, tuple[int, str]]) -> tuple[tuple[str, int], ...]:
            return tuple(sorted((stream, ranks[stream][tick]) for stream, (tick, _) in entries.items()))

        streams = {
            name: (spelled(state.clock), frozenset((buffer, spelled(clock)) for buffer, clock in state.overlays.items()))
            for name, state in self._streams.items()
        }
        buffers = {
            buffer: tuple(
                (p.lo, p.hi, p.write[0], ranks[p.write[0]][p.write[1]], marks(p.reads), marks(p.merges)) for p in ranges
            )
            for buffer, ranges in self._buffers.items()
        }
        return frozenset(streams.items()), frozenset(buffers.items())

    # ---- leaving the shortcut ----------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Tell for real what was followed: some whole steps, for their events' sake, and the part of this one.

        The clock still knows what it did when the first followed step began: nothing was told to it since.
        """
        script, at, current = self._script, self._at, self._round
        assert script is not None
        self._script = self._told = None
        self._attempts = 0
        oldest = max(0, current - ROUNDS)
        events: dict[int, list[Event]] = {}
        for number in range(oldest, current + 1):
            events[number] = []
            for operation in script if number < current else script[:at]:
                self._tell(operation, events[number])
        self._keep()
        for reference in self._kept:
            promise = reference()
            if promise is not None and promise.event is None:
                # One of a step before the oldest of these vouches for nothing that still counts, as the oldest's does.
                promise.event = events[max(promise.round, oldest)][promise.serial]
        self._kept.clear()

    def _keep(self) -> None:
        """Remember the promises that outlive their step."""
        references = [*self._kept, *map(weakref.ref, self._given)]
        self._given.clear()
        self._kept = [reference for reference in references if reference() is not None]

    def _tell(self, operation: Operation, events: list[Event]) -> None:
        kind, *arguments = operation
        if kind == "record":
            events.append(super().record(*arguments))
        elif kind == "wait":
            super().wait(arguments[0], events[arguments[1]])
        else:
            getattr(super(), kind)(*arguments)

    def _resolved(self, event: Event | Promise) -> Event:
        """The event itself."""
        if not isinstance(event, Promise):
            return event
        assert event.event is not None, "the shortcut that gave it ended, and told it"
        return event.event

    def _note(self, *operation: Any) -> None:
        if self._told is not None:
            self._told.append(operation)

    def _follows(self, *operation: Any) -> bool:
        """Whether the step goes on as the last ones did; if not, the shortcut ends here."""
        script = self._script
        if script is None:
            return False
        if self._at < len(script) and script[self._at] == operation:
            self._at += 1
            return True
        self._leave()
        return False

    # ---- the clock's methods -----------------------------------------------------------------------------------

    def launch(self, stream: str) -> None:
        if not self._follows("launch", stream):
            self._note("launch", stream)
            super().launch(stream)

    def work(self, stream: str, accesses: Sequence[BufferAccess], who: str = "") -> None:
        script = self._script
        if script is not None:  # written out: this is what costs in a step
            at = self._at
            if at < len(script):
                known = script[at]
                if known[0] == "work" and (known[2] is accesses or known[2] == tuple(accesses)) and known[1] == stream:
                    self._at = at + 1
                    return
            self._leave()
        told, self._told = self._told, None  # a step with a refused access is none to follow
        super().work(stream, accesses, who)
        self._told = told
        self._note("work", stream, tuple(accesses), who)  # a caller's list may change

    def access(
        self, stream: str, buffer: Hashable, kind: Access, who: str = "", lo: int = 0, hi: int = WHOLE
    ) -> None:
        if not self._follows("access", stream, buffer, kind, who, lo, hi):
            told, self._told = self._told, None
            super().access(stream, buffer, kind, who, lo, hi)
            self._told = told
            self._note("access", stream, buffer, kind, who, lo, hi)

    def record(self, stream: str, covers: Iterable[Hashable] | None = None) -> Event:
        listed = None if covers is None else frozenset(covers)
        if self._follows("record", stream, listed):
            promise = Promise(self._era, self._round, self._serial)
            self._serial += 1
            self._given.append(promise)
            return promise  # type: ignore[return-value]
        event = super().record(stream, listed)
        if self._told is not None:
            self._told.append(("record", stream, listed))
            self._serials[id(event)] = (len(self._serials), event)
        return event

    def wait(self, stream: str, event: Event) -> None:
        if self._script is not None:
            this = isinstance(event, Promise) and event.era == self._era and event.round == self._round
            if self._follows("wait", stream, event.serial if this else None):  # type: ignore[attr-defined]
                return
        event = self._resolved(event)
        if self._told is not None:
            serial, _ = self._serials.get(id(event), (None, None))
            if serial is None:  # an earlier step's: this step depends on more than what was known when it began
                self._told = None
            else:
                self._told.append(("wait", stream, serial))
        super().wait(stream, event)

    def forget(self, buffer: Hashable) -> None:
        if not self._follows("forget", buffer):
            self._note("forget", buffer)
            super().forget(buffer)

    def settle(self) -> None:
        if not self._follows("settle"):
            self._note("settle")
            super().settle()
