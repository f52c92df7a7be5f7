"""The vocabulary of small programs: what a host launches, in its order, and the edges it records.

A :class:`Program` is a sequence of operations. :class:`Launch` puts one action on a stream (``"host"``: the host does it
itself); its accesses are those it states plus those that its hidden-state *work* implies (:func:`uses`). Streams run their
operations in the order of launching; a launch comes after whatever the host did before. :class:`Record`, :class:`Wait` and
:class:`Settle` are the only other edges.

**What an early event means.** An event with ``covers`` vouches for the buffers it lists and for no others: for a buffer that
it does not list, waiting for it is no edge. So which orders are allowed is a question per buffer, through chains too: a full
event on the waiting stream, a host synchronisation or a launch hands on what the early event vouched for, for its buffers
alone.

Byte ranges are half open. Two accesses conflict where their ranges overlap, except READ with READ and MAX_MERGE with MAX_MERGE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

HOST = "host"
READ, WRITE, MAX_MERGE = "read", "write", "max_merge"
ACCESSES = (READ, WRITE, MAX_MERGE)
FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)
WEIGHTS = ("a", "b")
GRADS = ("a", "b", "norm")
LAYOUTS = ("rows", "columns")
DIRECTION_OF = {"F": FORWARD, "I": BACKWARD}
WRITES = {"F": (), "I": ("norm",), "W": WEIGHTS}


@dataclass(frozen=True)
class Touch:
    """One access to bytes ``[lo, hi)`` of a buffer."""

    buffer: str
    kind: str
    lo: int = 0
    hi: int = 8

    def conflicts(self, other: Touch) -> bool:
        return (
            self.buffer == other.buffer
            and max(self.lo, other.lo) < min(self.hi, other.hi)
            and (self.kind != other.kind or self.kind == WRITE)
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.buffer}[{self.lo}:{self.hi}]"


# ---- hidden-state work ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A cached weight is read in a layout; ``version``: the one the reader needs (None: the parameter's own)."""

    weight: str
    layout: str
    version: int | None = None

    def __str__(self) -> str:
        return f"{self.weight}.{self.layout}" + ("" if self.version is None else f"@{self.version}")


@dataclass(frozen=True)
class Move:
    """F, I or W of a microbatch over its I-slot and W-slot.

    ``epoch``: the scale epoch it needs (None: the step's own). ``silent``: roles whose amax it does not report. ``idle``: it
    had no work for its gradients and reports EMPTY for them. ``part``: ``open`` and ``close`` are the two ends of an action
    during which the host does other things.
    """

    kind: str
    chunk: int
    microbatch: int
    i_slot: int
    w_slot: int
    beta: int | None = None
    reads: tuple[Read, ...] = ()
    epoch: int | None = None
    silent: tuple[str, ...] = ()
    idle: bool = False
    part: str = "whole"

    @property
    def key(self) -> tuple[int, int]:
        return (self.chunk, self.microbatch)

    def __str__(self) -> str:
        words = [f"{self.chunk}{self.kind}{self.microbatch} slots I{self.i_slot} W{self.w_slot}"]
        words += [] if self.part == "whole" else [self.part]
        words += [] if self.beta is None else [f"beta {self.beta}"]
        words += [f"reads {' '.join(map(str, self.reads))}"] if self.reads else []
        words += [] if self.epoch is None else [f"epoch {self.epoch}"]
        words += [f"silent {' '.join(self.silent)}"] if self.silent else []
        return " ".join(words + ["idle"] * self.idle)


@dataclass(frozen=True)
class Commit:
    """The scales' epoch ``epoch`` is closed."""

    epoch: int
    directions: tuple[str, ...] = DIRECTIONS

    def __str__(self) -> str:
        return f"COMMIT {'+'.join(self.directions)} epoch {self.epoch}"


@dataclass(frozen=True)
class Optimizer:
    """Reads the gradients of ``expected`` contributions each and writes all parameters."""

    expected: int

    def __str__(self) -> str:
        return f"OPTIMIZER expects {self.expected}"


@dataclass(frozen=True)
class Bump:
    """Somebody else writes parameters, and says so."""

    weights: tuple[str, ...] = WEIGHTS

    def __str__(self) -> str:
        return f"BUMP {' '.join(self.weights)}"


@dataclass(frozen=True)
class Refresh:
    """Weight caches are made from the parameters with the current scales; their amax enters the open window."""

    weights: tuple[str, ...] = WEIGHTS
    layouts: tuple[str, ...] = LAYOUTS

    def __str__(self) -> str:
        return f"REFRESH {' '.join(self.weights)} ({' '.join(self.layouts)})"


@dataclass(frozen=True)
class ZeroIdle:
    """Gradients that nobody wrote in this step become zero."""

    def __str__(self) -> str:
        return "ZERO IDLE"


@dataclass(frozen=True)
class Consume:
    """What the last F of a microbatch left for W is taken through the handle that was kept then."""

    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"CONSUME handle of {self.chunk}F{self.microbatch}"


Work = Move | Commit | Optimizer | Bump | Refresh | ZeroIdle | Consume


# ---- operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One action on a stream: its work, if it has to do with hidden state, and further accesses."""

    stream: str
    work: Work | None = None
    touches: tuple[Touch, ...] = ()

    def __str__(self) -> str:
        parts = ([str(self.work)] if self.work is not None else []) + [str(touch) for touch in self.touches]
        return f"launch on {self.stream}: {', '.join(parts) or 'nothing'}"


