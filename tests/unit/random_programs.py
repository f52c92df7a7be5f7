"""Random programs for qeffect_lm.modelcheck: sound ones by construction, then altered; and their minimal forms.

A script of actions is drawn that obeys all rules; then its hidden state may be altered; then streams are chosen and every
edge that the accesses need is recorded (full events, early ones, detours over a third stream or the host); then edges may be
altered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from qeffect_lm.modelcheck.program import (
    ACCESSES,
    BACKWARD,
    DIRECTION_OF,
    DIRECTIONS,
    FORWARD,
    HOST,
    LAYOUTS,
    MAX_MERGE,
    READ,
    WEIGHTS,
    WRITE,
    Abandon,
    Begin,
    Bump,
    Commit,
    Consume,
    End,
    Launch,
    Move,
    Op,
    Optimizer,
    Program,
    Read,
    Record,
    Refresh,
    Settle,
    Touch,
    Wait,
    ZeroIdle,
)

STREAMS = ("s1", "s2", "s3")
PLAIN = ("x", "y")
MAX_ACTIONS = 9
KEYS = ((0, 0), (0, 1), (1, 0))


def random_program(rng: Random) -> Program:
    """A program of at most 9 actions on 3 streams and the host."""
    window = rng.choice(("step", "step", "microbatch"))
    keys = tuple(rng.sample(KEYS, rng.choice((1, 1, 1, 2, 2, 3))))
    script = _Script(rng, window, keys)
    plain = rng.random() < 0.25
    ops = script.plain() if plain else script.weights() if rng.random() < 0.15 else script.steps()
    keys = script.keys
    if rng.random() < (0.1 if plain else 0.5):
        for _ in range(rng.choice((1, 1, 1, 2))):
            ops = _altered(rng, ops)
    ops = _launched(ops)
    woven = _Weaver(rng, Program(window, tuple(ops), keys)).weave(restless=plain)
    if rng.random() < (0.7 if plain else 0.35):
        for _ in range(rng.choice((1, 2, 3) if plain else (1, 1, 1, 2, 3))):
            woven = _edges_altered(rng, woven)
    woven = _closed_where_opened(woven)
    return Program(window, tuple(woven), keys)


# ---- sound scripts -------------------------------------------------------------------------------------------


@dataclass
class _Script:
    rng: Random
    window: str
    keys: tuple[tuple[int, int], ...]
    ops: list[Op] = field(default_factory=list)
    version: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, 0))
    epoch: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    states: dict[tuple[int, int], str] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def actions(self) -> int:
        return sum(isinstance(op, Launch) for op in self.ops)

    def add(self, work, touches: tuple[Touch, ...] = ()) -> None:
        self.ops.append(Launch("", work, touches))

    def touch(self, most: int = 2) -> tuple[Touch, ...]:
        found = []
        for _ in range(self.rng.randint(0, most)):
            lo = self.rng.choice((0, 0, 2, 4))
            found.append(Touch(self.rng.choice(PLAIN), self.rng.choice(ACCESSES), lo, lo + self.rng.choice((2, 4, 8))))
        return tuple(found)

    def plain(self) -> list[Op]:
        """Accesses alone; half of the time to few bytes, by readers and mergers that only a last writer must wait for."""
        rng = self.rng
        few = rng.random() < 0.5
        for _ in range(rng.randint(3, MAX_ACTIONS)):
            if rng.random() < 0.06:
                self.ops.append(Settle())
            kind = rng.choice((READ, READ, MAX_MERGE, MAX_MERGE, WRITE))
            self.add(None, (Touch("x", kind, *rng.choice(((0, 8), (0, 4), (4, 8), (2, 6)))),) if few else self.touch(3))
        return self.ops

    def steps(self) -> list[Op]:
        budget = self.rng.choice((4, 5, 6, 7, 7, 8, 8, 9, 9, 9))
        self.reading = self.rng.random() < 0.6
        self.extras = self.rng.random() < 0.3
        while self.actions < budget:
            self.step(budget)
        return self.ops

    def weights(self) -> list[Op]:
        """A step and the next one's F, all with the same reads, and caches made anew in between, mostly as they should be."""
        rng, key = self.rng, self.keys[0]
        self.keys = (key,)
        version = 0 if rng.random() < 0.3 else None
        usual = tuple(Read(w, layout, version) for w in WEIGHTS for layout in LAYOUTS if rng.random() < 0.4)
        usual = usual or (Read("a", "rows"),)
        moves = {kind: Move(kind, *key, 0, 0, None if kind == "F" else 0, usual if kind != "W" else ()) for kind in "FIW"}
        ends = [Commit(0)] if self.window == "step" else [Commit(0, (FORWARD,)), Commit(0, (BACKWARD,))]
        self.ops = [Begin(), *(Launch("", moves[kind]) for kind in "FIW"), *(Launch("", commit) for commit in ends)]
        if self.window == "microbatch":
            self.ops[2:2] = [self.ops.pop(4)]
        self.ops += [Launch("", Refresh()), End(), Begin(), Launch("", moves["F"])]
        for _ in range(rng.randint(0, 2)):
            place = rng.randint(1, len(self.ops) - 1)
            some = tuple(sorted(rng.sample(WEIGHTS, rng.randint(1, 2))))
            made = Launch("", Refresh(some, rng.choice((LAYOUTS, LAYOUTS, ("rows",), ("columns",)))))
            self.ops[place:place] = rng.choice(([Launch("", Bump(some))], [Launch("", Bump(some)), made], [made]))
        if rng.random() < 0.4:
            last = max(i for i, op in enumerate(self.ops) if isinstance(op, Launch) and isinstance(op.work, Refresh))
            self.ops[last] = Launch("", Refresh((rng.choice(WEIGHTS),)))
        return self.ops

    def step(self, budget: int) -> None:
        """One step, until its end or the budget's."""
        rng = self.rng
        self.ops.append(Begin())
        self.states, self.slots = dict.fromkeys(self.keys, ""), {}
        self.pending: dict[str, bool] = dict.fromkeys(DIRECTIONS, False)  # a commit is due
        self.committed = self.optimized = False
        self.written = dict.fromkeys(("I", "W"), 0)
        self.idle = {kind: rng.random() < 0.06 for kind in ("I", "W")}
        while self.actions < budget:
            if self.extras and rng.random() < 0.25:
                self.add(None, self.touch())
                continue
            choices = self.choices()
            if not choices:
                break
            rng.choice(choices)()
            if rng.random() < 0.02:
                self.ops.append(Abandon())
                return
        if self.over():
            self.ops.append(End())
        elif rng.random() < 0.2:
            self.ops.append(Abandon())

    def over(self) -> bool:
        return all(state == "W" for state in self.states.values()) and not any(self.pending.values()) and (
            self.committed or self.window == "microbatch"
        )

    def choices(self) -> list[Callable[[], None]]:
        """What may come next."""
        result: list[Callable[[], None]] = []
        for key, state in self.states.items():
            following = {"": "F", "F": "I", "I": "W"}.get(state)
            if following is None or (following == "F" and self.free(key) is None):
                continue
            direction = DIRECTION_OF.get(following)
            if self.window == "microbatch" and direction is not None and self.pending[direction]:
                continue
            result += [lambda k=key, f=following: self.move(f, k)] * (3 if following == "W" else 2)  # type: ignore[misc]
        moved = set(self.states.values())
        if self.window == "microbatch":
            result += [lambda d=d: self.commit((d,)) for d in DIRECTIONS if self.pending[d]] * 3  # type: ignore[misc]
        elif moved <= {"I", "W"} and not self.committed:
            result += [lambda: self.commit(DIRECTIONS)] * 2
        done = moved == {"W"} and not self.optimized
        if done:
            result += [self.optimize] * 3
        if self.reading and self.over() and self.optimized and not self.fresh:
            return [self.refresh]
        if moved == {"W"} and self.over() and (self.optimized or self.rng.random() < 0.2):
            return []
        return result

    def free(self, key: tuple[int, int]) -> tuple[int, int] | None:
        """An I-slot and a W-slot that nobody holds."""
        held_i = {i for k, (i, _) in self.slots.items() if k[0] == key[0] and self.states[k] == "F"}
        held_w = {w for k, (_, w) in self.slots.items() if k[0] == key[0] and self.states[k] in "FI"}
        free_i, free_w = sorted({0, 1} - held_i), sorted({0, 1} - held_w)
        return (self.rng.choice(free_i), self.rng.choice(free_w)) if free_i and free_w else None

    def move(self, kind: str, key: tuple[int, int]) -> None:
        rng = self.rng
        if kind == "F":
            slots = self.free(key)
            assert slots is not None
            self.slots[key] = slots
        direction = DIRECTION_OF.get(kind)
        beta, idle = None, False
        if kind != "F":
            idle = self.idle[kind]
            beta = int(self.written[kind] > 0)
            self.written[kind] += not idle
        reads: tuple[Read, ...] = ()
        if direction is not None and self.reading:
            wanted = [(w, layout) for w in WEIGHTS for layout in LAYOUTS if rng.random() < 0.35]
            if self.usual is None or rng.random() < 0.3:
                self.usual = wanted
            stated = rng.random() < 0.3
            reads = tuple(Read(w, layout, self.version[w] if stated else None) for w, layout in self.usual)
        epoch = self.epoch[direction] if direction is not None and rng.random() < 0.5 else None
        self.add(
            Move(kind, *key, *self.slots[key], beta, reads, epoch, idle=idle),
            self.touch(1) if self.extras and rng.random() < 0.4 else (),
        )
        self.states[key] = kind
        if direction is not None:
            self.pending[direction] = True

    def commit(self, directions: tuple[str, ...]) -> None:
        self.add(Commit(self.epoch[directions[0]], directions))
        for direction in directions:
            self.epoch[direction] += 1
            self.pending[direction] = False
        self.committed = self.window == "step"

    def optimize(self) -> None:
        if any(self.idle.values()):
            self.add(ZeroIdle())
        self.add(Optimizer(len(self.keys)))
        self.optimized, self.fresh = True, False
        for name in WEIGHTS:
            self.version[name] += 1

    def refresh(self) -> None:
        self.add(Refresh())
        self.fresh = True

    usual: list[tuple[str, str]] | None = None  # what graphs read again and again
    fresh: bool = True
    reading: bool = True
    extras: bool = False
    committed: bool = False
    optimized: bool = False


