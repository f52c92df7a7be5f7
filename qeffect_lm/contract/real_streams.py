"""Streams and events together with their account: one call makes the real wait and tells the ledger of it.

So the two cannot drift apart: an edge that was told is made, an edge that was made is told. On CPU, where work is done when
the call returns, a stream is only a name and the account alone is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.contract.streams import HOST, Event
from qeffect_lm.errors import UsageError


class BoundEvent(NamedTuple):
    """A recorded event: the ledger's (None in mode ``off``) and, on a GPU, the real one."""

    account: Event | None
    real: torch.cuda.Event | None


class RealStreams:
    """Named streams of one device.

    Args:
        ledger: told of every edge.
        streams: names (CPU), or name → ``torch.cuda.Stream``.
        device: with ``create``, where streams are made.
        create: make a stream the first time that a name is used; otherwise an unknown name is an error.

    Raises:
        UsageError: a stream is called ``host``, which is the calling thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        streams: Iterable[str] | Mapping[str, torch.cuda.Stream] = (),
        *,
        device: torch.device | str = "cpu",
        create: bool = False,
    ) -> None:
        self._ledger, self._device, self._create = ledger, torch.device(device), create
        self._streams: dict[str, torch.cuda.Stream | None]
        self._streams = dict(streams) if isinstance(streams, Mapping) else dict.fromkeys(streams)
        if HOST in self._streams:
            raise UsageError(f"a stream cannot be called {HOST!r}: that is the calling thread")

    def real(self, name: str) -> torch.cuda.Stream | None:
        """The stream behind a name; None on CPU and for the host."""
        if name not in self._streams and name != HOST:
            if not self._create:
                raise UsageError(f"no stream {name!r}: there are {', '.join(map(repr, self._streams))}")
            self._streams[name] = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        return self._streams.get(name)

    def current(self, name: str) -> AbstractContextManager[object]:
        """A context in which ``name`` is torch's current stream (nothing to do on CPU)."""
        real = self.real(name)
        return nullcontext() if real is None else torch.cuda.stream(real)

    def record(self, name: str, covers: Iterable[Hashable] | None = None) -> BoundEvent:
        """An event after the work launched on ``name`` so far; ``covers``: an early one, for these buffers only."""
        real = self.real(name)
        event = None
        if real is not None:
            event = torch.cuda.Event()
            event.record(real)
        return BoundEvent(self._ledger.record(name, covers), event)

    def wait(self, name: str, event: BoundEvent) -> None:
        """Work on ``name`` from here on waits for ``event``; for ``"host"`` the calling thread does."""
        real = self.real(name)
        if event.real is not None:
            if name == HOST:
                event.real.synchronize()
            elif real is not None:
                real.wait_event(event.real)
        self._ledger.wait(name, event.account)

    def edge(self, source: str, target: str) -> None:
        """Work on ``target`` from here on waits for the work on ``source`` so far."""
        self.wait(target, self.record(source))

    def synchronize_all(self) -> None:
        """The host waits for every stream (the device's part only: see :meth:`Ledger.settle` for the account)."""
        for real in self._streams.values():
            if real is not None:
                real.synchronize()
