"""The state and resource contract.

A training step is more than its dataflow graph. Which scale a tensor was quantised with, whose activations a buffer
holds, whether a cached FP8 weight still equals its master, whether the writer of a buffer is done: a graph of tensors and
operations says nothing of these, and a captured CUDA graph freezes the addresses they hide behind. The contract keeps an
account of them on the host. Every action (forward F, input gradient I, weight gradient W, optimizer step, commit, refresh,
send, receive, replay) declares its effects; the first one that breaks an invariant raises a :class:`ContractViolation` with a
name, before its work is launched. There are four invariants.

I1  **Scaling updates are serialised in time** (:class:`ScaleTimeline`). A scale is read at an immutable *epoch*. What running
    work observes (amax) goes into the open window by maximum, which commutes, so that the order of microbatches cannot matter.
    ``commit`` alone ends the window and makes the next epoch: once, after every contributor reported, before any reader of
    the next epoch. Violations: :class:`ScaleOrderError`.

I2  **Retained backward resources have owners and generations** (:class:`LeaseTable`). What F leaves for I and W belongs to
    (step, chunk, microbatch, layer) and lies in a *slot*. It moves EMPTY → FORWARDED → INPUT_GRAD_DONE → FREE and no other
    way; a slot has one holder, its generation counts them, and a handle of an older generation reads nothing. W consumes its
    handle once. Violations: :class:`LeaseError` and its subclasses, one per illegal move.

I3  **Cached weights have versions** (:class:`WeightVersions`). A parameter's version moves when somebody says ``bump``; a cache
    records the version and the scale epoch it was made from; a reader states what it needs. Violations:
    :class:`StaleWeightError`.

I4  **Streams complete in both directions** (:class:`StreamClock`). Streams carry vector clocks, events copy them, waits join
    them; the host is a stream too. Each byte range remembers its last write and the reads and maxima since. An access that no
    recorded edge orders after the last conflicting one raises :class:`StreamOrderError`, whether or not the race would have
    bitten this time. So the verdict depends on the program alone, never on timing.

One :class:`Ledger` per rank holds the four accounts and the mode: ``enforce`` (check), ``trace`` (also write every effect to
a file for ``python -m tools.explain``) or ``off`` (to measure what checking costs). Eager actions open a scope
(:meth:`Ledger.action`) and tell it what they touch; a captured graph's effects are its :class:`Summary`, recorded once and
checked at each replay in a few comparisons (:meth:`Ledger.replay`). :class:`Guard` wraps a loop of your own: torch's streams,
events and graphs with their account.

This package needs torch and nothing of our models, pipeline or checkpoints. docs/contract-api.md has an example and the API.
"""

# ruff: noqa: F401  (the imports below are for type checkers; __all__ is made from _HOMES)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qeffect_lm.contract.errors import (
        CaptureError,
        ContractViolation,
        GradSlotError,
        InputGradTwiceError,
        LeaseError,
        LeaseLeakError,
        LeaseRetainedError,
        NotForwardedError,
        PlanError,
        ResumeError,
        ScaleOrderError,
        StaleHandleError,
        StaleWeightError,
        StreamOrderError,
        WeightGradBeforeInputGradError,
        WeightGradTwiceError,
    )
    from qeffect_lm.contract.grads import GradSlot, GradSlots
    from qeffect_lm.contract.guard import Guard, GuardedGraph
    from qeffect_lm.contract.leases import LeaseTable, Slot
    from qeffect_lm.contract.ledger import Ledger, Mode, Summary
    from qeffect_lm.contract.streams import HOST, Access, Event, StreamClock
    from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
    from qeffect_lm.contract.trace import TraceWriter
    from qeffect_lm.contract.versions import WeightVersions

# Where each public name is made. Looked up when it is first used: the errors must not bring torch along, since some
# settings are only heeded before torch is imported.
_HOMES = {
    "errors": (
        "CaptureError",
        "ContractViolation",
        "GradSlotError",
        "InputGradTwiceError",
        "LeaseError",
        "LeaseLeakError",
        "LeaseRetainedError",
        "NotForwardedError",
        "PlanError",
        "ResumeError",
        "ScaleOrderError",
        "StaleHandleError",
        "StaleWeightError",
        "StreamOrderError",
        "WeightGradBeforeInputGradError",
        "WeightGradTwiceError",
    ),
    "grads": ("GradSlot", "GradSlots"),
    "guard": ("Guard", "GuardedGraph"),
    "leases": ("LeaseTable", "Slot"),
    "ledger": ("Ledger", "Mode", "Summary"),
    "streams": ("HOST", "Access", "Event", "StreamClock"),
    "timeline": ("Direction", "ScaleRole", "ScaleTimeline"),
    "trace": ("TraceWriter",),
    "versions": ("WeightVersions",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