# ---- altered hidden state ------------------------------------------------------------------------------------


def _altered(rng: Random, ops: list[Op]) -> list[Op]:
    """One thing changed in a script."""
    ops = list(ops)
    place = rng.randrange(len(ops))
    common = ("field",) * 4 + ("insert", "split") * 2
    how = rng.choice(("drop", "copy", "again", "swap", "move", *common))
    if how == "again":  # I or W a second time, soon after
        places = [i for i, op in enumerate(ops) if isinstance(op, Launch) and isinstance(op.work, Move) and op.work.kind != "F"]
        place = rng.choice(places or [place])
        ops.insert(min(len(ops), place + rng.randint(1, 3)), ops[place])
    elif how == "drop":
        del ops[place]
    elif how == "copy":
        op = ops[place]
        if isinstance(op, Launch) and isinstance(op.work, Move) and op.work.kind == "F" and rng.random() < 0.7:
            op = replace(op, work=replace(op.work, microbatch=2))  # over the same slots
        ops.insert(rng.randint(place + 1, len(ops)), op)
    elif how == "swap":
        other = rng.randrange(len(ops))
        ops[place], ops[other] = ops[other], ops[place]
    elif how == "move":
        op = ops.pop(place)
        ops.insert(rng.randint(0, len(ops)), op)
    elif how == "insert":
        foreign = _foreign(rng)
        ops.insert(rng.randint(0, len(ops)), foreign)
        if isinstance(foreign, Launch) and isinstance(foreign.work, Consume):
            ops.append(foreign)
    else:
        moves = [i for i, op in enumerate(ops) if isinstance(op, Launch) and op.work is not None]
        if moves:
            place = rng.choice(moves)
            op = ops[place]
            assert isinstance(op, Launch) and op.work is not None
            if how == "field":
                ops[place] = replace(op, work=_other_field(rng, op.work))
            elif isinstance(op.work, Move):
                ops[place] = replace(op, work=replace(op.work, part="open"))
                ops.insert(
                    rng.randint(place + 1, min(len(ops), place + 2)),
                    replace(op, work=replace(op.work, part="close")),
                )
    return ops or [Begin()]


