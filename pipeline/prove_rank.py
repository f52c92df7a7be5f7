"""One rank's program, checked in host order: what :func:`pipeline.prove.prove` does for each rank.

Every operation goes through the contract's own classes, as in a run: a :class:`~qeffect_lm.contract.ledger.Ledger` over one
made-up layer per chunk holds leases, scale epochs, weight versions, gradient writers and stream clocks, and raises as it would
at run time. What a run sees in the numbers alone is followed here by name: which microbatch each buffer of a slot holds, and
who is still to read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.coalesce import members_of
from pipeline.effects import Effects
from pipeline.program import (
    BEGIN,
    COMPLETE,
    END,
    LAUNCH,
    RECORD,
    STEP_WORKS,
    TRANSFERS,
    WAIT,
    Buffer,
    Op,
    buffer_text,
)
from pipeline.schedules import Placement
from qeffect_lm.contract.errors import ContractViolation, GradSlotError, PlanError, ScaleOrderError, StaleWeightError
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Joint, Slot
from qeffect_lm.contract.ledger import Ledger, Summary
from qeffect_lm.contract.streams import Access, Event
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions

LAYOUTS = ("rows", "columns")
_DIRECTION = {"F": Direction.FORWARD, "I": Direction.BACKWARD}
_FIELDS = {  # what a launch must say
    "F": {"i_slot", "w_slot", "epoch", "version"},
    "I": {"i_slot", "w_slot", "beta", "epoch", "version"},
    "W": {"i_slot", "w_slot", "beta"},
    "STEP": {"version"},
    "REFRESH": {"epoch", "version"},
    **dict.fromkeys(("COMMIT", "COMMIT_F", "COMMIT_I"), {"epoch"}),
    **dict.fromkeys(TRANSFERS, {"peer"}),
}
_ALL_FIELDS = ("peer", "i_slot", "w_slot", "beta", "epoch", "version", "members", "joint_beta")
_PHASES = {  # the step's ends run once each and in this order; everything else while the step is "open"
    "DIVISOR": ("begun", "open"),
    "SUM": ("open", "summed"),
    "REDUCE": ("summed", "reduced"),
    "NORM": ("reduced", "normed"),
    "GATHER": ("normed", "gathered"),
    "STEP": ("gathered", "stepped"),
    "COMMIT": ("stepped", "committed"),
}


class _AnySlot(dict):
    """Slot 0 for every microbatch: the shape of an access list without its slots."""

    def __missing__(self, key: object) -> int:
        return 0


@dataclass
class _Held:
    """What a buffer of a slot holds: a microbatch's value, and the works that are still to read it."""

    microbatch: int
    owed: set[str]
    transfer: tuple[str, int, int] | None = None  # that fills it or empties it


@dataclass
class Counts:
    """How often each property was checked on a rank."""

    leases: int = 0
    buffers: int = 0
    scale_reads: int = 0
    commits: int = 0
    weight_reads: int = 0
    accesses: int = 0
    edges: int = 0
    workspaces: set[Buffer] = field(default_factory=set)
    workspace_users: int = 0
    grad_writes: int = 0


