"""Mutation testing of the plan check: break a valid plan in every small way and see that each break is noticed, or harmless.

A mutant drops, swaps (any two of a rank), duplicates or retargets one action of the plan, or one operation of its effects:
chunk, microbatch, slot, buffer, access, peer, stream, beta, epoch, version, event. :func:`score` runs the check on it:

* *rejected*, with rank, position, action and reason. The simulator (:mod:`pipeline.symbolic`), which shares no code with the
  check, then says whether it is *wrong* (another result, in some interleaving at least; a deadlock; two users of a workspace),
  or right and refused by a rule: the account contradicts the work, or the engine keeps that order;
* *accepted*: the simulator must show that it ends, in one way, with the valid plan's result. Else the check has missed
  something, and :attr:`Score.wrong_survivors` names it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pipeline.actions import Action
from pipeline.effects import program as program_of
from pipeline.plan import Plan
from pipeline.program import LAUNCH, RECORD, WAIT, Buffer, Op, Program
from pipeline.prove import prove
from pipeline.symbolic import Simulator
from pipeline.validate import validate
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError

MOST_MUTANTS = 1_000_000  # of one plan; making them all takes a minute


@dataclass(frozen=True)
class Mutant:
    """One broken plan. ``how`` is drop, swap, duplicate or retarget; ``what`` describes it."""

    how: str
    what: str
    subject: Program | list[list[Action]]


@dataclass
class Score:
    """What became of the mutants, by their kind (``plan drop``, ``effects swap`` …).

    Attributes:
        wrong: rejected, and shown to be wrong by the simulator.
        policy: rejected, though the simulator finds the valid plan's result.
        unexpressed: rejected, and there is no program to simulate: the plan has no slots for what it says.
        unknown: rejected; the simulator gave up.
        equal: accepted, and shown to be equal to the valid plan in every interleaving.
        wrong_survivors, unplaced: must be empty. Accepted and not shown equal; rejected without rank, position and action.
    """

    wrong: Counter[str] = field(default_factory=Counter)
    policy: Counter[str] = field(default_factory=Counter)
    unexpressed: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    wrong_survivors: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)

    @property
    def rejected(self) -> int:
        return sum(map(Counter.total, (self.wrong, self.policy, self.unexpressed, self.unknown)))

    @property
    def total(self) -> int:
        return self.rejected + self.equal.total() + len(self.wrong_survivors)

    def __add__(self, other: Score) -> Score:
        names = self.__dataclass_fields__
        return Score(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def lines(self) -> list[str]:
        """A line for each kind of mutant, and the sum."""
        columns = self.wrong, self.policy, self.unexpressed, self.unknown, self.equal
        kinds = sorted(set().union(*columns))
        lines = ["mutants             rejected:  wrong  by rule  no program  unknown   survive: equal   wrong"]
        for kind in kinds:
            wrong, policy, unexpressed, unknown, equal = (column[kind] for column in columns)
            lines.append(f"{kind:<28} {wrong:>6} {policy:>8} {unexpressed:>11} {unknown:>8} {equal:>16}")
        wrong, policy, unexpressed, unknown, equal = (column.total() for column in columns)
        last = f"{'all ' + str(self.total):<28} {wrong:>6} {policy:>8} {unexpressed:>11} {unknown:>8} {equal:>16}"
        return [*lines, f"{last} {len(self.wrong_survivors):>7}"]


def score(subject: Plan | Program, sample: int | None = None, seed: int = 0) -> Score:
    """Mutation testing of a valid plan: of its actions and of its effects; of a program: of its effects.

    Args:
        sample: how many mutants, drawn with ``seed``; None: all.

    Raises:
        PlanError: the plan itself is rejected.
        UsageError: it has more than :data:`MOST_MUTANTS` mutants.
    """
    prove(subject)
    total = 0
    for _ in _mutants(subject):
        total += 1
        if total > MOST_MUTANTS:
            raise UsageError(f"this plan can be broken in more than {MOST_MUTANTS:,} ways: test the check on a smaller one")
    if sample is None or sample >= total:
        return judge(subject, _mutants(subject))
    places = random.Random(seed).sample(range(total), sample)
    wanted = set(places)
    drawn = {place: mutant for place, mutant in enumerate(_mutants(subject)) if place in wanted}  # all would not fit
    return judge(subject, [drawn[place] for place in places])


def _mutants(subject: Plan | Program) -> Iterator[Mutant]:
    yield from effects_mutants(program_of(subject) if isinstance(subject, Plan) else subject)
    if isinstance(subject, Plan):
        yield from plan_mutants(subject)


def judge(subject: Plan | Program, mutants: Iterable[Mutant]) -> Score:
    """Check every mutant, and simulate it."""
    simulator, result = Simulator(), Score()
    valid = simulator.run(program_of(subject) if isinstance(subject, Plan) else subject)
    assert valid.sound, "the simulator finds fault with the valid plan"
    for mutant in mutants:
        kind = f"{'effects' if isinstance(mutant.subject, Program) else 'plan'} {mutant.how}"
        program, error = _checked(subject, mutant.subject)
        if error is None:
            assert program is not None
            outcome = simulator.run(program)
            if outcome.sound and outcome.finals == valid.finals:
                result.equal[kind] += 1
            else:
                result.wrong_survivors.append(f"{kind}: {mutant.what}: {outcome}")
            continue
        if not {"rank", "position", "action"} <= set(error.place):
            result.unplaced.append(f"{kind}: {mutant.what}: {error}")
        if program is None:
            result.unexpressed[kind] += 1
        else:
            outcome = simulator.run(program)
            right = outcome.sound and outcome.finals == valid.finals
            unknown = not right and not (outcome.deadlock or outcome.overlap or outcome.finals - valid.finals)
            column = result.policy if right else result.unknown if unknown else result.wrong
            column[kind] += 1
    return result


def _checked(valid: Plan | Program, mutant: Program | list[list[Action]]) -> tuple[Program | None, PlanError | None]:
    """The program of a mutant, as far as it has one, and why it is rejected, if it is."""
    program: Program | None = None
    try:
        if isinstance(mutant, Program):
            program = mutant
        else:
            assert isinstance(valid, Plan)
            try:  # fails where an action has no slot
                program = program_of(replace(valid, actions=tuple(map(tuple, mutant))))
            except (LookupError, PlanError, UsageError):
                pass
            unordered, window, joined = valid.allow_unordered, valid.window, valid.coalesce_w
            placement, microbatches = valid.placement, valid.microbatches
            validate(mutant, placement, microbatches, lowered=True, allow_unordered=unordered, window=window, coalesce_w=joined)
            assert program is not None, "a plan that has no slots was accepted"
        prove(program)
    except PlanError as error:
        return program, error
    return program, None


# ---- mutants of the plan -----------------------------------------------------------------------------------------


def plan_mutants(plan: Plan) -> Iterator[Mutant]:
    """Every action dropped, duplicated, swapped with any other of its rank, moved to any other chunk or microbatch."""
    for rank, row in enumerate(plan.actions):

        def with_row(changed: Iterable[Action], rank: int = rank) -> list[list[Action]]:
            return [list(changed) if other == rank else list(same) for other, same in enumerate(plan.actions)]

        for i, action in enumerate(row):
            place = f"{action} (rank {rank}, position {i})"
            yield Mutant("drop", place, with_row([*row[:i], *row[i + 1 :]]))
            yield Mutant("duplicate", place, with_row([*row[: i + 1], *row[i:]]))
            for j in range(i + 1, len(row)):
                if row[j] != action:
                    changed = list(row)
                    changed[i], changed[j] = row[j], action
                    yield Mutant("swap", f"{place} with {row[j]}", with_row(changed))
            if action.chunk is None:
                continue
            for chunk in range(plan.placement.num_chunks):
                for microbatch in range(plan.microbatches):
                    if (chunk, microbatch) != action.key:
                        other = replace(action, chunk=chunk, microbatch=microbatch)
                        yield Mutant("retarget", f"{place} to {other}", with_row([*row[:i], other, *row[i + 1 :]]))


# ---- mutants of the effects --------------------------------------------------------------------------------------


def effects_mutants(program: Program) -> Iterator[Mutant]:
    """Every operation dropped, duplicated, swapped with any other of its rank, and each of its fields changed."""
    for rank, row in enumerate(program.rows):
        streams = sorted({op.stream for op in row if op.stream})
        events = sorted({op.event for op in row if op.event is not None})
        for i, op in enumerate(row):
            place = f"{op.name} (rank {rank}, operation {i})"
            yield Mutant("drop", place, program.with_row(rank, [*row[:i], *row[i + 1 :]]))
            yield Mutant("duplicate", place, program.with_row(rank, [*row[: i + 1], *row[i:]]))
            for j in range(i + 1, len(row)):
                if row[j] != op:
                    changed = list(row)
                    changed[i], changed[j] = row[j], op
                    yield Mutant("swap", f"{place} with {row[j].name} ({j})", program.with_row(rank, changed))
            for other in _retargeted(op, program, row, streams, events):
                yield Mutant("retarget", f"{place} to {other}", program.with_row(rank, [*row[:i], other, *row[i + 1 :]]))


def _retargeted(op: Op, program: Program, row: Iterable[Op], streams: list[str], events: list[int]) -> Iterator[Op]:
    """The operation with one field changed, and every other operation of its kind of work in its place."""
    if op.stream:
        yield from (replace(op, stream=stream) for stream in streams if stream != op.stream)
    if op.kind in (RECORD, WAIT):
        yield from (replace(op, event=event) for event in events if event != op.event)
    if op.chunk is not None:
        chunks, microbatches = range(program.placement.num_chunks), range(program.microbatches)
        keys = [(chunk, microbatch) for chunk in chunks for microbatch in microbatches if (chunk, microbatch) != op.key]
        yield from (replace(op, chunk=chunk, microbatch=microbatch) for chunk, microbatch in keys)
    if op.kind != LAUNCH:
        return
    if op.peer is not None:
        yield from (replace(op, peer=peer) for peer in range(program.placement.num_ranks) if peer != op.peer)
    for name in ("i_slot", "w_slot", "epoch", "version", "members"):
        value = getattr(op, name)
        if value is not None:
            yield replace(op, **{name: value + 1})
            if value:
                yield replace(op, **{name: value - 1})
    if op.beta is not None:
        yield replace(op, beta=1 - op.beta)
    if op.joint_beta is not None:
        yield replace(op, joint_beta=1 - op.joint_beta)
    yield from (other for other in dict.fromkeys(row) if other.work == op.work and other != op and other.kind == LAUNCH)
    buffers = sorted({buffer for other in row for buffer, _ in other.accesses}, key=str)
    for place, (buffer, access) in enumerate(op.accesses):
        before, after = op.accesses[:place], op.accesses[place + 1 :]
        yield replace(op, accesses=(*before, *after))
        for kind in ("read", "write", "max_merge"):
            if kind != access:
                yield replace(op, accesses=(*before, (buffer, kind), *after))
        for other in buffers:
            if other != buffer and _alike(buffer, other):
                yield replace(op, accesses=(*before, (other, access), *after))


def _alike(one: Buffer, other: Buffer) -> bool:
    """Two slots of one buffer, or the same buffer of another chunk."""
    return not isinstance(one, str) and not isinstance(other, str) and one[0] == other[0]
