"""I2, ``Lease``: retained backward resources have owners and generations.

A lease belongs to (step, chunk, microbatch, layer) and lives EMPTY → FORWARDED → INPUT_GRAD_DONE → FREE. Its payload (what
the weight-gradient GEMM needs) lies in a *slot*; a slot's generation counts its owners, and a handle of an older
generation reads nothing. Look-ups are by key, never first-in-first-out.

A chunk's microbatch is itself a lease (layer ``*``), so that a chunk without a split layer is guarded too. Layers of one
group that move together, as a graph's do, are one comparison.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from typing import Any, NamedTuple

from qeffect_lm.contract.errors import (
    InputGradTwiceError,
    LeaseError,
    LeaseLeakError,
    LeaseRetainedError,
    NotForwardedError,
    ScaleOrderError,
    StaleHandleError,
    WeightGradBeforeInputGradError,
    WeightGradTwiceError,
)
from qeffect_lm.contract.names import Names
from qeffect_lm.errors import UsageError


class LeaseState(StrEnum):
    EMPTY = "empty"
    FORWARDED = "forwarded"
    INPUT_GRAD_DONE = "input_grad_done"
    FREE = "free"


class Slot(NamedTuple):
    """A place for what a microbatch retains: kind ``I`` (forward → input gradient) or ``W`` (forward → weight gradient)."""

    kind: str
    chunk: int
    index: int  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return f"{self.kind}{self.chunk}.{self.index}"


class Joint(NamedTuple):
    """What an action does where W of several consecutive microbatches is one product (``pipeline.coalesce_w``).

    Attributes:
        members: how many microbatches' operands this W multiplies, its own last; 0 for F, for I, and for a W that leaves its
            operands to a later one.
        beta: of the main gradients that the product is written to; None where there is none.
    """

    members: int = 0
    beta: int | None = None


class Owner(NamedTuple):
    step: int
    chunk: int
    microbatch: int


@dataclass
class WeightGradHandle:
    """What one W GEMM needs. Affine: :meth:`LeaseTable.consume` gives the payload out once."""

    owner: Owner
    layer: str
    slot: Slot
    generation: int
    payload: Any
    consumed: bool = False


@dataclass
class _Group:
    owner: Owner
    i_slot: Slot
    w_slot: Slot
    state: LeaseState = LeaseState.EMPTY
    layers: dict[str, LeaseState] = field(default_factory=dict)
    together: Names | None = None  # layers that only graphs have moved so far, all at once: their state is the group's
    handles: dict[str, WeightGradHandle] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)  # of its F and I, where W is of several microbatches

    def each(self) -> dict[str, LeaseState]:
        """The layers one by one, to be read or moved so."""
        if self.together is not None:
            self.layers.update(dict.fromkeys(self.together, self.state))
            self.together = None
        return self.layers


@dataclass
class _SlotRecord:
    generation: int = 0
    holder: Owner | None = None


_NEXT = {
    "F": (LeaseState.EMPTY, LeaseState.FORWARDED),
    "I": (LeaseState.FORWARDED, LeaseState.INPUT_GRAD_DONE),
    "W": (LeaseState.INPUT_GRAD_DONE, LeaseState.FREE),
}


def _illegal(move: str, state: LeaseState, owner: Owner, layer: str) -> LeaseError:
    place: dict[str, Hashable] = {
        "step": owner.step,
        "chunk": owner.chunk,
        "microbatch": owner.microbatch,
        "layer": layer,
        "state": str(state),
    }
    if state is LeaseState.EMPTY:
        return NotForwardedError(f"{move} of a microbatch that was never forwarded", **place)
    if move == "F":
        return LeaseRetainedError("F of a microbatch that already went forward in this step", **place)
    if move == "I":
        return InputGradTwiceError("I runs a second time", **place)
    if state is LeaseState.FORWARDED:
        return WeightGradBeforeInputGradError("W before I: the output gradient is not there yet", **place)
    return WeightGradTwiceError("W runs a second time: its handle was consumed", **place)


class LeaseTable:
    """All leases and slots of one rank."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._groups: dict[tuple[int, int], _Group] = {}
        self._slots: dict[Slot, _SlotRecord] = {}

    # ---- the step ----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        if self._groups:
            self.end_step()
        self.step = step

    def end_step(self) -> None:
        """Every microbatch of the step must be FREE.

        Raises:
            LeaseLeakError: names the first layer and microbatch whose W (or I) did not run.
        """
        for group in self._groups.values():
            for layer, state in [*group.each().items(), ("*", group.state)]:
                if state is not LeaseState.FREE:
                    missing = "W" if state is LeaseState.INPUT_GRAD_DONE else "I"
                    raise LeaseLeakError(
                        f"the step ends while a lease is retained: {missing} did not run",
                        step=group.owner.step,
                        chunk=group.owner.chunk,
                        microbatch=group.owner.microbatch,
                        layer=layer,
                        state=str(state),
                        slot=tuple(group.w_slot),
                        generation=self._slots[group.w_slot].generation,
                    )
            if self._slots[group.w_slot].holder == group.owner:
                raise LeaseLeakError(
                    "the step ends while a W-slot is retained: the W that multiplies its operands with others' did not run",
                    step=group.owner.step,
                    chunk=group.owner.chunk,
                    microbatch=group.owner.microbatch,
                    slot=tuple(group.w_slot),
                    generation=self._slots[group.w_slot].generation,
                )
        self._groups.clear()
        self.step = None

    def abandon(self) -> None:
        """Free everything after a failed step; generations move on, so old handles stay dead."""
        for record in self._slots.values():
            record.generation += 1
            record.holder = None
        self._groups.clear()
        self.step = None

    # ---- actions -----------------------------------------------------------------------------------------------

    def open(self, chunk: int, microbatch: int, i_slot: Slot, w_slot: Slot, *, check: bool = True) -> Owner:
        """F begins: the microbatch takes its two slots (mode ``off``: unchecked).

        Raises:
            LeaseRetainedError: it went forward already, or a slot is still held.
            UsageError: chunk or microbatch is no whole number (a 0-dim tensor, say).
        """
        if not (isinstance(chunk, Integral) and isinstance(microbatch, Integral)):  # a tensor is its own key, and no other's
            raise UsageError(f"chunk and microbatch of an action are whole numbers, not {chunk!r} and {microbatch!r}")
        if self.step is None:
            raise LeaseError("an action outside a step", chunk=chunk, microbatch=microbatch)
        owner = Owner(self.step, chunk, microbatch)
        if check and (i_slot.kind, w_slot.kind, i_slot.chunk, w_slot.chunk) != ("I", "W", chunk, chunk):
            raise LeaseError(
                f"F of chunk {chunk} takes one of its I-slots and one of its W-slots, not {tuple(i_slot)} and {tuple(w_slot)}",
                chunk=chunk,
                microbatch=microbatch,
            )
        present = self._groups.get((chunk, microbatch))
        if present is not None and check:
            begun = LeaseState.FORWARDED if present.state is LeaseState.EMPTY else present.state
            raise _illegal("F", begun, owner, "*")
        for slot in (i_slot, w_slot):
            claimed = self._slots.get(slot)
            if claimed is not None and claimed.holder is not None and check:
                raise LeaseRetainedError(
                    f"slot {tuple(slot)} is claimed while {tuple(claimed.holder)} retains it",
                    step=owner.step,
                    chunk=chunk,
                    microbatch=microbatch,
                    holder=tuple(claimed.holder),
                    generation=claimed.generation,
                )
        for slot in (i_slot, w_slot):
            record = self._slots.setdefault(slot, _SlotRecord())
            record.holder = owner
            record.generation += 1
        self._groups[chunk, microbatch] = _Group(owner, i_slot, w_slot)
        return owner

    def require(
        self,
        move: str,
        chunk: int,
        microbatch: int,
        slots: tuple[Slot, Slot] | None = None,
        joint: Joint | None = None,
    ) -> None:
        """Raise the move's own error unless the whole microbatch may make it now (before any work is launched).

        ``slots`` (I-slot, W-slot) are those that the work will run over; they must be the ones that F took. ``joint``: of a
        W, whose other microbatches must have left their operands beside its own.

        Raises:
            StaleHandleError: they are other slots, which hold another microbatch or nothing.
        """
        group = self._group(move, chunk, microbatch, check=True)
        if slots is not None and slots != (group.i_slot, group.w_slot):
            raise StaleHandleError(
                f"{move} runs over the slots {slots[0].name} and {slots[1].name}, the microbatch lies in {group.i_slot.name} "
                f"and {group.w_slot.name}",
                step=group.owner.step,
                chunk=chunk,
                microbatch=microbatch,
                generation=self._slots[group.w_slot].generation,
            )
        if joint is not None and move == "W":
            for member in self._members(group, joint)[:-1]:
                self._require_member(group, member, joint)

    def _members(self, last: _Group, joint: Joint) -> list[_Group]:
        """The microbatches whose operands ``last``'s W multiplies, in order; none where it leaves its own to a later one."""
        _, chunk, microbatch = last.owner
        return [self._group("W", chunk, m) for m in range(microbatch - joint.members + 1, microbatch + 1)]

    def _require_member(self, last: _Group, member: _Group, joint: Joint) -> None:
        owner, distance = member.owner, last.owner.microbatch - member.owner.microbatch
        what = f"W of microbatch {last.owner.microbatch} multiplies the operands of {joint.members} microbatches"
        place = {"step": owner.step, "chunk": owner.chunk, "microbatch": owner.microbatch, "state": str(member.state)}
        if member.state in (LeaseState.EMPTY, LeaseState.FORWARDED):
            raise _illegal("W", member.state, owner, "*")
        if member.state is not LeaseState.FREE:
            raise LeaseError(f"{what}: W of microbatch {owner.microbatch} has not handed its leases over", **place)
        record, wanted = self._slots[member.w_slot], last.w_slot._replace(index=last.w_slot.index - distance)
        if record.holder != owner or member.w_slot != wanted:
            holder = None if record.holder is None else tuple(record.holder)
            raise StaleHandleError(
                f"{what}: those of microbatch {owner.microbatch} lay in {member.w_slot.name}, they are read in {wanted.name}",
                **place,
                holder=holder,
                generation=record.generation,
            )
        if member.epochs != last.epochs:
            raise ScaleOrderError(
                f"{what} with one scale: microbatch {owner.microbatch} was quantised in other epochs",
                **place,
                epochs=tuple(member.epochs),
                needed=tuple(last.epochs),
            )

    def bind(self, chunk: int, microbatch: int, epoch: int) -> None:
        """F or I of a microbatch whose W is joined with others' quantises with the scales of ``epoch``."""
        self._groups[chunk, microbatch].epochs.append(epoch)

    def advance(self, move: str, chunk: int, microbatch: int, layer: str) -> None:
        """One layer makes a move (F, I or W)."""
        group = self._group(move, chunk, microbatch)
        before, after = _NEXT[move]
        layers = group.each()
        state = layers.get(layer, LeaseState.EMPTY)
        if state is not before:
            raise _illegal(move, state, group.owner, layer)
        layers[layer] = after

    def finish(self, move: str, chunk: int, microbatch: int, *, together: bool = False, joint: Joint | None = None) -> None:
        """The action ends: all layers must have made the move; I releases the I-slot, W the W-slot.

        ``together``: a graph has just moved those layers that only graphs have moved. ``joint``: W releases the W-slots of all
        microbatches that it multiplied, or none.
        """
        group = self._group(move, chunk, microbatch, check=True)
        after = _NEXT[move][1]
        if not together:
            group.each()
        for layer, state in group.layers.items():
            if state is not after:
                raise LeaseLeakError(
                    f"{move} ended but a layer did not take part in it",
                    step=group.owner.step,
                    chunk=chunk,
                    microbatch=microbatch,
                    layer=layer,
                    state=str(state),
                )
        group.state = after
        if move == "I":
            self._release(group.i_slot)
        elif move == "W":
            group.handles.clear()
            for member in [group] if joint is None else self._members(group, joint):
                self._release(member.w_slot)

    def replay(
        self,
        move: str,
        chunk: int,
        microbatch: int,
        layers: tuple[str, ...],
        members: Names | None = None,
        joint: Joint | None = None,
    ) -> None:
        """A graph makes the move for all of ``layers`` at once.

        ``members``: the same layers in an order that does not depend on the move, one object for equal ones; with it layers
        that move together are one comparison.
        """
        group = self._group(move, chunk, microbatch, check=True)
        if members is not None and not group.layers and (move == "F" or group.together is members):
            group.together = members
            self.finish(move, chunk, microbatch, together=True, joint=joint)
        else:
            self._replay_each(group, move, layers)
            self.finish(move, chunk, microbatch, joint=joint)

    @staticmethod
    def _replay_each(group: _Group, move: str, layers: tuple[str, ...]) -> None:
        before, after = _NEXT[move]
        states = group.each()
        for layer in layers:
            state = states.get(layer, LeaseState.EMPTY)
            if state is not before:
                raise _illegal(move, state, group.owner, layer)
        moved = dict.fromkeys(layers, after)
        if len(moved) != len(layers):
            twice = next(layer for layer in layers if layers.count(layer) > 1)
            raise _illegal(move, after, group.owner, twice)
        states.update(moved)

    # ---- payloads ----------------------------------------------------------------------------------------------

    def retain(self, chunk: int, microbatch: int, layer: str, payload: Any) -> WeightGradHandle:
        """F leaves what W will need in the microbatch's W-slot."""
        group = self._group("F", chunk, microbatch)
        handle = WeightGradHandle(group.owner, layer, group.w_slot, self._slots[group.w_slot].generation, payload)
        group.handles[layer] = handle
        return handle

    def handle(self, chunk: int, microbatch: int, layer: str) -> WeightGradHandle:
        """The handle of a key."""
        group = self._group("W", chunk, microbatch)
        if layer not in group.handles:
            raise _illegal("W", group.each().get(layer, LeaseState.EMPTY), group.owner, layer)
        return group.handles[layer]

    def consume(self, handle: WeightGradHandle) -> Any:
        """The payload, once.

        Raises:
            StaleHandleError: the slot has had another owner since.
            WeightGradTwiceError: it was consumed before.
            WeightGradBeforeInputGradError: I of the layer has not added the output gradient yet.
        """
        record = self._slots[handle.slot]
        if handle.consumed and record.generation == handle.generation:
            raise _illegal("W", LeaseState.FREE, handle.owner, handle.layer)
        if record.generation != handle.generation or record.holder != handle.owner:
            raise StaleHandleError(
                f"a handle of generation {handle.generation} is used when slot {tuple(handle.slot)} is at {record.generation}",
                step=handle.owner.step,
                chunk=handle.owner.chunk,
                microbatch=handle.owner.microbatch,
                layer=handle.layer,
                generation=handle.generation,
                slot_generation=record.generation,
            )
        group = self._groups.get((handle.owner.chunk, handle.owner.microbatch))
        if group is not None and group.each().get(handle.layer) is LeaseState.FORWARDED:
            raise _illegal("W", LeaseState.FORWARDED, handle.owner, handle.layer)
        handle.consumed = True
        payload, handle.payload = handle.payload, None  # the table holds no memory that W has read
        return payload

    def payloads(self, chunk: int, microbatch: int) -> dict[str, Any]:
        """What F left, by layer; capture takes I and W of one F more than once and puts it back in between."""
        return {layer: handle.payload for layer, handle in self._groups[chunk, microbatch].handles.items()}

    def put_back(self, chunk: int, microbatch: int, payloads: dict[str, Any]) -> None:
        """The inverse of :meth:`payloads`."""
        for layer, handle in self._groups[chunk, microbatch].handles.items():
            handle.payload, handle.consumed = payloads[layer], False

    # ---- inside ------------------------------------------------------------------------------------------------

    def _group(self, move: str, chunk: int, microbatch: int, check: bool = False) -> _Group:
        group = self._groups.get((chunk, microbatch))
        if group is None:
            owner = Owner(-1 if self.step is None else self.step, chunk, microbatch)
            raise _illegal(move, LeaseState.EMPTY, owner, "*")
        if check and group.state is not _NEXT[move][0]:
            raise _illegal(move, group.state, group.owner, "*")
        return group

    def _release(self, slot: Slot) -> None:
        self._slots[slot].holder = None

    def counts(self) -> dict[str, int]:
        """How many leases and slots are held now (flat over steps in a sound run)."""
        held = sum(1 for group in self._groups.values() if group.state is not LeaseState.FREE)
        return {"groups": held, "slots": sum(1 for record in self._slots.values() if record.holder is not None)}

    def held(self, chunk: int, microbatch: int) -> tuple[str, int, str, int]:
        """(I-slot, its generation, W-slot, its generation) of a microbatch of this step, for traces."""
        group = self._groups[chunk, microbatch]
        i_slot, w_slot = group.i_slot, group.w_slot
        return i_slot.name, self._slots[i_slot].generation, w_slot.name, self._slots[w_slot].generation

    def generations(self) -> dict[str, int]:
        """Slot generations by name, for traces and tests."""
        return {s.name: record.generation for s, record in sorted(self._slots.items())}
