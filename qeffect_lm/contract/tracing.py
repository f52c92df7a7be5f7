"""What mode ``trace`` writes, and when: a :class:`Tracer` attached to a ledger and its parts.

Attached, it wraps the public methods of timeline, leases, versions, gradient slots and stream clock, so that a violation is
written at the moment it is raised, through whichever of them it comes, and edges, commits and bumps are written by whoever
makes them. Other modes wrap nothing and pay nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from qeffect_lm.contract.errors import AccessSite, ContractViolation, StreamOrderError
from qeffect_lm.contract.streams import WHOLE, Event
from qeffect_lm.contract.trace import ACCESS_LETTERS, TraceWriter, buffer_name

if TYPE_CHECKING:
    from qeffect_lm.contract.ledger import Ledger, Scope, Summary

PARTS = ("timeline", "leases", "versions", "grads", "streams")


class Tracer:
    """Writes the effects of one ledger; silent while a graph is captured."""

    def __init__(self, ledger: Ledger, writer: TraceWriter) -> None:
        self._ledger, self._writer = ledger, writer
        self.silent = False
        self._doing: str | None = None  # the action under way
        self._scope: Scope | None = None  # the eager one, until its effects are written
        self._inside = False  # a launch or a refresh that is written as a whole
        self._began = time.perf_counter()
        self._after: dict[str, Callable[..., None]] = {
            "streams.launch": self._stream_launched,
            "streams.access": self._accessed,
            "streams.record": self._recorded,
            "streams.wait": self._waited,
            "streams.settle": self._settled,
            "timeline.commit": self._committed,
            "versions.bump": self._bumped,
            "versions.refreshed": self._cast,
            "grads.report_empty": self._empty,
        }
        for part in PARTS:
            self._watch(part, getattr(ledger, part))
        self._wrap_bump(ledger.versions)

    # ---- attaching ---------------------------------------------------------------------------------------------

    def _watch(self, name: str, part: Any) -> None:
        for method, function in vars(type(part)).items():
            if isinstance(function, FunctionType) and not method.startswith("_"):
                setattr(part, method, self._watched(getattr(part, method), self._after.get(f"{name}.{method}")))

    def _watched(self, call: Callable[..., Any], after: Callable[..., None] | None) -> Callable[..., Any]:
        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except ContractViolation as error:
                self.violation(error)
                raise
            if after is not None and not self._inside and not self.silent:
                after(result, *args, **kwargs)
            return result

        return watched

    def _wrap_bump(self, versions: Any) -> None:
        bump = versions.bump

        @wraps(bump)
        def bumped(names: Iterable[str] | None = None) -> None:
            bump(None if names is None else tuple(names))  # an iterator is read twice: once for the trace

        versions.bump = bumped

    def detach(self) -> None:
        """Give the ledger's parts their own methods back."""
        for name in PARTS:
            part = getattr(self._ledger, name)
            for method in [m for m, f in vars(type(part)).items() if isinstance(f, FunctionType)]:
                vars(part).pop(method, None)

    # ---- what the ledger tells -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self._began = time.perf_counter()
        self._write("s", step)

    def end_step(self) -> None:
        self._write("z")

    def abandon_step(self, error: BaseException | None) -> None:
        """A step ends by ``error``; a violation that none of the ledger's parts raised is written now."""
        if isinstance(error, ContractViolation):
            self.violation(error)
        self._doing = self._scope = None
        self._write("x", None if error is None else f"{type(error).__name__}: {error}")

    def launch(self, stream: str, accesses: Sequence[tuple[Any, ...]], who: str) -> None:
        """Work is about to be launched: the clock's single accesses are not written until :meth:`launched`."""
        if self.silent:
            return
        key = (stream, who, tuple(accesses))
        self._write("l", self._writer.intern(key, lambda: self._spell_launch(*key)), self._now())
        self._inside = True

    def launched(self) -> None:
        self._inside = False

    def begin_action(self, kind: str, chunk: int, microbatch: int) -> None:
        self._doing = f"{chunk}{kind}{microbatch}"

    def begin_effects(self, scope: Scope) -> None:
        self._scope = scope

    def end_action(self, scope: Scope, *, whole: bool) -> None:
        """An eager action has run, or broke off; at a violation it was written before that."""
        if self._scope is scope:
            self._scope = None
            self._act("a" if whole else "i", scope.summarise(), scope.chunk, scope.microbatch, scope.epoch)
        if whole:
            self._doing = None

    def replayed(self, summary: Summary, chunk: int, microbatch: int, epoch: int) -> None:
        self._act("r", summary, chunk, microbatch, epoch)
        self._doing = None

    def refresh(self) -> None:
        """Casts are about to be accounted for: they are written together by :meth:`refreshed`."""
        self._inside = True

    def refreshed(self, names: Iterable[str], epoch: int) -> None:
        self._inside = False
        self._write("f", epoch, self._versions(names))

    def captured(self, graphs: int) -> None:
        self._write("g", graphs)

    def violation(self, error: ContractViolation) -> None:
        """Write ``error``, once, with the effects of the eager action that it ends."""
        if self.silent or error.traced:
            return
        error.traced = True
        if self._scope is not None:
            self.end_action(self._scope, whole=False)
        sites = (error.earlier, error.later) if isinstance(error, StreamOrderError) else (None, None)
        told = dict(zip(("earlier", "later"), map(_spell_site, sites), strict=True), doing=self._doing, t=self._now())
        told |= {"class": type(error).__name__, "message": error.message, "place": error.place}
        self._inside = False
        self._doing = None
        self._write("!", told)

    # ---- what the parts do ---------------------------------------------------------------------------------------

    def _stream_launched(self, _: None, stream: str) -> None:
        self.launch(stream, (), "")
        self._inside = False

    def _accessed(self, _: None, stream: str, buffer: Hashable, kind: str, who: str = "", lo: int = 0, hi: int = WHOLE) -> None:
        self.launch(stream, [(buffer, kind, lo, hi)], who)
        self._inside = False

    def _recorded(self, event: Event, *_: Any, **__: Any) -> None:
        covers = [] if event.covers is None else [sorted(map(buffer_name, event.covers))]
        self._write("e", self._name(event.stream), event.clock[event.stream], *covers)

    def _waited(self, _: None, stream: str, event: Event) -> None:
        self._write("w", self._name(stream), self._name(event.stream), event.clock[event.stream])

    def _settled(self, _: None) -> None:
        self._write("h")

    def _committed(self, _: None, epoch: int, directions: Iterable[str] | None = None, by: str = "commit", **__: Any) -> None:
        closed = ("forward", "backward") if directions is None else directions
        self._write("c", by, epoch, [str(direction) for direction in closed])

    def _bumped(self, _: None, names: Iterable[str] | None = None) -> None:
        self._write("v", self._versions(self._ledger.versions.versions if names is None else names))

    def _cast(self, _: None, name: str, *, epoch: int, **__: Any) -> None:
        self._write("f", epoch, self._versions([name]))

    def _empty(self, _: None, name: str) -> None:
        self._write("u", name)

    # ---- spelling ------------------------------------------------------------------------------------------------

    def _write(self, code: str, *values: Any) -> None:
        if not self.silent:
            self._writer.write(code, *values)

    def _now(self) -> int:
        return int(1e6 * (time.perf_counter() - self._began))

    def _name(self, name: str) -> int:
        return self._writer.intern(name)

    def _names(self, names: Iterable[str]) -> int:
        return self._writer.intern(tuple(names))

    def _versions(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """[names, version] for each version among ``names``."""
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(self._ledger.versions.versions[name], []).append(name)
        return [(self._names(group), version) for version, group in groups.items()]

    def _spell_launch(self, stream: str, who: str, accesses: tuple[tuple[Any, ...], ...]) -> list[Any]:
        spelled = []
        for buffer, kind, *span in accesses:
            whole = [] if span in ([], [0, WHOLE]) else span
            spelled.append([buffer_name(buffer), ACCESS_LETTERS[str(kind)], *whole])
        return [self._name(stream), who, spelled]

    def _act(self, code: str, done: Summary, chunk: int, microbatch: int, epoch: int) -> None:
        """Write the effects that a summary holds."""
        if self.silent:
            return
        held: tuple[str | int | None, ...] = self._ledger.leases.held(chunk, microbatch)
        if done.kind == "W":  # the I-slot was released by I and may have another owner
            held = (None, None, *held[2:])
        i_slot, gi, w_slot, gw = held
        lists = (done.layers, done.roles, done.empty, tuple(name for name, _ in done.weights), done.grads)
        head = (done.kind, chunk, microbatch, done.beta, i_slot, w_slot)
        joint = done.joint  # told of a W alone
        told = () if joint is None or done.kind != "W" else (joint.beta, done.idle, done.joined)
        act = self._writer.intern(
            (head, lists, told), lambda: [*head, *map(self._names, lists), *told[:1], *map(self._names, told[1:])]
        )
        exchanged = [self._names(done.collectives)] if done.collectives else []
        self._write(code, act, epoch, gi, gw, self._now(), *exchanged)


def _spell_site(site: AccessSite | None) -> dict[str, Any] | None:
    if site is None:
        return None
    span = {} if (site.lo, site.hi) == (0, WHOLE) else {"lo": site.lo, "hi": site.hi}
    return {"who": site.who, "access": site.access, "stream": site.stream, "buffer": buffer_name(site.buffer), **span}
