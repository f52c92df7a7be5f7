"""Saving while training goes on: the state is copied, and a thread writes the copy with the same commit as any save.

Three events tell how far a save is: *requested* (the loop asked for it), *staged* (the state is copied: training may change
it), *durable* (committed: a resume will find it). One save is under way at a time. A second one that is requested meanwhile
waits, and says so: never are two written at once, and never is there more than one copy.

A thread is enough, and a process of its own is not needed: hashing, writing and waiting for other ranks all leave the
interpreter's lock to the training loop (``python -m tools.bench saving`` measures what is left).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.layout import CheckpointError, describe
from checkpoint.staging import Staged, Staging
from qeffect_lm.errors import QEffectError
from qeffect_lm.state import LogicalTensor
from qeffect_lm.units import format_bytes

log = logging.getLogger(__name__)

REQUESTED, STAGED, DURABLE, WAITING, FAILED = "requested", "staged", "durable", "waiting", "failed"


@dataclass(frozen=True)
class SaveEvent:
    """Something that happened to the save of ``step``.

    ``seconds`` have passed since it was requested. ``nbytes`` are those of this rank's copy (with *durable*: of all files of
    the checkpoint). ``other`` is, with *waiting*, the step that is still being written; ``text`` says why a save failed.
    """

    what: str
    step: int
    seconds: float = 0.0
    nbytes: int = 0
    other: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        size = format_bytes(self.nbytes)
        said = {
            REQUESTED: "",
            STAGED: f": {size} of this rank copied, {self.seconds:.2f} s after the request",
            DURABLE: f": {size} in all files, {self.seconds:.2f} s after the request",
            WAITING: f" for that of step {self.other}, which is still being written after {self.seconds:.2f} s: save less "
            "often (checkpoint.every) or to a faster disk",
            FAILED: f": {self.text}",
        }
        return f"checkpoint of step {self.step} {self.what}{said[self.what]}"


@dataclass
class _Pending:
    step: int
    requested: float
    thread: threading.Thread
    failure: QEffectError | None = None


class AsyncSaver:
    """One rank's saves in the background.

    Args:
        staging: where the copies go.
        notify: called with every event, from the loop's thread or from the one that writes.
    """

    def __init__(self, staging: Staging, notify: Callable[[SaveEvent], None] = lambda _: None) -> None:
        self._staging, self._told = staging, notify
        self._pending: _Pending | None = None

    def save(
        self,
        step: int,
        tensors: Sequence[LogicalTensor],
        write: Callable[[list[LogicalTensor]], Path],
    ) -> None:
        """Copy ``tensors`` and return; ``write`` is then called with the copies in another thread, and returns the
        checkpoint's directory. A save that is still being written is waited for first.

        Raises the error of that one, if it failed (:class:`QEffectError`, as ``write`` raised it).
        """
        began = time.monotonic()
        self._notify(SaveEvent(REQUESTED, step))
        pending = self._pending
        if pending is not None and self.busy:
            self._notify(SaveEvent(WAITING, step, began - pending.requested, other=pending.step))
        self.wait()
        try:
            staged = self._staging.stage(tensors)
            name = f"checkpoint of step {step}"
            thread = threading.Thread(target=lambda: self._run(mine, staged, write), name=name, daemon=True)
            mine = self._pending = _Pending(step, began, thread)  # before it starts: Ctrl-C may come while it does
            thread.start()
        except Exception as error:  # no memory, no thread
            self._pending, failure = None, _failure(step, error)
            self._notify(SaveEvent(FAILED, step, time.monotonic() - began, text=str(failure)))
            raise failure from error

    @property
    def busy(self) -> bool:
        """Something is being written."""
        return self._pending is not None and self._pending.thread.is_alive()

    @property
    def failed(self) -> bool:
        """A save has failed, and nobody was told yet: :meth:`wait` raises its error."""
        return self._pending is not None and self._pending.failure is not None

    def wait(self) -> None:
        """Return when nothing is being written; raises the error of a save that failed, once."""
        pending = self._pending
        if pending is None:
            return
        pending.thread.join()
        self._pending = None
        if pending.failure is not None:
            raise pending.failure

    def _run(self, pending: _Pending, staged: Staged, write: Callable[[list[LogicalTensor]], Path]) -> None:
        try:
            staged.complete()
            self._notify(SaveEvent(STAGED, pending.step, time.monotonic() - pending.requested, staged.nbytes))
            path = write(staged.tensors)
            self._notify(SaveEvent(DURABLE, pending.step, time.monotonic() - pending.requested, _size(path)))
        except BaseException as error:  # whatever it is: the loop has to learn that there is no checkpoint
            pending.failure = _failure(pending.step, error)
        if pending.failure is not None:
            seconds = time.monotonic() - pending.requested
            self._notify(SaveEvent(FAILED, pending.step, seconds, staged.nbytes, text=str(pending.failure)))

    def _notify(self, event: SaveEvent) -> None:
        """A save does not fail because its news cannot be told."""
        try:
            self._told(event)
        except Exception as error:
            log.warning("cannot report that the %s: %s", event, describe(error))


def _failure(step: int, error: BaseException) -> QEffectError:
    if isinstance(error, QEffectError):
        return error
    failure = CheckpointError(f"the checkpoint of step {step} was not saved: {describe(error)}")
    failure.__cause__ = error
    return failure


def _size(path: Path) -> int:
    """Bytes of all files of a checkpoint; 0 where they cannot be seen."""
    try:
        return sum(file.stat().st_size for file in path.iterdir())
    except OSError:
        return 0
