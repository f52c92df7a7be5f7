"""The capture transaction: snapshot all declared state, capture, roll back, compare every byte.

Warming up and capturing run real work on real state. Whatever happens inside, an exception included, the declared state
afterwards has the bytes it had before, and the process can go on, eagerly or with another capture.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.graphs.register import HiddenStateRegister
from qeffect_lm.runtime.rng import restore_generators, save_generators

# The host's account of each part: plain values, no tensors.
_HOST_STATE: dict[str, tuple[str, ...]] = {
    "timeline": ("epochs", "commits", "_readers", "_reported", "_contributed", "_window_open"),
    "versions": ("versions", "caches", "casts", "_stale", "_epochs", "_present", "refreshes"),
    "grads": ("_writes", "_reports", "_group_writes", "_singles", "_zeroed", "_read"),
    "leases": ("step", "_slots"),
}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte, where the tensors live: NaNs and signed zeros included."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


class HostSnapshot:
    """A copy of the ledger's host-side account."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step = ledger.step
        self._saved: dict[str, dict[str, Any]] = {
            part: {name: copy.deepcopy(getattr(getattr(ledger, part), name)) for name in names}
            for part, names in _HOST_STATE.items()
        }

    def restore(self) -> None:
        self._ledger.abandon_step()
        self._ledger.step = self._step
        for part, values in self._saved.items():
            for name, value in values.items():
                setattr(getattr(self._ledger, part), name, copy.deepcopy(value))


class Snapshot:
    """Copies of every mutable registered tensor, of the random generators and of the ledger's account."""

    def __init__(self, register: HiddenStateRegister, ledger: Ledger) -> None:
        self._entries = register.mutable()
        self._copies = [entry.tensor.detach().clone() for entry in self._entries]
        self._generators = save_generators()
        self._host = HostSnapshot(ledger)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place."""
        for entry, saved in zip(self._entries, self._copies, strict=True):
            entry.tensor.copy_(saved)
        restore_generators(self._generators)
        self._host.restore()

    def check(self) -> None:
        """Raise :class:`CaptureError` with the name of the first tensor that differs from the snapshot."""
        for entry, saved in zip(self._entries, self._copies, strict=True):
            if not _same_bytes(entry.tensor, saved):
                raise CaptureError(f"{entry.name!r} ({entry.owner}) was not rolled back", tensor=entry.name)


@contextmanager
def transaction(register: HiddenStateRegister, ledger: Ledger) -> Iterator[Snapshot]:
    """Roll back on every way out, and prove it."""
    snapshot = Snapshot(register, ledger)
    try:
        yield snapshot
    finally:
        snapshot.restore()
        snapshot.check()