def _foreign(rng: Random) -> Op:
    some = tuple(sorted(rng.sample(WEIGHTS, rng.randint(1, 2))))
    return rng.choice(
        (
            Launch("", Bump(some)),
            Launch("", Refresh(some, rng.choice((LAYOUTS, LAYOUTS, ("rows",), ("columns",))))),
            Launch("", Consume(*rng.choice(KEYS))),
            Launch("", Consume(0, 0)),
            Launch("", Commit(rng.randint(0, 1), rng.choice((DIRECTIONS, (FORWARD,), (BACKWARD,))))),
            Launch("", ZeroIdle()),
            Launch("", Move("F", 1, 1, 0, 0)),  # nobody waits for it
            Launch("", Optimizer(1)),
            Begin(),
            End(),
            Abandon(),
            Settle(),
        )
    )


def _other_field(rng: Random, work):
    """The same work with one value changed."""
    if isinstance(work, Move):
        changes: list[dict] = [
            {"i_slot": 1 - work.i_slot},
            {"w_slot": 1 - work.w_slot},
            {"microbatch": 1 - work.microbatch},
            {"kind": rng.choice("FIW")},
        ]
        if work.kind != "F":
            changes += [{"beta": 1 - (work.beta or 0)}] * 3 + [{"idle": not work.idle}]
        if work.kind != "W":
            changes += [
                {"epoch": (work.epoch or 0) + rng.choice((-1, 1))},
                {"silent": (f"{rng.choice(WEIGHTS)}.{'input' if work.kind == 'F' else 'grad_output'}",)},
                {"reads": (Read(rng.choice(WEIGHTS), rng.choice(LAYOUTS), rng.choice((None, 0, 1, 2))),)},
            ]
        changed = replace(work, **rng.choice(changes))
        if changed.kind != work.kind:
            beta = None if changed.kind == "F" else (work.beta or 0)
            kept = work.reads if changed.kind != "W" else ()
            changed = replace(changed, beta=beta, reads=kept, epoch=None, idle=False, silent=())
        return changed
    if isinstance(work, Commit):
        return rng.choice(
            (
                replace(work, epoch=work.epoch + rng.choice((-1, 1))),
                replace(work, directions=rng.choice((DIRECTIONS, (FORWARD,), (BACKWARD,)))),
            )
        )
    if isinstance(work, Optimizer):
        return replace(work, expected=work.expected + rng.choice((-1, 1)))
    if isinstance(work, Bump):
        return replace(work, weights=(rng.choice(WEIGHTS),))
    if isinstance(work, Refresh):
        return rng.choice(
            (
                replace(work, weights=(rng.choice(WEIGHTS),)),
                replace(work, layouts=(rng.choice(LAYOUTS),)),
            )
        )
    return work