class RankCheck:
    """The state of one rank between two operations. :meth:`run` checks one step; what it leaves is the next one's start.

    Args:
        row: the rank's program.
        rank, placement, microbatches, window, unordered, coalesce_w: of the plan.
    """

    def __init__(
        self,
        row: Sequence[Op],
        rank: int,
        placement: Placement,
        microbatches: int,
        window: str,
        unordered: bool,
        coalesce_w: int = 1,
    ) -> None:
        self._rank, self._placement, self._microbatches, self._window = rank, placement, microbatches, window
        self._coalesce_w = coalesce_w
        self._chunks = self._placement.chunks(rank)
        self._last = self._placement.num_chunks - 1
        self._early = any(op.work == "REDUCE_G" for op in row)
        peers = any(buffer == ("communicator", "peers") for op in row for buffer, _ in op.accesses)
        places = _AnySlot(), _AnySlot()
        self._shapes = Effects(self._placement, rank, *places, self._early, False, coalesce_w, microbatches, peers)
        self._required: dict[tuple[str, int | None, bool], frozenset] = {}
        # Equal lists of accesses are one object, so that what is known of one is known of all: there are few, one for each work
        # and place, and many operations.
        lists: dict[tuple[tuple[Buffer, str], ...], tuple[tuple[Buffer, Access], ...]] = {}
        for op in row:
            if op.accesses not in lists:
                lists[op.accesses] = tuple((buffer, Access(access)) for buffer, access in op.accesses)
        self._ops = [(op, lists[op.accesses]) for op in row]
        self._well_formed: set[tuple[str, int | None, bool, int]] = set()  # (…, a list of accesses by identity)
        self._ledger = self._make_ledger()
        self._events: dict[int, Event] = {}
        self._held: dict[Buffer, _Held] = {}
        self._transfers: dict[tuple[str, int, int], bool] = {}  # posted → completed
        self._reduced: dict[str, tuple[int, int] | None] = {}  # window microbatch: whose amax were merged over replicas
        self._losses: set[int] = set()
        self._closed: set[int] = set()  # chunks whose gradients were reduced over replicas
        self._summaries: dict[tuple[str, int, int | None, Joint | None], Summary] = {}
        self._unordered = unordered
        self._newest: dict[tuple[str, int], int] = {}  # of F, I and W of a chunk, the last microbatch
        self._phase = "ended"
        self._epochs = dict(self._ledger.timeline.epochs)  # at the step's start
        self._version = 0
        self._step = 0
        self.counts = Counts()

    def _make_ledger(self) -> Ledger:
        forward, backward = Direction.FORWARD, Direction.BACKWARD
        roles = [ScaleRole(f"{chunk}.{name}", forward, 1.0) for chunk in self._chunks for name in ("input", "weight")]
        roles += [ScaleRole(f"{chunk}.grad_output", backward, 1.0) for chunk in self._chunks]
        timeline = ScaleTimeline(roles, window=self._window, history=1)
        for kind, direction in _DIRECTION.items():
            everyone = [(kind, chunk, m) for chunk in self._chunks for m in range(self._microbatches)]
            timeline.expect(direction, everyone)
        weights = [f"{chunk}.weight" for chunk in self._chunks]
        nothing: Any = None  # no tensor: only the writers are counted
        parts = ("norm",) if self._coalesce_w == 1 else ("norm", "joined")
        slots = [GradSlot(name, nothing) for name in (*weights, *(f"{c}.{part}" for c in self._chunks for part in parts))]
        ledger = Ledger(timeline, WeightVersions(weights), GradSlots(slots))
        ledger.refreshed({name: name for name in weights}, LAYOUTS)
        return ledger

    # ---- one step ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Check the program once.

        Raises:
            PlanError: at the first illegal operation; names rank, position, action and reason.
        """
        position = 0
        try:
            while position < len(self._ops):
                self._check(*self._ops[position])
                position += 1
            if not self._ops:
                self._refuse("a program without operations")
            if self._phase != "ended":
                self._refuse("the program does not end its step")
        except ContractViolation as error:
            action = self._ops[position][0].name if position < len(self._ops) else END
            kind = "" if type(error) is PlanError else f"{type(error).__name__}: "
            later = "" if self._step < 2 else ", in the step after the first"
            raise PlanError(f"{kind}{error}{later}", rank=self._rank, position=position, action=action) from None

    def _refuse(self, reason: str) -> None:
        raise PlanError(reason)

    def _check(self, op: Op, accesses: Sequence[tuple[Buffer, Access]]) -> None:
        if op.kind == BEGIN:
            self._begin()
            return
        if self._phase == "ended":
            self._refuse("outside a step")
        if op.kind == RECORD:
            assert op.event is not None
            event = self._ledger.record(op.stream)
            assert event is not None
            self._events[op.event] = event
        elif op.kind == WAIT:
            event = self._events.get(op.event)  # type: ignore[arg-type]
            if event is None:
                self._refuse(f"event e{op.event} was never recorded: the wait would not wait")
            self._ledger.wait(op.stream, event)
            self.counts.edges += 1
        elif op.kind == COMPLETE:
            self._complete(op)
        elif op.kind == LAUNCH:
            self._launch(op, accesses)
        else:
            self._end()

    def _begin(self) -> None:
        if self._phase != "ended":
            self._refuse("a step begins before the one before it ended")
        self._ledger.begin_step(self._step)
        self._step += 1
        self._phase = "begun"
        self._epochs = dict(self._ledger.timeline.epochs)
        self._version = max(self._ledger.versions.versions.values())
        self._newest.clear()

    def _end(self) -> None:
        if self._phase != "refreshed":
            self._refuse(f"the step ends, and its end has only come to {self._phase!r}")
        for (work, chunk, microbatch), completed in self._transfers.items():
            if not completed:
                self._refuse(f"the step ends, and nobody waited for {chunk}{work}{microbatch}")
        for buffer, held in self._held.items():
            if held.owed:
                readers = " and ".join(sorted(held.owed))
                self._refuse(f"the step ends, and {buffer_text(buffer)} still holds microbatch {held.microbatch} for {readers}")
        self._ledger.end_step()
        self._phase = "ended"

    def _complete(self, op: Op) -> None:
        key = op.work, *op.key
        if self._transfers.get(key, True):
            self._refuse(f"{op.name} {'was completed before' if key in self._transfers else 'was not posted'}")
        self._transfers[key] = True

    # ---- launches ----------------------------------------------------------------------------------------------

    def _launch(self, op: Op, accesses: Sequence[tuple[Buffer, Access]]) -> None:
        self._check_form(op, accesses)
        self._move_phase(op)
        self._ledger.launch(op.stream, accesses, op.name)  # type: ignore[arg-type]
        self.counts.accesses += len(accesses)
        for buffer, access in accesses:
            if buffer[0] == "workspace":
                self.counts.workspaces.add(buffer)
                self.counts.workspace_users += 1
            elif len(buffer) == 3 and not isinstance(buffer, str):
                self._touch(op, buffer, access)
        if op.work in ("F", "I", "W"):
            self._act(op)
        elif op.work in TRANSFERS:
            self._transfers[op.work, *op.key] = False
        else:
            self._account(op)

    def _check_form(self, op: Op, accesses: Sequence[tuple[Buffer, Access]]) -> None:
        """The work belongs here and says what its kind must say, and it accesses at least what that work accesses."""
        if op.work not in STEP_WORKS:
            chunk, microbatch = op.key
            if chunk not in self._chunks:
                self._refuse(f"chunk {chunk} does not live on rank {self._rank}")
            if microbatch >= self._microbatches:
                self._refuse(f"microbatch out of range: the step has {self._microbatches} microbatches")
        said = {name for name in _ALL_FIELDS if getattr(op, name) is not None}
        needed = self._needed(op)
        if said != needed:
            wanted = ", ".join(sorted(needed)) or "nothing"
            self._refuse(f"{op.work} says {', '.join(sorted(said)) or 'nothing'}, it must say {wanted}")
        self._check_place(op)
        seen = op.work, op.chunk, bool(op.members), id(accesses)
        if seen in self._well_formed:
            return
        key = op.work, op.chunk, bool(op.members)
        required = self._required.get(key)
        if required is None:
            shape = self._shapes.launch(op.work, op.chunk, op.microbatch)
            required = self._required[key] = frozenset(_shape(buffer, access) for buffer, access in shape.accesses)
        missing = required.difference([_shape(buffer, access) for buffer, access in accesses])
        if missing:
            buffer, access = min(missing, key=str)
            self._refuse(f"{op.work} must declare that it accesses {buffer_text(buffer)} ({access})")
        self._well_formed.add(seen)

    def _needed(self, op: Op) -> set[str]:
        """What a launch must say."""
        fields = _FIELDS.get(op.work, set())
        if op.work != "W" or self._coalesce_w == 1:
            return fields
        members = members_of(op.key[1], self._coalesce_w, self._microbatches)
        if op.members is not None and op.members != members:
            self._refuse(f"{op.name} multiplies the operands of {op.members} microbatches, by its place they are {members}")
        return fields | {"members"} | ({"joint_beta"} if members else set())

    def _check_place(self, op: Op) -> None:
        """Work that only some chunks, or only one window, have."""
        chunk, work = op.chunk, op.work
        if chunk is not None:
            neighbour = {"F": chunk + 1, "B": chunk - 1}.get(work[-1], chunk) if work[:4] in ("SEND", "PASS") else chunk
            if work.startswith("RECV"):
                neighbour = chunk - 1 if work == "RECV_F" else chunk + 1
            if not 0 <= neighbour <= self._last:
                self._refuse(f"chunk {chunk} has nobody to exchange this with")
            other = self._placement.ranks[neighbour]
            if work in TRANSFERS and other == self._rank:
                self._refuse("both chunks live on this rank: nothing is sent")
            if work in TRANSFERS and op.peer != other:
                self._refuse(f"chunk {neighbour} lives on rank {other}, not on {op.peer}")
            if work.startswith("PASS") and other != self._rank:
                self._refuse(f"chunk {neighbour} lives on rank {other}: its input has to be sent")
            if work == "LOSS" and chunk != self._last:
                self._refuse("only the last chunk has a loss")
        window = "microbatch" if work in ("COMMIT_F", "COMMIT_I", "REDUCE_F", "REDUCE_I") else self._window
        if window != self._window or (work == "COMMIT" and window != "step"):
            self._refuse(f"no {work} in window {self._window}")

    def _move_phase(self, op: Op) -> None:
        if op.work == "REFRESH":
            before, after = "committed" if self._window == "step" else "stepped", "refreshed"
        else:
            before, after = _PHASES.get(op.work, ("open", "open"))
        if self._phase != before:
            self._refuse(f"{op.name} comes when the step is {before!r}, now it is {self._phase!r}")
        self._phase = after

    # ---- what buffers hold -------------------------------------------------------------------------------------

    def _readers(self, role: str, chunk: int) -> set[str]:
        """Who reads a buffer once its value is there."""
        if role == "retained_W":
            return {"I", "W"} if self._coalesce_w == 1 else {"I", "W", "the product"}
        if role in ("x", "targets"):
            return {"F", "I"}
        if role in ("out", "dx"):
            if role == "out" and chunk == self._last:
                return {"LOSS"}
            target = chunk + 1 if role == "out" else chunk - 1
            way = "SEND" if self._placement.ranks[target] != self._rank else "PASS"
            return {f"{way}_{'F' if role == 'out' else 'B'}"}
        return {"F"} if role == "key" else {"I"}

    def _touch(self, op: Op, buffer: Buffer, access: Access) -> None:
        role, chunk = buffer[0], buffer[1]
        assert isinstance(role, str) and isinstance(chunk, int)
        if role == "dy" and chunk == self._last:
            return  # a constant one
        self.counts.buffers += 1
        assert op.microbatch is not None
        held = self._held.get(buffer)
        if op.members and role == "retained_W" and access is Access.READ:
            self._multiply(op, buffer, held)
            return
        if access is Access.READ or (op.work == "I" and role == "retained_W"):
            self._read(op, buffer, held)
            return
        if held is not None and held.owed:
            readers = " and ".join(sorted(held.owed))
            self._refuse(f"{buffer_text(buffer)} is written while it holds microbatch {held.microbatch} for {readers}")
        if held is not None and held.transfer is not None and not self._transfers.get(held.transfer, True):
            work, of, microbatch = held.transfer
            self._refuse(f"{buffer_text(buffer)} is written before {of}{work}{microbatch} was completed")
        transfer = (op.work, *op.key) if op.work in TRANSFERS else None
        self._held[buffer] = _Held(op.microbatch, self._readers(role, chunk), transfer)

    def _multiply(self, op: Op, buffer: Buffer, held: _Held | None) -> None:
        """A product of several microbatches reads the operands of each in its own place, in microbatch order."""
        assert op.w_slot is not None and op.members and isinstance(buffer[2], int)
        distance = op.w_slot - buffer[2]
        microbatch = op.key[1] - distance
        if not 0 <= distance < op.members:
            self._refuse(f"{op.name} multiplies what lies in {buffer_text(buffer)}, which is no place of its group")
        if held is None or held.microbatch != microbatch:
            holds = "nothing yet" if held is None else f"microbatch {held.microbatch}"
            self._refuse(f"{op.name} multiplies {buffer_text(buffer)} as microbatch {microbatch}'s, it holds {holds}")
            return
        if distance == 0:
            held.owed.discard("W")
        if held.owed != {"the product"}:
            self._refuse(f"{op.name} multiplies {buffer_text(buffer)} when {' and '.join(sorted(held.owed))} are due there")
        held.owed.clear()

    def _read(self, op: Op, buffer: Buffer, held: _Held | None) -> None:
        if held is None or held.microbatch != op.microbatch:
            holds = "nothing yet" if held is None else f"microbatch {held.microbatch}"
            self._refuse(f"{op.name} reads {buffer_text(buffer)}, which holds {holds}")
            return
        if op.work not in held.owed:
            self._refuse(f"{op.name} reads {buffer_text(buffer)} and is none of those who have still to read it")
        if held.transfer is not None and not self._transfers.get(held.transfer, True):
            self._refuse(f"{op.name} reads {buffer_text(buffer)} before its transfer was completed")
        held.owed.discard(op.work)
        if op.work in TRANSFERS:
            held.transfer = op.work, *op.key

    # ---- accounts ----------------------------------------------------------------------------------------------

    def _act(self, op: Op) -> None:
        chunk, microbatch = op.key
        assert op.i_slot is not None and op.w_slot is not None
        newest = self._newest.get((op.work, chunk), -1)
        if newest > microbatch and not self._unordered:
            self._refuse(
                f"{op.work} of chunk {chunk} leaves microbatch order (after {newest}): sums would depend on the schedule"
            )
        self._newest[op.work, chunk] = microbatch
        used = {buffer[:2]: buffer[2] for buffer, _ in op.accesses if len(buffer) == 3 and not isinstance(buffer, str)}
        for name, slot in (("retained_I", op.i_slot), ("retained_W", op.w_slot)):
            if used.get((name, chunk), slot) != slot:
                self._refuse(f"{op.name} states slot {slot} and accesses {name} of slot {used[name, chunk]}")
        direction = _DIRECTION.get(op.work)
        if direction is not None:
            self._require_version(op)
            self.counts.scale_reads += 1
            self.counts.weight_reads += 1
        self._ledger.replay(
            self._summary(op, self._joint(op)),
            chunk,
            microbatch,
            slots=(Slot("I", chunk, op.i_slot), Slot("W", chunk, op.w_slot)),
            epoch=None if direction is None else self._epochs[direction] + (op.epoch or 0),
        )
        self.counts.leases += op.work == "W"
        self.counts.grad_writes += (op.work != "F") + bool(op.members)

    def _joint(self, op: Op) -> Joint | None:
        return None if self._coalesce_w == 1 else Joint(op.members or 0, op.joint_beta)

    def _summary(self, op: Op, joint: Joint | None) -> Summary:
        """The effects of one linear's part of F, I or W, with a norm's gradient finished in I; the same object each time.

        Where W of several microbatches is one product, a second linear takes part in it.
        """
        kind, chunk, beta = op.work, op.key[0], op.beta
        known = self._summaries.get((kind, chunk, beta, joint))
        if known is not None:
            return known
        roles = {"F": (f"{chunk}.input",), "I": (f"{chunk}.grad_output",)}.get(kind, ())
        weights = {"F": ((f"{chunk}.weight", "rows"),), "I": ((f"{chunk}.weight", "columns"),)}.get(kind, ())
        grads = {"I": (f"{chunk}.norm",), "W": (f"{chunk}.weight",)}.get(kind, ())
        directions = frozenset([_DIRECTION[kind]] if kind in _DIRECTION else [])
        made = Summary(kind, directions, roles, weights, (f"{chunk}.linear",), grads, beta)
        if joint is not None:
            shared = (f"{chunk}.joined",)
            made = replace(made, layers=(*made.layers, *shared), joint=joint)
            if kind == "W":
                made = replace(made, joined=shared) if joint.members else replace(made, idle=shared)
        self._summaries[kind, chunk, beta, joint] = made
        return made

    def _require_version(self, op: Op) -> None:
        """The version that an operation states, counted from the step's start, is the parameters'."""
        current = max(self._ledger.versions.versions.values()) - self._version
        if op.version != current:
            raise StaleWeightError(f"{op.name} states version {op.version}, the parameters are at {current}")

    def _account(self, op: Op) -> None:
        ledger, work = self._ledger, op.work
        if work == "LOSS":
            self._losses.add(op.key[1])
        elif work == "REDUCE_G":
            parts = ("weight", "norm") if self._coalesce_w == 1 else ("weight", "norm", "joined")
            ledger.grads.close([f"{op.key[0]}.{part}" for part in parts], self._microbatches)
            self._closed.add(op.key[0])
        elif work == "REDUCE":  # which already must have them all; from here on none may be written
            ledger.grads.check_complete(self._microbatches)
            left = sorted(set(self._chunks) - self._closed) if self._early else []
            if left:
                raise GradSlotError(f"the gradients of chunk {left[0]} are complete and not reduced over replicas")
            self._closed.clear()
        elif work == "SUM" and self._last in self._chunks and len(self._losses) != self._microbatches:
            raise GradSlotError(f"losses are summed when {len(self._losses)} of {self._microbatches} are there")
        elif work == "STEP":
            ledger.versions.bump()
            self._require_version(op)
        elif work == "REFRESH":
            self._require_version(op)
            self._require_epoch(op)
            ledger.refreshed({name: name for name in ledger.versions.versions}, LAYOUTS)
        elif work.startswith("REDUCE_"):
            if self._newest.get((work[-1], op.key[0])) != op.key[1]:
                raise ScaleOrderError(f"{op.name}, and {op.key[0]}{work[-1]}{op.key[1]} has not reported its amax yet")
            self._reduced[work[-1]] = op.key
        elif work.startswith("COMMIT"):
            self._commit(op)

    def _require_epoch(self, op: Op) -> None:
        current = self._ledger.timeline.epochs[Direction.FORWARD] - self._epochs[Direction.FORWARD]
        if op.epoch != current:
            raise ScaleOrderError(f"{op.name} states epoch {op.epoch}, the scales are at {current}")

    def _commit(self, op: Op) -> None:
        kind = op.work[-1] if op.chunk is not None else ""
        directions = (_DIRECTION[kind],) if kind else tuple(Direction)
        if kind and self._reduced.get(kind) != op.key:
            raise ScaleOrderError(f"{op.name}, and the amax of {op.chunk}{kind}{op.microbatch} was not merged over replicas")
        assert op.epoch is not None
        self._ledger.commit(self._epochs[directions[0]] + op.epoch, directions, op.name)
        self._reduced[kind] = None
        self.counts.commits += 1


def _shape(buffer: Buffer, access: str) -> tuple[Buffer, str]:
    """An access without its slot, and a workspace without its stream."""
    if isinstance(buffer, str):
        return buffer, access
    return ("workspace" if buffer[0] == "workspace" else buffer[:2]), access
