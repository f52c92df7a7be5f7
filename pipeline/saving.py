"""Copying the state for a checkpoint while the engine goes on (invariant I4).

Copies are launched between two steps, on a stream of their own. What a step changes as soon as it begins (open amax slots,
scales and histories with window ``microbatch``) is copied before any work that is launched later. What only the optimizer and
what follows it change (parameters, masters, moments, cached weights: nearly all bytes) is copied while the next step runs
forward and backward, and its optimizer waits. A step that is one graph waits as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.program import SAVING, BufferAccesses
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.contract.real_streams import BoundEvent, RealStreams
from qeffect_lm.contract.streams import Access


def _reads(*names: str) -> BufferAccesses:
    return tuple((name, Access.READ) for name in names)


AT_ONCE = _reads("scales_forward", "scales_backward", "amax_forward", "amax_backward", "optimizer")
UNTIL_UPDATE = _reads("parameters", "optimizer", "caches")


class StateCopies:
    """The order between an engine's steps and the copies for checkpoints.

    Args:
        compute_stream: names the stream that the steps' work is launched on.
    """

    def __init__(self, streams: RealStreams, ledger: Ledger, compute_stream: Callable[[], str]) -> None:
        self._streams, self._ledger, self._compute = streams, ledger, compute_stream
        self._open: tuple[BoundEvent, Callable[[], object]] | None = None
        self.waited = 0.0  # seconds in all that the host has waited here

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Copies of what the next step changes first; its work comes after them."""
        with self._copying(AT_ONCE, "the copy for a checkpoint"):
            yield
        self._streams.edge(SAVING, self._compute())

    @contextmanager
    def until_update(self, done: Callable[[], object]) -> Iterator[None]:
        """Copies of what nothing changes before the next optimizer step, which waits for them.

        Args:
            done: called on the host before that: returns when those copies are made that another thread makes.
        """
        self.before_update()  # of a save without a step since
        with self._copying(UNTIL_UPDATE, "the copy of the parameters for a checkpoint"):
            yield
        self._open = self._streams.record(SAVING), done

    def before_update(self) -> None:
        """The optimizer is about to be launched: after the copies."""
        if self._open is None:
            return
        (event, done), self._open = self._open, None
        self._streams.wait(self._compute(), event)
        began = time.monotonic()
        done()
        self.waited += time.monotonic() - began

    @contextmanager
    def _copying(self, reads: BufferAccesses, who: str) -> Iterator[None]:
        self._streams.edge(self._compute(), SAVING)
        self._ledger.launch(SAVING, reads, who)
        with self._streams.current(SAVING):
            yield