def _launched(ops: list[Op]) -> list[Op]:
    """At most nine actions; an action closes as it was opened, and a step is abandoned between actions only."""
    result: list[Op] = []
    running: Move | None = None
    actions = 0
    for op in ops:
        work = op.work if isinstance(op, Launch) else None
        if isinstance(work, Move) and work.part == "close":
            if running is None:
                continue
            op = replace(op, work=replace(running, part="close"))  # type: ignore[type-var]
            running = None
        elif isinstance(op, Abandon) and running is not None:
            continue
        elif isinstance(work, Move) and work.part == "open":
            running = work
        if isinstance(op, Launch):
            actions += 1
            if actions > MAX_ACTIONS:
                break
        result.append(op)
    return result


def _closed_where_opened(ops: list[Op]) -> list[Op]:
    """Both ends of an action lie on one stream."""
    stream = ""
    for place, op in enumerate(ops):
        if isinstance(op, Launch) and isinstance(op.work, Move):
            if op.work.part == "open":
                stream = op.stream
            elif op.work.part == "close":
                ops[place] = replace(op, stream=stream)
    return ops


# ---- edges ---------------------------------------------------------------------------------------------------


class _Weaver:
    """Chooses streams and records the edges that the accesses need."""

    def __init__(self, rng: Random, script: Program) -> None:
        self.rng, self.script = rng, script
        self.ops: list[Op] = []
        self.events = 0
        self.known: dict[str, set[int]] = {stream: set() for stream in (HOST, *STREAMS)}
        self.kept: dict[str, list[tuple[int, set[int]]]] = {stream: [] for stream in STREAMS}
        self.stream: dict[int, str] = {}

    def weave(self, restless: bool) -> list[Op]:
        rng = self.rng
        pool = STREAMS if restless else STREAMS[: rng.choice((1, 2, 2, 3, 3))]
        at = rng.choice(pool)
        for place, op in enumerate(self.script.ops):
            if not isinstance(op, Launch):
                self.ops.append(op)
                if isinstance(op, Settle | Abandon):
                    self.known[HOST] |= set(self.stream)
                continue
            if restless or rng.random() < 0.5:
                at = HOST if rng.random() < 0.12 else rng.choice(pool)
            self.order(place, at)
            self.ops.append(replace(op, stream=at))
            self.stream[place] = at
            if at != HOST:
                self.known[at] |= self.known[HOST]
            self.known[at].add(place)
            if at != HOST and rng.random() < 0.4:
                self.kept[at].append((self.record(at), set(self.known[at])))
        return self.ops

    def order(self, place: int, at: str) -> None:
        """Edges from every action that conflicts with the one at ``place``."""
        mine = self.script.accesses[place]
        seen = self.known[at] | self.known[HOST]
        for other in sorted(self.stream, reverse=True):
            buffers = {t.buffer for t in mine for o in self.script.accesses[other] if t.conflicts(o)}
            source = self.stream[other]
            if not buffers or source in (at, HOST) or other in seen:
                continue
            if self.rng.random() < 0.25:
                covers = buffers | set(self.rng.sample(PLAIN, self.rng.randint(0, 1)))
                self.edge(source, at, frozenset(covers))  # known for these buffers only: not noted
            else:
                seen |= self.edge(source, at, None, other)

    def edge(self, source: str, at: str, covers: frozenset[str] | None, other: int = -1) -> set[int]:
        rng = self.rng
        vouched = set(self.known[source])
        kept = [(event, known) for event, known in self.kept[source] if other in known]
        if covers is None and kept and rng.random() < 0.6:
            event, vouched = rng.choice(kept)
        else:
            event = self.record(source, covers)
        way = rng.random()
        third = [s for s in STREAMS if s not in (source, at)]
        if way < 0.15 and at != HOST:
            self.ops.append(Wait(HOST, event))
            if covers is None:
                self.known[HOST] |= vouched
        elif way < 0.35:
            over = rng.choice(third)
            self.ops.append(Wait(over, event))
            if covers is None:
                self.known[over] |= vouched
            self.ops.append(Wait(at, self.record(over, covers if rng.random() < 0.5 else None)))
        else:
            self.ops.append(Wait(at, event))
        if covers is None:
            self.known[at] |= vouched
        return vouched

    def record(self, stream: str, covers: frozenset[str] | None = None) -> int:
        self.events += 1
        self.ops.append(Record(self.events, stream, covers))
        return self.events


