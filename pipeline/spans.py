"""Who may look on while an engine runs a step: watches, and named spans for profilers (``F s1 mb3 slot2``, ``REFRESH``).

An engine enters :data:`NO_SPANS` unless somebody gave it another; that does nothing. Spans lie around the launch of work (eager
or a graph's replay) on the compute stream, never inside of a capture: what a capture records would otherwise hold them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

from pipeline.actions import RECEIVES, SENDS, Action, Kind
from pipeline.slots import SlotPlan


class Watch(Protocol):
    """Told of each F, I and W before and after it is launched (:mod:`pipeline.measure`)."""

    def begin(self, action: Action) -> None: ...
    def end(self, action: Action) -> None: ...


class SpanKind(StrEnum):
    """What a step's time goes into; the table of docs/profile.md has a line for each."""

    DATA = "data"
    F = "F"
    I = "I"  # noqa: E741 - as in actions
    W = "W"
    GRAPH = "step graph"
    SEND_RECV = "send/recv start"
    WAIT = "send/recv wait"
    REDUCE = "reduce"
    STEP = "optimizer"
    COMMIT = "commit"
    REFRESH = "refresh"


class Spans(Protocol):
    """Told of each piece of a step; the piece runs inside of what it returns."""

    def action(self, action: Action, slots: SlotPlan) -> AbstractContextManager[object]:
        """An action of the plan, without the waits and copies before it."""
        ...

    def wait(self, transfer: tuple[str, int, int]) -> AbstractContextManager[object]:
        """Compute waits for a transfer: (RECV_F…, chunk, microbatch), or (SEND_F…, chunk, I-slot)."""
        ...

    def piece(self, name: str, kind: SpanKind) -> AbstractContextManager[object]:
        """Anything else."""
        ...


class NoSpans:
    """Nobody wants to know."""

    _nothing = nullcontext()

    def action(self, action: Action, slots: SlotPlan) -> AbstractContextManager[object]:
        return self._nothing

    def wait(self, transfer: tuple[str, int, int]) -> AbstractContextManager[object]:
        return self._nothing

    def piece(self, name: str, kind: SpanKind) -> AbstractContextManager[object]:
        return self._nothing


NO_SPANS = NoSpans()


def action_name(action: Action, slots: SlotPlan) -> str:
    """``F s1 mb3 slot2``: kind, chunk (global stage number), microbatch, and its slot: of F and I the I-slot, of W the W-slot.
    Actions without a chunk are their kind."""
    if action.chunk is None:
        return str(action.kind)
    kind = f"{action.kind}_{action.detail}" if action.detail else str(action.kind)
    name = f"{kind} s{action.chunk} mb{action.microbatch}"
    if not action.is_compute:
        return name
    index = slots.w_slots.index if action.kind is Kind.W else slots.i_slots.index
    return f"{name} slot{index[action.key]}"


def wait_name(transfer: tuple[str, int, int]) -> str:
    """``WAIT RECV_F s1 mb3``, ``WAIT SEND_F s0 slot1``."""
    what, chunk, number = transfer
    return f"WAIT {what} s{chunk} {'mb' if what.startswith('RECV') else 'slot'}{number}"


def kind_of(action: Action) -> SpanKind:
    if action.kind in SENDS or action.kind in RECEIVES:
        return SpanKind.SEND_RECV
    return SpanKind[action.kind.name]
