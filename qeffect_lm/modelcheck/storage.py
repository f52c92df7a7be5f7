"""What hidden-state work does to stored values, and what it sees that it must not.

Every storage holds a small value that says what its bytes mean: a slot whose activations it holds and how far they are, a scale
its epoch, open amax slots who merged into them, a cached weight its (version, epoch, layouts), a main gradient whose sum it is.
A work reads and writes them in the order of one interleaving; :meth:`Memory.wrong` is an observation that no sound program
makes. Values are immutable, so that states are hashable.

Some values change under a mere READ (a slot that its last reader gives back, a reader that runs, a gradient that was taken).
Such marks commute with each other and say only what the reader itself did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from qeffect_lm.modelcheck.program import (
    DIRECTION_OF,
    DIRECTIONS,
    FORWARD,
    GRADS,
    LAYOUTS,
    WEIGHTS,
    WRITES,
    Bump,
    Commit,
    Consume,
    Move,
    Optimizer,
    Program,
    Read,
    Refresh,
    Work,
    ZeroIdle,
    i_slot,
    w_slot,
)

Owner = tuple[int, int, int]  # (serial of the step, chunk, microbatch)


class Scale(NamedTuple):
    epoch: int = 0
    committed_in: int | None = None  # the step whose commit made it
    running: frozenset = frozenset()


class Held(NamedTuple):
    """A slot: whose it is, the last move over it, the other slot of the pair (what W needs lies in the pair's pool), and
    whether W's payload was taken."""

    owner: Owner
    state: str
    pair: str
    taken: bool = False


class Cached(NamedTuple):
    version: int = 0
    epoch: int = 0
    layouts: frozenset[str] = frozenset(LAYOUTS)


class Sum(NamedTuple):
    """A main gradient: the step it belongs to, its writers and EMPTY reports, zeroed, read by the optimizer."""

    step: int = 0
    writes: int = 0
    reports: int = 0
    zeroed: bool = False
    read: bool = False


START: dict[str, Any] = {
    **{f"scale.{d}": Scale() for d in DIRECTIONS},
    **{f"amax.{d}": frozenset() for d in DIRECTIONS},
    **{f"param.{w}": 0 for w in WEIGHTS},
    **{f"cache.{w}": Cached() for w in WEIGHTS},
    **{f"grad.{g}": Sum() for g in GRADS},
}


@dataclass(frozen=True)
class Context:
    """Where an operation stands in host order: the step it is in (None: outside), how many steps have begun, and, for a
    :class:`Consume`, whose handle it is."""

    place: int
    step: int | None
    begun: int
    owner: Owner | None = None
    slot: int = 0


class Memory:
    """The storages as one work sees them in one interleaving."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read
        self.written: dict[str, Any] = {}
        self.seen: list[tuple[str, str]] = []  # (kind, what was wrong)

    def get(self, storage: str) -> Any:
        return self.written[storage] if storage in self.written else self._read(storage)

    def put(self, storage: str, value: Any) -> None:
        self.written[storage] = value

    def wrong(self, kind: str, what: str) -> None:
        self.seen.append((kind, what))


def storages(program: Program) -> tuple[str, ...]:
    """All storages of a program, in a fixed order."""
    slots = {
        name
        for op in program.ops
        if isinstance(work := getattr(op, "work", None), Move)
        for name in (i_slot(work.chunk, work.i_slot), w_slot(work.chunk, work.w_slot))
    }
    return (*START, *sorted(slots))


def run(work: Work, memory: Memory, at: Context, program: Program) -> None:
    """Execute ``work``: observe, then write."""
    if isinstance(work, Move):
        _move(work, memory, at, program)
    elif isinstance(work, Commit):
        _commit(work, memory, at, program)
    elif isinstance(work, Optimizer):
        _optimizer(work, memory, at)
    elif isinstance(work, Bump):
        for name in work.weights:
            memory.put(f"param.{name}", memory.get(f"param.{name}") + 1)
    elif isinstance(work, Refresh):
        epoch = memory.get(f"scale.{FORWARD}").epoch
        for name in work.weights:
            memory.put(f"cache.{name}", Cached(memory.get(f"param.{name}"), epoch, frozenset(work.layouts)))
    elif isinstance(work, ZeroIdle):
        for name in GRADS:
            total = _sum(memory, name, at)
            memory.put(f"grad.{name}", total._replace(zeroed=True) if not total.writes else total)
    elif isinstance(work, Consume):
        _consume(memory, at)


# ---- F, I, W ---------------------------------------------------------------------------------------------------


def _move(move: Move, memory: Memory, at: Context, program: Program) -> None:
    owner = (at.begun, *move.key)
    direction = DIRECTION_OF.get(move.kind)
    if move.part != "close":
        _begin_move(move, memory, owner)
        if direction is not None:
            _begin_reading(move, memory, at, direction, program.window)
    if move.part == "open":
        return
    for read in move.reads:
        _read_weight(read, memory, program.window)
    if direction is not None:
        _report(move, memory, owner, direction)
    for name in WRITES[move.kind]:
        _write_grad(name, move, memory, at)
    _end_move(move, memory, owner)


def _begin_move(move: Move, memory: Memory, owner: Owner) -> None:
    """F claims two slots that nobody retains; I and W find their own microbatch there, as the move before left it."""
    i, w = i_slot(move.chunk, move.i_slot), w_slot(move.chunk, move.w_slot)
    if move.kind == "F":
        for name, released, pair in ((i, "I", w), (w, "W", i)):
            held = memory.get(name)
            if held is not None and held.state != released:
                memory.wrong("LeaseRetainedError", f"{name} is retained by {held.owner}")
            memory.put(name, Held(owner, "begun", pair))
        return
    for name, pair in ((i, w), (w, i)) if move.kind == "I" else ((w, i),):
        held = memory.get(name)
        if held is None or held.owner != owner or held.pair != pair:
            memory.wrong("StaleHandleError", f"{name} holds {held and held.owner}, not {owner} with {pair}")
        elif move.kind == "I" and held.state != "F":
            memory.wrong("InputGradTwiceError", f"{name} is past I: {held.state}")
        elif move.kind == "W" and held.state == "F":
            memory.wrong("WeightGradBeforeInputGradError", f"{name} holds no output gradient")
        elif move.kind == "W" and held.state == "W":
            memory.wrong("WeightGradTwiceError", f"{name} was read by W")


def _end_move(move: Move, memory: Memory, owner: Owner) -> None:
    i, w = i_slot(move.chunk, move.i_slot), w_slot(move.chunk, move.w_slot)
    if move.kind != "W":
        memory.put(i, Held(owner, move.kind, w))
    held = memory.get(w)
    if move.kind == "W" and held is not None and held.owner == owner and held.taken and held.state == "I":
        memory.wrong("WeightGradTwiceError", f"what {w} held for W was taken")
    memory.put(w, Held(owner, move.kind, i, move.kind == "W" or (move.kind == "I" and held is not None and held.taken)))


def _consume(memory: Memory, at: Context) -> None:
    if at.owner is None:
        return  # there was no F, so there is no handle
    name = w_slot(at.owner[1], at.slot)
    held = memory.get(name)
    if held is None or held.owner != at.owner:
        memory.wrong("StaleHandleError", f"{name} holds {held and held.owner}, the handle is of {at.owner}")
    elif held.taken:
        memory.wrong("WeightGradTwiceError", f"what {name} held for W was taken")
    elif held.state == "F":
        memory.wrong("WeightGradBeforeInputGradError", f"{name} holds no output gradient")
    else:
        memory.put(name, held._replace(taken=True))


# ---- scales and cached weights ---------------------------------------------------------------------------------


def _begin_reading(move: Move, memory: Memory, at: Context, direction: str, window: str) -> None:
    scale: Scale = memory.get(f"scale.{direction}")
    merged = memory.get(f"amax.{direction}")
    if move.epoch is not None and move.epoch != scale.epoch:
        memory.wrong("ScaleOrderError", f"the scale is of epoch {scale.epoch}, not {move.epoch}")
    if window == "step" and scale.committed_in == at.begun:
        memory.wrong("ScaleOrderError", "the scale is already the next step's")
    if window == "microbatch" and merged | scale.running:
        memory.wrong("ScaleOrderError", "the window holds another microbatch's amax")
    memory.put(f"scale.{direction}", scale._replace(running=scale.running | {(move.kind, *move.key)}))


def _report(move: Move, memory: Memory, owner: Owner, direction: str) -> None:
    scale: Scale = memory.get(f"scale.{direction}")
    merged = memory.get(f"amax.{direction}")
    if move.silent:
        memory.wrong("ScaleOrderError", f"nobody reported the amax of {' '.join(move.silent)}")
    if (move.kind, *owner) in merged:
        memory.wrong("ScaleOrderError", "it merged into this window before")
    memory.put(f"amax.{direction}", merged | {(move.kind, *owner)})
    memory.put(f"scale.{direction}", scale._replace(running=scale.running - {(move.kind, *move.key)}))


def _commit(commit: Commit, memory: Memory, at: Context, program: Program) -> None:
    if program.window == "step" and set(commit.directions) != set(DIRECTIONS):
        memory.wrong("ScaleOrderError", "one direction alone")
    for direction in commit.directions:
        scale: Scale = memory.get(f"scale.{direction}")
        merged = memory.get(f"amax.{direction}")
        if commit.epoch != scale.epoch:
            memory.wrong("ScaleOrderError", f"the scale is of epoch {scale.epoch}, not {commit.epoch}")
        if scale.running:
            memory.wrong("ScaleOrderError", f"{set(scale.running)} still read the scale")
        if program.window == "step":
            if at.step is None or scale.committed_in == at.step:
                memory.wrong("ScaleOrderError", "no window is open")
            kind = "F" if direction == FORWARD else "I"
            if any((kind, at.step, *key) not in merged for key in program.expected):
                memory.wrong("ScaleOrderError", "a contributor has not merged its amax")
        elif not merged:
            memory.wrong("ScaleOrderError", "nothing was merged into the window")
        memory.put(f"amax.{direction}", frozenset())
        memory.put(f"scale.{direction}", Scale(scale.epoch + 1, at.step))


def _read_weight(read: Read, memory: Memory, window: str) -> None:
    cached: Cached = memory.get(f"cache.{read.weight}")
    version = memory.get(f"param.{read.weight}")
    if cached.version != version:
        memory.wrong("StaleWeightError", f"the cache of {read.weight} is of version {cached.version}, the weight of {version}")
    if read.version is not None and version != read.version:
        memory.wrong("StaleWeightError", f"{read.weight} is at version {version}, not {read.version}")
    if window == "step" and cached.epoch != memory.get(f"scale.{FORWARD}").epoch:
        memory.wrong("StaleWeightError", f"the cache of {read.weight} is of epoch {cached.epoch}")
    if read.layout not in cached.layouts:
        memory.wrong("StaleWeightError", f"the cache of {read.weight} has no layout {read.layout}")


# ---- gradients -------------------------------------------------------------------------------------------------


def _sum(memory: Memory, name: str, at: Context) -> Sum:
    """The gradient as this step has made it: what earlier steps left counts for nothing."""
    total: Sum = memory.get(f"grad.{name}")
    return total if total.step == at.begun else Sum(at.begun)


def _write_grad(name: str, move: Move, memory: Memory, at: Context) -> None:
    total = _sum(memory, name, at)
    if move.idle:
        memory.put(f"grad.{name}", total._replace(reports=total.reports + 1))
        return
    if total.read:
        memory.wrong("GradSlotError", f"the optimizer has read the gradient of {name}")
    if (move.beta == 0) != (total.writes == 0):
        memory.wrong("GradSlotError", f"beta {move.beta} over {total.writes} contributions to {name}")
    memory.put(f"grad.{name}", total._replace(writes=total.writes + 1))


def _optimizer(work: Optimizer, memory: Memory, at: Context) -> None:
    for name in GRADS:
        total = _sum(memory, name, at)
        if total.read:
            memory.wrong("GradSlotError", f"the gradient of {name} was applied before")
        if total.writes + total.reports != work.expected:
            memory.wrong("GradSlotError", f"{total.writes}+{total.reports} of {work.expected} contributions to {name}")
        if not total.writes and not total.zeroed:
            memory.wrong("GradSlotError", f"the gradient of {name} is the previous step's")
        memory.put(f"grad.{name}", total._replace(read=True))
    for name in WEIGHTS:
        memory.put(f"param.{name}", memory.get(f"param.{name}") + 1)


# ---- steps -----------------------------------------------------------------------------------------------------


def step_left_open(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What a step that ends has left: slots that are still retained, amax that no commit closed."""
    seen = []
    for name, value in values.items():
        if name.startswith("slot.") and value is not None and value.state != name[5]:
            seen.append(("LeaseLeakError", f"{name} is retained by {value.owner}"))
        if name.startswith("amax.") and value:
            seen.append(("ScaleOrderError", f"{name} was never committed"))
    return seen


def abandon(name: str, value: Any) -> Any:
    """A storage after its step was abandoned: slots are free, the step's amax is gone."""
    if name.startswith("slot."):
        return None
    if name.startswith("amax."):
        return frozenset()
    if name.startswith("scale."):
        return value._replace(running=frozenset())
    return value