@dataclass(frozen=True)
class Record:
    """An event after the work launched on a stream so far (``covers``: an early one, for these buffers only)."""

    event: int
    stream: str
    covers: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"record e{self.event} on {self.stream}" + (
            "" if self.covers is None else f" covering only {' '.join(sorted(self.covers)) or 'nothing'}"
        )


@dataclass(frozen=True)
class Wait:
    """A stream waits for an event (the host: it synchronises); one that was never recorded orders nothing."""

    stream: str
    event: int

    def __str__(self) -> str:
        return f"{self.stream} waits for e{self.event}"


@dataclass(frozen=True)
class Settle:
    """The host waits for everything launched so far."""

    def __str__(self) -> str:
        return "settle"


@dataclass(frozen=True)
class Begin:
    """A step begins."""

    def __str__(self) -> str:
        return "begin step"


@dataclass(frozen=True)
class End:
    """A step ends."""

    def __str__(self) -> str:
        return "end step"


@dataclass(frozen=True)
class Abandon:
    """The step failed: the host waits for everything and forgets what had begun."""

    def __str__(self) -> str:
        return "abandon step"


Op = Launch | Record | Wait | Settle | Begin | End | Abandon


@dataclass(frozen=True)
class Program:
    """Operations in host order. ``expected``: the (chunk, microbatch) whose F and I every window ``step`` waits for."""

    window: str
    ops: tuple[Op, ...]
    expected: tuple[tuple[int, int], ...] = ()

    @cached_property
    def accesses(self) -> tuple[tuple[Touch, ...], ...]:
        """Per operation, all its accesses to buffers."""
        slots: dict[tuple[int, int], int] = {}
        result: list[tuple[Touch, ...]] = []
        for op in self.ops:
            touches: tuple[Touch, ...] = ()
            if isinstance(op, Launch):
                work = op.work
                if isinstance(work, Consume):
                    slot = slots.get((work.chunk, work.microbatch))
                    touches = () if slot is None else (located(w_slot(work.chunk, slot), READ),)
                elif work is not None:
                    touches = tuple(located(storage, kind) for storage, kind in uses(work))
                if isinstance(work, Move) and work.kind == "F" and work.part != "open":
                    slots[work.key] = work.w_slot
                touches += op.touches
            result.append(touches)
        return tuple(result)

    def __str__(self) -> str:
        lines = [f"window {self.window}, every window waits for {list(self.expected)}"]
        return "\n".join([*lines, *(f"{i:3d}  {op}" for i, op in enumerate(self.ops))])


# ---- where hidden state lies ---------------------------------------------------------------------------------

_PLACES = {
    **{f"scale.{d}": ("scales", 8 * i) for i, d in enumerate(DIRECTIONS)},
    **{f"amax.{d}": ("amax", 8 * i) for i, d in enumerate(DIRECTIONS)},
    **{f"param.{w}": ("params", 8 * i) for i, w in enumerate(WEIGHTS)},
    **{f"cache.{w}": ("caches", 8 * i) for i, w in enumerate(WEIGHTS)},
    **{f"grad.{g}": ("grads", 8 * i) for i, g in enumerate(GRADS)},
}


def i_slot(chunk: int, index: int) -> str:
    return f"slot.I{chunk}.{index}"


def w_slot(chunk: int, index: int) -> str:
    return f"slot.W{chunk}.{index}"


@cache
def located(storage: str, kind: str) -> Touch:
    """The access to the bytes of a storage."""
    buffer, lo = _PLACES.get(storage, (storage, 0))
    return Touch(buffer, kind, lo, lo + 8)


def uses(work: Work) -> Iterator[tuple[str, str]]:
    """The storages that a work reads, writes or merges into (:class:`Consume`: see :attr:`Program.accesses`)."""
    if isinstance(work, Move):
        yield from _move_uses(work)
    elif isinstance(work, Commit):
        for direction in work.directions:
            yield from ((f"amax.{direction}", WRITE), (f"scale.{direction}", WRITE))
    elif isinstance(work, Optimizer):
        yield from ((f"grad.{name}", READ) for name in GRADS)
        yield from ((f"param.{name}", WRITE) for name in WEIGHTS)
    elif isinstance(work, Bump):
        yield from ((f"param.{name}", WRITE) for name in work.weights)
    elif isinstance(work, Refresh):
        yield from ((f"scale.{FORWARD}", READ), (f"amax.{FORWARD}", MAX_MERGE))
        for name in work.weights:
            yield from ((f"param.{name}", READ), (f"cache.{name}", WRITE))
    elif isinstance(work, ZeroIdle):
        yield from ((f"grad.{name}", WRITE) for name in GRADS)


def _move_uses(move: Move) -> Iterator[tuple[str, str]]:
    if move.kind != "W":
        yield i_slot(move.chunk, move.i_slot), WRITE if move.kind == "F" else READ
        yield f"scale.{DIRECTION_OF[move.kind]}", READ
        yield f"amax.{DIRECTION_OF[move.kind]}", MAX_MERGE
    yield w_slot(move.chunk, move.w_slot), READ if move.kind == "W" else WRITE
    if move.part == "open":
        return
    if move.reads and move.kind == "I":
        yield f"scale.{FORWARD}", READ
    for weight in sorted({read.weight for read in move.reads}):
        yield from ((f"param.{weight}", READ), (f"cache.{weight}", READ))
    yield from ((f"grad.{name}", WRITE) for name in WRITES[move.kind])
