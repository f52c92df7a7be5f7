"""What the engine asks of a graph backend, and the eager stand-in that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from qeffect_lm.graphs.register import HiddenStateRegister


class Graph(Protocol):
    """A captured piece of work: the same operations over the same storages at each replay."""

    @property
    def lines(self) -> list[str]:
        """What it launches, in order and without addresses: ``node …`` where it is a device's graph
        (:mod:`qeffect_lm.graphs.nodes`), then ``operation …`` as dispatched, with shapes, dtypes and frozen literals."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of the lines."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes of the storages the graph made for itself."""
        ...

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Destroy the graph and what it made; it replays no more."""
        ...

    def storages(self) -> dict[int, int]:
        """Storages that the graph made (identity → number in the order of making); graphs of the same slot may touch them."""
        ...


class GraphBackend(Protocol):
    """Makes graphs."""

    name: str
    warms_up: bool  # work must have run eagerly before it is captured

    def across(self, work: Callable[[], object]) -> object:
        """In a capture: run ``work``, which talks to other ranks, so that a replay does it again."""
        ...

    def capture(
        self,
        label: str,
        work: Callable[[], None],
        *,
        register: HiddenStateRegister,
        shares: Iterable[Graph] = (),
    ) -> Graph:
        """Run ``work`` once while recording it.

        Args:
            label: names the graph in errors.
            register: the storages it may touch.
            shares: graphs of the same slot, whose storages it may touch too.

        Raises:
            CaptureError: an unknown address, a host read, a random draw or a data-dependent shape.
        """
        ...