def _edges_altered(rng: Random, ops: list[Op]) -> list[Op]:
    """One edge dropped, weakened or bent, or one action on another stream."""
    ops = list(ops)
    edges = [i for i, op in enumerate(ops) if isinstance(op, Record | Wait)]
    actions = [i for i, op in enumerate(ops) if isinstance(op, Launch)]
    how = rng.choice(("drop", "drop", "drop", "weaken", "weaken", "bend", "later", "stream"))
    if how == "stream" and actions:
        place = rng.choice(actions)
        ops[place] = replace(ops[place], stream=rng.choice((*STREAMS, HOST)))  # type: ignore[type-var, call-arg]
    elif edges:
        place = rng.choice(edges)
        op = ops[place]
        if how == "drop":
            del ops[place]
        elif how == "later":
            del ops[place]
            ops.insert(rng.randint(place, min(len(ops), place + 4)), op)
        elif isinstance(op, Record):
            if how == "weaken":
                buffers = sorted({t.buffer for touches in Program("step", tuple(ops)).accesses for t in touches})
                ops[place] = replace(op, covers=frozenset(rng.sample(buffers, rng.randint(0, min(3, len(buffers))))))
            else:
                ops[place] = replace(op, stream=rng.choice(STREAMS))
        else:
            assert isinstance(op, Wait)
            events = [other.event for other in ops if isinstance(other, Record)]
            if how == "weaken" and events:
                ops[place] = replace(op, event=rng.choice(events))
            else:
                ops[place] = replace(op, stream=rng.choice((*STREAMS, HOST)))
    return ops


# ---- minimal forms -------------------------------------------------------------------------------------------


def minimal(program: Program, disagrees: Callable[[Program], bool]) -> Program:
    """A program that still disagrees and from which nothing can be left out."""
    shrunk = True
    while shrunk:
        shrunk = False
        for place in reversed(range(len(program.ops))):
            for simpler in _simpler(program.ops[place]):
                ops = _launched([*program.ops[:place], *simpler, *program.ops[place + 1 :]])
                candidate = replace(program, ops=tuple(ops))
                if candidate.ops != program.ops and disagrees(candidate):
                    program, shrunk = candidate, True
                    break
    return program


def _simpler(op: Op) -> list[list[Op]]:
    """Nothing, or the same with less in it."""
    result: list[list[Op]] = [[]]
    if isinstance(op, Launch):
        result += [[replace(op, touches=())]] * bool(op.touches)
        work = op.work
        if isinstance(work, Move):
            result += [[replace(op, work=replace(work, reads=()))]] * bool(work.reads)
            result += [[replace(op, work=replace(work, epoch=None))]] * (work.epoch is not None)
    return result
