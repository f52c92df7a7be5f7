"""The capture transaction: snapshot all declared state, capture, roll back, compare.

Warming up and capturing run real work on real state. Whatever happens inside, an exception included, the declared state
afterwards has the bytes it had before, and the process can go on, eagerly or with another capture.

A copy of masters and moments would double a rank's memory on a GPU. There a capture runs nothing, and the eager run before it
skips the optimizer, so nothing changes them (:class:`~qeffect_lm.graphs.register.Rule` ``GUARDED``); a checksum of every one,
before and after, proves it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.graphs.register import HiddenStateRegister, Rule
from qeffect_lm.runtime.rng import restore_generators, save_generators

# The host's account of each part: plain values, no tensors.
_HOST_STATE: dict[str, tuple[str, ...]] = {
    "timeline": ("epochs", "commits", "_readers", "_reported", "_contributed", "_window_open"),
    "versions": ("versions", "caches", "casts", "_stale", "_epochs", "_present", "refreshes"),
    "grads": ("_writes", "_reports", "_group_writes", "_singles", "_zeroed", "_closed", "_read"),
    "leases": ("step", "_slots"),
}


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte, where the tensors live: NaNs and signed zeros included."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


_CHUNK = 1 << 22  # 8-byte words that are summed at once: with its temporaries 100 MiB


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 of a tensor's bytes, made where it lives, without a copy of it.

    The 8-byte words are mixed with their positions (multiply and xor-shift, as in splitmix64) and added modulo 2^64. A change
    of any one word always shows, since mixing loses nothing; any other change but by a chance of 1 in 2^64.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    words = (words if words.data_ptr() % 8 == 0 else words.clone()).view(torch.int64)
    tail = data[whole:].to(torch.int64).add_(256)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    positions = torch.arange(1, 1 + min(_CHUNK, max(words.numel(), 8)), device=data.device).mul_(0x1E3779B97F4A7C15)
    for piece in (*words.split(_CHUNK), tail):
        mixed = piece + positions[: piece.numel()]
        for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
            mixed.bitwise_xor_((mixed >> 30).bitwise_and_((1 << 34) - 1)).mul_(factor)  # a shift that copies no sign
        total.mul_(0x2545F4914F6CDD1D).add_(mixed.sum())
    return total


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
    """What puts back, or proves unchanged, every registered tensor that lasts, the random generators and the ledger's account.

    Args:
        copy_guarded: copy tensors under ``GUARDED`` too, since captures run their work.
    """

    def __init__(self, register: HiddenStateRegister, ledger: Ledger, copy_guarded: bool) -> None:
        self._entries = register.under(Rule.RESTORED, *([Rule.GUARDED] if copy_guarded else []))
        self._copies = [entry.tensor.detach().clone() for entry in self._entries]
        self._guarded = [] if copy_guarded else register.under(Rule.GUARDED)
        self._sums = [checksum(entry.tensor) for entry in self._guarded]
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
        for entry, before in zip(self._guarded, self._sums, strict=True):
            if not torch.equal(checksum(entry.tensor), before):
                raise CaptureError(
                    f"{entry.name!r} ({entry.owner}) changed while graphs were captured, and no copy of it was kept: load the "
                    "last checkpoint; what wrote it must not run in the eager run before a capture",
                    tensor=entry.name,
                )


@contextmanager
def transaction(register: HiddenStateRegister, ledger: Ledger, *, copy_guarded: bool = True) -> Iterator[Snapshot]:
    """Roll back on every way out, and prove it."""
    snapshot = Snapshot(register, ledger, copy_guarded)
    try:
        yield snapshot
    finally:
        snapshot.restore()
        snapshot.check()
