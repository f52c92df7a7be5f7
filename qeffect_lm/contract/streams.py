"""I4, ``StreamClock``: streams complete in both directions.

Every stream carries a vector clock (Fidge 1988, Mattern 1989); an event is a copy of it; a wait joins it. Every
contract-managed byte range of a buffer remembers its last write and the reads and max-merges since, as the streams' own
ticks (the epoch idea of FastTrack, Flanagan and Freund 2009), so a check is one comparison per remembered access. The
host is a stream like the others: a launch is an edge host → stream, a host synchronisation one stream → host.

The verdict depends on the recorded edges alone, never on timing: an access not ordered after the last conflicting one
raises :class:`StreamOrderError` whether or not the race would have bitten.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from qeffect_lm.contract.errors import AccessSite, StreamOrderError

HOST = "host"
Clock = dict[str, int]


class Access(StrEnum):
    """What an action does to a byte range. MAX_MERGEs commute with each other and with nothing else."""

    READ = "read"
    WRITE = "write"
    MAX_MERGE = "max_merge"


class Event(NamedTuple):
    """A recorded event. ``covers`` lists the only buffers that an *early* event vouches for (None: all)."""

    stream: str
    clock: Mapping[str, int]
    overlays: Mapping[Hashable, Mapping[str, int]]
    covers: frozenset[Hashable] | None = None


@dataclass(slots=True)
class _Stream:
    clock: Clock
    overlays: dict[Hashable, Clock] = field(default_factory=dict)  # per buffer, from early events
    learned: int = 0  # how often it learned of other streams
    from_host: int = -1  # what the host had learned when it last launched here


@dataclass(slots=True)
class _Range:
    """Bytes [lo, hi) and who touched them last: (stream, tick, description)."""

    lo: int
    hi: int
    write: tuple[str, int, str] = ("", 0, "")  # tick 0: nobody yet
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    merges: dict[str, tuple[int, str]] = field(default_factory=dict)

    def cut(self, lo: int, hi: int) -> _Range:
        return _Range(lo, hi, self.write, dict(self.reads), dict(self.merges))


WHOLE = 1 << 62  # the end of a range given without one
RangeAccess = tuple[Hashable, Access, int, int]  # bytes [lo, hi) of a buffer
BufferAccess = tuple[Hashable, Access] | RangeAccess  # a whole buffer, or bytes of it
REMEMBERED = 4096  # tuples of accesses that are looked up once


def _join(into: Clock, other: Mapping[str, int]) -> None:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


class _Touched(NamedTuple):
    """The ranges behind one tuple of accesses, while the ranges are cut as in ``shape``."""

    accesses: Sequence[BufferAccess]
    shape: int
    reads: list[tuple[Hashable, _Range]]
    writes: list[tuple[Hashable, _Range]]
    merges: list[tuple[Hashable, _Range]]


class StreamClock:
    """Vector clocks over named streams and the access history of named buffers."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._buffers: dict[Hashable, list[_Range]] = {}
        self._shape = 0  # how often ranges were made, cut or forgotten
        self._remembered: dict[int, _Touched] = {}

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            self._streams[name] = _Stream({name: 1})
        return self._streams[name]

    # ---- edges -------------------------------------------------------------------------------------------------

    def launch(self, stream: str) -> None:
        """The host launches work on ``stream``: whatever the host knows is ordered before it."""
        self._launch(stream)

    def _launch(self, stream: str) -> None:
        if stream == HOST:
            return
        host, target = self._stream(HOST), self._stream(stream)
        if target.from_host == host.learned:  # since the last launch here, the host went on and learned nothing else
            target.clock[HOST] = host.clock[HOST]
        else:
            _join(target.clock, host.clock)
            for buffer, clock in host.overlays.items():
                _join(target.overlays.setdefault(buffer, {}), clock)
            target.from_host = host.learned
        host.clock[HOST] += 1  # what the host does from here on is not ordered before this launch

    def record(self, stream: str, covers: Iterable[Hashable] | None = None) -> Event:
        """Record an event after all work launched on ``stream`` so far (early: only for the buffers in ``covers``)."""
        state = self._stream(stream)
        overlays = {buffer: dict(clock) for buffer, clock in state.overlays.items()} if state.overlays else {}
        event = Event(stream, dict(state.clock), overlays, None if covers is None else frozenset(covers))
        state.clock[stream] += 1  # later work has a later tick than the event vouches for
        return event

    def wait(self, stream: str, event: Event) -> None:
        """Make later work on ``stream`` wait for ``event``."""
        state = self._stream(stream)
        state.learned += 1
        if event.covers is None:
            _join(state.clock, event.clock)
            for buffer, clock in event.overlays.items():
                _join(state.overlays.setdefault(buffer, {}), clock)
            return
        for buffer in event.covers:
            overlay = state.overlays.setdefault(buffer, {})
            _join(overlay, event.clock)
            _join(overlay, event.overlays.get(buffer, {}))

    def synchronize(self, event: Event) -> None:
        """The host blocks until ``event``."""
        self.wait(HOST, event)

    # ---- accesses ----------------------------------------------------------------------------------------------

    def work(self, stream: str, accesses: Sequence[BufferAccess], who: str = "") -> None:
        """:meth:`launch` and every :meth:`access` of one piece of work; a refused one leaves no access behind.

        What a hot path calls: a tuple of accesses that comes again is looked up once, not buffer by buffer.

        Raises:
            StreamOrderError: a conflicting earlier access is not ordered before one of these.
        """
        self._launch(stream)
        state = self._stream(stream)
        touched = self._touched(accesses)
        clock, known = state.clock, state.clock.get
        for _, piece in touched.reads:
            if known(piece.write[0], 0) < piece.write[1] or piece.merges:
                self._check_all(state, stream, accesses, who)
                break
        for _, piece in touched.writes:
            if known(piece.write[0], 0) < piece.write[1] or piece.merges:
                self._check_all(state, stream, accesses, who)
                break
            for other, (tick, _) in piece.reads.items():
                if known(other, 0) < tick:
                    self._check_all(state, stream, accesses, who)
        for _, piece in touched.merges:
            if known(piece.write[0], 0) < piece.write[1] or piece.reads:
                self._check_all(state, stream, accesses, who)
                break
        mark = (clock[stream], who)
        for _, piece in touched.reads:
            piece.reads[stream] = mark
        for _, piece in touched.merges:
            piece.merges[stream] = mark
        if touched.writes:
            write = (stream, *mark)
            for _, piece in touched.writes:
                piece.write = write
                if piece.reads:
                    piece.reads = {}
                if piece.merges:
                    piece.merges = {}

    def _check_all(self, state: _Stream, stream: str, accesses: Sequence[BufferAccess], who: str) -> None:
        """The whole check, access by access in the order given: an early event, or a merge long past, may still order them."""
        for buffer, kind, *span in accesses:
            for piece in self._pieces(buffer, *(span or (0, WHOLE))):
                self._check(state, stream, buffer, piece, kind, who)

    def _touched(self, accesses: Sequence[BufferAccess]) -> _Touched:
        """The ranges that a tuple of accesses means, by kind; remembered until some range is split or forgotten."""
        found = self._remembered.get(id(accesses))
        if found is not None and found.accesses is accesses and found.shape == self._shape:
            return found
        for buffer, _, *span in accesses:  # all splits come before any range is taken down
            self._pieces(buffer, *(span or (0, WHOLE)))
        by_kind: dict[Access, list[tuple[Hashable, _Range]]] = {kind: [] for kind in Access}
        for buffer, kind, *span in accesses:
            known = kind if type(kind) is Access else Access(kind)
            by_kind[known] += [(buffer, piece) for piece in self._pieces(buffer, *(span or (0, WHOLE)))]
        made = _Touched(accesses, self._shape, by_kind[Access.READ], by_kind[Access.WRITE], by_kind[Access.MAX_MERGE])
        if isinstance(accesses, tuple):
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            self._remembered[id(accesses)] = made  # kept: its identity is the key
        return made

    def access(
        self, stream: str, buffer: Hashable, kind: Access, who: str = "", lo: int = 0, hi: int = WHOLE
    ) -> None:
        """Declare that work now launched on ``stream`` accesses bytes [lo, hi) of ``buffer``.

        Raises:
            StreamOrderError: a conflicting earlier access is not ordered before this one.
        """
        state = self._stream(stream)
        tick = state.clock[stream]
        pieces = self._pieces(buffer, lo, hi)
        for piece in pieces:  # all of them before any is marked: a refused access leaves no trace
            self._check(state, stream, buffer, piece, kind, who)
        for piece in pieces:
            if kind is Access.WRITE:
                piece.write, piece.reads, piece.merges = (stream, tick, who), {}, {}
            elif kind is Access.READ:
                piece.reads[stream] = (tick, who)
            else:
                piece.merges[stream] = (tick, who)

    def _check(
        self, state: _Stream, stream: str, buffer: Hashable, piece: _Range, kind: Access, who: str
    ) -> None:
        overlay = state.overlays.get(buffer)

        def ordered(other: str, tick: int) -> bool:
            return state.clock.get(other, 0) >= tick or (overlay is not None and overlay.get(other, 0) >= tick)

        earlier: list[tuple[Access, str, int, str]] = []
        if piece.write[1]:
            earlier.append((Access.WRITE, *piece.write))
        if kind is not Access.READ:
            earlier += [(Access.READ, other, *entry) for other, entry in piece.reads.items()]
        if kind is not Access.MAX_MERGE:
            earlier += [(Access.MAX_MERGE, other, *entry) for other, entry in piece.merges.items()]
        for past_kind, other, tick, by in earlier:
            if not ordered(other, tick):
                raise StreamOrderError(
                    f"{who or kind} ({kind} on stream {stream!r}) is not ordered after {by or past_kind} "
                    f"({past_kind} on stream {other!r}) of buffer {buffer!r}: record an event on {other!r} after it "
                    f"and make {stream!r} wait for it",
                    earlier=AccessSite(by, str(past_kind), other, buffer, piece.lo, piece.hi),
                    later=AccessSite(who, str(kind), stream, buffer, piece.lo, piece.hi),
                    buffer=buffer,
                    stream=stream,
                    other_stream=other,
                    since_tick=tick,
                    known_tick=max(state.clock.get(other, 0), (overlay or {}).get(other, 0)),
                )

    def _pieces(self, buffer: Hashable, lo: int, hi: int) -> list[_Range]:
        """The ranges that make up [lo, hi), splitting at its ends; gaps become fresh ranges."""
        if lo >= hi:
            return []
        ranges = self._buffers.setdefault(buffer, [])
        if len(ranges) == 1 and ranges[0].lo == lo and ranges[0].hi == hi:
            return ranges
        present = [piece for piece in ranges if piece.lo >= lo and piece.hi <= hi]
        if sum(piece.hi - piece.lo for piece in present) == hi - lo:  # they tile it as they are
            return present
        self._shape += 1
        result: list[_Range] = []
        inside: list[_Range] = []
        at = lo
        for piece in ranges:
            if piece.hi <= lo or piece.lo >= hi:
                result.append(piece)
                continue
            if piece.lo < lo:
                result.append(piece.cut(piece.lo, lo))
            if piece.lo > at:
                inside.append(_Range(at, piece.lo))
            inside.append(piece.cut(max(piece.lo, lo), min(piece.hi, hi)))
            at = inside[-1].hi
            if piece.hi > hi:
                result.append(piece.cut(hi, piece.hi))
        if at < hi:
            inside.append(_Range(at, hi))
        self._buffers[buffer] = sorted(result + inside, key=lambda piece: piece.lo)
        return inside

    # ---- upkeep ------------------------------------------------------------------------------------------------

    def forget(self, buffer: Hashable) -> None:
        """Drop a buffer's history (its storage was given back)."""
        self._buffers.pop(buffer, None)
        self._shape += 1
        for state in self._streams.values():
            state.overlays.pop(buffer, None)

    def settle(self) -> None:
        """The host has waited for everything (an end of step, an abort): every stream knows every other."""
        joined: Clock = {}
        self._stream(HOST)  # whatever it launches from here on, on new streams too, comes after
        for state in self._streams.values():
            _join(joined, state.clock)
        for state in self._streams.values():
            state.overlays.clear()
        for name, state in self._streams.items():
            state.clock = dict(joined)
            state.clock[name] += 1  # nobody knows yet what the stream does from here on
            state.learned += 1

    @property
    def buffers(self) -> tuple[Hashable, ...]:
        """The buffers with a history, in order of first access."""
        return tuple(self._buffers)
